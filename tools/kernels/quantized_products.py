"""The forms of the kernels of `models.ops.triton.quantized_products`, for each target."""

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.quantized_products import four_bit_gemm_kernel, fp8_gemm_kernel, quantize_groups_kernel
from models.ops.types import FP8_GROUP
from tools.kernels.compilation import Compilation

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

_FOUR_BIT_GEMM_COMPILATIONS = tuple(
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

COMPILATIONS = (*_FP8_COMPILATIONS, *_FP8_GEMM_COMPILATIONS, *_FOUR_BIT_GEMM_COMPILATIONS)
