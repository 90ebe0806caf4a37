"""Products with weights that stay quantised on a GPU: which weights do, how they are filled, and the product.

Called by `models.layers.product` and `FusedMoE`, and by the loader before and while it fills a model.
"""

from types import EllipsisType
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from models.kernels import aiter, triton
from models.kernels.aiter import dense as aiter_dense
from models.kernels.types import FP8_GROUP
from models.quantization.config import LayerQuantConfig, Storage
from models.quantization.stored import Codes, QuantizedRows

if TYPE_CHECKING:
    from models.kernels.triton.four_bit import FourBitWeight
    from models.kernels.triton.fp8 import FP8Weight
    from models.kernels.triton.moe_sort import SortedPairs
    from models.layers.activation import Gating

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
        from models.kernels.triton.four_bit import RUN, mxfp4_of

        codes, exponents = mxfp4_of(rows.to(self._device))
        return Codes("mxfp4", codes, exponents, None, RUN, lambda: rows)

    def _begin(self, rows: Codes) -> None:
        from models.kernels.triton.configs import target_of

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
        from models.kernels.triton.four_bit import pack_nibbles
        from models.kernels.triton.fp8 import to_flavour

        codes, scales = rows.codes.to(self._device), rows.scales.to(self._device)
        return to_flavour(codes, scales, self._codes.dtype) if rows.kind == "fp8" else (pack_nibbles(codes), scales)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`. # [tokens, in_features] -> [tokens, out_features]"""
        if x.shape[0] == 0 or triton.is_idle():
            return x.new_zeros(x.shape[0], self._shape[0])
        if self.kind == "fp8":
            import models.kernels.triton.fp8_gemm as fp8

            if aiter.runs("linear", x) and (blocks := self.fp8_blocks()) is not None:
                return _by_aiter(x, *blocks, bias)
            return fp8.fp8_linear(x, self._fp8(), bias)
        import models.kernels.triton.four_bit_gemm as four_bit

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
            import models.kernels.triton.moe_fp8_gemm as fp8

            return fp8.moe_fp8_gemm(rows, self._fp8(), bias, pairs, num_pairs, gating=gating)
        import models.kernels.triton.moe_four_bit_gemm as four_bit

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
        from models.kernels.triton.four_bit import FourBitWeight
        from models.kernels.triton.reference.quantized import four_bit_weight

        assert self._first is not None, "a weight is filled before it is used"
        codes, scales = self._codes[at], self._scales[at]
        if self._first.kind == "fp8":
            inputs = self._shape[-1]
            scales = scales.repeat_interleave(min(self._first.width, inputs), -1)[..., :inputs]
            return codes.float() * scales
        zeros = None if self._zeros is None else self._zeros[at]
        return four_bit_weight(FourBitWeight(codes, scales, zeros), self._dtype)

    def _fp8(self) -> "FP8Weight":
        import models.kernels.triton.fp8 as kernels

        assert self._first is not None, "a weight is filled before it is used"
        return kernels.FP8Weight(self._codes, self._scales if self._first.width == FP8_GROUP else self._scales[..., 0])

    def _four_bit(self) -> "FourBitWeight":
        import models.kernels.triton.four_bit as kernels

        assert self._first is not None, "a weight is filled before it is used"
        return kernels.FourBitWeight(self._codes, self._scales, self._zeros)


def _by_aiter(x: torch.Tensor, codes: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from models.kernels.triton.fp8 import quantize_groups

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
