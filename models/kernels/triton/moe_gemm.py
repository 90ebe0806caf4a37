"""Grouped GEMM of a mixture of experts: each block of pairs by its own expert's weight. Called by `FusedMoE`.

The first of a layer's two products multiplies gate and up in one pass over the tokens and applies the activation to
the sums in registers, so that the wide intermediate is never written. Pairs are gathered by index as they are read and
scattered as they are written: tokens are never copied into the order of experts.
"""

import torch
import triton
import triton.language as tl

from models.kernels.cpu.structures import CLAMPED_SILU
from models.kernels.triton.arithmetic import cdiv
from models.kernels.triton.configs import TARGETS
from models.kernels.triton.configs_dense import launch_of
from models.kernels.triton.grouped import FORMS, Form, compilation_of, pairs_of_block, products_of, store_products
from models.kernels.triton.moe_sort import SortedPairs
from models.layers.activation import Gating


@triton.jit
def _load_run(at, is_inside, IS_WHOLE: tl.constexpr):
    return tl.load(at) if IS_WHOLE else tl.load(at, mask=is_inside, other=0.0)


@triton.jit(do_not_specialize=["max_blocks"])
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
    pair, is_pair, expert = pairs_of_block(pairs, block_experts, block_rows, block, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies past the edges is read from row 0, and never written.
    read = tl.where(column < columns, column, 0)
    ks = tl.arange(0, BLOCK_K)
    left = rows + (pair // PAIRS_PER_ROW)[:, None] * row_stride + ks[None, :]
    right = weight + expert * expert_stride + read[None, :] * weight_stride + ks[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    if ACTIVATION >= 0:
        up_right = right + columns * weight_stride
    for first in range(0, inner, BLOCK_K):
        a = _load_run(left, ks[None, :] < inner - first, IS_WHOLE)
        acc = tl.dot(a, _load_run(right, ks[:, None] < inner - first, IS_WHOLE), acc, input_precision="ieee")
        if ACTIVATION >= 0:
            up = tl.dot(a, _load_run(up_right, ks[:, None] < inner - first, IS_WHOLE), up, input_precision="ieee")
            up_right += BLOCK_K
        left += BLOCK_K
        right += BLOCK_K
    parts = 2 if ACTIVATION >= 0 else 1
    weight_row = expert * columns * parts + read
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
) -> torch.Tensor:
    """Each pair's row by its expert's weight, summed in float32 in the order of the inner dimension.

    # [tokens, inner] or [num_pairs, inner], [experts, out, inner], [experts, out] -> [num_pairs, out]

    With `gating` the weight's rows are gates and then what they gate, and the result is [num_pairs, out / 2]. Rows of
    pairs that `sorted_pairs` left out are undefined. `weight` must lie with its inner dimension side by side.
    """
    _, outputs, inner = weight.shape
    made = products_of(rows, outputs, bias, sorted_pairs, num_pairs, gating)
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


COMPILATIONS = tuple(
    compilation_of(
        moe_gemm_kernel,
        "moe_gemm",
        form,
        target,
        prefix="bf16",
        pointers=dict.fromkeys(("rows", "weight"), "*bf16"),
        integers=("expert_stride", "weight_stride", "max_blocks"),
        constexprs={"IS_WHOLE": True},
        divisible=frozenset({"expert_stride", "weight_stride"}),
        has_bias=form.gating.activation == CLAMPED_SILU,
        # A bias is read once a tile, as the sums lie.
        narrow_loads=64 if form.gating.activation == CLAMPED_SILU else 0,
        element=2,
    )
    for target in TARGETS.values()
    for form in (*FORMS, Form(128, Gating(CLAMPED_SILU)))
)
