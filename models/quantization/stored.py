"""Weights that stay quantised: from a module's tensors to `QuantizedRows`, and a model's weight filled with them.

Loaders slice a checkpoint's tensors by rows and columns and know nothing of what these hold; so a quantised weight is
a tensor to them, of the dense one's shape and type, whose slices are quantised as well.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models.ops.stored_weight import make_dense, stored_of
from models.ops.types import FP8_GROUP
from models.ops.weight_formats import RUN, Codes
from models.quantization.config import Granularity, LayerQuantConfig, Storage
from models.quantization.layouts import AWQ_NIBBLES, Parts, block_shape, exponents, on_grid, unpacked


class QuantizedRows(torch.Tensor):
    """A quantised weight as a tensor of its shape and type. What needs its numbers has the dense ones."""

    held: Codes

    @staticmethod
    def of(held: Codes, dtype: torch.dtype) -> "QuantizedRows":
        """# [rows, inputs]"""
        made: QuantizedRows = torch.Tensor._make_wrapper_subclass(
            QuantizedRows, held.codes.shape, dtype=dtype, device=torch.device("cpu")
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Slices are quantised; any other operator has dense tensors."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        if func is torch.ops.aten.slice.Tensor:
            of, dim, first, last, step = (*args, *(0, 0, None, 1)[len(args) - 1 :])[:5]
            size = of.shape[dim]
            first, last = first or 0, size if last is None else min(last, size)
            held = of.held.part(dim, first, last) if step == 1 else None
            if held is not None:
                return QuantizedRows.of(held, of.dtype)
        dense = [arg.held.dense() if isinstance(arg, QuantizedRows) else arg for arg in args]
        return func(*dense, **(kwargs or {}))


def stored_rows(
    parts: Parts, layer: LayerQuantConfig, dtype: torch.dtype, dense: Callable[[], torch.Tensor]
) -> QuantizedRows | None:
    """A module's tensors as they are; None where the kernels have no such layout. `dense` is what it would be else."""
    match layer.storage:
        case Storage.SCALED if layer.quant_dtype == "fp8" and layer.symmetric:
            held = _fp8(parts, layer, dense)
        case Storage.MXFP4:
            held = _mxfp4(parts, dense)
        case Storage.AWQ | Storage.GPTQ | Storage.PACKED if layer.bits == 4 and not layer.has_group_index:
            held = _int4(parts, layer, dense)
        case _:
            held = None
    return None if held is None else QuantizedRows.of(held, dtype)


def _fp8(parts: Parts, layer: LayerQuantConfig, dense: Callable[[], torch.Tensor]) -> Codes | None:
    weight, scale = parts["weight"], parts["weight_scale"]
    if weight.dtype is not torch.float8_e4m3fn or weight.ndim != 2 or scale.dtype.itemsize == 1:
        return None
    rows, columns = weight.shape
    block_rows, width = block_shape(layer, rows, columns, scale.numel())
    if width not in (FP8_GROUP, columns):
        return None
    grid = on_grid("", "", scale, (-(-rows // block_rows), -(-columns // width)))
    return Codes("fp8", weight, grid.repeat_interleave(block_rows, 0)[:rows].contiguous(), None, width, dense)


def _mxfp4(parts: Parts, dense: Callable[[], torch.Tensor]) -> Codes | None:
    pairs, scale = parts["weight"], exponents(parts["weight_scale"])
    if pairs.ndim != 2 or scale.shape != (len(pairs), pairs.shape[1] // 16) or pairs.shape[1] % RUN:
        return None
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
    return Codes("mxfp4", codes, scale, None, RUN, dense)


def _int4(parts: Parts, layer: LayerQuantConfig, dense: Callable[[], torch.Tensor]) -> Codes | None:
    if layer.storage is Storage.PACKED:
        rows, inputs = (int(size) for size in parts["weight_shape"])
        codes, scales = unpacked(parts["weight_packed"], 4)[:, :inputs], parts["weight_scale"]
        if layer.symmetric:
            zeros = torch.full_like(scales, 8, dtype=torch.uint8)
        else:
            zeros = unpacked(parts["weight_zero_point"].t(), 4).t()[:rows]
    elif layer.storage is Storage.AWQ:
        codes, scales = unpacked(parts["qweight"], 4, AWQ_NIBBLES).t(), parts["scales"].t()
        zeros = unpacked(parts["qzeros"], 4, AWQ_NIBBLES).t()
    else:
        codes, scales = unpacked(parts["qweight"].t(), 4), parts["scales"].t()
        zeros = (unpacked(parts["qzeros"], 4) + layer.zero_offset & 15).t()
    rows, inputs = codes.shape
    width = (layer.group_size or inputs) if layer.quant_type is Granularity.GROUP else inputs
    groups = inputs // width
    fits = inputs % (2 * RUN) == 0 and width % RUN == 0 and inputs % width == 0
    if not fits or tuple(scales.shape) != (rows, groups) or tuple(zeros.shape) != (rows, groups):
        return None
    return Codes("int4", codes.to(torch.uint8), scales.float(), zeros.to(torch.uint8), width, dense)


_FOUR_BIT = (Storage.MXFP4, Storage.AWQ, Storage.GPTQ, Storage.PACKED)


def fill_stored(parameter: nn.Parameter, first: int, rows: torch.Tensor, place: int | None = None) -> bool:
    """Fill rows of a weight that stays quantized, of a stack those of weight `place`; False if the weight is dense.

    A weight whose rows differ in layout, or are dense in part, becomes dense.
    """
    stored = stored_of(parameter)
    if stored is None:
        return False
    codes = rows.held if isinstance(rows, QuantizedRows) else stored.codes_of(rows)
    if codes is not None and stored.put(first, codes, place):
        return True
    make_dense(parameter)
    return False


def can_stay(layer: LayerQuantConfig) -> bool:
    """Whether there is a kernel for weights that are quantised so."""
    if layer.quant_dtype == "fp8":
        return layer.storage is Storage.SCALED and layer.symmetric
    return layer.storage in _FOUR_BIT and layer.bits == 4 and not layer.has_group_index


def can_be_rounded_again(stack: nn.Parameter, layer: LayerQuantConfig) -> bool:
    """Whether a stack that the checkpoint has in one tensor of MXFP4 may stay so. A rank may have some inputs."""
    return layer.storage is Storage.MXFP4_EXPERTS and stack.shape[2] % 64 == 0
