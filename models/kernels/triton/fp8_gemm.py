"""Products of FP8 weights with activations, rounded to FP8 too where the hardware multiplies it. See `fp8`."""

import torch
import triton
import triton.language as tl

from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of
from models.kernels.triton.fp8 import FP8Weight, add_group, operands
from models.kernels.types import FP8_GROUP


@triton.jit(do_not_specialize=["M"])  # It differs from step to step.
def fp8_gemm_kernel(
    x,  # [M, K] FP8, or not rounded
    x_scales,  # [M, groups] float32; any pointer where not IS_ROUNDED
    weight,  # [N, K] FP8, or its bytes where not IS_ROUNDED
    weight_scales,  # float32; one for SCALE_ROWS output features and, where IS_BLOCKED, each group
    bias,  # [N], or any pointer
    out,  # [M, N]
    M,
    N,
    K,
    x_stride,
    num_groups,
    SCALE_ROWS: tl.constexpr,  # 0: one scale for all
    IS_ROUNDED: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
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
    x_at = x + safe_rows[:, None].to(tl.int64) * x_stride + depth[None, :]
    weight_at = weight + safe_columns[:, None].to(tl.int64) * K + depth[None, :]
    x_scale_at = x_scales + safe_rows[:, None] * num_groups
    scale_rows = safe_columns * 0 if SCALE_ROWS == 0 else safe_columns // SCALE_ROWS
    weight_scale_at = weight_scales + (scale_rows * num_groups if IS_BLOCKED else scale_rows)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in range(num_groups):
        exists = depth[None, :] < K - group * DEPTH
        a = tl.load(x_at, mask=exists, other=0.0)
        a_scale = tl.load(x_scale_at + group) if IS_ROUNDED else 1.0
        total = add_group(total, a, a_scale, weight_at, weight_scale_at + group, exists, IS_ROUNDED, IS_BLOCKED)
        x_at += DEPTH
        weight_at += DEPTH
    if not IS_BLOCKED:
        total = total * tl.load(weight_scale_at)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    at = out + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def fp8_linear(x: torch.Tensor, weight: FP8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, of activations rounded as `fp8` says. # [M, K] -> [M, N] of x's type"""
    sides = operands(x, weight)
    rows, inputs = x.shape
    outputs = weight.codes.shape[0]
    out = x.new_empty(rows, outputs)
    launch = launch_of("fp8_gemm", x.device, rows=next_power_of_2(rows))
    grid = cdiv(outputs, launch.blocks["COLUMNS"]), cdiv(rows, launch.blocks["ROWS"])
    fp8_gemm_kernel[grid](
        sides.rows,
        weight.scales if sides.row_scales is None else sides.row_scales,
        sides.codes,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        sides.rows.stride(0),
        cdiv(inputs, FP8_GROUP),
        SCALE_ROWS=weight.scale_rows,
        IS_ROUNDED=sides.row_scales is not None,
        IS_BLOCKED=weight.is_blocked,
        HAS_BIAS=bias is not None,
        DEPTH=FP8_GROUP,
        **launch.keywords,
    )
    return out


COMPILATIONS = tuple(
    Compilation(
        kernel=fp8_gemm_kernel,
        variant=f"{'blocks' if is_blocked else 'channels'} m{rows}",
        target=target,
        config=config_of("fp8_gemm", target, rows=rows),
        signature={
            "x": "*bf16" if target.fp8 is None else target.fp8_pointer,
            "weight": "*u8" if target.fp8 is None else target.fp8_pointer,
            **dict.fromkeys(("x_scales", "weight_scales"), "*fp32"),
            **dict.fromkeys(("bias", "out"), "*bf16"),
            **dict.fromkeys(("M", "N", "K", "x_stride", "num_groups"), "i32"),
        },
        constexprs={
            # As the loader keeps the scales of blocks: a row may then lie beside any other.
            "SCALE_ROWS": 1,
            "IS_ROUNDED": target.fp8 is not None,
            "IS_BLOCKED": is_blocked,
            "HAS_BIAS": False,
            "DEPTH": FP8_GROUP,
        },
        divisible=frozenset({"N", "K", "x_stride"}),
        large=frozenset({"x", "weight", "out"}),
        has_dot=True,
    )
    for target in TARGETS.values()
    for rows, is_blocked in ((16, True), (64, True), (128, True), (16, False), (128, False))
)
