"""FP8 weights and activations: how they lie, how activations are rounded, and a step of their products.

Used by the dense and by the experts' products (DeepSeek-V3, 2024, section 3.3). Weights have a scale a block of
128 x 128, an output feature or a tensor, activations one for 128 inputs. A group's products are summed by the matrix
units, then scaled and added up in float32. Hardware without FP8 multiplies activations as they are, by weights that
become numbers of their type in registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_quantized  # noqa: F401, the rows of these kernels
from models.kernels.triton.arithmetic import cdiv
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of, target_of
from models.kernels.triton.configs_dense import launch_of
from models.kernels.types import FP8_GROUP


@triton.jit
def quantize_groups_kernel(
    x,  # [M, K]
    codes,  # [M, K] FP8
    scales,  # [M, groups] float32
    x_stride,
    K,
    num_groups,
    LARGEST: tl.constexpr,  # Finite number of the FP8
    DEPTH: tl.constexpr,  # Of a group
    GROUPS: tl.constexpr,  # Of one program
):
    """Some groups of one row, each by its largest value. Grid: (M, tiles of groups)."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    values = tl.load(x + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 1)
    scale = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    # Division may round the largest value past the end.
    values = tl.clamp(values / scale[:, None], -LARGEST, LARGEST)
    tl.store(codes + row * K + columns, values.to(codes.dtype.element_ty), mask=columns < K)
    tl.store(scales + row * num_groups + groups, scale, mask=groups < num_groups)


@triton.jit
def fp8_values(codes, dtype: tl.constexpr):
    """The numbers of e4m3fn's bytes, exact in bfloat16; NaN is not among them.

    A code's bits, moved to float32's places, are the number but for the bias, also those without a leading one.
    """
    bits = ((codes & 0x80).to(tl.int32) << 24) | ((codes & 0x7F).to(tl.int32) << 20)
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120


@triton.jit
def add_group(
    total,  # [ROWS, COLUMNS] float32
    x,  # [ROWS, FP8_GROUP]
    row_scale,  # [ROWS, 1] float32; any where x was not rounded
    weight_at,  # [COLUMNS, FP8_GROUP]
    column_scale_at,  # [COLUMNS]; any where not IS_BLOCKED
    exists,  # [1, FP8_GROUP]
    IS_ROUNDED: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
):
    """`total` and the product of one group of inputs, which is scaled before it is added."""
    weight = tl.load(weight_at, mask=exists, other=0.0)
    if not IS_ROUNDED:
        weight = fp8_values(weight, x.dtype)
    if IS_ROUNDED or IS_BLOCKED:
        product = tl.dot(x, tl.trans(weight), input_precision="ieee")
        if IS_ROUNDED:
            product = product * row_scale
        if IS_BLOCKED:
            product = product * tl.load(column_scale_at)[None, :]
        return total + product
    return tl.dot(x, tl.trans(weight), total, input_precision="ieee")


class FP8Weight(NamedTuple):
    """A weight in the FP8 of its device, with its scales."""

    codes: torch.Tensor  # [N, K] float8, or [experts, N, K]
    scales: torch.Tensor
    """float32: [N / 128, K / 128], rounded up, of blocks; [N, K / 128] of 128 inputs of a row; [N] of rows; [1].

    Of a stack: [experts, N, K / 128] or [experts, N].
    """

    @property
    def is_blocked(self) -> bool:
        """Whether a scale is of 128 inputs."""
        return self.scales.dim() == self.codes.dim()

    @property
    def scale_rows(self) -> int:
        """Output features that share a scale; 0: all. Not of a stack, where each has its own."""
        num_scales = self.scales.shape[0]
        return 0 if num_scales == 1 else 1 if num_scales == self.codes.shape[0] else FP8_GROUP


def to_flavour(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """OCP codes as `dtype`, the same numbers: e4m3fnuz reads the same bits as half of them, and has no negative zero.

    # [N, K] float8_e4m3fn
    """
    if dtype is torch.float8_e4m3fn:
        return codes, scales
    bits = codes.view(torch.uint8)
    return torch.where(bits == 0x80, 0, bits).to(torch.uint8).view(torch.float8_e4m3fnuz), scales * 2


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds groups of 128 of each row to the device's FP8; codes, and what they are to be multiplied by.

    # [M, K] -> [M, K], [M, groups] float32

    Raises `ValueError` on a device without FP8.
    """
    target = target_of(x.device)
    if target.fp8 is None:
        raise ValueError(f"{target.arch} has no FP8; activations stay as they are there")
    rows, inputs = x.shape
    groups = cdiv(inputs, FP8_GROUP)
    codes = x.new_empty(rows, inputs, dtype=target.fp8_dtype)
    scales = x.new_empty(rows, groups, dtype=torch.float32)
    launch = launch_of("quantize_groups", x.device)
    quantize_groups_kernel[(rows, cdiv(groups, launch.blocks["GROUPS"]))](
        x,
        codes,
        scales,
        x.stride(0),
        inputs,
        groups,
        LARGEST=target.fp8_max,
        DEPTH=FP8_GROUP,
        **launch.keywords,
    )
    return codes, scales


class Operands(NamedTuple):
    """A product's two sides as the matrix units of their device take them."""

    rows: torch.Tensor
    row_scales: torch.Tensor | None
    """[M, groups] float32 of rows that were rounded to FP8; None of those that were not."""
    codes: torch.Tensor
    """Of the weight; uint8 where the units know no FP8, and its numbers are made in registers."""


def operands(x: torch.Tensor, weight: FP8Weight) -> Operands:
    """Rounds rows to FP8 where the hardware multiplies it. # [M, K]"""
    if target_of(x.device).fp8 is None:
        return Operands(x, None, weight.codes.view(torch.uint8))
    return Operands(*quantize_groups(x), weight.codes)


COMPILATIONS = tuple(
    Compilation(
        kernel=quantize_groups_kernel,
        variant="bf16",
        target=target,
        config=config_of("quantize_groups", target),
        signature={
            "x": "*bf16",
            "codes": target.fp8_pointer,
            "scales": "*fp32",
            **dict.fromkeys(("x_stride", "K", "num_groups"), "i32"),
        },
        constexprs={"LARGEST": target.fp8_max, "DEPTH": FP8_GROUP},
        divisible=frozenset({"x_stride", "K"}),
        has_wide_loads=False,
    )
    for target in TARGETS.values()
    if target.fp8 is not None
)
