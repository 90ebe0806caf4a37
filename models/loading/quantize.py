"""`write_quantized`: writes a copy of a dense checkpoint with quantised linear layers and experts (`kaon quantize`).

The format is `pack-quantized` or `mxfp4-pack-quantized` of compressed-tensors, which other engines read as well. Codes
and scales equal those that the loader computes when it rounds a dense checkpoint. Embeddings, heads and other weights
that `rounding_of` does not round are copied. Each input file becomes one output file, written a few rows at a time.
"""

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from models.architectures.config import ModelConfig
from models.config.weight_files import damaged, weight_files
from models.errors import CheckpointError
from models.layers.linear import VocabParallelEmbedding
from models.layers.moe import FusedMoE
from models.layers.parameter import can_be_packed, products_without_memory, rounding_of
from models.loading.checkpoint import read_checkpoint_config
from models.loading.loader import (
    CheckpointNames,
    Target,
    checkpoint_names,
    default_dtype,
    expert_names,
    make_model,
    wanted_tensors,
)
from models.ops.cpu.packed_weight import PANEL, QuantizedWeight, group_of
from models.ops.weight_formats import mxfp4_of
from models.quantization.config import MXFP4_GROUP, ROUNDING_FIELD, ROUNDINGS, Rounding
from models.quantization.dequantize import unstacked

_CHUNK_BYTES = 64 << 20
"""Number of bytes of a dense weight that are rounded at a time."""
_WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
"""Endings of files that are not copied: weights in safetensors and in other formats."""
_INDEX_FILE = "model.safetensors.index.json"
_NAMES = {torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8", torch.bfloat16: "BF16"}
"""safetensors' names of the dtypes of a rounded weight's tensors."""
_SHAPE = "weight_shape"


def write_quantized(source: Path, out: Path, rounding: Rounding, *, progress: bool = False) -> None:
    """Round the checkpoint directory `source` into the new directory `out`, which is created by an atomic rename.

    Needs the CPU operators. Raises `CheckpointError` if the checkpoint cannot be rounded, `out` exists, or `out`
    cannot be written.
    """
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists; name a directory that does not, or remove it first")
    plan = _Plan(source, rounding)
    temporary = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        _write_checkpoint(source, temporary, plan, progress=progress)
        os.rename(temporary, out)
        _sync(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written ({error.strerror or error})") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


class _Weight(NamedTuple):
    """A dense weight to be rounded: a tensor of the checkpoint, or one expert's part of a stacked tensor."""

    name: str
    """Name of the tensor in the source checkpoint."""
    expert: int | None
    """Index of the expert in a stacked tensor; None if the tensor is one weight."""
    rows: slice
    """Rows of the tensor, or of the expert's matrix in it."""
    module: str
    """Name of the module in the new checkpoint."""


class _Plan:
    """Decides which tensors of a checkpoint are rounded."""

    def __init__(self, source: Path, rounding: Rounding) -> None:
        """Raises `CheckpointError` if the checkpoint cannot be rounded."""
        config = read_checkpoint_config(source)
        if not isinstance(config, ModelConfig):
            raise CheckpointError(
                f"{config.architecture} of {source} runs by {config.runs_by}, whose weights are not rounded; choose a "
                "model of an architecture of Kaon's own"
            )
        if config.quantization is not None:
            raise CheckpointError(
                f"{source} is quantised already, by {config.quantization.quant_method}; serve it as it is, or give "
                "its dense checkpoint"
            )
        with default_dtype(torch.bfloat16), products_without_memory():
            model = make_model(config)
        if any(not each.has_plain_stacks for each in model.modules() if isinstance(each, FusedMoE)):
            raise CheckpointError(
                f"{config.architecture} of {source} has its experts in stacks whose inputs come before their outputs, "
                "which are not rounded; serve it with --quantization, or a checkpoint that its publisher has quantised"
            )
        self.rounding: Rounding = rounding
        self.names: CheckpointNames = checkpoint_names(config)
        self._wanted = wanted_tensors(model)
        self._dense = {id(each.weight) for each in model.modules() if isinstance(each, VocabParallelEmbedding)}

    def weights_of(self, name: str, tensor: torch.Tensor) -> list[_Weight]:
        """Return the weights of a checkpoint tensor that are rounded; empty if the tensor is copied."""
        own = self.names.rename(name)
        target = None if self.names.is_ignored(name) else self._wanted.get(own)
        if target is None or not self._is_rounded(target) or not tensor.is_floating_point():
            return []
        if tensor.ndim == 2:
            return [_Weight(name, None, slice(0, len(tensor)), name.removesuffix(".weight"))]
        each = expert_names(self._wanted, own)
        rows = tensor.shape[1] // len({part for _, part in each})
        parts = []
        for position, (alone, _) in enumerate(unstacked(name, tensor, each)):
            expert, part = divmod(position, tensor.shape[1] // rows)
            layer, _, of_expert = alone.partition(".experts.")
            module = f"{name.removesuffix(own.removeprefix(layer))}.experts.{of_expert.removesuffix('.weight')}"
            parts.append(_Weight(name, expert, slice(part * rows, (part + 1) * rows), module))
        return parts

    def _is_rounded(self, target: Target) -> bool:
        parameter: nn.Parameter = target.parameter
        if id(parameter) in self._dense or not can_be_packed(parameter):
            return False
        is_whole = parameter.shape[-1] % _group(self.rounding) == 0
        return is_whole and rounding_of(parameter, self.rounding) == self.rounding


def _group(rounding: Rounding) -> int:
    """Return the number of inputs that share a scale."""
    return MXFP4_GROUP if rounding == "mxfp4" else group_of(8 if rounding == "int8" else 4)


def _write_checkpoint(source: Path, target: Path, plan: _Plan, *, progress: bool) -> None:
    """Write all files of the new checkpoint into the directory `target`."""
    mask = os.umask(0)
    os.umask(mask)
    target.chmod(0o777 & ~mask)
    _copy_others(source, target)
    files = weight_files(source)
    weight_map: dict[str, str] = {}
    # A tied head has no tensor, but other tools have a linear layer for it, which they must not expect quantised.
    dense = {"lm_head"}
    num_bytes = 0
    for file in tqdm(files, desc="Rounding weights", unit="file", file=sys.stderr, disable=not progress):
        with ExitStack() as stack:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a dict
                types = {name: opened.get_slice(name).get_dtype() for name in tensors}
            except (SafetensorError, OSError) as error:
                raise damaged(file, error) from error
            rounded = {name: plan.weights_of(name, tensor) for name, tensor in tensors.items()}
            written = _write_file(target / file.name, tensors, types, rounded, plan.rounding)
        weight_map |= dict.fromkeys(written, file.name)
        num_bytes += (target / file.name).stat().st_size
        dense |= {name.removesuffix(".weight") for name in tensors if not rounded[name] and tensors[name].ndim == 2}
    if len(files) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        _write_json(target / _INDEX_FILE, index)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for section in (config, config.get("text_config")):
        if isinstance(section, dict):
            section |= dict.fromkeys({"dtype", "torch_dtype"} & section.keys() or {"dtype"}, "bfloat16")
    config["quantization_config"] = _quantization_config(plan.rounding, sorted(dense))
    if plan.rounding != "mxfp4":
        config[ROUNDING_FIELD] = plan.rounding
    _write_json(target / "config.json", config)
    for file in target.iterdir():
        _sync(file)
    _sync(target)


def _copy_others(source: Path, target: Path) -> None:
    """Copy all files but the weights: tokenizer, chat template, generation settings and others."""

    def is_left_out(name: str) -> bool:
        return name.startswith(".") or name.endswith(_WEIGHT_ENDINGS)

    for entry in source.iterdir():
        if is_left_out(entry.name):
            continue
        if entry.is_dir():
            shutil.copytree(entry, target / entry.name, ignore=lambda _, names: list(filter(is_left_out, names)))
        else:
            shutil.copyfile(entry, target / entry.name)


class _Part(NamedTuple):
    """A tensor of the output file."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def _write_file(
    path: Path,
    tensors: dict[str, torch.Tensor],
    types: dict[str, str],
    rounded: dict[str, list[_Weight]],
    rounding: Rounding,
) -> list[str]:
    """Write one safetensors file; return the names of its tensors."""
    parts: dict[str, _Part] = {}
    for name, tensor in tensors.items():
        if not rounded[name]:
            parts[name] = _Part(types[name], tuple(tensor.shape), tensor.nbytes)
        for weight in rounded[name]:
            shape = (weight.rows.stop - weight.rows.start, tensor.shape[-1])
            for leaf, (dtype, sizes) in _leaves(rounding, shape).items():
                num_bytes = math.prod(sizes) * dtype.itemsize
                parts[f"{weight.module}.{leaf}"] = _Part(_NAMES[dtype], sizes, num_bytes)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, part in parts.items():
        offsets[name] = end
        header[name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [end, end + part.num_bytes]}
        end += part.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # The data section starts at a multiple of 8 bytes.
    first = 8 + len(text)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        # Allocating first makes a full disk fail before any work is done.
        os.posix_fallocate(file.fileno(), 0, first + end)
        for name, tensor in tensors.items():
            if not rounded[name]:
                _put(file.fileno(), tensor, first + offsets[name])
            for weight in rounded[name]:
                whole = tensor if weight.expert is None else tensor[weight.expert]
                positions = {leaf: first + offsets[f"{weight.module}.{leaf}"] for leaf in _leaves(rounding, (0, 0))}
                for leaf, chunk in _rounded(whole[weight.rows], rounding):
                    _put(file.fileno(), chunk, positions[leaf])
                    positions[leaf] += chunk.nbytes
    return list(parts)


def _put(file: int, tensor: torch.Tensor, offset: int) -> None:
    """Write a tensor's bytes at an offset of the file."""
    # A dimension of one element may have any stride, with which torch does not view bytes.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    data = flat.view(torch.uint8).numpy().data
    while data:
        count = os.pwrite(file, data[:_CHUNK_BYTES], offset)
        data, offset = data[count:], offset + count


def _leaves(rounding: Rounding, shape: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor that a rounded weight of `shape` has, by the last part of its name."""
    rows, inputs = shape
    groups = inputs // _group(rounding)
    if rounding == "mxfp4":
        return {"weight_packed": (torch.uint8, (rows, inputs // 2)), "weight_scale": (torch.uint8, (rows, groups))}
    return {
        "weight_packed": (torch.int32, (rows, inputs * ROUNDINGS[rounding] // 32)),
        "weight_scale": (torch.bfloat16, (rows, groups)),
        _SHAPE: (torch.int64, (2,)),
    }


def _rounded(weight: torch.Tensor, rounding: Rounding) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `_leaves` for a weight, in chunks of rows. # [rows, inputs]"""
    step = max(1, _CHUNK_BYTES // (PANEL * weight.shape[1] * 2)) * PANEL
    for first in range(0, len(weight), step):
        rows = weight[first : first + step].to(torch.bfloat16)
        if rounding == "mxfp4":
            codes, scales = mxfp4_of(rows)
            yield "weight_packed", _in_pairs(codes)
        else:
            bits: Literal[4, 8] = 8 if rounding == "int8" else 4
            packed = QuantizedWeight(len(rows), rows.shape[1], bits)
            packed.put(0, rows)
            values, scales = packed.codes()
            unsigned = (values + (1 << bits - 1)).view(torch.uint8)
            yield "weight_packed", unsigned if bits == 8 else _in_pairs(unsigned)
        yield "weight_scale", scales
    if rounding != "mxfp4":
        yield _SHAPE, torch.tensor(weight.shape, dtype=torch.int64)


def _in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Pack two 4-bit codes per byte, the first in the low half. # [rows, n] uint8 -> [rows, n / 2] uint8"""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _quantization_config(rounding: Rounding, dense: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` in compressed-tensors' format. `dense`: modules whose matrices are not
    rounded."""
    storage = "mxfp4-pack-quantized" if rounding == "mxfp4" else "pack-quantized"
    weights: dict[str, Any] = {
        "num_bits": ROUNDINGS[rounding],
        "type": "float" if rounding == "mxfp4" else "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": _group(rounding),
        "dynamic": False,
    }
    if rounding == "mxfp4":
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    group = {
        "targets": ["Linear"],
        "format": storage,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": dense,
        "kv_cache_scheme": None,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Flush a file or directory to the disk, so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
