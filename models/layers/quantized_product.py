"""Products with weights that stay quantised on a GPU: which weights do, how they are filled, and the product.

Called by `models.layers.product`, and by the loader before and while it fills a model.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from models.kernels import aiter
from models.kernels.aiter import dense as aiter_dense
from models.quantization.config import LayerQuantConfig, Storage
from models.quantization.stored import GROUP, Codes, QuantizedRows

if TYPE_CHECKING:
    from models.kernels.triton.four_bit import FourBitWeight

_FOUR_BIT = (Storage.MXFP4, Storage.AWQ, Storage.GPTQ, Storage.PACKED)


class StoredWeight:
    """The memory of one weight, of the kind of its first rows."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._first: Codes | None = None
        self._codes = self._scales = torch.empty(0)
        self._zeros: torch.Tensor | None = None
        self._fp8_blocks: tuple[torch.Tensor, torch.Tensor] | None = None
        self._has_looked_for_blocks = False

    @property
    def is_begun(self) -> bool:
        """Whether it has rows."""
        return self._first is not None

    def put(self, first: int, rows: Codes) -> bool:
        """Fill rows from `first` on; False where they are of another kind than those before."""
        from models.kernels.triton.four_bit import pack_nibbles
        from models.kernels.triton.fp8_gemm import to_flavour

        if self._first is None:
            self._begin(rows)
        begun = self._first
        assert begun is not None
        if (rows.kind, rows.width, rows.scales.shape[1]) != (begun.kind, begun.width, begun.scales.shape[1]):
            return False
        some = slice(first, first + len(rows.codes))
        if rows.kind == "fp8":
            codes, scales = to_flavour(rows.codes, rows.scales, self._codes.dtype)
            self._codes.view(torch.uint8)[some] = codes.view(torch.uint8).to(self._device)
        else:
            self._codes[some] = pack_nibbles(rows.codes).to(self._device)
            scales = rows.scales
        self._scales[some] = scales.to(self._device, self._scales.dtype)
        if self._zeros is not None:
            assert rows.zeros is not None
            self._zeros[some] = rows.zeros.to(self._device)
        return True

    def _begin(self, rows: Codes) -> None:
        from models.kernels.triton.configs import target_of

        self._first = rows
        outputs, inputs = self._shape
        groups = rows.scales.shape[1]

        def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(outputs, columns, dtype=dtype, device=self._device)

        if rows.kind == "fp8":
            self._codes = empty(inputs, getattr(torch, f"float8_{target_of(self._device).fp8}"))
            self._scales = empty(groups, torch.float32)
        else:
            self._codes = empty(inputs // 2, torch.uint8)
            self._scales = empty(groups, torch.uint8 if rows.kind == "mxfp4" else self._dtype)
            self._zeros = empty(groups, torch.uint8) if rows.kind == "int4" else None

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`. # [tokens, in_features] -> [tokens, out_features]"""
        assert self._first is not None, "a weight is filled before it is used"
        if len(x) == 0:
            return x.new_empty(0, self._shape[0])
        if self._first.kind == "fp8":
            from models.kernels.triton.fp8_gemm import FP8Weight, fp8_linear

            if aiter.runs("linear", x) and (blocks := self.fp8_blocks()) is not None:
                return _by_aiter(x, *blocks, bias)
            scales = self._scales if self._first.width == GROUP else self._scales[:, 0]
            return fp8_linear(x, FP8Weight(self._codes, scales), bias)
        from models.kernels.triton.four_bit import FourBitWeight
        from models.kernels.triton.four_bit_gemm import four_bit_linear

        return four_bit_linear(x, FourBitWeight(self._codes, self._scales, self._zeros), bias)

    def fp8_blocks(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """FP8 with a scale for each block of 128 x 128, once it is filled; None where it is of another kind.

        # [..., outputs, inputs], [..., outputs / 128, inputs / 128] float32
        """
        if not self._has_looked_for_blocks:  # Once, since it waits for the device.
            assert self._first is not None
            inputs = self._shape[-1]
            if self._first.kind == "fp8" and self._first.width == GROUP and inputs % GROUP == 0:
                blocks = aiter_dense.scale_blocks(self._scales)
                self._fp8_blocks = None if blocks is None else (self._codes, blocks)
            self._has_looked_for_blocks = True
        return self._fp8_blocks

    def dense(self) -> torch.Tensor:
        """The weight's numbers, as torch computes with them; undefined where rows were not filled."""
        from models.kernels.triton.four_bit import FourBitWeight
        from models.kernels.triton.reference.quantized import four_bit_weight

        assert self._first is not None
        if self._first.kind == "fp8":
            inputs = self._shape[1]
            scales = self._scales.repeat_interleave(min(self._first.width, inputs), 1)[:, :inputs]
            return (self._codes.float() * scales).to(self._dtype)
        return four_bit_weight(FourBitWeight(self._codes, self._scales, self._zeros), self._dtype)


def _by_aiter(x: torch.Tensor, codes: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from models.kernels.triton.fp8_gemm import quantize_groups

    out = aiter_dense.fp8_linear(*quantize_groups(x), codes, blocks, x.dtype)
    return out if bias is None else out.add_(bias)


class StoredExperts:
    """The memory of a stack of weights that were MXFP4: dense rows are rounded to the same numbers again."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        *rows, inputs = shape
        self._packed = torch.empty(*rows, inputs // 2, dtype=torch.uint8, device=device)
        self._scales = torch.empty(*rows, inputs // 32, dtype=torch.uint8, device=device)

    def put(self, place: int, first: int, rows: torch.Tensor) -> None:
        """Fill rows of one expert from `first` on. # [count, inputs]"""
        from models.kernels.triton.four_bit import mxfp4_of, pack_nibbles

        codes, exponents = mxfp4_of(rows.to(self._packed.device))
        some = slice(first, first + len(rows))
        self._packed[place, some], self._scales[place, some] = pack_nibbles(codes), exponents

    @property
    def weight(self) -> "FourBitWeight":
        """As the kernel takes it."""
        from models.kernels.triton.four_bit import FourBitWeight

        return FourBitWeight(self._packed, self._scales)


def stored_experts_of(parameter: nn.Parameter) -> StoredExperts | None:
    """The memory of a stack of weights that stays quantised."""
    return getattr(parameter, "stored_experts", None)


def stored_of(parameter: nn.Parameter) -> StoredWeight | None:
    """The memory of a weight that stays quantised."""
    return getattr(parameter, "stored", None)


def fill_stored(parameter: nn.Parameter, first: int, rows: torch.Tensor, place: int | None = None) -> bool:
    """Put rows of a weight, or of one of a stack, that stays quantised into their places; False where none does.

    One whose rows are of several kinds, or dense in part, becomes dense.
    """
    experts = stored_experts_of(parameter)
    if experts is not None and place is not None:
        experts.put(place, first, rows)
        return True
    stored = stored_of(parameter)
    if stored is None or (isinstance(rows, QuantizedRows) and stored.put(first, rows.held)):
        return stored is not None
    dense = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if stored.is_begun:
        dense.copy_(stored.dense())
    parameter.data = dense
    del parameter.stored  # type: ignore[attr-defined]
    return False


def can_stay(layer: LayerQuantConfig, device: torch.device) -> bool:
    """Whether there is a kernel on a device for weights that are quantised so."""
    from models.kernels.triton.configs import target_of

    if layer.quant_dtype == "fp8":
        return layer.storage is Storage.SCALED and layer.symmetric and target_of(device).fp8 is not None
    return layer.storage in _FOUR_BIT and layer.bits == 4 and not layer.has_group_index


def keep_quantized(parameter: nn.Parameter) -> None:
    """Have a weight that is not filled yet, or a stack of them, stay quantised."""
    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
    if parameter.dim() == 2:
        parameter.stored = StoredWeight(shape, dtype, device)  # type: ignore[attr-defined]
    else:
        parameter.stored_experts = StoredExperts(shape, device)  # type: ignore[attr-defined]
    parameter.data = torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape)


def can_stay_stacked(parameter: nn.Parameter, layer: LayerQuantConfig) -> bool:
    """The same of a stack, of which a rank may have some inputs."""
    return layer.storage is Storage.MXFP4_EXPERTS and parameter.shape[2] % 64 == 0
