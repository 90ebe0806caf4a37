"""The forms of the kernels of `models.ops.triton.int8_products`, for each target."""

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.int8_products import LARGEST, int8_gemm_kernel, quantize_rows_kernel
from tools.kernels.compilation import Compilation

_ROUNDING_COMPILATIONS = tuple(
    Compilation(
        kernel=quantize_rows_kernel,
        variant="bf16",
        target=target,
        config=config_of("quantize_rows", target),
        signature={"x": "*bf16", "codes": "*i8", "scales": "*fp32", **dict.fromkeys(("x_stride", "K"), "i32")},
        constexprs={"LARGEST": LARGEST},
        divisible=frozenset({"x_stride", "K"}),
    )
    for target in TARGETS.values()
)
_GEMM_COMPILATIONS = tuple(
    Compilation(
        kernel=int8_gemm_kernel,
        variant=f"m{rows}",
        target=target,
        config=config_of("int8_gemm", target, rows=rows),
        signature={
            **dict.fromkeys(("x", "weight"), "*i8"),
            **dict.fromkeys(("x_scales", "weight_scales"), "*fp32"),
            **dict.fromkeys(("bias", "out"), "*bf16"),
            **dict.fromkeys(("M", "N", "K"), "i32"),
        },
        constexprs={"HAS_BIAS": False},
        divisible=frozenset({"N", "K"}),
        large=frozenset({"x", "weight", "out"}),
        has_dot=True,
    )
    for target in TARGETS.values()
    for rows in (16, 64, 128)
)

COMPILATIONS = (*_ROUNDING_COMPILATIONS, *_GEMM_COMPILATIONS)
