"""Grouped GEMM of a mixture of experts: each block of pairs by its own expert's weight. Called by `FusedMoE`.

The first of a layer's two products multiplies gate and up in one pass over the tokens and applies the activation to
the sums in registers, so that the wide intermediate is never written. Pairs are gathered by index as they are read and
scattered as they are written: tokens are never copied into the order of experts.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from models.kernels.cpu.structures import CLAMPED_SILU, SILU
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of
from models.kernels.triton.gated import gated_product
from models.kernels.triton.moe_sort import SortedPairs
from models.layers.activation import Gating

NO_ACTIVATION = -1


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
    lanes = tl.arange(0, BLOCK_M)
    is_pair = lanes < tl.load(block_rows + block)
    pair = tl.load(pairs + block * BLOCK_M + lanes, mask=is_pair, other=0).to(tl.int64)
    expert = tl.load(block_experts + block).to(tl.int64)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    has_column = column < columns
    # What lies past the edges is read from row 0, and never written.
    read = tl.where(has_column, column, 0)
    ks = tl.arange(0, BLOCK_K)
    left = rows + (pair // PAIRS_PER_ROW)[:, None] * row_stride + ks[None, :]
    right = weight + expert * expert_stride + read[None, :] * weight_stride + ks[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if ACTIVATION >= 0:
        up_right = right + columns * weight_stride
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, inner, BLOCK_K):
        a = _load_run(left, ks[None, :] < inner - first, IS_WHOLE)
        acc = tl.dot(a, _load_run(right, ks[:, None] < inner - first, IS_WHOLE), acc, input_precision="ieee")
        if ACTIVATION >= 0:
            up = tl.dot(a, _load_run(up_right, ks[:, None] < inner - first, IS_WHOLE), up, input_precision="ieee")
            up_right += BLOCK_K
        left += BLOCK_K
        right += BLOCK_K
    if ACTIVATION >= 0:
        if HAS_BIAS:
            of_expert = bias + expert * 2 * columns + read
            acc += tl.load(of_expert).to(tl.float32)[None, :]
            up += tl.load(of_expert + columns).to(tl.float32)[None, :]
        acc = gated_product(acc, up, alpha, limit, ACTIVATION)
    elif HAS_BIAS:
        acc += tl.load(bias + expert * columns + read).to(tl.float32)[None, :]
    at = out + pair[:, None] * columns + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & has_column[None, :])


def block_of(num_pairs: int, num_experts: int) -> int:
    """Pairs of a block: about what an expert has if they are spread evenly, so that few rows are multiplied idly."""
    each = num_pairs / num_experts
    return 16 if each <= 16 else 64 if each <= 128 else 128


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
    inner = weight.shape[2]
    columns = weight.shape[1] // (1 if gating is None else 2)
    out = rows.new_empty(num_pairs, columns)
    shape = {"block": sorted_pairs.block, "gated": gating is not None, "element": rows.element_size()}
    launch = launch_of("moe_gemm", rows.device, **shape)
    tiles = triton.cdiv(columns, launch.blocks["BLOCK_N"])
    activation, alpha, limit = gating or Gating(NO_ACTIVATION)
    moe_gemm_kernel[(sorted_pairs.max_blocks * tiles,)](
        rows,
        weight,
        weight if bias is None else bias,
        out,
        *sorted_pairs[:4],
        columns,
        inner,
        rows.stride(0),
        weight.stride(0),
        weight.stride(1),
        alpha,
        limit,
        sorted_pairs.max_blocks,
        PAIRS_PER_ROW=num_pairs // max(1, len(rows)),
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        IS_WHOLE=inner % launch.blocks["BLOCK_K"] == 0,
        **launch.keywords,
    )
    return out


def _compilations() -> tuple[Compilation, ...]:
    forms: dict[str, tuple[int, Gating]] = {
        "gate-up 16": (16, Gating(SILU)),
        "gate-up 64": (64, Gating(SILU)),
        "gate-up 128": (128, Gating(SILU)),
        "gate-up 128 clamped": (128, Gating(CLAMPED_SILU)),
        "down 16": (16, Gating(NO_ACTIVATION)),
        "down 64": (64, Gating(NO_ACTIVATION)),
        "down 128": (128, Gating(NO_ACTIVATION)),
    }
    return tuple(
        Compilation(
            kernel=moe_gemm_kernel,
            variant=f"bf16 {variant}",
            target=target,
            config=config_of("moe_gemm", target, block=block, gated=gating.activation >= 0, element=2),
            signature=_signature("*bf16"),
            constexprs={
                "PAIRS_PER_ROW": 8 if gating.activation >= 0 else 1,
                "HAS_BIAS": gating.activation == CLAMPED_SILU,
                "ACTIVATION": gating.activation,
                "IS_WHOLE": True,
            },
            divisible=frozenset({"columns", "inner", "row_stride", "expert_stride", "weight_stride"}),
            large=frozenset({"rows", "weight", "out"}),
            has_dot=True,
            # A bias is read once a tile, as the sums lie.
            narrow_loads=64 if gating.activation == CLAMPED_SILU else 0,
        )
        for target in TARGETS.values()
        for variant, (block, gating) in forms.items()
    )


def _signature(dtype: str) -> dict[str, Any]:
    return {
        **dict.fromkeys(("rows", "weight", "bias", "out"), dtype),
        **dict.fromkeys(("pairs", "block_experts", "block_rows", "num_blocks"), "*i32"),
        **dict.fromkeys(("columns", "inner", "row_stride", "expert_stride", "weight_stride", "max_blocks"), "i32"),
        **dict.fromkeys(("alpha", "limit"), "fp32"),
    }


COMPILATIONS = _compilations()
