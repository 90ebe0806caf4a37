"""`LoRAConfig`: reads and checks an adapter's adapter_config.json in PEFT's format. Imports no torch.

As in PEFT, LoRA (Hu et al. 2021) scales by alpha / r, and rank-stabilised LoRA (Kalajdzievski 2023) by
alpha / sqrt(r).
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from models.config.fields import Fields
from models.errors import CheckpointError

CONFIG_FILE = "adapter_config.json"

_UNSUPPORTED = {
    "use_dora": "DoRA rescales the merged weights",
    "modules_to_save": "whole modules cannot be exchanged by request",
    "lora_bias": "a low-rank product has no bias here",
    "trainable_token_indices": "embeddings take no adapter",
    "layer_replication": "the base model's layers are as they are",
    "alora_invocation_tokens": "an adapter holds for a whole request",
    "use_qalora": "inputs are not pooled",
    "arrow_config": "adapters are chosen by request",
}
"""Fields that change what an adapter computes, and why each must be left out (or false, or empty)."""
_CHANGES_BASE_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base weights, so that the adapter fits only the changed base weights."""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Ranks and scales of one adapter."""

    rank: int
    alpha: float
    rank_stabilized: bool
    target_modules: tuple[str, ...] | str
    """Names or name endings of modules, or one regular expression that matches whole names."""
    target_parameters: tuple[str, ...] = ()
    """Names or name endings of stacks of experts."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Overrides of rank and alpha, by a regular expression that matches a module's name or its ending."""
    some_layers_only: bool = False
    """Whether the adapter omits modules that `target_modules` names."""

    @classmethod
    def from_adapter(cls, path: Path) -> "LoRAConfig":
        """Read the adapter directory `path`. Raises `CheckpointError` naming file, field and value."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory; name the directory of a LoRA adapter as PEFT saves it")
        if not (path / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"{path} has no {CONFIG_FILE}; name the directory of a LoRA adapter as PEFT saves it"
            )
        fields = Fields.from_file(path / CONFIG_FILE)
        _reject_unsupported(fields)
        return cls(
            rank=fields.integer("r"),
            alpha=fields.number("lora_alpha"),
            rank_stabilized=fields.boolean("use_rslora", False),
            target_modules=_target_modules(fields),
            target_parameters=fields.strings("target_parameters"),
            rank_pattern={key: int(value) for key, value in _pattern(fields, "rank_pattern", fractions=False).items()},
            alpha_pattern=_pattern(fields, "alpha_pattern", fractions=True),
            some_layers_only=any(fields.values.get(name) for name in ("layers_to_transform", "exclude_modules")),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its checkpoint name."""
        return self.rank_pattern.get(_first_match(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the module's low-rank product."""
        alpha = self.alpha_pattern.get(_first_match(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def targets(self, module: str) -> bool:
        """Whether the adapter must hold a product for the module of that name."""
        if self.some_layers_only or isinstance(self.target_modules, str):
            return False
        return _is_named(module, self.target_modules)

    def targets_parameter(self, parameter: str) -> bool:
        """Whether the adapter must hold a product for the stack of experts of that name."""
        return not self.some_layers_only and _is_named(parameter, self.target_parameters)


def _is_named(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _reject_unsupported(fields: Fields) -> None:
    if fields.string("peft_type", "LORA") != "LORA":
        raise fields.invalid("peft_type", "LORA: no other kind of adapter is served")
    if fields.string("bias", "none") != "none":
        raise fields.invalid("bias", "none: biases belong to the base model")
    for name, why in _UNSUPPORTED.items():
        if fields.values.get(name):
            raise fields.invalid(name, f"left out, because {why}")
    initialisation = fields.values.get("init_lora_weights")
    if isinstance(initialisation, str) and initialisation.lower().startswith(_CHANGES_BASE_WEIGHTS):
        raise fields.invalid("init_lora_weights", "another, because it changes the base model's weights; convert it")


def _target_modules(fields: Fields) -> tuple[str, ...] | str:
    value = fields.values.get("target_modules")
    return value if isinstance(value, str) else fields.strings("target_modules")


def _pattern(fields: Fields, name: str, *, fractions: bool) -> dict[str, float]:
    section = fields.section(name)
    if section is None:
        return {}
    for key in section.values:
        try:
            _names_by(key)
        except SchemaError as error:
            reason = str(error).splitlines()[-1].strip().removeprefix("error: ").removeprefix("SchemaError: ")
            raise fields.invalid(
                name, f"an object of regular expressions, and {key[:100]!r} is none that can be used ({reason})"
            ) from error
    return {key: section.number(key) if fractions else section.integer(key) for key in section.values}


def _first_match(pattern: Mapping[str, object], module: str) -> str:
    """Return the first expression that matches the name or its ending after a dot, else the empty string."""
    return next((key for key in pattern if _matches(key, module)), "")


@functools.lru_cache(1024)
def _names_by(expression: str) -> TypeAdapter[str]:
    """Return what accepts the names that `expression` matches, whole or after a dot. Raises `SchemaError`.

    pydantic's expressions (Rust's) take time linear in the name and bounded memory: adapters come from anywhere, and
    `re` can take hours for an expression such as `(a+)+b`, in which no other thread of the engine runs.
    """
    return TypeAdapter(Annotated[str, Field(pattern=rf"^(?:.*\.)?(?:{expression})$")])


def _matches(expression: str, module: str) -> bool:
    try:
        _names_by(expression).validate_python(module)
    except ValidationError:
        return False
    return True
