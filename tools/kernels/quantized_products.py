"""The forms of the kernels of `models.ops.triton.quantized_products`, for each target."""

from models.ops.triton.configs import FEW_ROWS, TARGETS, Target, config_of
from models.ops.triton.quantized_products import (
    add_splits_kernel,
    four_bit_gemm_kernel,
    fp8_gemm_kernel,
    quantize_groups_kernel,
    splits_of,
)
from models.ops.types import FP8_GROUP
from tools.kernels.compilation import Compilation

_WIDTH = 4096
"""Inputs and outputs of the weights."""

_FP8_COMPILATIONS = tuple(
    Compilation(
        kernel=quantize_groups_kernel,
        variant="bf16",
        target=target,
        config=config_of("quantize_groups", target),
        signature={
            "x": "*bf16",
            "codes": target.fp8_pointer,
            "scales": "*fp32",
            **dict.fromkeys(("x_stride", "K", "num_groups"), "i32"),
        },
        constexprs={"LARGEST": target.fp8_max, "DEPTH": FP8_GROUP},
        divisible=frozenset({"x_stride", "K"}),
        has_wide_loads=False,
    )
    for target in TARGETS.values()
    if target.fp8 is not None
)


def _columns(kernel: str, target: Target, rows: int) -> int:
    return config_of(kernel, target, rows=rows).blocks["COLUMNS"]


_FP8_GEMM_COMPILATIONS = tuple(
    Compilation(
        kernel=fp8_gemm_kernel,
        variant=f"{'blocks' if is_blocked else 'channels'} m{rows}",
        target=target,
        config=config_of("fp8_gemm", target, rows=rows),
        signature={
            "x": "*bf16" if target.fp8 is None else target.fp8_pointer,
            "weight": "*u8" if target.fp8 is None else target.fp8_pointer,
            **dict.fromkeys(("x_scales", "weight_scales"), "*fp32"),
            "bias": "*bf16",
            "out": "*bf16" if rows > FEW_ROWS else "*fp32",
            **dict.fromkeys(("M", "N", "K", "x_stride", "num_groups"), "i32"),
        },
        constexprs={
            # As the loader keeps the scales of blocks: any two rows may then be neighbours.
            "SCALE_ROWS": 1,
            "IS_ROUNDED": target.fp8 is not None,
            "IS_BLOCKED": is_blocked,
            "IS_EVEN": True,
            "HAS_BIAS": False,
            "DEPTH": FP8_GROUP,
            "SPLITS": splits_of(rows, _WIDTH, _WIDTH // FP8_GROUP, _columns("fp8_gemm", target, rows)),
        },
        divisible=frozenset({"N", "K", "x_stride"}),
        large=frozenset({"x", "weight", "out"}),
        has_dot=True,
    )
    for target in TARGETS.values()
    for rows, is_blocked in ((16, True), (64, True), (128, True), (16, False), (128, False))
)

_FOUR_BIT_GEMM_COMPILATIONS = tuple(
    Compilation(
        kernel=four_bit_gemm_kernel,
        variant=f"{'mxfp4' if is_mxfp4 else 'int4 g128'} m{rows}",
        target=target,
        config=config_of("four_bit_gemm", target, rows=rows),
        signature={
            **dict.fromkeys(("x", "bias"), "*bf16"),
            "out": "*bf16" if rows > FEW_ROWS else "*fp32",
            **dict.fromkeys(("weight", "zeros"), "*u8"),
            **dict.fromkeys(("M", "N", "K", "x_stride", "num_groups"), "i32"),
            "scales": "*u8" if is_mxfp4 else "*bf16",
        },
        constexprs={
            "IS_MXFP4": is_mxfp4,
            "SUBGROUPS": 1 if is_mxfp4 else 4,
            "IS_EVEN": True,
            "HAS_BIAS": False,
            "SPLITS": splits_of(rows, _WIDTH, _WIDTH // 128, _columns("four_bit_gemm", target, rows)),
        },
        divisible=frozenset({"N", "K", "x_stride"}),
        large=frozenset({"x", "weight", "out"}),
        has_dot=True,
        # Four warps of few rows load 8 bytes a thread, and are predicted to wait less than two that load 16.
        has_wide_loads=rows > FEW_ROWS,
        # A scale, and a zero point, of each run of 32 weights that a thread has.
        narrow_loads=32,
    )
    for target in TARGETS.values()
    for is_mxfp4 in (True, False)
    for rows in (16, 64, 128)
)

_ADD_SPLITS_COMPILATIONS = tuple(
    Compilation(
        kernel=add_splits_kernel,
        variant="bf16 4",
        target=target,
        config=config_of("add_splits", target),
        signature={"partial": "*fp32", "bias": "*bf16", "out": "*bf16", "M": "i32", "N": "i32"},
        constexprs={"HAS_BIAS": False, "SPLITS": 4},
        divisible=frozenset({"N"}),
    )
    for target in TARGETS.values()
)

COMPILATIONS = (*_ADD_SPLITS_COMPILATIONS, *_FP8_COMPILATIONS, *_FP8_GEMM_COMPILATIONS, *_FOUR_BIT_GEMM_COMPILATIONS)
