"""Products of 4-bit weights, MXFP4 or integers with zero points, with bfloat16 activations.

Weights go through memory as they are stored and become bfloat16 in registers. See `four_bit` for their layout: a byte
holds inputs that lie 32 apart, so that both halves of a tile meet activations that lie in a row, and nothing is
interleaved.
"""

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_quantized  # noqa: F401, the rows of these kernels
from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of
from models.kernels.triton.four_bit import FourBitWeight, add_runs


@triton.jit(do_not_specialize=["M"])  # It differs from step to step.
def four_bit_gemm_kernel(
    x,  # [M, K]
    weight,  # [N, K / 2] uint8
    scales,  # [N, groups] of x's type; with MXFP4 uint8 exponents of two
    zeros,  # [N, groups] uint8, or any pointer with MXFP4
    bias,  # [N], or any pointer
    out,  # [M, N]
    M,
    N,
    K,
    x_stride,
    num_groups,
    IS_MXFP4: tl.constexpr,
    SUBGROUPS: tl.constexpr,  # Runs of 32 inputs that share a scale
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # Inputs at a time, a multiple of 64
):
    """A tile [ROWS, COLUMNS] of `x @ weight.T + bias`. Grid: (tiles of N, tiles of M)."""
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
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, DEPTH):
        exists = (start + inputs < K)[None, :]
        runs = start // 64 + run[None, :]
        low_x = tl.load(x_at, mask=exists, other=0.0)
        high_x = tl.load(x_at + 32, mask=exists, other=0.0)
        total = add_runs(
            total, low_x, high_x, weight_at, scales + group_at, zeros + group_at, runs, runs * 64 < K, IS_MXFP4,
            SUBGROUPS, COLUMNS, DEPTH,
        )  # fmt: skip
        x_at += DEPTH
        weight_at += DEPTH // 2
    if HAS_BIAS:
        total += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    at = out + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def four_bit_linear(x: torch.Tensor, weight: FourBitWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, of weights rounded to x's type, summed in float32. # [M, K] -> [M, N]"""
    rows, inputs = x.shape
    outputs, groups = weight.scales.shape
    out = x.new_empty(rows, outputs)
    launch = launch_of("four_bit_gemm", x.device, rows=next_power_of_2(rows))
    grid = cdiv(outputs, launch.blocks["COLUMNS"]), cdiv(rows, launch.blocks["ROWS"])
    four_bit_gemm_kernel[grid](
        x,
        weight.packed,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        x.stride(0),
        groups,
        IS_MXFP4=weight.zeros is None,
        SUBGROUPS=inputs // groups // 32,
        HAS_BIAS=bias is not None,
        **launch.keywords,
    )
    return out


COMPILATIONS = tuple(
    Compilation(
        kernel=four_bit_gemm_kernel,
        variant=f"{'mxfp4' if is_mxfp4 else 'int4 g128'} m{rows}",
        target=target,
        config=config_of("four_bit_gemm", target, rows=rows),
        signature={
            **dict.fromkeys(("x", "bias", "out"), "*bf16"),
            **dict.fromkeys(("weight", "zeros"), "*u8"),
            **dict.fromkeys(("M", "N", "K", "x_stride", "num_groups"), "i32"),
            "scales": "*u8" if is_mxfp4 else "*bf16",
        },
        constexprs={"IS_MXFP4": is_mxfp4, "SUBGROUPS": 1 if is_mxfp4 else 4, "HAS_BIAS": False},
        divisible=frozenset({"N", "K", "x_stride"}),
        large=frozenset({"x", "weight", "out"}),
        has_dot=True,
        # A scale, and a zero point, of each run of 32 weights that a thread has.
        narrow_loads=32,
    )
    for target in TARGETS.values()
    for is_mxfp4 in (True, False)
    for rows in (16, 64, 128)
)
