"""Products of weights in 8-bit integers with activations that are rounded to 8 bits too (SmoothQuant, 2022).

A weight has a scale for each output feature, activations one for each token, found as they come. Sums of integers are
exact, in any order: a row's result depends neither on its batch nor on tiles.
"""

import torch
import triton.language as tl

from models.ops.triton.configs import launch_of
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.launcher import jit
from models.ops.weight_formats import Int8Weight

LARGEST = 127
"""The largest code of an activation, either way."""


@jit
def quantize_rows_kernel(
    x,  # [M, K]
    codes,  # [M, K] int8
    scales,  # [M] float32
    x_stride,
    K,
    LARGEST: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row, by its largest value. Grid: (M,)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILE)
    largest = tl.zeros([TILE], tl.float32)
    for start in range(0, K, TILE):
        values = tl.load(x + row * x_stride + start + tile, mask=start + tile < K, other=0.0).to(tl.float32)
        # NaN becomes a scale that is not finite, and so is the row's result.
        largest = tl.maximum(largest, tl.where(values == values, tl.abs(values), float("inf")))
    reach = tl.max(largest, 0)
    scale = tl.where(reach > 0.0, reach / LARGEST, 1.0)
    for start in range(0, K, TILE):
        values = tl.load(x + row * x_stride + start + tile, mask=start + tile < K, other=0.0).to(tl.float32)
        steps = tl.floor(values / scale + 0.5)
        steps = tl.where(steps == steps, tl.clamp(steps, -LARGEST * 1.0, LARGEST * 1.0), 0.0)
        tl.store(codes + row * K + start + tile, steps.to(tl.int8), mask=start + tile < K)
    tl.store(scales + row, scale)


@jit(do_not_specialize=["M"])  # It differs from step to step.
def int8_gemm_kernel(
    x,  # [M, K] int8
    x_scales,  # [M] float32
    weight,  # [N, K] int8
    weight_scales,  # [N] float32
    bias,  # [N], or any pointer
    out,  # [M, N]
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile [ROWS, COLUMNS] of `x @ weight.T + bias`. Grid: (tiles of N, tiles of M)."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Rows and columns past the end compute what is never stored.
    safe_rows, safe_columns = tl.minimum(rows, M - 1), tl.minimum(columns, N - 1)
    x_at = x + safe_rows[:, None].to(tl.int64) * K + depth[None, :]
    weight_at = weight + safe_columns[:, None].to(tl.int64) * K + depth[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.int32)
    for start in range(0, K, DEPTH):
        exists = depth[None, :] < K - start
        a = tl.load(x_at, mask=exists, other=0)
        b = tl.load(weight_at, mask=exists, other=0)
        total = tl.dot(a, tl.trans(b), total, out_dtype=tl.int32)
        x_at += DEPTH
        weight_at += DEPTH
    scale = tl.load(x_scales + safe_rows)[:, None] * tl.load(weight_scales + safe_columns)[None, :]
    product = total.to(tl.float32) * scale
    if HAS_BIAS:
        product += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    at = out + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(at, product.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds rows to 8-bit integers; codes, and what they are to be multiplied by. # [M, K] -> [M, K], [M] float32"""
    rows, inputs = x.shape
    codes = x.new_empty(rows, inputs, dtype=torch.int8)
    scales = x.new_empty(rows, dtype=torch.float32)
    launch = launch_of("quantize_rows", x.device)
    quantize_rows_kernel[(rows,)](x, codes, scales, x.stride(0), inputs, LARGEST=LARGEST, **launch.keywords)
    return codes, scales


def int8_linear(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, of activations rounded for each token. # [M, K] -> [M, N] of x's type"""
    rows, inputs = x.shape
    outputs = weight.codes.shape[0]
    codes, scales = quantize_rows(x)
    out = x.new_empty(rows, outputs)
    launch = launch_of("int8_gemm", x.device, rows=next_power_of_2(rows))
    int8_gemm_kernel[(cdiv(outputs, launch.blocks["COLUMNS"]), cdiv(rows, launch.blocks["ROWS"]))](
        codes,
        scales,
        weight.codes,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        HAS_BIAS=bias is not None,
        **launch.keywords,
    )
    return out
