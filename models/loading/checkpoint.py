"""Reads a checkpoint directory: its tensors, and its configuration (`read_checkpoint_config`).

The configuration decides which code runs the model: Kaon's own (`ModelConfig`, `EncoderConfig`) or transformers'
(`TransformersConfig`). transformers is imported only to read the latter.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from models.architectures.config import DTYPES, CheckpointConfig, ModelConfig
from models.architectures.encoder_config import EncoderConfig
from models.architectures.pooling import PoolingConfig
from models.architectures.registry import ARCHITECTURES, ENCODERS, INDEXED_LAYERS, TEXT_PARTS
from models.config.fields import Fields, read_config, read_generation_config
from models.config.rope import RopeContext
from models.config.weight_files import damaged
from models.errors import CheckpointError, first_line
from models.quantization.methods import parse_quantization

ModelImpl: TypeAlias = Literal["auto", "kaon", "transformers"]
"""The code that runs a model; `auto`: Kaon's own if it implements the architecture, else transformers'."""
_LENGTHS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx", "context_length")
"""Fields that hold the context length, in order of precedence."""
_NO_LENGTH = 1 << 17
"""The context of models without attention: states have no longest context, but block tables need a limit."""
_LAYER_KINDS = {
    "full_attention",
    "sliding_attention",
    *INDEXED_LAYERS,
    *("conv", "linear_attention", "hybrid", "hybrid_sliding", "moe", "mlp"),
}
"""The kinds of layers that the general route serves; those of the last line have states, or no attention."""


def tensors_of_file(
    file: Path, seen: dict[str, Path], is_ignored: Callable[[str], bool] = lambda _name: False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each tensor of a file that is not ignored; tensors are memory-mapped.

    `seen` maps the names yielded so far to their files, and is updated. Raises `CheckpointError` for a damaged file,
    or a tensor that an earlier file holds too.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, not a dict
                if is_ignored(name):
                    continue
                if name in seen:
                    raise CheckpointError(f"{name} is in both {seen[name]} and {file.name}; only one may hold it")
                seen[name] = file
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """Return one tensor, memory-mapped. Raises `CheckpointError`."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(name)  # type: ignore[no-any-return]
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error


@dataclass(frozen=True, slots=True)
class TransformersConfig(CheckpointConfig):
    """The fields that the engine needs of a model that runs by transformers' own code."""

    runs_by: ClassVar[str] = "transformers' own code over Kaon's paged attention (the general route)"

    rope: RopeContext | None = None
    """How rotary frequencies depend on a sequence's length, or None if they do not."""

    @property
    def default_max_len(self) -> int:
        """transformers' `max_position_embeddings`, which does not include the extension by a `dynamic` rope."""
        return self.rope.original if self.rope is not None and self.rope.grows else self.max_model_len

    def rope_context(self, served: int) -> RopeContext | None:
        return self.rope if self.rope is not None and served > self.rope.original else None

    @classmethod
    def from_checkpoint(cls, path: Path, config: Fields, generation: Fields) -> "TransformersConfig":
        """Read `path`, whose config.json and generation_config.json are given.

        Raises `CheckpointError` for a model that cannot be served.
        """
        if (kind := str(config.values.get("model_type"))).endswith("_assistant"):
            raise CheckpointError(
                f"model_type of {config.where} is {kind}, a drafter that reads hidden states, keys and values of the "
                "model that it drafts for; serve that model"
            )
        whole = _auto_config(path, config)
        architecture = _architecture(config, whole)
        if getattr(whole, "is_encoder_decoder", False):
            raise CheckpointError(
                f"{architecture} of {config.where} is an encoder and a decoder; only decoder-only models can be served"
            )
        text = whole.get_text_config(decoder=True)
        if getattr(text, "add_cross_attention", False):
            raise CheckpointError(
                f"add_cross_attention of {config.where} is true; only decoder-only models can be served"
            )
        kinds = getattr(text, "layer_types", None) or ()
        if others := sorted(set(kinds) - _LAYER_KINDS):
            raise CheckpointError(
                f"{architecture} of {config.where} has layers of {' and '.join(others)}, which the general route "
                "cannot serve: it serves full, sliding-window and indexed attention, and recurrent states"
            )
        if getattr(text, "alibi", False) or getattr(getattr(text, "attn_config", None), "alibi", False):
            raise CheckpointError(
                f"alibi of {config.where} is true; the general route cannot serve biases on attention scores"
            )
        rope = _rope_context(text)
        stretched = 0
        if rope is not None and rope.grows:
            stretched = int(rope.original * text.rope_parameters.get("factor", 1.0))
        length = next((name for name in _LENGTHS if getattr(text, name, None) is not None), _LENGTHS[0])
        names = ("vocab_size", "bos_token_id", "eos_token_id", length)
        values = {name: getattr(text, name, None) for name in names}
        if values[length] is None and getattr(text, "num_attention_heads", None) is None:
            values[length] = _NO_LENGTH
        read = Fields(values, config.where)
        bos = generation.token_ids("bos_token_id") or read.token_ids("bos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            # The minimum of 2 is one token of a prompt and one generated token.
            max_model_len=max(read.integer(length, minimum=2), stretched),
            dtype=_dtype(text, whole, config),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=generation.token_ids("eos_token_id") or read.token_ids("eos_token_id"),
            quantization=parse_quantization(config, path),
            rope=rope,
        )


def _rope_context(text: Any) -> RopeContext | None:
    """Return the parameters of a rope that depends on lengths, from transformers' configuration, or None.

    Ropes that differ by kind of layer are checked later, when the model is built (`_follow_lengths`).
    """
    parameters = getattr(text, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return None
    kind, whole = parameters.get("rope_type"), getattr(text, "max_position_embeddings", None)
    original = parameters.get("original_max_position_embeddings") if kind == "longrope" else whole
    if kind not in ("dynamic", "longrope") or not isinstance(original, int):
        return None
    return RopeContext(original, kind == "dynamic")


def read_checkpoint_config(
    path: Path, model_impl: ModelImpl = "auto", pooling: PoolingConfig | None = None
) -> CheckpointConfig:
    """Read the configuration of the checkpoint directory `path`.

    Returns a `ModelConfig` or `EncoderConfig` if Kaon's own code runs the model, else a `TransformersConfig`.
    `pooling`: how the model pools prompts, or None if it generates. Encoders, and bodies that were saved without their
    head, run by Kaon's own code only. Raises `CheckpointError` naming file, field and value.
    """
    config = read_config(path)
    if pooling is not None:
        is_ours = pooling.body in ENCODERS or pooling.body in ARCHITECTURES
        if model_impl == "transformers" and (pooling.is_encoder or pooling.body != config.strings("architectures")[0]):
            raise CheckpointError(
                f"model_impl is transformers, but a body such as {pooling.body}, which reads texts in both directions "
                "or was saved without its head, runs by Kaon's own code; set it to auto"
            )
        if pooling.body in ENCODERS:
            return EncoderConfig.from_checkpoint(path, pooling.body)
        if model_impl == "kaon" or (model_impl == "auto" and is_ours):
            return ModelConfig.from_checkpoint(path, pooling.body, is_bidirectional=pooling.is_encoder)
    names = config.values.get("architectures")
    is_ours = isinstance(names, list) and len(names) == 1 and (names[0] in ARCHITECTURES or names[0] in TEXT_PARTS)
    if model_impl == "kaon" or (model_impl == "auto" and is_ours):
        return ModelConfig.from_checkpoint(path)
    return TransformersConfig.from_checkpoint(path, config, read_generation_config(path))


def _auto_config(path: Path, config: Fields) -> Any:
    """Return transformers' configuration object of config.json."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Configuration classes may raise anything.
        if config.has("auto_map"):
            raise CheckpointError(
                f"auto_map of {config.where} asks for code from the checkpoint, which is never run; it must be an "
                "architecture of Kaon or of transformers"
            ) from error
        raise CheckpointError(f"transformers cannot read {config.where}: {first_line(error)}") from error


def _architecture(config: Fields, whole: Any) -> str:
    """Return the name of the model's class. Raises `CheckpointError` if transformers has no causal model of this
    type."""
    try:
        return str(causal_model_class(whole).__name__)
    except KeyError:
        raise config.invalid("model_type", "a causal language model of transformers") from None


def causal_model_class(config: Any) -> Any:
    """Return transformers' causal model class for a configuration object. Raises `KeyError` if there is none."""
    from transformers import AutoModelForCausalLM

    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    return model_class[0] if isinstance(model_class, tuple | list) else model_class


def _dtype(text: Any, whole: Any, config: Fields) -> str:
    found = next((own.dtype for own in (text, whole) if getattr(own, "dtype", None) is not None), "float32")
    dtype = str(found).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype of {config.where} is {dtype}; it must be one of {', '.join(DTYPES)}")
    return dtype
