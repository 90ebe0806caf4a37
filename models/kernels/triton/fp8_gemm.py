"""Products of FP8 weights with activations rounded to FP8 in groups of 128 (DeepSeek-V3, 2024, section 3.3).

Weights have a scale a block of 128 x 128, an output feature or a tensor. A group's products are summed by the matrix
units, then scaled and added up in float32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_quantized  # noqa: F401, the rows of these kernels
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of, target_of
from models.kernels.triton.configs_dense import launch_of

GROUP = 128
"""Input features that share a scale."""


@triton.jit
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
    largest = tl.max(tl.abs(values), 1)
    scale = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    # Division may round the largest value past the end.
    values = tl.clamp(values / scale[:, None], -LARGEST, LARGEST)
    tl.store(codes + row * K + columns, values.to(codes.dtype.element_ty), mask=columns < K)
    tl.store(scales + row * num_groups + groups, scale, mask=groups < num_groups)


@triton.jit(do_not_specialize=["M"])  # It differs from step to step.
def fp8_gemm_kernel(
    x,  # [M, K] FP8
    x_scales,  # [M, groups] float32
    weight,  # [N, K] FP8
    weight_scales,  # float32; one for SCALE_ROWS output features and, where IS_BLOCKED, each group
    bias,  # [N], or any pointer
    out,  # [M, N]
    M,
    N,
    K,
    num_groups,
    SCALE_ROWS: tl.constexpr,  # 0: one scale for all
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
    x_at = x + safe_rows[:, None].to(tl.int64) * K + depth[None, :]
    weight_at = weight + safe_columns[:, None].to(tl.int64) * K + depth[None, :]
    x_scale_at = x_scales + safe_rows * num_groups
    scale_rows = safe_columns * 0 if SCALE_ROWS == 0 else safe_columns // SCALE_ROWS
    weight_scale_at = weight_scales + (scale_rows * num_groups if IS_BLOCKED else scale_rows)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in range(num_groups):
        left = K - group * DEPTH
        a = tl.load(x_at, mask=depth[None, :] < left, other=0.0)
        b = tl.load(weight_at, mask=depth[None, :] < left, other=0.0)
        scale = tl.load(x_scale_at + group)[:, None]
        if IS_BLOCKED:
            scale = scale * tl.load(weight_scale_at + group)[None, :]
        total += tl.dot(a, tl.trans(b)) * scale
        x_at += DEPTH
        weight_at += DEPTH
    if not IS_BLOCKED:
        total = total * tl.load(weight_scale_at)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    at = out + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


class FP8Weight(NamedTuple):
    """A weight in the FP8 of its device, with its scales."""

    codes: torch.Tensor  # [N, K] float8
    scales: torch.Tensor
    """float32: [N / 128, K / 128], rounded up, of blocks; [N, K / 128] of 128 inputs of a row; [N] of rows; [1]."""

    @property
    def is_blocked(self) -> bool:
        """Whether a scale is of 128 inputs."""
        return self.scales.dim() == 2

    @property
    def scale_rows(self) -> int:
        """Output features that share a scale; 0: all."""
        return {len(self.codes): 1, 1: 0}.get(len(self.scales), GROUP)


def to_flavour(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """OCP codes as `dtype`, the same numbers: e4m3fnuz reads the same bits as half of them, and has no negative zero.

    # [N, K] float8_e4m3fn
    """
    if dtype is torch.float8_e4m3fn:
        return codes, scales
    bits = codes.view(torch.uint8)
    return torch.where(bits == 0x80, 0, bits).to(torch.uint8).view(torch.float8_e4m3fnuz), scales * 2


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds groups of 128 of each row to the device's FP8; codes, and what they are to be multiplied by.

    # [M, K] -> [M, K], [M, groups] float32

    Raises `ValueError` on a device without FP8.
    """
    target = target_of(x.device)
    if target.fp8 is None:
        raise ValueError(f"{target.arch} has no FP8; weights are made dense as they are read there")
    rows, inputs = x.shape
    groups = triton.cdiv(inputs, GROUP)
    codes = x.new_empty(rows, inputs, dtype=getattr(torch, f"float8_{target.fp8}"))
    scales = x.new_empty(rows, groups, dtype=torch.float32)
    launch = launch_of("quantize_groups", x.device)
    quantize_groups_kernel[(rows, triton.cdiv(groups, launch.blocks["GROUPS"]))](
        x,
        codes,
        scales,
        x.stride(0),
        inputs,
        groups,
        LARGEST=target.fp8_max,
        DEPTH=GROUP,
        **launch.keywords,
    )
    return codes, scales


def fp8_linear(x: torch.Tensor, weight: FP8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, of activations rounded to FP8 as above. # [M, K] -> [M, N] of x's type"""
    codes, scales = quantize_groups(x)
    rows, inputs = x.shape
    outputs = len(weight.codes)
    out = x.new_empty(rows, outputs)
    launch = launch_of("fp8_gemm", x.device, rows=triton.next_power_of_2(rows))
    grid = triton.cdiv(outputs, launch.blocks["COLUMNS"]), triton.cdiv(rows, launch.blocks["ROWS"])
    fp8_gemm_kernel[grid](
        codes,
        scales,
        weight.codes,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        scales.shape[1],
        SCALE_ROWS=weight.scale_rows,
        IS_BLOCKED=weight.is_blocked,
        HAS_BIAS=bias is not None,
        DEPTH=GROUP,
        **launch.keywords,
    )
    return out


def _compilations() -> tuple[Compilation, ...]:
    found = []
    for target in TARGETS.values():
        if target.fp8 is None:
            continue
        fp8 = "*fp8e4nv" if target.fp8 == "e4m3fn" else "*fp8e4b8"
        found.append(
            Compilation(
                kernel=quantize_groups_kernel,
                variant="bf16",
                target=target,
                config=config_of("quantize_groups", target),
                signature={
                    "x": "*bf16",
                    "codes": fp8,
                    "scales": "*fp32",
                    **dict.fromkeys(("x_stride", "K", "num_groups"), "i32"),
                },
                constexprs={"LARGEST": target.fp8_max, "DEPTH": GROUP},
                divisible=frozenset({"x_stride", "K"}),
                has_wide_loads=False,
            )
        )
        for rows, is_blocked in ((16, True), (64, True), (128, True), (16, False), (128, False)):
            found.append(
                Compilation(
                    kernel=fp8_gemm_kernel,
                    variant=f"{'blocks' if is_blocked else 'channels'} m{rows}",
                    target=target,
                    config=config_of("fp8_gemm", target, rows=rows),
                    signature={
                        **dict.fromkeys(("x", "weight"), fp8),
                        **dict.fromkeys(("x_scales", "weight_scales"), "*fp32"),
                        **dict.fromkeys(("bias", "out"), "*bf16"),
                        **dict.fromkeys(("M", "N", "K", "num_groups"), "i32"),
                    },
                    constexprs={
                        # As the loader keeps the scales of blocks: a row may then lie beside any other.
                        "SCALE_ROWS": 1,
                        "IS_BLOCKED": is_blocked,
                        "HAS_BIAS": False,
                        "DEPTH": GROUP,
                    },
                    divisible=frozenset({"N", "K"}),
                    large=frozenset({"x", "weight", "out"}),
                    has_dot=True,
                )
            )
    return tuple(found)


COMPILATIONS = _compilations()
