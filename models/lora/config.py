"""`LoRAConfig`: reads and checks an adapter's adapter_config.json in PEFT's format. Imports no torch.

As in PEFT, LoRA (Hu et al. 2021) scales by alpha / r, and rank-stabilised LoRA (Kalajdzievski 2023) by
alpha / sqrt(r).
"""

import math
import re
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

_NAME = re.compile(r"[\w.]+")
"""Keys of patterns that are names. A dot of theirs would match any character, and there is a dot in modules' names."""
_MOST_EXPRESSIONS = 128
"""Most other keys, which are regular expressions: PEFT's own examples have a few, and each module may have a name."""
_MOST_CHARACTERS = 4096
"""Most characters of all regular expressions together, which bounds their memory and their time for a name: 60 KB of
`\\w*` took 1.6 GB, and 0.3 s for a name."""


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
    rank_pattern: "Overrides" = field(default_factory=lambda: Overrides({}))
    alpha_pattern: "Overrides" = field(default_factory=lambda: Overrides({}))
    """Overrides of rank and alpha by the names of modules."""
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
            rank_pattern=_overrides(fields, "rank_pattern", fractions=False),
            alpha_pattern=_overrides(fields, "alpha_pattern", fractions=True),
            some_layers_only=any(fields.values.get(name) for name in ("layers_to_transform", "exclude_modules")),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its checkpoint name."""
        return int(self.rank_pattern.of(module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of the module's low-rank product."""
        alpha = self.alpha_pattern.of(module, self.alpha)
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


def _overrides(fields: Fields, name: str, *, fractions: bool) -> "Overrides":
    section = fields.section(name)
    if section is None:
        return Overrides({})
    try:
        return Overrides({key: section.number(key) if fractions else section.integer(key) for key in section.values})
    except ValueError as error:
        raise fields.invalid(name, f"an object of names or regular expressions, but {error}") from error


class Overrides:
    """Values by names of modules, or by regular expressions that match a name, whole or after a dot.

    Adapters come from anywhere, and `re` can take hours for an expression such as `(a+)+b`, in which no other thread
    of the engine runs. pydantic's expressions (Rust's) take time linear in the name; their number and size are
    bounded.
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        """Raises `ValueError` for an expression that cannot be used."""
        self._values = list(values.values())
        self._names = {key: index for index, key in enumerate(values) if _NAME.fullmatch(key)}
        others = [(index, key) for index, key in enumerate(values) if key not in self._names]
        if len(others) > _MOST_EXPRESSIONS:
            raise ValueError(
                f"{len(others)} of its keys are regular expressions; it may have at most {_MOST_EXPRESSIONS}"
            )
        if (characters := sum(len(key) for _, key in others)) > _MOST_CHARACTERS:
            raise ValueError(
                f"its regular expressions have {characters} characters; they may have at most {_MOST_CHARACTERS}"
            )
        self._expressions = [(index, _names_by(key)) for index, key in others]
        self._found: dict[str, int | None] = {}

    def of(self, module: str, default: float) -> float:
        """Return the value of the first key that matches the module's name or an ending of it after a dot."""
        if module not in self._found:
            parts = module.split(".")
            ends = (".".join(parts[start:]) for start in range(len(parts)))
            indexes = [self._names[end] for end in ends if end in self._names]
            indexes += [index for index, names in self._expressions if _matches(names, module)]
            self._found[module] = min(indexes, default=None)
        index = self._found[module]
        return default if index is None else self._values[index]


def _names_by(expression: str) -> TypeAdapter[str]:
    """Return what accepts the names that `expression` matches. Raises `ValueError`."""
    if "{" in expression:
        raise ValueError(f"{expression[:100]!r} counts repetitions; write them out")
    try:
        return TypeAdapter(Annotated[str, Field(pattern=rf"^(?:.*\.)?(?:{expression})$")])
    except SchemaError as error:
        reason = str(error).splitlines()[-1].strip().removeprefix("error: ")
        raise ValueError(f"{expression!r} is not a regular expression that can be used ({reason})") from error


def _matches(names: TypeAdapter[str], module: str) -> bool:
    try:
        names.validate_python(module)
    except ValidationError:
        return False
    return True
