"""`load_model`: builds a model and fills it from the checkpoint's safetensors. Called by the model runner.

Every parameter must be filled and every tensor used, or a `CheckpointError` names those that were not.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from models.base import CausalLM
from models.config_fields import Fields
from models.errors import CheckpointError
from models.layers.parameter import WeightShapeError, weight_loader_of
from models.model_config import ModelConfig
from models.parallel import SINGLE_RANK, TensorParallel
from models.registry import resolve_model_class

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_NAMED_IN_ERRORS = 5
_BAR_AFTER_SECONDS = 1.0
"""A load that is over sooner shows no bar."""


def load_model(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    parallel: TensorParallel = SINGLE_RANK,
) -> CausalLM:
    """The model of the checkpoint directory `path`, this rank's shard of it, converted to `dtype` on `device`.

    `progress` draws a bar of files on stderr. Raises `CheckpointError` for a checkpoint that is damaged, or is not
    the model that `config` describes.
    """
    files = _weight_files(path)
    model_class = resolve_model_class(config.architecture)
    try:
        with _default_dtype(dtype), device:
            model = model_class(config, parallel)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the memory of device {device} ({_first_line(error)})") from error
    missing = _wanted_tensors(model)
    left_over: list[str] = []
    bar = tqdm(
        files, desc="Loading weights", unit="file", file=sys.stderr, delay=_BAR_AFTER_SECONDS, disable=not progress
    )
    for file in bar:
        for name, tensor in _tensors(file):
            target = missing.pop(name, None)
            if target is not None:
                _fill(target, tensor, name, file)
            elif not _is_harmless(name, config):
                left_over.append(name)
    if missing:
        raise CheckpointError(f"{path} lacks {_some(missing)}, which {config.architecture} needs")
    if left_over:
        raise CheckpointError(f"{path} holds {_some(left_over)}, for which {config.architecture} has no place")
    return cast(CausalLM, model.eval())


class _Target(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    parameter: nn.Parameter
    shard: str | int | None


def _weight_files(path: Path) -> list[Path]:
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
        raise CheckpointError(f"{path} lacks {_some(absent, 'file')}, which {_INDEX_FILE} names; download it again")
    return files


def _wanted_tensors(model: nn.Module) -> dict[str, _Target]:
    """By name in the checkpoint, each tensor that fills a parameter or a part of a packed one."""
    parts: dict[str, list[tuple[str, str | int]]] = {}
    for source, (packed, shard) in cast("dict[str, tuple[str, str | int]]", model.packed_modules_mapping).items():
        parts.setdefault(packed, []).append((source, shard))
    wanted = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        parent, _, kind = module.rpartition(".")
        if kind in parts:
            for source, shard in parts[kind]:
                wanted[f"{parent}.{source}.{leaf}"] = _Target(parameter, shard)
        else:
            wanted[name] = _Target(parameter, None)
    return wanted


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a file by name, mapped into memory and read as it is copied."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, not a dict
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or is not a safetensors file ({error}); download it again"
        ) from error


def _fill(target: _Target, tensor: torch.Tensor, name: str, file: Path) -> None:
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise CheckpointError(
            f"{name} in {file} is {tensor.dtype}, but this release runs unquantised checkpoints only; use the "
            "model's original checkpoint"
        )
    try:
        weight_loader_of(target.parameter)(target.parameter, tensor, target.shard)
    except WeightShapeError as error:
        raise CheckpointError(f"{name} in {file} has {error} by config.json") from error


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints carry beside the weights: computed ones, and a copy of the tied embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _some(names: Iterable[str], noun: str = "tensor") -> str:
    """A count and the first few names."""
    first = sorted(names)
    dots = ", ..." if len(first) > _NAMED_IN_ERRORS else ""
    plural = "" if len(first) == 1 else "s"
    return f"{len(first)} {noun}{plural} ({', '.join(first[:_NAMED_IN_ERRORS])}{dots})"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
