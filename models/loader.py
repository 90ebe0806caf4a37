"""`load_model`: builds a model and fills it from the checkpoint's safetensors. Called by the model runner.

Every parameter must be filled and every tensor used, or a `CheckpointError` names those that were not.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from models.base import CausalLM
from models.checkpoint_config import CheckpointConfig
from models.config_fields import Fields
from models.errors import CheckpointError
from models.kernels.cpu import ops
from models.layers.attention import Attention
from models.layers.embedding import VocabParallelEmbedding
from models.layers.linear import ParallelLinear
from models.layers.parameter import Shard, Spelling, WeightShapeError, pack, packed_of, sources_of, weight_loader_of
from models.model_config import ModelConfig
from models.parallel import SINGLE_RANK, TensorParallel
from models.quantization.dequantize import Dequantizer
from models.registry import resolve_model_class
from models.transformers_config import TransformersConfig

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_NAMED_IN_ERRORS = 5
_BAR_AFTER_SECONDS = 1.0
"""A load that is over sooner shows no bar."""


def load_model(
    path: Path,
    config: CheckpointConfig,
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
    if isinstance(config, TransformersConfig):
        from models.transformers_model import load_transformers_model

        if parallel.size > 1:
            raise CheckpointError(
                f"tensor_parallel_size is {parallel.size}, but {config.architecture} runs by transformers' own code, "
                "on one device; set it to 1"
            )
        return load_transformers_model(path, config, dtype=dtype, device=device, progress=progress)
    assert isinstance(config, ModelConfig)
    files = _weight_files(path)
    model_class = resolve_model_class(config.architecture)
    try:
        with _default_dtype(dtype), device:
            model = model_class(config, parallel)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the memory of device {device} ({_first_line(error)})") from error
    if dtype is torch.bfloat16 and device.type == "cpu" and ops.active():
        _pack_products(model)
    missing = _wanted_tensors(model)
    ignored = _prediction_layers(config)
    left_over: list[str] = []
    dequantizer = Dequantizer(config.quantization, dtype, missing.__contains__)
    bar = tqdm(
        files, desc="Loading weights", unit="file", file=sys.stderr, delay=_BAR_AFTER_SECONDS, disable=not progress
    )
    for file in bar:
        for name, tensor in dequantizer.dense(_tensors(file, ignored)):
            target = missing.pop(name, None)
            if target is not None:
                _fill(target, tensor, name, file)
                for rival in target.rivals:
                    missing.pop(rival, None)
            elif not _is_harmless(name, config):
                left_over.append(name)
    if lacking := [name for name, target in missing.items() if not target.is_alternative_to(missing)]:
        raise CheckpointError(f"{path} lacks {_some(dequantizer.lacking(lacking))}, which {config.architecture} needs")
    if left_over := left_over + dequantizer.left_over():
        raise CheckpointError(f"{path} holds {_some(left_over)}, for which {config.architecture} has no place")
    for module in model.modules():
        if isinstance(module, Attention) and module.layer_name in dequantizer.kv_scales:
            module.scale_cache(*dequantizer.kv_scales[module.layer_name])
    return cast(CausalLM, model.eval())


def _pack_products(model: nn.Module) -> None:
    """Let weights that are used in products alone lie as the CPU's products read them."""
    for module in model.modules():
        is_product = isinstance(module, ParallelLinear) and module.is_packable
        if is_product or isinstance(module, VocabParallelEmbedding):
            weight = cast(nn.Parameter, module.weight)
            if packed_of(weight) is None:  # A tied weight is met twice.
                pack(weight)


class _Target(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    parameter: nn.Parameter
    shard: Shard
    rivals: tuple[str, ...] = ()
    """The parameter's tensors in other spellings, which this one's spelling replaces."""
    is_first_spelling: bool = True

    def is_alternative_to(self, missing: Mapping[str, "_Target"]) -> bool:
        """Whether nothing of the parameter was found, and another spelling is the one to name."""
        return not self.is_first_spelling and any(rival in missing for rival in self.rivals)


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
    wanted: dict[str, _Target] = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = _checkpoint_name(name, model).rpartition(".")
        parent, _, kind = module.rpartition(".")
        if spellings := sources_of(parameter):
            wanted |= _in_any_spelling(parameter, parent, spellings)
        elif kind in parts:
            for source, shard in parts[kind]:
                wanted[f"{parent}.{source}.{leaf}"] = _Target(parameter, shard)
        else:
            wanted[f"{module}.{leaf}"] = _Target(parameter, None)
    return wanted


def _in_any_spelling(parameter: nn.Parameter, parent: str, spellings: tuple[Spelling, ...]) -> dict[str, _Target]:
    """By name in the checkpoint, each tensor that may fill a part of the parameter."""
    named = [{f"{parent}.{name}": shard for name, shard in spelling.items()} for spelling in spellings]
    targets = {}
    for spelling in named:
        rivals = tuple(name for other in named if other is not spelling for name in other)
        for name, shard in spelling.items():
            targets[name] = _Target(parameter, shard, rivals, spelling is named[0])
    return targets


def _checkpoint_name(name: str, model: nn.Module) -> str:
    """A parameter's name with its modules as the checkpoint calls them."""
    renamed: Mapping[str, str] = getattr(model, "checkpoint_modules", {})
    return ".".join(renamed.get(part, part) for part in name.split("."))


def _tensors(file: Path, ignored: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a file by name, mapped into memory and read as it is copied; none that begins with `ignored`."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, not a dict
                if not name.startswith(ignored):
                    yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or is not a safetensors file ({error}); download it again"
        ) from error


def _fill(target: _Target, tensor: torch.Tensor, name: str, file: Path) -> None:
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise CheckpointError(
            f"{name} in {file} is {tensor.dtype}, but config.json names no quantisation of it; use a checkpoint whose "
            "quantization_config says how its weights are stored"
        )
    try:
        weight_loader_of(target.parameter)(target.parameter, tensor, target.shard)
    except WeightShapeError as error:
        raise CheckpointError(f"{name} in {file} has {error} by config.json") from error


def _prediction_layers(config: ModelConfig) -> tuple[str, ...]:
    """What the tensors' names begin with of layers past the last one, which predict further tokens (DeepSeek-V3)."""
    first, count = config.num_hidden_layers, config.fields.integer("num_nextn_predict_layers", 0, minimum=0)
    return tuple(f"model.layers.{layer}." for layer in range(first, first + count))


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
