"""Products with quantized weights: FP8, then 4 bits.

FP8 (DeepSeek-V3, 2024, section 3.3): weights have a scale for each block of 128 x 128, output feature or tensor,
activations one for 128 inputs. A group's products are summed by the matrix units, then scaled and added in float32.
Hardware without FP8 multiplies activations as they are, by weights that are converted to their type in registers.

4 bits: MXFP4, or integers with zero points. Weights go through memory as they are stored and become bfloat16 in
registers. The experts' products share both layouts.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.ops import triton as kernels
from models.ops.triton.configs import FEW_ROWS, Target, launch_of, target_of
from models.ops.triton.elementwise import largest_of_groups, load_some
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.int8_products import int8_linear
from models.ops.triton.launcher import jit
from models.ops.weight_formats import FP8_GROUP, FourBitWeight, FP8Weight, Int8Weight, QuantizedWeight, RoundedRows


@jit
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
    largest = largest_of_groups(values)
    scale = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    # Division may round the largest value past the end.
    values = tl.clamp(values / scale[:, None], -LARGEST, LARGEST)
    tl.store(codes + row * K + columns, values.to(codes.dtype.element_ty), mask=columns < K)
    tl.store(scales + row * num_groups + groups, scale, mask=groups < num_groups)


@triton.jit
def fp8_values(codes, dtype: tl.constexpr):
    """The numbers of e4m3fn's bytes, exact in bfloat16; NaN is not among them.

    A code's bits, shifted to those of float32's exponent and mantissa, are the number but for the bias, also of
    numbers without a leading one.
    """
    bits = ((codes & 0x80).to(tl.int32) << 24) | ((codes & 0x7F).to(tl.int32) << 20)
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120


@triton.jit
def add_group(
    total,  # [ROWS, COLUMNS] float32
    x,  # [ROWS, FP8_GROUP]
    row_scale,  # [ROWS, 1] float32; any where x was not rounded
    weight,  # [COLUMNS, FP8_GROUP], loaded before x: it comes from memory, and x from a cache
    column_scale,  # [COLUMNS]; any where not IS_BLOCKED
    IS_ROUNDED: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
):
    """`total` and the product of one group of inputs, which is scaled before it is added."""
    if not IS_ROUNDED:
        weight = fp8_values(weight, x.dtype)
    if IS_ROUNDED or IS_BLOCKED:
        product = tl.dot(x, tl.trans(weight), input_precision="ieee")
        if IS_ROUNDED:
            product = product * row_scale
        if IS_BLOCKED:
            product = product * column_scale[None, :]
        return total + product
    return tl.dot(x, tl.trans(weight), total, input_precision="ieee")


def quantize_groups(x: torch.Tensor) -> RoundedRows:
    """Rounds groups of 128 of each row to the device's FP8. # [M, K]

    Raises `ValueError` on a device without FP8.
    """
    target = target_of(x.device)
    if target.fp8 is None:
        raise ValueError(f"{target.arch} has no FP8; activations stay as they are there")
    assert target.fp8_dtype is not None
    rows, inputs = x.shape
    groups = cdiv(inputs, FP8_GROUP)
    rounded = RoundedRows.empty(rows, inputs, target.fp8_dtype, x.device)
    launch = launch_of("quantize_groups", x.device)
    quantize_groups_kernel[(rows, cdiv(groups, launch.blocks["GROUPS"]))](
        x,
        *rounded,
        x.stride(0),
        inputs,
        groups,
        LARGEST=target.fp8_max,
        DEPTH=FP8_GROUP,
        **launch.keywords,
    )
    return rounded


class Operands(NamedTuple):
    """A product's two sides as the matrix units of their device take them."""

    rows: torch.Tensor
    row_scales: torch.Tensor | None
    """[M, groups] float32 of rows that were rounded to FP8; None of those that were not."""
    codes: torch.Tensor
    """Of the weight; uint8 where the units know no FP8, and its numbers are made in registers."""


def operands(x: torch.Tensor, weight: FP8Weight, rounded: RoundedRows | None = None) -> Operands:
    """Rounds rows to FP8 where the hardware multiplies it, unless they are rounded already. # [M, K]"""
    if target_of(x.device).fp8 is None:
        return Operands(x, None, weight.codes.view(torch.uint8))
    return Operands(*(quantize_groups(x) if rounded is None else rounded), weight.codes)


# Products of FP8 weights with activations, which are rounded to FP8 too where the hardware multiplies it.


@triton.jit
def sum_groups(
    x_at,  # [ROWS, DEPTH], of the first group of inputs
    x_scale_at,  # [ROWS, 1]
    weight_at,  # [COLUMNS, DEPTH]
    weight_scale_at,  # [COLUMNS]
    first,
    count,
    num_groups,
    K,
    IS_ROUNDED: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The sum over `count` groups of inputs from `first` on, as far as there are any. # [ROWS, COLUMNS] float32"""
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    x_at += first * DEPTH
    weight_at += first * DEPTH
    for group in range(first, tl.minimum(first + count, num_groups)):
        exists = None if IS_EVEN else depth[None, :] < K - group * DEPTH
        part = load_some(weight_at, exists)
        part_scale = tl.load(weight_scale_at + group) if IS_BLOCKED else 1.0
        a = load_some(x_at, exists)
        a_scale = tl.load(x_scale_at + group) if IS_ROUNDED else 1.0
        total = add_group(total, a, a_scale, part, part_scale, IS_ROUNDED, IS_BLOCKED)
        x_at += DEPTH
        weight_at += DEPTH
    return total


@jit(do_not_specialize=["M"])  # It differs from step to step.
def fp8_gemm_kernel(
    x,  # [M, K] FP8, or not rounded
    x_scales,  # [M, groups] float32; any pointer where not IS_ROUNDED
    weight,  # [N, K] FP8, or its bytes where not IS_ROUNDED
    weight_scales,  # float32; one for SCALE_ROWS output features and, where IS_BLOCKED, each group
    bias,  # [N], or any pointer
    out,  # [M, N]; of one split's sums [SPLITS, M, N] float32
    M,
    N,
    K,
    x_stride,
    num_groups,
    SCALE_ROWS: tl.constexpr,  # 0: one scale for all
    IS_ROUNDED: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_EVEN: tl.constexpr,  # whether K is a multiple of DEPTH
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # Whether a program computes all splits' sums, and adds them in their order
):
    """A tile [ROWS, COLUMNS] of `x @ weight.T + bias`, or of one split's sum.

    Grid: (tiles of N, tiles of M, SPLITS; 1 where IS_WHOLE).
    """
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Rows and columns past the end compute what is never stored.
    safe_rows, safe_columns = tl.minimum(rows, M - 1), tl.minimum(columns, N - 1)
    x_at = x + safe_rows[:, None].to(tl.int64) * x_stride + depth[None, :]
    weight_at = weight + safe_columns[:, None].to(tl.int64) * K + depth[None, :]
    x_scale_at = x_scales + safe_rows[:, None] * num_groups
    scale_rows = safe_columns * 0 if SCALE_ROWS == 0 else safe_columns // SCALE_ROWS
    weight_scale_at = weight_scales + (scale_rows * num_groups if IS_BLOCKED else scale_rows)
    share = tl.cdiv(num_groups, SPLITS)
    if IS_WHOLE and SPLITS > 1:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for split in range(SPLITS):
            total += sum_groups(
                x_at, x_scale_at, weight_at, weight_scale_at, split * share, share, num_groups, K, IS_ROUNDED,
                IS_BLOCKED, IS_EVEN, ROWS, COLUMNS, DEPTH,
            )  # fmt: skip
    else:
        total = sum_groups(
            x_at, x_scale_at, weight_at, weight_scale_at, tl.program_id(2) * share, share, num_groups, K, IS_ROUNDED,
            IS_BLOCKED, IS_EVEN, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
    # Scaled once, after the splits' sums are added: in whichever kernel that is.
    if IS_WHOLE and not IS_BLOCKED:
        total = total * tl.load(weight_scale_at)[None, :]
    if HAS_BIAS and IS_WHOLE:
        total += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    at = out + (tl.program_id(2) * M + rows[:, None]).to(tl.int64) * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


@jit(do_not_specialize=["M"])
def add_splits_kernel(
    partial,  # [SPLITS, M, N] float32
    scales,  # float32, one for SCALE_ROWS output features; any pointer where not IS_SCALED
    bias,  # [N], or any pointer
    out,  # [M, N]
    M,
    N,
    IS_SCALED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # 0: one scale for all
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The splits' sums in their order, and the bias. Grid: (tiles of N, M)."""
    row = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    total = tl.zeros([COLUMNS], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * M + row).to(tl.int64) * N + columns, mask=inside, other=0.0)
    if IS_SCALED:
        total = total * tl.load(scales + (columns * 0 if SCALE_ROWS == 0 else columns // SCALE_ROWS), mask=inside)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * N + columns, total.to(out.dtype.element_ty), mask=inside)


_MOST_SPLITS = 8
_ENOUGH_PROGRAMS = 512
"""The number of programs whose bytes in flight together suffice for the memory's bandwidth."""
_LEAST_STEPS = 4
"""Least steps of a program's loop, because a program's start takes as long as some steps."""


def split_rows(kernel: str, target: Target) -> int:
    """Rows up to which a kernel's products are split. Tiles of more rows make enough programs, whose split sums would
    be much memory; so they are for FP8 on Radeons, which have few units.
    """
    is_radeon = target.backend == "hip" and target.warp_size == 32
    return FEW_ROWS if is_radeon and kernel == "fp8_gemm" else 64


def splits_of(rows: int, outputs: int, steps: int, columns: int, most_rows: int) -> tuple[int, bool]:
    """The number of sums into which a product is split, and whether one program computes all of a tile's.

    `steps` of DEPTH inputs that the weight has; `columns` of a tile of few rows. By the weight's size alone up to
    `most_rows`, and beyond where a row's sums must have one order in steps of any number of rows.
    """
    splits = 1
    while (
        splits < _MOST_SPLITS
        and cdiv(outputs, columns) * splits < _ENOUGH_PROGRAMS
        and steps >= 2 * splits * _LEAST_STEPS
    ):
        splits *= 2
    if rows <= most_rows:
        return splits, splits == 1
    return splits if kernels.is_invariant() else 1, True


def rows_of_tile(rows: int, device: torch.device) -> int:
    """Rows by which a product's tile is chosen. On NVIDIA larger tiles take other instructions, whose sums may be
    rounded otherwise: where results may not depend on the batch, all rows take the tile of few.
    """
    if kernels.is_invariant() and target_of(device).backend == "cuda":
        return min(rows, FEW_ROWS)
    return rows


def merged(
    partial: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, scaled: FP8Weight | None = None
) -> torch.Tensor:
    """`out` [M, N] from the sums of `partial` [SPLITS, M, N] float32. `scaled`: the weight whose scales are not in
    the sums yet.
    """
    splits, rows, outputs = partial.shape
    launch = launch_of("add_splits", out.device)
    add_splits_kernel[(cdiv(outputs, launch.blocks["COLUMNS"]), rows)](
        partial,
        partial if scaled is None else scaled.scales,
        out if bias is None else bias,
        out,
        rows,
        outputs,
        IS_SCALED=scaled is not None,
        SCALE_ROWS=0 if scaled is None else scaled.scale_rows,
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        **launch.keywords,
    )
    return out


def fp8_linear(
    x: torch.Tensor, weight: FP8Weight, bias: torch.Tensor | None = None, rounded: RoundedRows | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias`, of activations rounded as `fp8` says. # [M, K] -> [M, N] of x's type

    `rounded`: `x`, where it is rounded already.
    """
    sides = operands(x, weight, rounded)
    rows, inputs = x.shape
    outputs = weight.codes.shape[0]
    out = x.new_empty(rows, outputs)
    launch = launch_of("fp8_gemm", x.device, rows=next_power_of_2(rows_of_tile(rows, x.device)))
    columns = launch_of("fp8_gemm", x.device, rows=1).blocks["COLUMNS"]
    most_rows = split_rows("fp8_gemm", target_of(x.device))
    splits, is_whole = splits_of(rows, outputs, cdiv(inputs, FP8_GROUP), columns, most_rows)
    summed = out if is_whole else x.new_empty(splits, rows, outputs, dtype=torch.float32)
    grid = cdiv(outputs, launch.blocks["COLUMNS"]), cdiv(rows, launch.blocks["ROWS"]), 1 if is_whole else splits
    fp8_gemm_kernel[grid](
        sides.rows,
        weight.scales if sides.row_scales is None else sides.row_scales,
        sides.codes,
        weight.scales,
        weight.scales if bias is None else bias,
        summed,
        rows,
        outputs,
        inputs,
        sides.rows.stride(0),
        cdiv(inputs, FP8_GROUP),
        SCALE_ROWS=weight.scale_rows,
        IS_ROUNDED=sides.row_scales is not None,
        IS_BLOCKED=weight.is_blocked,
        IS_EVEN=inputs % FP8_GROUP == 0,
        HAS_BIAS=bias is not None,
        DEPTH=FP8_GROUP,
        SPLITS=splits,
        IS_WHOLE=is_whole,
        **launch.keywords,
    )
    return out if is_whole else merged(summed, out, bias, None if weight.is_blocked else weight)


# 4-bit weights: the numbers of their codes, and one step of a product. `models.ops.weight_formats` describes the
# layout: a tile of bytes is two tiles of weights with contiguous inputs, so loads of activations stay wide and nothing
# is interleaved.


@triton.jit
def mxfp4_of_words(words, BIT: tl.constexpr):
    """2^-126 times the numbers of the E2M1 codes that begin at BIT of each word, exact in float32.

    A code's bits, shifted to those of float32's exponent and mantissa, are the number but for the bias, also of 0.5,
    which has no leading one. The arithmetic shift leaves the sign where float32 has it, and copies of it that the mask
    clears.
    """
    bits = (words << (28 - BIT)) >> 6
    return (bits & -0x7E400000).to(tl.float32, bitcast=True)  # 0x81C00000, of 32 bits


@triton.jit
def mxfp4_values(codes, exponents, dtype: tl.constexpr):
    """The numbers of E2M1 codes times powers of two (OCP microscaling formats 1.0), exact in bfloat16."""
    scale = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    value = mxfp4_of_words(codes.to(tl.int32), 0) * 8.507059173023462e37 * scale  # 2^126
    if dtype == tl.bfloat16:
        # Nothing is cut off, and rounding takes several instructions where the hardware has none for it.
        return (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505, what follows a constant branch's return is compiled too
        return value.to(dtype)


@triton.jit
def integer_values(codes, zeros, scales, dtype: tl.constexpr):
    """`(code - zero) * scale`, rounded once."""
    steps = codes.to(tl.int32) - zeros.to(tl.int32)
    return (steps.to(tl.float32) * scales.to(tl.float32)).to(dtype)


@triton.jit
def load_runs(
    codes_at,  # [COLUMNS, RUNS, 32] of bytes
    scales_at,  # [COLUMNS, 1] of each column's first
    zeros_at,
    run,  # [1, RUNS], which 64 inputs of the weight's
    has_run,  # [1, RUNS]; None: all are there
    IS_MXFP4: tl.constexpr,
    SUBGROUPS: tl.constexpr,  # Runs of 32 inputs that share a scale
):
    """One step of a weight: bytes, scales of low and of high nibbles, and zero points of both.

    To be called before rows are loaded: weights come from memory, and rows from a cache.
    """
    codes = load_some(codes_at, None if has_run is None else has_run[:, :, None])
    first, second = run * 2 // SUBGROUPS, (run * 2 + 1) // SUBGROUPS
    low_scale = load_some(scales_at + first, has_run)
    low_zero = low_scale if IS_MXFP4 else load_some(zeros_at + first, has_run)
    high_scale, high_zero = low_scale, low_zero
    if SUBGROUPS % 2:
        high_scale = load_some(scales_at + second, has_run)
        high_zero = high_scale if IS_MXFP4 else load_some(zeros_at + second, has_run)
    return codes, low_scale, high_scale, low_zero, high_zero


@triton.jit
def add_runs(
    total,  # [ROWS, COLUMNS] float32
    low_x,  # [ROWS, DEPTH / 2], the inputs of low nibbles
    high_x,
    codes,  # as `load_runs` returns these
    low_scale,
    high_scale,
    low_zero,
    high_zero,
    IS_MXFP4: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # Inputs at a time, a multiple of 64
):
    """`total` and the product of one step: a tile of bytes is two of weights."""
    if IS_MXFP4:
        low = mxfp4_values(codes & 15, low_scale[:, :, None], low_x.dtype)
        high = mxfp4_values(codes >> 4, high_scale[:, :, None], low_x.dtype)
    else:
        low = integer_values(codes & 15, low_zero[:, :, None], low_scale[:, :, None], low_x.dtype)
        high = integer_values(codes >> 4, high_zero[:, :, None], high_scale[:, :, None], low_x.dtype)
    low, high = tl.reshape(low, [COLUMNS, DEPTH // 2]), tl.reshape(high, [COLUMNS, DEPTH // 2])
    total = tl.dot(low_x, tl.trans(low), total, input_precision="ieee")
    return tl.dot(high_x, tl.trans(high), total, input_precision="ieee")


# The product of 4-bit weights with bfloat16 activations.


@triton.jit
def sum_runs(
    x_at,  # [ROWS, DEPTH / 2], the inputs of low nibbles of the first step
    weight_at,  # [COLUMNS, RUNS, 32]
    scale_at,  # [COLUMNS, 1]
    zero_at,
    first,
    count,
    K,
    IS_MXFP4: tl.constexpr,
    SUBGROUPS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The sum over `count` inputs from `first` on, as far as there are any. # [ROWS, COLUMNS] float32"""
    half, run = tl.arange(0, DEPTH // 2), tl.arange(0, DEPTH // 64)
    inputs = half // 32 * 64 + half % 32
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    x_at += first
    weight_at += first // 2
    for start in range(first, tl.minimum(first + count, K), DEPTH):
        runs = start // 64 + run[None, :]
        exists = None if IS_EVEN else (start + inputs < K)[None, :]
        has_run = None if IS_EVEN else runs * 64 < K
        codes, low_scale, high_scale, low_zero, high_zero = load_runs(
            weight_at, scale_at, zero_at, runs, has_run, IS_MXFP4, SUBGROUPS
        )
        low_x = load_some(x_at, exists)
        high_x = load_some(x_at + 32, exists)
        total = add_runs(
            total, low_x, high_x, codes, low_scale, high_scale, low_zero, high_zero, IS_MXFP4, COLUMNS, DEPTH
        )
        x_at += DEPTH
        weight_at += DEPTH // 2
    return total


@jit(do_not_specialize=["M"])  # It differs from step to step.
def four_bit_gemm_kernel(
    x,  # [M, K]
    weight,  # [N, K / 2] uint8
    scales,  # [N, groups] of x's type; with MXFP4 uint8 exponents of two
    zeros,  # [N, groups] uint8, or any pointer with MXFP4
    bias,  # [N], or any pointer
    out,  # [M, N]; of one split's sums [SPLITS, M, N] float32
    M,
    N,
    K,
    x_stride,
    num_groups,
    IS_MXFP4: tl.constexpr,
    SUBGROUPS: tl.constexpr,  # Runs of 32 inputs that share a scale
    IS_EVEN: tl.constexpr,  # whether K is a multiple of DEPTH
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # Inputs at a time, a multiple of 64
    SPLITS: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # as in `fp8_gemm_kernel`
):
    """A tile [ROWS, COLUMNS] of `x @ weight.T + bias`, or of one split's sum. Grid: as `fp8_gemm_kernel`."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Half of a tile's inputs, those in low nibbles: every other run of 32. A run shares a scale.
    RUNS: tl.constexpr = DEPTH // 64
    half, run = tl.arange(0, DEPTH // 2), tl.arange(0, RUNS)
    inputs = half // 32 * 64 + half % 32
    safe_rows, safe_columns = tl.minimum(rows, M - 1), tl.minimum(columns, N - 1)
    x_at = x + safe_rows[:, None].to(tl.int64) * x_stride + inputs[None, :]
    bytes_at = run[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    weight_at = weight + safe_columns[:, None, None].to(tl.int64) * (K // 2) + bytes_at
    group_at = safe_columns[:, None] * num_groups
    share = tl.cdiv(tl.cdiv(K, DEPTH), SPLITS) * DEPTH
    scale_at, zero_at = scales + group_at, zeros + group_at
    if IS_WHOLE and SPLITS > 1:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for split in range(SPLITS):
            total += sum_runs(
                x_at, weight_at, scale_at, zero_at, split * share, share, K, IS_MXFP4, SUBGROUPS, IS_EVEN, ROWS,
                COLUMNS, DEPTH,
            )  # fmt: skip
    else:
        total = sum_runs(
            x_at, weight_at, scale_at, zero_at, tl.program_id(2) * share, share, K, IS_MXFP4, SUBGROUPS, IS_EVEN, ROWS,
            COLUMNS, DEPTH,
        )  # fmt: skip
    if HAS_BIAS and IS_WHOLE:
        total += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    at = out + (tl.program_id(2) * M + rows[:, None]).to(tl.int64) * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


# One row by 4-bit weights: a vector. Matrix units would compute 16 rows for it, and what takes time is to unpack
# codes. So words of 8 codes are unpacked by few instructions of 32 bits, and multiplied and added in float32.

LOAD_WORDS = tl.constexpr(2)
"""Words of one load of a thread: 8 bytes, and with them 16 bytes of each of two runs of the row."""
_LIFT = tl.constexpr(2.0**64)
_LOWER = tl.constexpr(2.0**62)
"""E2M1 codes are unpacked as 2^-126 of their numbers. Inputs are multiplied by the first factor, so that products are
not below float32's normal numbers, and sums by the second. An input may be up to 2^63."""


@triton.jit
def integers_of_words(words, BIT: tl.constexpr):
    """The codes that begin at BIT of each word, as float32."""
    return ((words >> BIT) & 15).to(tl.float32)


@triton.jit
def inputs_of_quads(quads, IS_BFLOAT16: tl.constexpr):
    """Four neighbouring inputs of 16 bits from each integer of 64 bits, in float32."""
    first, second = quads.to(tl.int32), (quads >> 32).to(tl.int32)
    if IS_BFLOAT16:
        a, b = (first << 16).to(tl.float32, bitcast=True), (first & -65536).to(tl.float32, bitcast=True)
        c, d = (second << 16).to(tl.float32, bitcast=True), (second & -65536).to(tl.float32, bitcast=True)
    else:
        a = first.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        b = (first >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        c = second.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        d = (second >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return a, b, c, d


@jit
def four_bit_vector_kernel(
    x,  # [K / 4] int64, four inputs of 16 bits each
    weight,  # [N, K / 8] int32, words of 8 codes
    scales,  # [N, groups] of x's type; with MXFP4 [N, groups / 2] int16, the exponents of a run's two groups
    zeros,  # [N, groups] uint8, or any pointer with MXFP4
    bias,  # [N], or any pointer
    out,  # [N]; of one split's sums [SPLITS, N] float32
    N,
    K,
    num_groups,
    IS_MXFP4: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
    SUBGROUPS: tl.constexpr,  # Runs of 32 inputs that share a scale
    IS_EVEN: tl.constexpr,  # whether K is a multiple of a tile's inputs
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOADS: tl.constexpr,  # Loads of LOAD_WORDS words in a column of a tile
    SPLITS: tl.constexpr,
):
    """COLUMNS outputs of `weight @ x + bias`, or of one split's sums. Grid: (tiles of N, SPLITS).

    A thread adds the products of its own inputs; the threads of a column are added once, at the end.
    """
    TILE: tl.constexpr = LOADS * LOAD_WORDS  # Words
    first_column = tl.program_id(0).to(tl.int64) * COLUMNS
    columns = tl.arange(0, COLUMNS)
    # Columns past the end compute what is never stored.
    safe_columns = tl.minimum(columns, N - 1 - tl.program_id(0) * COLUMNS)
    words_of_row = K // 8
    load = tl.arange(0, LOADS)
    word = load[:, None] * LOAD_WORDS + tl.arange(0, LOAD_WORDS)[None, :]
    # A run of 64 inputs is 8 words, and 16 integers of 4 inputs: first those of low nibbles, then those of high ones.
    quad = word // 8 * 16 + word % 8
    run = load // (8 // LOAD_WORDS)
    weight += first_column * words_of_row
    scales += first_column * (num_groups // 2 if IS_MXFP4 else num_groups)
    zeros += first_column * num_groups
    word_at = safe_columns[:, None, None] * words_of_row + word[None, :, :]
    share = tl.cdiv(tl.cdiv(words_of_row, TILE), SPLITS) * TILE
    begin = tl.program_id(1) * share
    total = tl.zeros([COLUMNS, LOADS], tl.float32)
    for start in range(begin, tl.minimum(begin + share, words_of_row), TILE):
        exists = None if IS_EVEN else (start + word < words_of_row)[None, :, :]
        has_run = None if IS_EVEN else ((start // 8 + run) * 8 < words_of_row)[None, :]
        words = load_some(weight + start + word_at, exists)
        low_quads = load_some(x + start * 2 + quad[None, :, :], exists)
        high_quads = load_some(x + start * 2 + 8 + quad[None, :, :], exists)
        if IS_MXFP4:
            pair_at = safe_columns[:, None] * (num_groups // 2) + run[None, :]
            exponents = load_some(scales + start // 8 + pair_at, has_run).to(tl.int32)
        else:
            low_at = safe_columns[:, None] * num_groups + ((start // 8 + run) * 2 // SUBGROUPS)[None, :]
            low_scale, low_zero = load_some(scales + low_at, has_run), load_some(zeros + low_at, has_run)
            if SUBGROUPS % 2:
                high_at = safe_columns[:, None] * num_groups + (((start // 8 + run) * 2 + 1) // SUBGROUPS)[None, :]
                high_scale, high_zero = load_some(scales + high_at, has_run), load_some(zeros + high_at, has_run)
        a, b, c, d = inputs_of_quads(low_quads, IS_BFLOAT16)
        e, f, g, h = inputs_of_quads(high_quads, IS_BFLOAT16)
        if IS_MXFP4:
            a, b, c, d, e, f, g, h = (
                a * _LIFT, b * _LIFT, c * _LIFT, d * _LIFT, e * _LIFT, f * _LIFT, g * _LIFT, h * _LIFT
            )  # fmt: skip
            low = mxfp4_of_words(words, 0) * a + mxfp4_of_words(words, 8) * b
            low += mxfp4_of_words(words, 16) * c + mxfp4_of_words(words, 24) * d
            high = mxfp4_of_words(words, 4) * e + mxfp4_of_words(words, 12) * f
            high += mxfp4_of_words(words, 20) * g + mxfp4_of_words(words, 28) * h
            low_power = ((exponents & 0xFF) << 23).to(tl.float32, bitcast=True)
            high_power = ((exponents & 0xFF00) << 15).to(tl.float32, bitcast=True)
            total += tl.sum(low, 2) * _LOWER * low_power + tl.sum(high, 2) * _LOWER * high_power
        else:
            low = integers_of_words(words, 0) * a + integers_of_words(words, 8) * b
            low += integers_of_words(words, 16) * c + integers_of_words(words, 24) * d
            high = integers_of_words(words, 4) * e + integers_of_words(words, 12) * f
            high += integers_of_words(words, 20) * g + integers_of_words(words, 28) * h
            # The sum of (code - zero) * input, whose second half no column but for its zero point depends on.
            low_x, high_x = tl.sum((a + b) + (c + d), 2), tl.sum((e + f) + (g + h), 2)
            if SUBGROUPS % 2:
                total += (tl.sum(low, 2) - low_x * low_zero.to(tl.float32)) * low_scale.to(tl.float32)
                total += (tl.sum(high, 2) - high_x * high_zero.to(tl.float32)) * high_scale.to(tl.float32)
            else:
                of_codes = tl.sum(low + high, 2)
                total += (of_codes - (low_x + high_x) * low_zero.to(tl.float32)) * low_scale.to(tl.float32)
    sums = tl.sum(total, 1)
    if HAS_BIAS and SPLITS == 1:
        sums += tl.load(bias + first_column + safe_columns).to(tl.float32)
    at = out + tl.program_id(1).to(tl.int64) * N + first_column + columns
    tl.store(at, sums.to(out.dtype.element_ty), mask=columns < N - tl.program_id(0) * COLUMNS)


_ENOUGH_VECTOR_PROGRAMS = 2048
"""As `_ENOUGH_PROGRAMS`: those of a vector are of one or two waves, and short."""


def vector_splits(outputs: int, inputs: int, launch: Mapping[str, int]) -> int:
    """The number of sums into which a product of one row is split. `launch`: tile sizes."""
    tiles, splits = cdiv(inputs, launch["LOADS"] * LOAD_WORDS.value * 8), 1
    while (
        splits < _MOST_SPLITS
        and cdiv(outputs, launch["COLUMNS"]) * splits < _ENOUGH_VECTOR_PROGRAMS
        and tiles >= 2 * splits
    ):
        splits *= 2
    return splits


def four_bit_vector(x: torch.Tensor, weight: FourBitWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`weight @ x + bias` in x's type, of 16 bits, with weights that are not rounded to it. # [1, K] -> [1, N]"""
    outputs, groups = weight.scales.shape
    row = x[0] if x.storage_offset() % 4 == 0 and x.stride(1) == 1 else x[0].clone()
    inputs = len(row)
    out = x.new_empty(1, outputs)
    launch = launch_of("four_bit_vector", x.device)
    splits = vector_splits(outputs, inputs, launch.blocks)
    summed = out if splits == 1 else x.new_empty(splits, 1, outputs, dtype=torch.float32)
    four_bit_vector_kernel[(cdiv(outputs, launch.blocks["COLUMNS"]), splits)](
        row.view(torch.int64),
        weight.packed.view(torch.int32),
        weight.scales.view(torch.int16) if weight.zeros is None else weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        summed,
        outputs,
        inputs,
        groups,
        IS_MXFP4=weight.zeros is None,
        IS_BFLOAT16=x.dtype is torch.bfloat16,
        SUBGROUPS=inputs // groups // 32,
        IS_EVEN=inputs % (launch.blocks["LOADS"] * LOAD_WORDS.value * 8) == 0,
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        **launch.keywords,
    )
    return out if splits == 1 else merged(summed, out, bias)


def four_bit_linear(x: torch.Tensor, weight: FourBitWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, of weights rounded to x's type, summed in float32. # [M, K] -> [M, N]"""
    rows, inputs = x.shape
    if rows == 1 and x.element_size() == 2 and not kernels.is_invariant():
        return four_bit_vector(x, weight, bias)
    outputs, groups = weight.scales.shape
    out = x.new_empty(rows, outputs)
    launch = launch_of(
        "four_bit_gemm",
        x.device,
        rows=next_power_of_2(rows_of_tile(rows, x.device)),
        mxfp4=weight.zeros is None,
    )
    columns = launch_of("four_bit_gemm", x.device, rows=1).blocks["COLUMNS"]
    most_rows = split_rows("four_bit_gemm", target_of(x.device))
    splits, is_whole = splits_of(rows, outputs, cdiv(inputs, launch.blocks["DEPTH"]), columns, most_rows)
    summed = out if is_whole else x.new_empty(splits, rows, outputs, dtype=torch.float32)
    grid = cdiv(outputs, launch.blocks["COLUMNS"]), cdiv(rows, launch.blocks["ROWS"]), 1 if is_whole else splits
    four_bit_gemm_kernel[grid](
        x,
        weight.packed,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        summed,
        rows,
        outputs,
        inputs,
        x.stride(0),
        groups,
        IS_MXFP4=weight.zeros is None,
        SUBGROUPS=inputs // groups // 32,
        IS_EVEN=inputs % launch.blocks["DEPTH"] == 0,
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        IS_WHOLE=is_whole,
        **launch.keywords,
    )
    return out if is_whole else merged(summed, out, bias)


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None, rounded: RoundedRows | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` by the kernel for the weight's layout. `rounded`: see `fp8_linear`. # [M, K] -> [M, N]"""
    if isinstance(weight, FP8Weight):
        return fp8_linear(weight.completed(x), weight, bias, rounded)
    if isinstance(weight, Int8Weight):
        return int8_linear(x, weight, bias)
    return four_bit_linear(weight.completed(x), weight, bias)
