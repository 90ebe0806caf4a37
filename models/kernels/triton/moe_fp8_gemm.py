"""Grouped GEMM of experts whose weights stay FP8: `moe_gemm`, with scales as in `fp8`. Called by `FusedMoE`."""

import torch
import triton
import triton.language as tl

from models.kernels.triton.arithmetic import cdiv
from models.kernels.triton.configs import TARGETS
from models.kernels.triton.configs_dense import launch_of
from models.kernels.triton.fp8 import FP8Weight, add_group, operands
from models.kernels.triton.grouped import FORMS, compilation_of, pairs_of_block, products_of, store_products
from models.kernels.triton.moe_sort import SortedPairs
from models.kernels.types import FP8_GROUP
from models.layers.activation import Gating


@triton.jit
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
    DEPTH: tl.constexpr,  # Of a group
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
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
        exists = depth[None, :] < inner - group * DEPTH
        a = tl.load(x_at, mask=exists, other=0.0)
        a_scale = tl.load(x_scale_at + group) if IS_ROUNDED else 1.0
        acc = add_group(acc, a, a_scale, weight_at, scale_at + group, exists, IS_ROUNDED, IS_BLOCKED)
        if ACTIVATION >= 0:
            up = add_group(up, a, a_scale, up_at, up_scale_at + group, exists, IS_ROUNDED, IS_BLOCKED)
            up_at += DEPTH
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
) -> torch.Tensor:
    """As `moe_gemm`, of a stack of weights in FP8, and of rows rounded as `fp8` says.

    # [tokens, inner] or [num_pairs, inner], [experts, out] -> [num_pairs, out], or half as many with `gating`
    """
    inner = weight.codes.shape[2]
    made = products_of(rows, weight.codes.shape[1], bias, sorted_pairs, num_pairs, gating)
    if not sorted_pairs.max_blocks:
        return made.out
    sides = operands(rows, weight)
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
        DEPTH=FP8_GROUP,
        **made.forms,
        **launch.keywords,
    )
    return made.out


COMPILATIONS = tuple(
    compilation_of(
        moe_fp8_gemm_kernel,
        "moe_fp8_gemm",
        form,
        target,
        prefix="blocks" if is_blocked else "channels",
        pointers={
            "rows": "*bf16" if target.fp8 is None else target.fp8_pointer,
            "weight": "*u8" if target.fp8 is None else target.fp8_pointer,
            **dict.fromkeys(("row_scales", "scales"), "*fp32"),
        },
        integers=("num_groups",),
        constexprs={"IS_ROUNDED": target.fp8 is not None, "IS_BLOCKED": is_blocked, "DEPTH": FP8_GROUP},
        divisible=frozenset(),
    )
    for target in TARGETS.values()
    for form in FORMS
    # Scales of channels leave out an addition a group: where blocks fit, they do.
    for is_blocked in ((True, False) if form.block == 16 else (True,))
)
