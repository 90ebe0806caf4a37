"""Grouped GEMM of experts whose weights stay MXFP4, as gpt-oss's do: `moe_gemm`, of weights that become bfloat16 in
registers. Called by `FusedMoE`.

A decode reads the weights of the experts it meets and little else: these are a quarter of what they are dense.
"""

from typing import Any

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_quantized  # noqa: F401, the rows of this kernel
from models.kernels.cpu.structures import CLAMPED_SILU
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of
from models.kernels.triton.four_bit import FourBitWeight, mxfp4_values
from models.kernels.triton.gated import gated_product
from models.kernels.triton.moe_gemm import NO_ACTIVATION
from models.kernels.triton.moe_sort import SortedPairs
from models.layers.activation import Gating


@triton.jit
def _add_product(total, low_x, high_x, codes_at, scales_at, has_run, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """`total` and a step's product: a tile of bytes is two of weights. See `four_bit`."""
    codes = tl.load(codes_at, mask=has_run[:, :, None], other=0)
    low_scale = tl.load(scales_at, mask=has_run, other=0)[:, :, None]
    high_scale = tl.load(scales_at + 1, mask=has_run, other=0)[:, :, None]
    low = tl.reshape(mxfp4_values(codes & 15, low_scale, low_x.dtype), [COLUMNS, DEPTH // 2])
    high = tl.reshape(mxfp4_values(codes >> 4, high_scale, low_x.dtype), [COLUMNS, DEPTH // 2])
    total = tl.dot(low_x, tl.trans(low), total, input_precision="ieee")
    return tl.dot(high_x, tl.trans(high), total, input_precision="ieee")


@triton.jit
def moe_mxfp4_gemm_kernel(
    rows,  # [tokens, inner], or [num_pairs, inner]
    weight,  # [experts, columns or twice as many, inner / 2] uint8
    scales,  # [experts, columns or twice as many, inner / 32] uint8
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
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # Inputs at a time, a multiple of 64
):
    """A tile [BLOCK_M pairs of one expert, COLUMNS] in float32. Grid: (tiles of columns, max_blocks)."""
    block = tl.program_id(1)
    if block >= tl.load(num_blocks):
        return
    lanes = tl.arange(0, BLOCK_M)
    is_pair = lanes < tl.load(block_rows + block)
    pair = tl.load(pairs + block * BLOCK_M + lanes, mask=is_pair, other=0).to(tl.int64)
    expert = tl.load(block_experts + block).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    has_column = column < columns
    # What lies past the edges is read from row 0, and never written.
    read = tl.where(has_column, column, 0)
    half, run = tl.arange(0, DEPTH // 2), tl.arange(0, DEPTH // 64)
    inputs = half // 32 * 64 + half % 32
    x_at = rows + (pair // PAIRS_PER_ROW)[:, None] * row_stride + inputs[None, :]
    parts = 2 if ACTIVATION >= 0 else 1
    first_row = expert * columns * parts + read
    bytes_of_run = run[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    codes_at = weight + first_row[:, None, None] * (inner // 2) + bytes_of_run
    scales_at = scales + first_row[:, None] * (inner // 32) + run[None, :] * 2
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    if ACTIVATION >= 0:
        up_codes_at = codes_at + columns.to(tl.int64) * (inner // 2)
        up_scales_at = scales_at + columns.to(tl.int64) * (inner // 32)
        up = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for start in range(0, inner, DEPTH):
        exists = (start + inputs < inner)[None, :]
        has_run = (start + run * 64 < inner)[None, :]
        low_x = tl.load(x_at, mask=exists, other=0.0)
        high_x = tl.load(x_at + 32, mask=exists, other=0.0)
        acc = _add_product(acc, low_x, high_x, codes_at, scales_at, has_run, COLUMNS, DEPTH)
        if ACTIVATION >= 0:
            up = _add_product(up, low_x, high_x, up_codes_at, up_scales_at, has_run, COLUMNS, DEPTH)
            up_codes_at += DEPTH // 2
            up_scales_at += DEPTH // 32
        x_at += DEPTH
        codes_at += DEPTH // 2
        scales_at += DEPTH // 32
    if ACTIVATION >= 0:
        if HAS_BIAS:
            acc += tl.load(bias + first_row).to(tl.float32)[None, :]
            up += tl.load(bias + first_row + columns).to(tl.float32)[None, :]
        acc = gated_product(acc, up, alpha, limit, ACTIVATION)
    elif HAS_BIAS:
        acc += tl.load(bias + first_row).to(tl.float32)[None, :]
    at = out + pair[:, None] * columns + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & has_column[None, :])


def moe_mxfp4_gemm(
    rows: torch.Tensor,
    weight: FourBitWeight,
    bias: torch.Tensor | None,
    sorted_pairs: SortedPairs,
    num_pairs: int,
    *,
    gating: Gating | None = None,
) -> torch.Tensor:
    """As `moe_gemm`, of weights [experts, out, in / 2] with exponents [experts, out, in / 32].

    # [tokens, inner] or [num_pairs, inner], [experts, out] -> [num_pairs, out], or half as many with `gating`
    """
    columns = weight.packed.shape[1] // (1 if gating is None else 2)
    out = rows.new_empty(num_pairs, columns)
    launch = launch_of("moe_mxfp4_gemm", rows.device, block=sorted_pairs.block, gated=gating is not None)
    activation, alpha, limit = gating or Gating(NO_ACTIVATION)
    if sorted_pairs.max_blocks:
        moe_mxfp4_gemm_kernel[(triton.cdiv(columns, launch.blocks["COLUMNS"]), sorted_pairs.max_blocks)](
            rows,
            weight.packed,
            weight.scales,
            weight.scales if bias is None else bias,
            out,
            *sorted_pairs[:4],
            columns,
            2 * weight.packed.shape[2],
            rows.stride(0),
            alpha,
            limit,
            PAIRS_PER_ROW=num_pairs // len(rows),
            HAS_BIAS=bias is not None,
            ACTIVATION=activation,
            **launch.keywords,
        )
    return out


def _compilations() -> tuple[Compilation, ...]:
    gate_up, down = Gating(CLAMPED_SILU), Gating(NO_ACTIVATION)
    signature: dict[str, Any] = {
        **dict.fromkeys(("rows", "bias", "out"), "*bf16"),
        **dict.fromkeys(("weight", "scales"), "*u8"),
        **dict.fromkeys(("pairs", "block_experts", "block_rows", "num_blocks"), "*i32"),
        **dict.fromkeys(("columns", "inner", "row_stride"), "i32"),
        **dict.fromkeys(("alpha", "limit"), "fp32"),
    }
    return tuple(
        Compilation(
            kernel=moe_mxfp4_gemm_kernel,
            variant=f"{'gate-up' if gating is gate_up else 'down'} {block}",
            target=target,
            config=config_of("moe_mxfp4_gemm", target, block=block, gated=gating is gate_up),
            signature=signature,
            constexprs={
                "PAIRS_PER_ROW": 4 if gating is gate_up else 1,
                "HAS_BIAS": True,
                "ACTIVATION": gating.activation,
            },
            divisible=frozenset({"columns", "inner", "row_stride"}),
            large=frozenset({"rows", "weight", "scales", "out"}),
            has_dot=True,
            # A scale of each run of 32 weights that a thread has, and biases.
            narrow_loads=64,
        )
        for target in TARGETS.values()
        for gating in (gate_up, down)
        for block in (16, 64, 128)
    )


COMPILATIONS = _compilations()
