"""Weights of a model that stay quantized on a GPU: a parameter's memory, filled row by row, and its product.

A parameter made by `keep_quantized` has the shape and type of the dense weight, and its numbers in a `StoredWeight`.
"""

import torch
from torch import nn

from models.ops import aiter, triton
from models.ops.aiter import operators as aiter_operators
from models.ops.types import FP8_GROUP
from models.ops.weight_formats import (
    Codes,
    FourBitWeight,
    FP8Weight,
    Int8Weight,
    QuantizedWeight,
    Rows,
    pack_nibbles,
    to_flavour,
)


class StoredWeight:
    """The memory of one weight, or of a stack of experts', of the kind of its first rows."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._first: Codes | None = None
        self._codes = self._scales = torch.empty(0)
        self._zeros: torch.Tensor | None = None
        self._fp8_blocks: tuple[torch.Tensor, torch.Tensor] | None = None
        self._has_looked_for_blocks = False

    @property
    def kind(self) -> str | None:
        """`fp8`, `int8`, `int4` or `mxfp4`; None before it has rows."""
        return None if self._first is None else self._first.kind

    def put(self, first: int, rows: Codes, index: int | None = None) -> bool:
        """Fill rows from `first` on, of a stack those of weight `index`; False if they differ in layout from those
        before, or no kernel reads theirs. # [count, inputs]
        """
        rows = rows.unpaired()
        if rows.kind == "int8" and (index is not None or rows.scales.shape[1] > 1 or _has_zero_points(rows)):
            return False
        if self._first is None:
            self._begin(rows)
        begun = self._first
        assert begun is not None
        if (rows.kind, rows.width, rows.scales.shape[1]) != (begun.kind, begun.width, begun.scales.shape[1]):
            return False
        some = slice(first, first + len(rows.codes))
        at = some if index is None else (index, some)
        codes, scales = self._as_kernels_read(rows)
        self._codes.view(torch.uint8)[at] = codes.view(torch.uint8)
        self._scales[at] = scales.to(self._scales.dtype)
        if self._zeros is not None:
            assert rows.zeros is not None
            self._zeros[at] = rows.zeros.to(self._device)
        return True

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
        elif rows.kind == "int8":
            self._codes, self._scales = empty(inputs, torch.int8), empty(groups, torch.float32)
        else:
            self._codes = empty(inputs // 2, torch.uint8)
            self._scales = empty(groups, torch.uint8 if rows.kind == "mxfp4" else self._dtype)
            self._zeros = empty(groups, torch.uint8) if rows.kind == "int4" else None

    def _as_kernels_read(self, rows: Codes) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales, on the device."""
        codes, scales = rows.codes.to(self._device), rows.scales.to(self._device)
        if rows.kind == "int8":
            return codes, scales
        return to_flavour(codes, scales, self._codes.dtype) if rows.kind == "fp8" else (pack_nibbles(codes), scales)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`. # [tokens, in_features] -> [tokens, out_features]"""
        if x.shape[0] == 0 or triton.is_idle():
            return x.new_zeros(x.shape[0], self._shape[0])
        import models.ops.triton.quantized_products as kernels

        if self.kind == "fp8" and aiter.runs("linear", x) and (blocks := self.fp8_blocks()) is not None:
            return _multiply_by_aiter(x, *blocks, bias)
        return kernels.quantized_linear(x, self.operand, bias)

    def fp8_blocks(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """FP8 with a scale for each block of 128 x 128, once it is filled; None where it is of another kind.

        # [..., outputs, inputs], [..., outputs / 128, inputs / 128] float32
        """
        if not self._has_looked_for_blocks:  # Once, since it waits for the device.
            assert self._first is not None
            inputs = self._shape[-1]
            if self._first.kind == "fp8" and self._first.width == FP8_GROUP and inputs % FP8_GROUP == 0:
                blocks = aiter_operators.scale_blocks(self._scales)
                self._fp8_blocks = None if blocks is None else (self._codes, blocks)
            self._has_looked_for_blocks = True
        return self._fp8_blocks

    def dense(self) -> torch.Tensor:
        """The weight's numbers, as torch computes with them; undefined where rows were not filled."""
        if self._first is None or len(self._shape) == 2:
            return self._dense(...)
        # One expert at a time: float32 of a whole stack may be more than there is.
        dense = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        for index in range(len(dense)):
            dense[index] = self._dense(index)
        return dense

    def _dense(self, at: Rows) -> torch.Tensor:
        if self._first is None:
            return torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self.operand.part(at).dense(self._dtype)

    @property
    def operand(self) -> QuantizedWeight:
        """The weight as kernels take it."""
        assert self._first is not None, "a weight is filled before it is used"
        if self._first.kind == "fp8":
            return FP8Weight(self._codes, self._scales if self._first.width == FP8_GROUP else self._scales[..., 0])
        if self._first.kind == "int8":
            return Int8Weight(self._codes, self._scales[..., 0])
        return FourBitWeight(self._codes, self._scales, self._zeros)


def _has_zero_points(rows: Codes) -> bool:
    return rows.zeros is not None and bool(rows.zeros.any())


def _multiply_by_aiter(
    x: torch.Tensor, codes: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    from models.ops.triton.quantized_products import quantize_groups

    out = aiter_operators.fp8_linear(*quantize_groups(x), codes, blocks, x.dtype)
    return out if bias is None else out.add_(bias)


def stored_of(parameter: nn.Parameter) -> StoredWeight | None:
    """The memory of a weight, or of a stack of them, that stays quantized."""
    return getattr(parameter, "stored", None)


def keep_quantized(parameter: nn.Parameter) -> None:
    """Have a weight that is not filled yet, or a stack of them, stay quantized, as `StoredWeight` has it."""
    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
    parameter.stored = StoredWeight(shape, dtype, device)  # type: ignore[attr-defined]
    parameter.data = torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape)


def make_dense(parameter: nn.Parameter) -> None:
    """Have torch multiply by a weight, or a stack of them, that stayed quantized."""
    stored = stored_of(parameter)
    if stored is not None:
        parameter.data = stored.dense()
        del parameter.stored  # type: ignore[attr-defined]


def operand_of(parameter: nn.Parameter) -> torch.Tensor | QuantizedWeight:
    """A weight, or a stack of them, as kernels take it: dense, or as it stays quantized."""
    stored = stored_of(parameter)
    return parameter if stored is None else stored.operand
