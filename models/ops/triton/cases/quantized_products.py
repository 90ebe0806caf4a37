"""Torch references and self-test cases of products with quantized weights."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from models.ops.self_test import FLOAT32, Case, Finding, Problems, relative_error, rounding_bound
from models.ops.triton.configs import target_of
from models.ops.triton.dense_products import dense_linear
from models.ops.triton.int8_products import LARGEST
from models.ops.triton.quantized_products import quantized_linear
from models.ops.weight_formats import (
    FP8_GROUP,
    RUN,
    FourBitWeight,
    FP8Weight,
    Int8Weight,
    QuantizedWeight,
    Rows,
    pack_nibbles,
    to_flavour,
)

# References: products with the dequantized weight in float32.


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


def reference_fp8_linear(
    x: torch.Tensor, weight: FP8Weight, bias: torch.Tensor | None = None, *, is_rounded: bool = True
) -> torch.Tensor:
    """As the kernel's launcher; `is_rounded`: as where the hardware has FP8."""
    by = rounded(x, weight.codes.dtype) if is_rounded else x.float()
    return F.linear(by, weight.dense(), None if bias is None else bias.float()).to(x.dtype)


def reference_quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `int8_products.quantize_rows`."""
    reach = x.float().abs().amax(1)
    scales = torch.where(reach > 0, reach / LARGEST, 1.0)
    return (x.float() / scales[:, None] + 0.5).floor().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def reference_four_bit_linear(
    x: torch.Tensor, weight: FourBitWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the kernel's launcher."""
    dense = weight.dense(x.dtype).float()
    return F.linear(x.float(), dense, None if bias is None else bias.float()).to(x.dtype)


_ROWS = (1, 40, 200)
"""Numbers of rows; each selects other tiles."""
_OUTPUTS = 64
"""Outputs that are compared at either end of a row."""


class Product(NamedTuple):
    """Sums of products in float32, and how far a kernel's may be from them before they are rounded."""

    exact: torch.Tensor
    bound: torch.Tensor


def product_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Product:
    """`x @ weight.T + bias`. # float32 [rows, inputs], [outputs, inputs], [outputs] of any type

    Numbers may have been rounded to `dtype` before they are multiplied, each by itself: what that makes of a sum
    grows as the root of the number of its terms.
    """
    exact = x @ weight.T
    each = (x.square() @ weight.square().T).sqrt()
    bound = 2 * rounding_bound(dtype) * each + FLOAT32 * (x.abs() @ weight.abs().T)
    return Product(exact if bias is None else exact + bias.float(), bound)


def as_multiplied(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """Activations as the kernel for a weight sees them. # [rows, inputs] -> float32"""
    if isinstance(weight, Int8Weight):
        codes, scales = reference_quantize_rows(x)
        return codes.float() * scales[:, None]
    fp8 = target_of(x.device).fp8_dtype
    if fp8 is None or not isinstance(weight, FP8Weight):
        return x.float()
    return rounded(weight.completed(x), fp8)[:, weight.lead :]


def ends_of(outputs: int) -> tuple[slice, ...]:
    """The outputs that are compared."""
    return slice(0, min(_OUTPUTS, outputs)), slice(max(0, outputs - _OUTPUTS), outputs)


def part_of(weight: torch.Tensor | QuantizedWeight, at: Rows, dtype: torch.dtype) -> torch.Tensor:
    """Some rows' numbers, as kernels multiply by them. # -> [..., inputs] float32"""
    if isinstance(weight, torch.Tensor):
        return weight[at].float()
    if isinstance(weight, FP8Weight | Int8Weight):
        return weight.part(at).dense()
    return weight.part(at).dense(dtype).float()


def random_weight(problems: Problems, kind: str, *shape: int, dtype: torch.dtype) -> QuantizedWeight:
    """A weight, or a stack of them, in `fp8`, `int8`, `int4` or `mxfp4`. # [.., outputs, inputs]"""
    *rows, inputs = shape
    if kind == "int8":
        codes = problems.normal(*shape, scale=40.0).clamp(-LARGEST, LARGEST).to(torch.int8)
        return Int8Weight(codes, 0.001 * problems.near_one(*rows))
    if kind == "fp8":
        codes = problems.normal(*shape).to(torch.float8_e4m3fn)
        scales = 0.02 * problems.near_one(*rows, -(-inputs // FP8_GROUP))
        fp8 = getattr(torch, f"float8_{target_of(problems.device).fp8 or 'e4m3fn'}")
        return FP8Weight(*to_flavour(codes, scales, fp8))
    codes = pack_nibbles((problems.normal(*shape, scale=3.0) + 8).clamp(0, 15).to(torch.uint8))
    if kind == "mxfp4":
        return FourBitWeight(codes, torch.full((*rows, inputs // RUN), 121, dtype=torch.uint8, device=problems.device))
    width = 128 if inputs % 128 == 0 else 2 * RUN
    scales = (0.02 * problems.near_one(*rows, inputs // width)).to(dtype)
    return FourBitWeight(codes, scales, torch.full(scales.shape, 8, dtype=torch.uint8, device=problems.device))


@dataclass(frozen=True, slots=True)
class ProductCase(Case):
    """A product with a linear layer's weight, quantized or dense."""

    operator: ClassVar[str] = "linear"
    weight: QuantizedWeight | torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    @property
    def key(self) -> Hashable:
        """See `Case`: layout and shape of the weight."""
        if isinstance(self.weight, torch.Tensor):
            return self.weight.shape, self.weight.dtype, self.bias is not None
        return self.weight.kind, self.weight[0].shape, self.weight.scales.shape, self.bias is not None

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`: one row, some and many, which take different tiles."""
        outputs, inputs = self.weight.shape
        for rows in _ROWS:
            x = problems.normal(rows, inputs, dtype=self.dtype)
            if isinstance(self.weight, torch.Tensor):
                kind, found = "dense numbers", dense_linear(x, self.weight, self.bias)
            else:
                kind, found = self.weight.kind, quantized_linear(x, self.weight, self.bias)
            seen = as_multiplied(x, self.weight)
            for some in ends_of(outputs):
                bias = None if self.bias is None else self.bias[some]
                exact, bound = product_of(seen, part_of(self.weight, some, self.dtype), bias, self.dtype)
                error = relative_error(found[:, some], exact, bound + rounding_bound(self.dtype) * exact.abs())
                yield Finding(f"{rows} tokens by a weight of {kind}, {outputs}x{inputs}", error)


_KINDS = ("fp8", "int8", "int4", "mxfp4")


def common_cases(device: torch.device) -> tuple[Case, ...]:
    """Products of 4096 inputs."""
    problems = Problems(device)
    weights = (random_weight(problems, kind, 1024, 4096, dtype=torch.bfloat16) for kind in _KINDS)
    return tuple(ProductCase(weight, None, torch.bfloat16) for weight in weights)


def small_cases(device: torch.device) -> dict[str, Case]:
    """Sizes for Triton's interpreter."""
    types = {"fp8 in fp16": torch.float16} | dict.fromkeys(_KINDS, torch.bfloat16)
    cases: dict[str, Case] = {}
    for name, dtype in types.items():
        problems = Problems(device)
        # Of as many inputs as are split.
        inputs = 1088 if name == "fp8" else 192
        weight = random_weight(problems, name.split()[0], 72, inputs, dtype=dtype)
        cases[f"a weight in {name}"] = ProductCase(weight, problems.normal(72, dtype=dtype), dtype)
    for dtype in (torch.bfloat16, torch.float32):
        problems = Problems(device)
        dense = problems.normal(72, 1088, dtype=dtype)
        cases[f"a dense weight in {dtype}"] = ProductCase(dense, problems.normal(72, dtype=dtype), dtype)
    return cases
