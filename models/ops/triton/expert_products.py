"""Grouped GEMMs of a mixture of experts: each block of (token, expert) pairs times its own expert's weight.

The first part is the pipeline that three kernels share: which pairs a program has and what happens to its sums. Then
follow `moe_gemm` for dense weights, `moe_fp8_gemm` for FP8, `moe_four_bit_gemm` for 4-bit weights and `moe_int8_gemm`
for 8-bit integers. Where a layer's experts are of several forms, each form's kernel writes the products of its pairs.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import models.ops.triton.configs  # noqa: F401, the rows of this kernel
from models.ops.triton.configs import launch_of
from models.ops.triton.elementwise import gated_product, load_some
from models.ops.triton.expert_routing import SortedPairs, moe_sort
from models.ops.triton.grids import cdiv
from models.ops.triton.int8_products import quantize_rows
from models.ops.triton.launcher import jit
from models.ops.triton.quantized_products import add_group, add_runs, load_runs, operands
from models.ops.types import Gating
from models.ops.weight_formats import (
    FP8_GROUP,
    FourBitWeight,
    FP8Weight,
    Int8Weight,
    MixedStack,
    RoundedRows,
    StackOperand,
)

NO_ACTIVATION = -1


@triton.jit
def tile_of_block(
    pairs,
    block_experts,
    block_rows,
    block,
    tile,  # Of columns
    columns,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What a program computes: a block's pairs, which of its rows are pairs, and their expert; a tile's columns, the
    columns to read in their stead, and these as rows of all experts' weights.

    # [BLOCK_M] int64, [BLOCK_M], int64, [COLUMNS], [COLUMNS], [COLUMNS] int64
    """
    lanes = tl.arange(0, BLOCK_M)
    is_pair = lanes < tl.load(block_rows + block)
    pair = tl.load(pairs + block * BLOCK_M + lanes, mask=is_pair, other=0).to(tl.int64)
    expert = tl.load(block_experts + block).to(tl.int64)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    # Columns past the edge are read from row 0, and never written.
    read = tl.where(column < columns, column, 0)
    parts = 2 if ACTIVATION >= 0 else 1
    return pair, is_pair, expert, column, read, expert * columns * parts + read


@triton.jit
def store_products(
    acc,  # [BLOCK_M, columns of the tile] float32
    up,  # The same of what `acc` gates, `columns` further on in the weight; any where there is no ACTIVATION
    bias,  # [experts, columns or twice as many]; any pointer where not HAS_BIAS
    out,  # [num_pairs, columns]
    pair,
    is_pair,
    weight_row,  # [columns of the tile], among those of all experts
    column,  # [columns of the tile]
    columns,
    alpha,
    limit,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Adds biases, gates, and writes to the rows of the pairs."""
    if HAS_BIAS:
        acc += tl.load(bias + weight_row).to(tl.float32)[None, :]
    if ACTIVATION >= 0:
        if HAS_BIAS:
            up += tl.load(bias + weight_row + columns).to(tl.float32)[None, :]
        acc = gated_product(acc, up, alpha, limit, ACTIVATION)
    at = out + pair[:, None] * columns + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & (column < columns)[None, :])


class Products(NamedTuple):
    """A grouped GEMM's outputs, and those arguments of its launch that are the same whatever the weights are."""

    out: torch.Tensor  # [num_pairs, columns]
    pairs: tuple[torch.Tensor, ...]
    columns: int
    gating: Gating
    forms: Mapping[str, int]
    """constexprs"""


def products_of(
    rows: torch.Tensor,
    outputs: int,
    bias: torch.Tensor | None,
    sorted_pairs: SortedPairs,
    num_pairs: int,
    gating: Gating | None,
    out: torch.Tensor | None = None,
) -> Products:
    """For `rows` [tokens, inner] or [num_pairs, inner] and a weight of `outputs` rows an expert. `out`: the memory of
    the products, of which those of other pairs are kept; None: new memory.
    """
    columns = outputs // (1 if gating is None else 2)
    gating = gating or Gating(NO_ACTIVATION)
    forms = {
        "PAIRS_PER_ROW": num_pairs // max(1, rows.shape[0]),
        "HAS_BIAS": bias is not None,
        "ACTIVATION": gating.activation,
    }
    out = rows.new_empty(num_pairs, columns) if out is None else out
    return Products(out, tuple(sorted_pairs[:4]), columns, gating, forms)


# Dense weights.
#
# The first of a layer's two products multiplies gate and up in one pass over the tokens and applies the activation
# to the sums in registers, so that the wide intermediate is never written. Pairs are gathered by index as they are
# read and scattered as they are written: tokens are never copied into the order of experts.


@jit(do_not_specialize=["max_blocks"])
def moe_gemm_kernel(
    rows,  # [tokens, inner], or [num_pairs, inner]
    weight,  # [experts, columns or twice as many, inner]
    bias,  # [experts, columns or twice as many]; any pointer where not HAS_BIAS
    out,  # [num_pairs, columns]
    pairs,  # [max_blocks * BLOCK_M] int32
    block_experts,  # [max_blocks] int32
    block_rows,  # [max_blocks] int32
    num_blocks,  # [1] int32
    columns,
    inner,
    row_stride,
    expert_stride,
    weight_stride,
    alpha,
    limit,
    max_blocks,
    PAIRS_PER_ROW: tl.constexpr,  # Neighbouring pairs that read the same row
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # Of columns of gates and, `columns` further, what they gate; -1 where there is none
    IS_WHOLE: tl.constexpr,  # The inner dimension is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # Blocks of pairs that stay together, to find each other's weights in the cache
):
    """A tile [BLOCK_M pairs of one expert, BLOCK_N columns] in float32. Grid: (max_blocks * tiles of columns,)."""
    tiles = tl.cdiv(columns, BLOCK_N)
    together = GROUP * tiles
    group, within = tl.program_id(0) // together, tl.program_id(0) % together
    height = tl.minimum(max_blocks - group * GROUP, GROUP)
    block, tile = group * GROUP + within % height, within // height
    if block >= tl.load(num_blocks):
        return
    pair, is_pair, expert, column, read, weight_row = tile_of_block(
        pairs, block_experts, block_rows, block, tile, columns, ACTIVATION, BLOCK_M, BLOCK_N
    )
    ks = tl.arange(0, BLOCK_K)
    left = rows + (pair // PAIRS_PER_ROW)[:, None] * row_stride + ks[None, :]
    right = weight + expert * expert_stride + read[None, :] * weight_stride + ks[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    if ACTIVATION >= 0:
        up_right = right + columns * weight_stride
    for first in range(0, inner, BLOCK_K):
        is_input = None if IS_WHOLE else ks[None, :] < inner - first
        is_depth = None if IS_WHOLE else ks[:, None] < inner - first
        a = load_some(left, is_input)
        acc = tl.dot(a, load_some(right, is_depth), acc, input_precision="ieee")
        if ACTIVATION >= 0:
            up = tl.dot(a, load_some(up_right, is_depth), up, input_precision="ieee")
            up_right += BLOCK_K
        left += BLOCK_K
        right += BLOCK_K
    store_products(
        acc, up, bias, out, pair, is_pair, weight_row, column, columns, alpha, limit, HAS_BIAS, ACTIVATION
    )  # fmt: skip


def moe_gemm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sorted_pairs: SortedPairs,
    num_pairs: int,
    *,
    gating: Gating | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each pair's row by its expert's weight, summed in float32 in the order of the inner dimension.

    # [tokens, inner] or [num_pairs, inner], [experts, out, inner], [experts, out] -> [num_pairs, out]

    With `gating` the weight's rows are gates and then what they gate, and the result is [num_pairs, out / 2]. Rows of
    pairs that `sorted_pairs` left out are undefined. The inner dimension of `weight` must be contiguous.
    """
    _, outputs, inner = weight.shape
    made = products_of(rows, outputs, bias, sorted_pairs, num_pairs, gating, out)
    shape = {"block": sorted_pairs.block, "gated": gating is not None, "element": rows.element_size()}
    launch = launch_of("moe_gemm", rows.device, **shape)
    tiles = cdiv(made.columns, launch.blocks["BLOCK_N"])
    moe_gemm_kernel[(sorted_pairs.max_blocks * tiles,)](
        rows,
        weight,
        weight if bias is None else bias,
        made.out,
        *made.pairs,
        made.columns,
        inner,
        rows.stride(0),
        *weight.stride()[:2],
        made.gating.alpha,
        made.gating.limit,
        sorted_pairs.max_blocks,
        IS_WHOLE=inner % launch.blocks["BLOCK_K"] == 0,
        **made.forms,
        **launch.keywords,
    )
    return made.out


# Weights that stay FP8, with scales as `fp8_linear` has them.


@jit
def moe_fp8_gemm_kernel(
    rows,  # [tokens, inner], or [num_pairs, inner]: FP8, or not rounded
    row_scales,  # [tokens or num_pairs, groups] float32; any pointer where not IS_ROUNDED
    weight,  # [experts, columns or twice as many, inner] FP8, or its bytes where not IS_ROUNDED
    scales,  # [experts, columns or twice as many] float32, and groups where IS_BLOCKED
    bias,  # [experts, columns or twice as many]; any pointer where not HAS_BIAS
    out,  # [num_pairs, columns]
    pairs,  # [max_blocks * BLOCK_M] int32
    block_experts,  # [max_blocks] int32
    block_rows,  # [max_blocks] int32
    num_blocks,  # [1] int32
    columns,
    inner,
    row_stride,
    num_groups,
    alpha,
    limit,
    PAIRS_PER_ROW: tl.constexpr,  # Neighbouring pairs that read the same row
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # As moe_gemm's
    IS_ROUNDED: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_EVEN: tl.constexpr,  # whether `inner` is a multiple of DEPTH
    DEPTH: tl.constexpr,  # Of a group
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile [BLOCK_M pairs of one expert, COLUMNS] in float32. Grid: (tiles of columns, max_blocks)."""
    block = tl.program_id(1)
    if block >= tl.load(num_blocks):
        return
    pair, is_pair, _, column, _, weight_row = tile_of_block(
        pairs, block_experts, block_rows, block, tl.program_id(0), columns, ACTIVATION, BLOCK_M, COLUMNS
    )
    depth = tl.arange(0, DEPTH)
    row = pair // PAIRS_PER_ROW
    x_at = rows + row[:, None] * row_stride + depth[None, :]
    x_scale_at = row_scales + row[:, None] * num_groups
    weight_at = weight + weight_row[:, None] * inner + depth[None, :]
    scale_at = scales + (weight_row * num_groups if IS_BLOCKED else weight_row)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    up = acc
    if ACTIVATION >= 0:
        up_at = weight_at + columns.to(tl.int64) * inner
        up_scale_at = scale_at + (columns.to(tl.int64) * num_groups if IS_BLOCKED else columns)
    for group in range(num_groups):
        exists = None if IS_EVEN else depth[None, :] < inner - group * DEPTH
        part = load_some(weight_at, exists)
        part_scale = tl.load(scale_at + group) if IS_BLOCKED else 1.0
        if ACTIVATION >= 0:
            up_part = load_some(up_at, exists)
            up_scale = tl.load(up_scale_at + group) if IS_BLOCKED else 1.0
            up_at += DEPTH
        a = load_some(x_at, exists)
        a_scale = tl.load(x_scale_at + group) if IS_ROUNDED else 1.0
        acc = add_group(acc, a, a_scale, part, part_scale, IS_ROUNDED, IS_BLOCKED)
        if ACTIVATION >= 0:
            up = add_group(up, a, a_scale, up_part, up_scale, IS_ROUNDED, IS_BLOCKED)
        x_at += DEPTH
        weight_at += DEPTH
    if not IS_BLOCKED:
        acc = acc * tl.load(scale_at)[None, :]
        if ACTIVATION >= 0:
            up = up * tl.load(up_scale_at)[None, :]
    store_products(
        acc, up, bias, out, pair, is_pair, weight_row, column, columns, alpha, limit, HAS_BIAS, ACTIVATION
    )  # fmt: skip


def moe_fp8_gemm(
    rows: torch.Tensor,
    weight: FP8Weight,
    bias: torch.Tensor | None,
    sorted_pairs: SortedPairs,
    num_pairs: int,
    *,
    gating: Gating | None = None,
    out: torch.Tensor | None = None,
    rounded: RoundedRows | None = None,
) -> torch.Tensor:
    """As `moe_gemm`, of a stack of weights in FP8, and of rows rounded as `fp8` says, or `rounded` already.

    # [tokens, inner] or [num_pairs, inner], [experts, out] -> [num_pairs, out], or half as many with `gating`
    """
    inner = weight.codes.shape[2]
    made = products_of(rows, weight.codes.shape[1], bias, sorted_pairs, num_pairs, gating, out)
    if not sorted_pairs.max_blocks:
        return made.out
    sides = operands(rows, weight, rounded)
    launch = launch_of("moe_fp8_gemm", rows.device, block=sorted_pairs.block, gated=gating is not None)
    moe_fp8_gemm_kernel[(cdiv(made.columns, launch.blocks["COLUMNS"]), sorted_pairs.max_blocks)](
        sides.rows,
        weight.scales if sides.row_scales is None else sides.row_scales,
        sides.codes,
        weight.scales,
        weight.scales if bias is None else bias,
        made.out,
        *made.pairs,
        made.columns,
        inner,
        sides.rows.stride(0),
        cdiv(inner, FP8_GROUP),
        made.gating.alpha,
        made.gating.limit,
        IS_ROUNDED=sides.row_scales is not None,
        IS_BLOCKED=weight.is_blocked,
        IS_EVEN=inner % FP8_GROUP == 0,
        DEPTH=FP8_GROUP,
        **made.forms,
        **launch.keywords,
    )
    return made.out


# 4-bit weights, which become bfloat16 in registers; `quantized_products` describes their layout.
#
# A decode reads little but the weights of the experts it meets, which are a quarter of their dense size.


@jit
def moe_four_bit_gemm_kernel(
    rows,  # [tokens, inner], or [num_pairs, inner]
    weight,  # [experts, columns or twice as many, inner / 2] uint8
    scales,  # [experts, columns or twice as many, groups] of rows' type; with MXFP4 uint8 exponents of two
    zeros,  # The same in uint8; any pointer with MXFP4
    bias,  # [experts, columns or twice as many]; any pointer where not HAS_BIAS
    out,  # [num_pairs, columns]
    pairs,  # [max_blocks * BLOCK_M] int32
    block_experts,  # [max_blocks] int32
    block_rows,  # [max_blocks] int32
    num_blocks,  # [1] int32
    columns,
    inner,
    row_stride,
    num_groups,
    alpha,
    limit,
    PAIRS_PER_ROW: tl.constexpr,  # Neighbouring pairs that read the same row
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # As moe_gemm's
    IS_MXFP4: tl.constexpr,
    SUBGROUPS: tl.constexpr,  # Runs of 32 inputs that share a scale
    IS_EVEN: tl.constexpr,  # whether `inner` is a multiple of DEPTH
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # Inputs at a time, a multiple of 64
):
    """A tile [BLOCK_M pairs of one expert, COLUMNS] in float32. Grid: (tiles of columns, max_blocks)."""
    block = tl.program_id(1)
    if block >= tl.load(num_blocks):
        return
    pair, is_pair, _, column, _, weight_row = tile_of_block(
        pairs, block_experts, block_rows, block, tl.program_id(0), columns, ACTIVATION, BLOCK_M, COLUMNS
    )
    half, run = tl.arange(0, DEPTH // 2), tl.arange(0, DEPTH // 64)
    inputs = half // 32 * 64 + half % 32
    x_at = rows + (pair // PAIRS_PER_ROW)[:, None] * row_stride + inputs[None, :]
    bytes_of_run = run[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    codes_at = weight + weight_row[:, None, None] * (inner // 2) + bytes_of_run
    group = weight_row[:, None] * num_groups
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    up = acc
    if ACTIVATION >= 0:
        up_codes_at = codes_at + columns.to(tl.int64) * (inner // 2)
        up_group = group + columns.to(tl.int64) * num_groups
    for start in range(0, inner, DEPTH):
        runs = start // 64 + run[None, :]
        exists = None if IS_EVEN else (start + inputs < inner)[None, :]
        has_run = None if IS_EVEN else runs * 64 < inner
        codes, low_scale, high_scale, low_zero, high_zero = load_runs(
            codes_at, scales + group, zeros + group, runs, has_run, IS_MXFP4, SUBGROUPS
        )
        if ACTIVATION >= 0:
            up_codes, up_low_scale, up_high_scale, up_low_zero, up_high_zero = load_runs(
                up_codes_at, scales + up_group, zeros + up_group, runs, has_run, IS_MXFP4, SUBGROUPS
            )
            up_codes_at += DEPTH // 2
        low_x = load_some(x_at, exists)
        high_x = load_some(x_at + 32, exists)
        acc = add_runs(acc, low_x, high_x, codes, low_scale, high_scale, low_zero, high_zero, IS_MXFP4, COLUMNS, DEPTH)
        if ACTIVATION >= 0:
            up = add_runs(
                up, low_x, high_x, up_codes, up_low_scale, up_high_scale, up_low_zero, up_high_zero, IS_MXFP4, COLUMNS,
                DEPTH,
            )  # fmt: skip
        x_at += DEPTH
        codes_at += DEPTH // 2
    store_products(
        acc, up, bias, out, pair, is_pair, weight_row, column, columns, alpha, limit, HAS_BIAS, ACTIVATION
    )  # fmt: skip


def moe_four_bit_gemm(
    rows: torch.Tensor,
    weight: FourBitWeight,
    bias: torch.Tensor | None,
    sorted_pairs: SortedPairs,
    num_pairs: int,
    *,
    gating: Gating | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `moe_gemm`, of weights [experts, out, in / 2] with scales, and zero points, [experts, out, groups].

    # [tokens, inner] or [num_pairs, inner], [experts, out] -> [num_pairs, out], or half as many with `gating`
    """
    inner, groups = 2 * weight.packed.shape[2], weight.scales.shape[2]
    made = products_of(rows, weight.packed.shape[1], bias, sorted_pairs, num_pairs, gating, out)
    if not sorted_pairs.max_blocks:
        return made.out
    launch = launch_of("moe_four_bit_gemm", rows.device, block=sorted_pairs.block, gated=gating is not None)
    moe_four_bit_gemm_kernel[(cdiv(made.columns, launch.blocks["COLUMNS"]), sorted_pairs.max_blocks)](
        rows,
        weight.packed,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        made.out,
        *made.pairs,
        made.columns,
        inner,
        rows.stride(0),
        groups,
        made.gating.alpha,
        made.gating.limit,
        IS_MXFP4=weight.zeros is None,
        SUBGROUPS=inner // groups // 32,
        IS_EVEN=inner % launch.blocks["DEPTH"] == 0,
        **made.forms,
        **launch.keywords,
    )
    return made.out


# Weights that stay 8-bit integers; `int8_products` describes how rows are rounded.


@jit
def moe_int8_gemm_kernel(
    rows,  # [tokens, inner] int8, or [num_pairs, inner]
    row_scales,  # [tokens or num_pairs] float32
    weight,  # [experts, columns or twice as many, inner] int8
    scales,  # [experts, columns or twice as many] float32
    bias,  # [experts, columns or twice as many]; any pointer where not HAS_BIAS
    out,  # [num_pairs, columns]
    pairs,  # [max_blocks * BLOCK_M] int32
    block_experts,  # [max_blocks] int32
    block_rows,  # [max_blocks] int32
    num_blocks,  # [1] int32
    columns,
    inner,
    row_stride,
    alpha,
    limit,
    PAIRS_PER_ROW: tl.constexpr,  # Neighbouring pairs that read the same row
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # As moe_gemm's
    IS_EVEN: tl.constexpr,  # whether `inner` is a multiple of DEPTH
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile [BLOCK_M pairs of one expert, COLUMNS], summed in int32. Grid: (tiles of columns, max_blocks)."""
    block = tl.program_id(1)
    if block >= tl.load(num_blocks):
        return
    pair, is_pair, _, column, _, weight_row = tile_of_block(
        pairs, block_experts, block_rows, block, tl.program_id(0), columns, ACTIVATION, BLOCK_M, COLUMNS
    )
    depth = tl.arange(0, DEPTH)
    row = pair // PAIRS_PER_ROW
    x_at = rows + row[:, None] * row_stride + depth[None, :]
    weight_at = weight + weight_row[:, None] * inner + depth[None, :]
    total = tl.zeros([BLOCK_M, COLUMNS], tl.int32)
    up_total = total
    if ACTIVATION >= 0:
        up_at = weight_at + columns.to(tl.int64) * inner
    for start in range(0, inner, DEPTH):
        exists = None if IS_EVEN else depth[None, :] < inner - start
        part = load_some(weight_at, exists)
        if ACTIVATION >= 0:
            up_part = load_some(up_at, exists)
            up_at += DEPTH
        a = load_some(x_at, exists)
        total = tl.dot(a, tl.trans(part), total, out_dtype=tl.int32)
        if ACTIVATION >= 0:
            up_total = tl.dot(a, tl.trans(up_part), up_total, out_dtype=tl.int32)
        x_at += DEPTH
        weight_at += DEPTH
    row_scale = tl.load(row_scales + row)[:, None]
    acc = total.to(tl.float32) * (row_scale * tl.load(scales + weight_row)[None, :])
    up = acc
    if ACTIVATION >= 0:
        up = up_total.to(tl.float32) * (row_scale * tl.load(scales + weight_row + columns)[None, :])
    store_products(
        acc, up, bias, out, pair, is_pair, weight_row, column, columns, alpha, limit, HAS_BIAS, ACTIVATION
    )  # fmt: skip


def moe_int8_gemm(
    rows: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None,
    sorted_pairs: SortedPairs,
    num_pairs: int,
    *,
    gating: Gating | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `moe_gemm`, of a stack of weights in 8-bit integers, and of rows rounded for each token or pair.

    # [tokens, inner] or [num_pairs, inner], [experts, out] -> [num_pairs, out], or half as many with `gating`
    """
    inner = weight.codes.shape[2]
    made = products_of(rows, weight.codes.shape[1], bias, sorted_pairs, num_pairs, gating, out)
    if not sorted_pairs.max_blocks:
        return made.out
    codes, row_scales = quantize_rows(rows)
    launch = launch_of("moe_int8_gemm", rows.device, block=sorted_pairs.block, gated=gating is not None)
    moe_int8_gemm_kernel[(cdiv(made.columns, launch.blocks["COLUMNS"]), sorted_pairs.max_blocks)](
        codes,
        row_scales,
        weight.codes,
        weight.scales,
        weight.scales if bias is None else bias,
        made.out,
        *made.pairs,
        made.columns,
        inner,
        codes.stride(0),
        made.gating.alpha,
        made.gating.limit,
        IS_EVEN=inner % launch.blocks["DEPTH"] == 0,
        **made.forms,
        **launch.keywords,
    )
    return made.out


def grouped_products(
    rows: torch.Tensor,
    weight: StackOperand,
    bias: torch.Tensor | None,
    pairs: SortedPairs,
    num_pairs: int,
    gating: Gating | None = None,
    out: torch.Tensor | None = None,
    rounded: RoundedRows | None = None,
) -> torch.Tensor:
    """Each pair's row by its expert's weight of a stack, by the kernel for the weight's layout.

    # [tokens or num_pairs, inner] -> [num_pairs, out]

    `out`: as in `products_of`. `rounded`: `rows`, where they are rounded as FP8 weights have them.
    """
    if isinstance(weight, MixedStack):
        for part, experts, slots in zip(weight.parts, weight.experts, weight.slots, strict=True):
            own = moe_sort(slots[pairs.ids], len(experts), pairs.block)
            of_part = None if bias is None else bias[experts]
            out = grouped_products(rows, part, of_part, own, num_pairs, gating, out, rounded)
        assert out is not None
        return out
    if isinstance(weight, FP8Weight):
        rows = weight.completed(rows)
        return moe_fp8_gemm(rows, weight, bias, pairs, num_pairs, gating=gating, out=out, rounded=rounded)
    if isinstance(weight, FourBitWeight):
        return moe_four_bit_gemm(weight.completed(rows), weight, bias, pairs, num_pairs, gating=gating, out=out)
    if isinstance(weight, Int8Weight):
        return moe_int8_gemm(rows, weight, bias, pairs, num_pairs, gating=gating, out=out)
    return moe_gemm(rows, weight, bias, pairs, num_pairs, gating=gating, out=out)
