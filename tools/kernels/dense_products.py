"""The forms of the kernel of `models.ops.triton.dense_products`, for each target."""

from models.ops.triton.configs import FEW_ROWS, TARGETS, config_of
from models.ops.triton.dense_products import dense_gemm_kernel
from tools.kernels.compilation import Compilation
from tools.kernels.quantized_products import split_constants, tile_rows

COMPILATIONS = tuple(
    Compilation(
        kernel=dense_gemm_kernel,
        variant=f"{dtype} m{rows}",
        target=target,
        config=(
            config := config_of(
                "dense_gemm",
                target,
                rows=tile_rows(target, rows, is_ordered=True),
                element=2 if dtype == "bf16" else 4,
            )
        ),
        signature={
            **dict.fromkeys(("x", "weight", "bias"), f"*{dtype}"),
            "out": f"*{dtype}" if rows > 64 else "*fp32",
            **dict.fromkeys(("M", "N", "K", "x_stride", "weight_stride"), "i32"),
        },
        constexprs={
            "IS_EVEN": True,
            "HAS_BIAS": False,
            **split_constants("dense_gemm", target, rows, config.blocks["DEPTH"], is_ordered=rows > 64),
        },
        divisible=frozenset({"N", "K", "x_stride", "weight_stride"}),
        large=frozenset({"x", "weight", "out"}),
        # Float32 is multiplied without matrix units but on CDNA.
        has_dot=dtype == "bf16" or target.has_float32_matrices,
    )
    for target in TARGETS.values()
    for dtype, rows in (("bf16", FEW_ROWS), ("bf16", 64), ("bf16", 128), ("fp32", FEW_ROWS), ("fp32", 128))
)
