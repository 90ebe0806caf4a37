"""A checkpoint's safetensors files and the tensors in them. Read by the loader, and by the general route's."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from models.architectures.config import DTYPES, CheckpointConfig, ModelConfig
from models.architectures.registry import ARCHITECTURES, INDEXED_LAYERS
from models.config.fields import Fields, read_config, read_generation_config
from models.errors import CheckpointError, first_line

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_NAMED_IN_ERRORS = 5


def weight_files(path: Path) -> list[Path]:
    """The checkpoint's safetensors files, as transformers chooses them: a single one before an index."""
    if (path / _SINGLE_FILE).is_file():
        return [path / _SINGLE_FILE]
    if not (path / _INDEX_FILE).is_file():
        raise CheckpointError(
            f"{path} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; convert the weights to safetensors"
        )
    index = Fields.from_file(path / _INDEX_FILE)
    weight_map = index.section("weight_map")
    if weight_map is None or not all(isinstance(name, str) for name in weight_map.values.values()):
        raise index.invalid("weight_map", "an object from tensor names to file names")
    files = [path / name for name in sorted(set(weight_map.values.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{path} lacks {some(absent, 'file')}, which {_INDEX_FILE} names; download it again")
    return files


def tensors_of_file(
    file: Path, seen: dict[str, Path], ignored: tuple[str, ...] = (), absent: Container[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a file by name, mapped into memory and read as it is copied; none that begins with `ignored` or
    is in `absent`.

    Each is noted in `seen`. Raises `CheckpointError` for a damaged file, or a tensor that an earlier file holds too.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, not a dict
                if name.startswith(ignored) or name in absent:
                    continue
                if name in seen:
                    raise CheckpointError(f"{name} is in both {seen[name]} and {file.name}; only one may hold it")
                seen[name] = file
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or is not a safetensors file ({error}); download it again"
        ) from error


def some(names: Iterable[str], noun: str = "tensor") -> str:
    """A count and the first few names, for a message."""
    first = sorted(names)
    dots = ", ..." if len(first) > _NAMED_IN_ERRORS else ""
    plural = "" if len(first) == 1 else "s"
    return f"{len(first)} {noun}{plural} ({', '.join(first[:_NAMED_IN_ERRORS])}{dots})"


# [transformers_config] `read_checkpoint_config`, which chooses whose code runs a model, and `TransformersConfig` for
# those of transformers.
#
# Imports transformers only when such a checkpoint is read.

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
    is_ours = isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES
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
