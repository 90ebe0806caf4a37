"""Grouped GEMM of experts whose weights stay 4-bit: `moe_gemm`, of weights that become bfloat16 in registers.

Called by `FusedMoE`. A decode reads the weights of the experts it meets and little else: these are a quarter of
what they are dense. See `four_bit` for their layout and numbers.
"""

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_quantized  # noqa: F401, the rows of this kernel
from models.kernels.triton.arithmetic import cdiv
from models.kernels.triton.configs import TARGETS
from models.kernels.triton.configs_dense import launch_of
from models.kernels.triton.four_bit import FourBitWeight, add_runs
from models.kernels.triton.grouped import (
    CLAMPED_FORMS,
    FORMS,
    compilation_of,
    pairs_of_block,
    products_of,
    store_products,
)
from models.kernels.triton.moe_sort import SortedPairs
from models.layers.activation import Gating


@triton.jit
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
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # Inputs at a time, a multiple of 64
):
    """A tile [BLOCK_M pairs of one expert, COLUMNS] in float32. Grid: (tiles of columns, max_blocks)."""
    block = tl.program_id(1)
    if block >= tl.load(num_blocks):
        return
    pair, is_pair, expert = pairs_of_block(pairs, block_experts, block_rows, block, BLOCK_M)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # What lies past the edges is read from row 0, and never written.
    read = tl.where(column < columns, column, 0)
    parts = 2 if ACTIVATION >= 0 else 1
    weight_row = expert * columns * parts + read
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
        exists = (start + inputs < inner)[None, :]
        runs = start // 64 + run[None, :]
        has_run = runs * 64 < inner
        low_x = tl.load(x_at, mask=exists, other=0.0)
        high_x = tl.load(x_at + 32, mask=exists, other=0.0)
        acc = add_runs(
            acc, low_x, high_x, codes_at, scales + group, zeros + group, runs, has_run, IS_MXFP4, SUBGROUPS, COLUMNS,
            DEPTH,
        )  # fmt: skip
        if ACTIVATION >= 0:
            up = add_runs(
                up, low_x, high_x, up_codes_at, scales + up_group, zeros + up_group, runs, has_run, IS_MXFP4,
                SUBGROUPS, COLUMNS, DEPTH,
            )  # fmt: skip
            up_codes_at += DEPTH // 2
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
) -> torch.Tensor:
    """As `moe_gemm`, of weights [experts, out, in / 2] with scales, and zero points, [experts, out, groups].

    # [tokens, inner] or [num_pairs, inner], [experts, out] -> [num_pairs, out], or half as many with `gating`
    """
    inner, groups = 2 * weight.packed.shape[2], weight.scales.shape[2]
    made = products_of(rows, weight.packed.shape[1], bias, sorted_pairs, num_pairs, gating)
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
        **made.forms,
        **launch.keywords,
    )
    return made.out


COMPILATIONS = tuple(
    compilation_of(
        moe_four_bit_gemm_kernel,
        "moe_four_bit_gemm",
        form,
        target,
        prefix="mxfp4" if is_mxfp4 else "int4 g128",
        pointers={
            "rows": "*bf16",
            **dict.fromkeys(("weight", "zeros"), "*u8"),
            "scales": "*u8" if is_mxfp4 else "*bf16",
        },
        integers=("num_groups",),
        constexprs={"IS_MXFP4": is_mxfp4, "SUBGROUPS": 1 if is_mxfp4 else 4},
        divisible=frozenset(),
        # gpt-oss's have a bias.
        has_bias=is_mxfp4,
        # A scale, and a zero point, of each run of weights that a thread has, and biases.
        narrow_loads=64,
    )
    for target in TARGETS.values()
    for is_mxfp4 in (True, False)
    for form in (CLAMPED_FORMS if is_mxfp4 else FORMS)
)
