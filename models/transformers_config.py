"""`read_checkpoint_config`, which chooses whose code runs a model, and `TransformersConfig` for those of transformers.

Imports transformers only when such a checkpoint is read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from models.checkpoint_config import DTYPES, CheckpointConfig
from models.config_fields import Fields, read_config, read_generation_config
from models.errors import CheckpointError, first_line
from models.model_config import ModelConfig
from models.registry import INDEXED_LAYERS, SUPPORTED_ARCHITECTURES

ModelImpl: TypeAlias = Literal["auto", "kaon", "transformers"]
"""Whose model code runs; `auto`: Kaon's own where it has the architecture."""

_LENGTHS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
"""Fields that hold the context length, in the order in which they are believed."""


_KINDS_OF_LAYER = {"full_attention", "sliding_attention", *INDEXED_LAYERS}


@dataclass(frozen=True, slots=True)
class TransformersConfig(CheckpointConfig):
    """Nothing more than the engine needs: the rest is transformers' own."""

    runs_by: ClassVar[str] = "transformers' own code over Kaon's paged attention (the general route)"

    @classmethod
    def from_checkpoint(cls, path: Path, config: Fields, generation: Fields) -> "TransformersConfig":
        """Of the directory `path`, whose two files are read. Raises `CheckpointError` for one not to be served."""
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
        if others := sorted(set(kinds) - _KINDS_OF_LAYER):
            raise CheckpointError(
                f"{architecture} of {config.where} has layers of {' and '.join(others)}, which the general route "
                "cannot serve: it serves full, sliding-window and indexed attention, and no recurrent state"
            )
        if getattr(text, "alibi", False) or getattr(getattr(text, "attn_config", None), "alibi", False):
            raise CheckpointError(
                f"alibi of {config.where} is true; the general route cannot serve biases on attention scores"
            )
        length = next((name for name in _LENGTHS if getattr(text, name, None) is not None), _LENGTHS[0])
        names = ("vocab_size", "bos_token_id", "eos_token_id", length)
        read = Fields({name: getattr(text, name, None) for name in names}, config.where)
        bos = generation.token_ids("bos_token_id") or read.token_ids("bos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            # A prompt's token and a generated one.
            max_model_len=read.integer(length, minimum=2),
            dtype=_dtype(text, whole, config),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=generation.token_ids("eos_token_id") or read.token_ids("eos_token_id"),
        )


def read_checkpoint_config(path: Path, model_impl: ModelImpl = "auto") -> CheckpointConfig:
    """Read the directory `path`: a `ModelConfig` where Kaon's own code runs the model, else a `TransformersConfig`.

    Raises `CheckpointError` naming file, field and value.
    """
    config = read_config(path)
    names = config.values.get("architectures")
    is_ours = isinstance(names, list) and len(names) == 1 and names[0] in SUPPORTED_ARCHITECTURES
    if model_impl == "kaon" or (model_impl == "auto" and is_ours):
        return ModelConfig.from_checkpoint(path)
    return TransformersConfig.from_checkpoint(path, config, read_generation_config(path))


def _auto_config(path: Path, config: Fields) -> Any:
    """transformers' reading of config.json."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Whatever its many authors raise.
        if config.has("auto_map"):
            raise CheckpointError(
                f"auto_map of {config.where} asks for code from the checkpoint, which is never run; it must be an "
                "architecture of Kaon or of transformers"
            ) from error
        raise CheckpointError(f"transformers cannot read {config.where}: {first_line(error)}") from error


def _architecture(config: Fields, whole: Any) -> str:
    """The class that transformers makes of the checkpoint. Raises `CheckpointError` where that is no causal model."""
    from transformers import AutoModelForCausalLM

    try:
        model_class = AutoModelForCausalLM._model_mapping[type(whole)]
    except KeyError:
        raise config.invalid("model_type", "a causal language model of transformers") from None
    if isinstance(model_class, tuple | list):
        model_class = model_class[0]
    return str(model_class.__name__)


def _dtype(text: Any, whole: Any, config: Fields) -> str:
    found = next((own.dtype for own in (text, whole) if getattr(own, "dtype", None) is not None), "float32")
    dtype = str(found).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype of {config.where} is {dtype}; it must be one of {', '.join(DTYPES)}")
    return dtype
