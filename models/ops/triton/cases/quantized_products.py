"""Torch references and self-test cases of products with quantized weights."""

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from models.ops.self_test import FLOAT32, Finding, Numbers, excess, slack
from models.ops.triton.configs import target_of
from models.ops.triton.quantized_products import FourBitWeight, FP8Weight, unpack_nibbles
from models.ops.types import FP8_GROUP
from models.quantization.stored import StoredWeight

# References: products with the dequantized weight in float32.

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def reference_quantize_groups(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel's launcher, for an FP8 of any device."""
    largest = 240.0 if dtype is torch.float8_e4m3fnuz else 448.0
    padded = F.pad(x.float(), (0, -x.shape[1] % FP8_GROUP)).view(len(x), -1, FP8_GROUP)
    reach = padded.abs().amax(-1)
    scales = torch.where(reach > 0, reach / largest, 1.0)
    codes = (padded / scales[..., None]).clamp(-largest, largest).to(dtype)
    return codes.flatten(1)[:, : x.shape[1]], scales


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Activations as products of FP8 see them. # [M, K] -> [M, K] float32"""
    codes, scales = reference_quantize_groups(x, dtype)
    return codes.float() * scales.repeat_interleave(FP8_GROUP, 1)[:, : x.shape[1]]


def fp8_weight(weight: FP8Weight) -> torch.Tensor:
    """Dense. # [.., N, K] float32"""
    scales, (outputs, inputs) = weight.scales, weight.codes.shape[-2:]
    if not weight.is_blocked:
        return weight.codes.float() * scales[..., None]
    rows = 1 if scales.shape[-2] == outputs else FP8_GROUP
    scales = scales.repeat_interleave(rows, -2).repeat_interleave(FP8_GROUP, -1)
    return weight.codes.float() * scales[..., :outputs, :inputs]


def reference_fp8_linear(
    x: torch.Tensor, weight: FP8Weight, bias: torch.Tensor | None = None, *, is_rounded: bool = True
) -> torch.Tensor:
    """As the kernel's launcher; `is_rounded`: as where the hardware has FP8."""
    by = rounded(x, weight.codes.dtype) if is_rounded else x.float()
    return F.linear(by, fp8_weight(weight), None if bias is None else bias.float()).to(x.dtype)


def four_bit_weight(weight: FourBitWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dense. # [.., out, in]"""
    codes = unpack_nibbles(weight.packed).long()
    size = codes.shape[-1] // weight.scales.shape[-1]
    if weight.zeros is None:
        values = torch.tensor(_E2M1, device=codes.device)[codes & 7] * (1 - (codes >> 3) * 2)
        scales = torch.exp2(weight.scales.float() - 127)
    else:
        values = (codes - weight.zeros.long().repeat_interleave(size, -1)).float()
        scales = weight.scales.float()
    return (values * scales.repeat_interleave(size, -1)).to(dtype)


def reference_four_bit_linear(
    x: torch.Tensor, weight: FourBitWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the kernel's launcher."""
    dense = four_bit_weight(weight, x.dtype).float()
    return F.linear(x.float(), dense, None if bias is None else bias.float()).to(x.dtype)


_ROWS = (1, 40, 200)
"""Each takes other tiles."""
_OUTPUTS = 64
"""Looked at at either end."""


class Product(NamedTuple):
    """Sums of products in float32, and how far a kernel's may be from them before they are rounded."""

    exact: torch.Tensor
    bound: torch.Tensor


def product_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Product:
    """`x @ weight.T + bias`. # float32 [rows, inputs], [outputs, inputs], [outputs] of any type

    Numbers may have been rounded to `dtype` before they are multiplied, each by itself: what that makes of a sum grows
    as the root of the number of its terms.
    """
    exact = x @ weight.T
    each = (x.square() @ weight.square().T).sqrt()
    bound = 2 * slack(dtype) * each + FLOAT32 * (x.abs() @ weight.abs().T)
    return Product(exact if bias is None else exact + bias.float(), bound)


def as_multiplied(x: torch.Tensor, kind: str | None) -> torch.Tensor:
    """Activations as kernels of a kind of weight see them. # [rows, inputs] -> float32"""
    fp8 = target_of(x.device).fp8
    return rounded(x, getattr(torch, f"float8_{fp8}")) if kind == "fp8" and fp8 is not None else x.float()


def ends_of(outputs: int) -> tuple[slice, ...]:
    """Outputs that are looked at."""
    return slice(0, min(_OUTPUTS, outputs)), slice(max(0, outputs - _OUTPUTS), outputs)


class ProductForm(NamedTuple):
    """A linear layer's weight."""

    weight: StoredWeight
    outputs: int
    inputs: int
    bias: torch.Tensor | None
    dtype: torch.dtype

    @property
    def key(self) -> Hashable:
        """Equal for weights that the same kernels multiply by, in as many steps."""
        return self.weight.form, self.outputs, self.inputs, self.bias is not None

    def check(self, numbers: Numbers) -> Iterator[Finding]:
        """By one token, by some and by many."""
        for rows in _ROWS:
            x = numbers.normal(rows, self.inputs, dtype=self.dtype)
            found, seen = self.weight.linear(x, self.bias), as_multiplied(x, self.weight.kind)
            for some in ends_of(self.outputs):
                bias = None if self.bias is None else self.bias[some]
                exact, bound = product_of(seen, self.weight.part(some), bias, self.dtype)
                error = excess(found[:, some], exact, bound + slack(self.dtype) * exact.abs())
                yield Finding(f"{rows} tokens by a weight of {self.weight.kind}, {self.outputs}x{self.inputs}", error)
