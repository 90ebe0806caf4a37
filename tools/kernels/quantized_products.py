"""The forms of the kernels of `models.ops.triton.quantized_products`, for each target."""

from models.ops.triton.configs import FEW_ROWS, TARGETS, Target, config_of
from models.ops.triton.quantized_products import (
    add_splits_kernel,
    four_bit_gemm_kernel,
    four_bit_vector_kernel,
    fp8_gemm_kernel,
    quantize_groups_kernel,
    split_rows,
    splits_of,
    vector_splits,
)
from models.ops.weight_formats import FP8_GROUP
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


ORDERED = "ordered "
"""Begins the number of rows in the name of a form whose programs add their splits' sums: of `--batch-invariant`."""


def split_constants(kernel: str, target: Target, rows: int, depth: int, *, is_ordered: bool) -> dict[str, int]:
    """SPLITS and IS_WHOLE of a launch of a product of so many rows. `depth`: inputs of a step."""
    columns = config_of(kernel, target, rows=1, element=2).blocks["COLUMNS"]
    most_rows = split_rows(kernel, target)
    splits, is_whole = splits_of(1 if is_ordered else rows, _WIDTH, _WIDTH // depth, columns, most_rows)
    return {"SPLITS": splits, "IS_WHOLE": is_whole or is_ordered}


def tile_rows(target: Target, rows: int, *, is_ordered: bool) -> int:
    """As `rows_of_tile`."""
    return FEW_ROWS if is_ordered and target.backend == "cuda" else rows


_FP8_GEMM_COMPILATIONS = tuple(
    Compilation(
        kernel=fp8_gemm_kernel,
        variant=f"{'blocks' if is_blocked else 'channels'} {ORDERED if is_ordered else ''}m{rows}",
        target=target,
        config=config_of("fp8_gemm", target, rows=tile_rows(target, rows, is_ordered=is_ordered)),
        signature={
            "x": "*bf16" if target.fp8 is None else target.fp8_pointer,
            "weight": "*u8" if target.fp8 is None else target.fp8_pointer,
            **dict.fromkeys(("x_scales", "weight_scales"), "*fp32"),
            "bias": "*bf16",
            "out": "*bf16" if constants["IS_WHOLE"] else "*fp32",
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
            **constants,
        },
        divisible=frozenset({"N", "K", "x_stride"}),
        large=frozenset({"x", "weight", "out"}),
        has_dot=True,
    )
    for target in TARGETS.values()
    for rows, is_blocked, is_ordered in (
        (16, True, False),
        (64, True, False),
        (128, True, False),
        (128, True, True),
        (16, False, False),
        (128, False, False),
        (128, False, True),
    )
    for constants in [split_constants("fp8_gemm", target, rows, FP8_GROUP, is_ordered=is_ordered)]
)

_FOUR_BIT_GEMM_COMPILATIONS = tuple(
    Compilation(
        kernel=four_bit_gemm_kernel,
        variant=f"{'mxfp4' if is_mxfp4 else 'int4 g128'} {ORDERED if is_ordered else ''}m{rows}",
        target=target,
        config=(
            config := config_of(
                "four_bit_gemm", target, rows=tile_rows(target, rows, is_ordered=is_ordered), mxfp4=is_mxfp4
            )
        ),
        signature={
            **dict.fromkeys(("x", "bias"), "*bf16"),
            "out": "*bf16" if rows > 64 else "*fp32",
            **dict.fromkeys(("weight", "zeros"), "*u8"),
            **dict.fromkeys(("M", "N", "K", "x_stride", "num_groups"), "i32"),
            "scales": "*u8" if is_mxfp4 else "*bf16",
        },
        constexprs={
            "IS_MXFP4": is_mxfp4,
            "SUBGROUPS": 1 if is_mxfp4 else 4,
            "IS_EVEN": True,
            "HAS_BIAS": False,
            **split_constants("four_bit_gemm", target, rows, config.blocks["DEPTH"], is_ordered=is_ordered),
        },
        divisible=frozenset({"N", "K", "x_stride"}),
        large=frozenset({"x", "weight", "out"}),
        has_dot=True,
        # Four warps of few rows load 8 bytes a thread, and are predicted to wait less than two that load 16.
        has_wide_loads=config.blocks["ROWS"] > FEW_ROWS,
        # A scale, and a zero point, of each run of 32 weights that a thread has.
        narrow_loads=32,
    )
    for target in TARGETS.values()
    for is_mxfp4 in (True, False)
    for rows, is_ordered in ((16, False), (64, False), (128, False), (128, True))
)

_FOUR_BIT_VECTOR_COMPILATIONS = tuple(
    Compilation(
        kernel=four_bit_vector_kernel,
        variant="mxfp4" if is_mxfp4 else "int4 g128",
        target=target,
        config=(config := config_of("four_bit_vector", target)),
        signature={
            "x": "*i64",
            "weight": "*i32",
            "zeros": "*u8",
            "scales": "*i16" if is_mxfp4 else "*bf16",
            "bias": "*bf16",
            "out": "*fp32",
            **dict.fromkeys(("N", "K", "num_groups"), "i32"),
        },
        constexprs={
            "IS_MXFP4": is_mxfp4,
            "IS_BFLOAT16": True,
            "SUBGROUPS": 1 if is_mxfp4 else 4,
            "IS_EVEN": True,
            "HAS_BIAS": False,
            "SPLITS": vector_splits(_WIDTH, _WIDTH, config.blocks),
        },
        divisible=frozenset({"N", "K", "num_groups"}),
        large=frozenset({"weight"}),
        # A scale, or a pair of exponents, and a zero point of each load of a thread.
        narrow_loads=32,
    )
    for target in TARGETS.values()
    for is_mxfp4 in (True, False)
)

_ADD_SPLITS_COMPILATIONS = tuple(
    Compilation(
        kernel=add_splits_kernel,
        variant="bf16 4",
        target=target,
        config=config_of("add_splits", target),
        signature={"partial": "*fp32", "scales": "*fp32", "bias": "*bf16", "out": "*bf16", "M": "i32", "N": "i32"},
        constexprs={"IS_SCALED": True, "SCALE_ROWS": 1, "HAS_BIAS": False, "SPLITS": 4},
        divisible=frozenset({"N"}),
    )
    for target in TARGETS.values()
)

COMPILATIONS = (
    *_ADD_SPLITS_COMPILATIONS,
    *_FP8_COMPILATIONS,
    *_FP8_GEMM_COMPILATIONS,
    *_FOUR_BIT_VECTOR_COMPILATIONS,
    *_FOUR_BIT_GEMM_COMPILATIONS,
)
