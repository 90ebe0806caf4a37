"""Weights that stay quantised: from a module's tensors to `QuantizedRows`, and a model's weight filled with them.

Loaders slice a checkpoint's tensors by rows and columns and know nothing of what these hold; so a quantised weight is
a tensor to them, of the dense one's shape and type, whose slices are quantised as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from models.kernels.types import FP8_GROUP
from models.quantization.config import Granularity, LayerQuantConfig, Storage
from models.quantization.layouts import AWQ_NIBBLES, Parts, block_shape, exponents, on_grid, unpacked

_RUN = 32
"""Inputs that lie in a row where codes have 4 bits."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of one quantised weight."""

    kind: str
    """`fp8`, `int4` or `mxfp4`."""
    codes: torch.Tensor  # [rows, inputs] float8_e4m3fn, or uint8 below 16
    scales: torch.Tensor
    """[rows, groups] of neighbouring inputs: float32, or with MXFP4 uint8 exponents of two, biased by 127."""
    zeros: torch.Tensor | None
    """[rows, groups] uint8, the code that means 0, with int4."""
    width: int
    """Inputs of a group; the last of FP8 may have fewer."""
    dense: Callable[[], torch.Tensor]
    """The same rows and columns as the model computes without kernels."""

    def part(self, dim: int, first: int, last: int) -> "Codes | None":
        """Some rows or columns; None where a group would be cut, or two runs of 4-bit codes."""
        dense = self.dense

        def slice_of_dense() -> torch.Tensor:
            return dense().narrow(dim, first, last - first)

        if dim == 0:
            some = slice(first, last)
            zeros = None if self.zeros is None else self.zeros[some]
            return replace(self, codes=self.codes[some], scales=self.scales[some], zeros=zeros, dense=slice_of_dense)
        inputs = self.codes.shape[1]
        groups = slice(0, self.scales.shape[1])
        if self.width < inputs:
            if first % self.width or (last % self.width and last != inputs):
                return None
            if self.kind != "fp8" and (last - first) % (2 * _RUN):
                return None
            groups = slice(first // self.width, -(-last // self.width))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return replace(
            self, codes=self.codes[:, first:last], scales=self.scales[:, groups], zeros=zeros, dense=slice_of_dense
        )


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
    if pairs.ndim != 2 or scale.shape != (len(pairs), pairs.shape[1] // 16) or pairs.shape[1] % _RUN:
        return None
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
    return Codes("mxfp4", codes, scale, None, _RUN, dense)


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
    fits = inputs % (2 * _RUN) == 0 and width % _RUN == 0 and inputs % width == 0
    if not fits or tuple(scales.shape) != (rows, groups) or tuple(zeros.shape) != (rows, groups):
        return None
    return Codes("int4", codes.to(torch.uint8), scales.float(), zeros.to(torch.uint8), width, dense)
