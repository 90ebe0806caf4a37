"""Weights that stay quantised: from a module's tensors to `QuantizedRows`, and a model's weight filled with them.

Loaders slice a checkpoint's tensors by rows and columns and know nothing of what these hold; so a quantised weight is
a tensor to them, of the dense one's shape and type, whose slices are quantised as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from models.ops import aiter, triton
from models.ops.aiter import operators as aiter_dense
from models.ops.types import FP8_GROUP
from models.quantization.config import Granularity, LayerQuantConfig, Storage
from models.quantization.layouts import AWQ_NIBBLES, Parts, block_shape, exponents, on_grid, unpacked

if TYPE_CHECKING:
    from models.ops.activation import Gating
    from models.ops.triton.expert_routing import SortedPairs
    from models.ops.triton.quantized_products import FourBitWeight, FP8Weight


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


# [quantized_product] Products with weights that stay quantised on a GPU: which weights do, how they are filled, and
# the product.
#
# Called by `models.layers.linear` and `FusedMoE`, and by the loader before and while it fills a model.

_Place: TypeAlias = int | slice | EllipsisType | tuple[int | slice, ...]
"""Some rows of a weight, or of a stack of them."""
_FOUR_BIT = (Storage.MXFP4, Storage.AWQ, Storage.GPTQ, Storage.PACKED)


class StoredWeight:
    """The memory of one weight, or of a stack of experts', of the kind of its first rows."""

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, *, is_rounded_again: bool = False
    ) -> None:
        """`is_rounded_again`: dense rows were MXFP4, and are rounded to the same numbers again."""
        self._shape, self._dtype, self._device = shape, dtype, device
        self._is_rounded_again = is_rounded_again
        self._first: Codes | None = None
        self._codes = self._scales = torch.empty(0)
        self._zeros: torch.Tensor | None = None
        self._fp8_blocks: tuple[torch.Tensor, torch.Tensor] | None = None
        self._has_looked_for_blocks = False

    @property
    def kind(self) -> str | None:
        """`fp8`, `int4` or `mxfp4`; None before it has rows."""
        return None if self._first is None else self._first.kind

    @property
    def form(self) -> tuple[str, int, int]:
        """Equal for weights that the same kernels multiply by: kind, inputs that share a scale, and groups of them."""
        assert self._first is not None, "a weight is filled before it is used"
        return self._first.kind, self._first.width, self._scales.shape[-1]

    def put(self, first: int, rows: torch.Tensor, place: int | None = None) -> bool:
        """Fill rows from `first` on, of a stack those of one of its weights; False where they cannot stay, or are of
        another kind than those before. # [count, inputs]
        """
        held = self._held(rows)
        if held is None:
            return False
        if self._first is None:
            self._begin(held)
        begun = self._first
        assert begun is not None
        if (held.kind, held.width, held.scales.shape[1]) != (begun.kind, begun.width, begun.scales.shape[1]):
            return False
        some = slice(first, first + len(held.codes))
        at = some if place is None else (place, some)
        codes, scales = self._as_kernels_read(held)
        self._codes.view(torch.uint8)[at] = codes.view(torch.uint8)
        self._scales[at] = scales.to(self._scales.dtype)
        if self._zeros is not None:
            assert held.zeros is not None
            self._zeros[at] = held.zeros.to(self._device)
        return True

    def _held(self, rows: torch.Tensor) -> Codes | None:
        if isinstance(rows, QuantizedRows):
            return rows.held
        if not self._is_rounded_again:
            return None
        from models.ops.triton.quantized_products import RUN, mxfp4_of

        codes, exponents = mxfp4_of(rows.to(self._device))
        return Codes("mxfp4", codes, exponents, None, RUN, lambda: rows)

    def _begin(self, rows: Codes) -> None:
        from models.ops.triton.configs import target_of

        self._first = rows
        *outputs, inputs = self._shape
        groups = rows.scales.shape[1]

        def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(*outputs, columns, dtype=dtype, device=self._device)

        if rows.kind == "fp8":
            self._codes = empty(inputs, getattr(torch, f"float8_{target_of(self._device).fp8 or 'e4m3fn'}"))
            self._scales = empty(groups, torch.float32)
        else:
            self._codes = empty(inputs // 2, torch.uint8)
            self._scales = empty(groups, torch.uint8 if rows.kind == "mxfp4" else self._dtype)
            self._zeros = empty(groups, torch.uint8) if rows.kind == "int4" else None

    def _as_kernels_read(self, rows: Codes) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales, on the device."""
        from models.ops.triton.quantized_products import pack_nibbles, to_flavour

        codes, scales = rows.codes.to(self._device), rows.scales.to(self._device)
        return to_flavour(codes, scales, self._codes.dtype) if rows.kind == "fp8" else (pack_nibbles(codes), scales)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`. # [tokens, in_features] -> [tokens, out_features]"""
        if x.shape[0] == 0 or triton.is_idle():
            return x.new_zeros(x.shape[0], self._shape[0])
        if self.kind == "fp8":
            import models.ops.triton.quantized_products as fp8

            if aiter.runs("linear", x) and (blocks := self.fp8_blocks()) is not None:
                return _by_aiter(x, *blocks, bias)
            return fp8.fp8_linear(x, self._fp8(), bias)
        import models.ops.triton.quantized_products as four_bit

        return four_bit.four_bit_linear(x, self._four_bit(), bias)

    def grouped(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        pairs: "SortedPairs",
        num_pairs: int,
        gating: "Gating | None" = None,
    ) -> torch.Tensor:
        """Each pair's row by its expert's weight of the stack, as `moe_gemm`."""
        if self.kind == "fp8":
            import models.ops.triton.expert_products as fp8

            return fp8.moe_fp8_gemm(rows, self._fp8(), bias, pairs, num_pairs, gating=gating)
        import models.ops.triton.expert_products as four_bit

        return four_bit.moe_four_bit_gemm(rows, self._four_bit(), bias, pairs, num_pairs, gating=gating)

    def fp8_blocks(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """FP8 with a scale for each block of 128 x 128, once it is filled; None where it is of another kind.

        # [..., outputs, inputs], [..., outputs / 128, inputs / 128] float32
        """
        if not self._has_looked_for_blocks:  # Once, since it waits for the device.
            assert self._first is not None
            inputs = self._shape[-1]
            if self._first.kind == "fp8" and self._first.width == FP8_GROUP and inputs % FP8_GROUP == 0:
                blocks = aiter_dense.scale_blocks(self._scales)
                self._fp8_blocks = None if blocks is None else (self._codes, blocks)
            self._has_looked_for_blocks = True
        return self._fp8_blocks

    def dense(self) -> torch.Tensor:
        """The weight's numbers, as torch computes with them; undefined where rows were not filled."""
        if self._first is None or len(self._shape) == 2:
            return self._dense(...)
        # One expert at a time: float32 of a whole stack may be more than there is.
        dense = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        for place in range(len(dense)):
            dense[place] = self._dense(place)
        return dense

    def part(self, at: _Place) -> torch.Tensor:
        """Some of the rows' numbers, as kernels multiply by them, in float32."""
        return self._values(at).float()

    def _dense(self, at: _Place) -> torch.Tensor:
        if self._first is None:
            return torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._values(at).to(self._dtype)

    def _values(self, at: _Place) -> torch.Tensor:
        from models.ops.triton.cases.quantized_products import four_bit_weight
        from models.ops.triton.quantized_products import FourBitWeight

        assert self._first is not None, "a weight is filled before it is used"
        codes, scales = self._codes[at], self._scales[at]
        if self._first.kind == "fp8":
            inputs = self._shape[-1]
            scales = scales.repeat_interleave(min(self._first.width, inputs), -1)[..., :inputs]
            return codes.float() * scales
        zeros = None if self._zeros is None else self._zeros[at]
        return four_bit_weight(FourBitWeight(codes, scales, zeros), self._dtype)

    def _fp8(self) -> "FP8Weight":
        import models.ops.triton.quantized_products as kernels

        assert self._first is not None, "a weight is filled before it is used"
        return kernels.FP8Weight(self._codes, self._scales if self._first.width == FP8_GROUP else self._scales[..., 0])

    def _four_bit(self) -> "FourBitWeight":
        import models.ops.triton.quantized_products as kernels

        assert self._first is not None, "a weight is filled before it is used"
        return kernels.FourBitWeight(self._codes, self._scales, self._zeros)


def _by_aiter(x: torch.Tensor, codes: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from models.ops.triton.quantized_products import quantize_groups

    out = aiter_dense.fp8_linear(*quantize_groups(x), codes, blocks, x.dtype)
    return out if bias is None else out.add_(bias)


def stored_of(parameter: nn.Parameter) -> StoredWeight | None:
    """The memory of a weight, or of a stack of them, that stays quantised."""
    return getattr(parameter, "stored", None)


def fill_stored(parameter: nn.Parameter, first: int, rows: torch.Tensor, place: int | None = None) -> bool:
    """Put rows of a weight, or of one of a stack, that stays quantised into their places; False where none does.

    One whose rows are of several kinds, or dense in part, becomes dense.
    """
    stored = stored_of(parameter)
    if stored is None or stored.put(first, rows, place):
        return stored is not None
    make_dense(parameter)
    return False


def make_dense(parameter: nn.Parameter) -> None:
    """Have torch multiply by a weight, or a stack of them, that stayed quantised."""
    stored = stored_of(parameter)
    if stored is not None:
        parameter.data = stored.dense()
        del parameter.stored  # type: ignore[attr-defined]


def keep_quantized(parameter: nn.Parameter, *, is_rounded_again: bool = False) -> None:
    """Have a weight that is not filled yet, or a stack of them, stay quantised, as `StoredWeight` has it."""
    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
    parameter.stored = StoredWeight(  # type: ignore[attr-defined]
        shape, dtype, device, is_rounded_again=is_rounded_again
    )
    parameter.data = torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape)


def can_stay(layer: LayerQuantConfig) -> bool:
    """Whether there is a kernel for weights that are quantised so."""
    if layer.quant_dtype == "fp8":
        return layer.storage is Storage.SCALED and layer.symmetric
    return layer.storage in _FOUR_BIT and layer.bits == 4 and not layer.has_group_index


def can_be_rounded_again(stack: nn.Parameter, layer: LayerQuantConfig) -> bool:
    """Whether a stack that the checkpoint has in one tensor of MXFP4 may stay so. A rank may have some inputs."""
    return layer.storage is Storage.MXFP4_EXPERTS and stack.shape[2] % 64 == 0
