"""The forms of the kernels of `models.ops.triton.expert_products`, for each target."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from models.ops.triton.configs import TARGETS, Target, config_of
from models.ops.triton.expert_products import (
    NO_ACTIVATION,
    moe_four_bit_gemm_kernel,
    moe_fp8_gemm_kernel,
    moe_gemm_kernel,
    moe_int8_gemm_kernel,
)
from models.ops.types import CLAMPED_SILU, SILU, Gating
from models.ops.weight_formats import FP8_GROUP
from tools.kernels.compilation import Compilation


class Form(NamedTuple):
    """A grouped GEMM that is compiled ahead of time."""

    block: int
    gating: Gating

    @property
    def is_gated(self) -> bool:
        """Whether the weight has gates and what they gate."""
        return self.gating.activation != NO_ACTIVATION

    @property
    def name(self) -> str:
        """Of the variant."""
        clamped = " clamped" if self.gating.activation == CLAMPED_SILU else ""
        return f"{'gate-up' if self.is_gated else 'down'} {self.block}{clamped}"


BLOCKS = (16, 64, 128)
"""Pairs of a block, as `block_of` chooses."""

FORMS = tuple(Form(block, Gating(activation)) for activation in (SILU, NO_ACTIVATION) for block in BLOCKS)

CLAMPED_FORMS = tuple(
    Form(block, Gating(activation)) for activation in (CLAMPED_SILU, NO_ACTIVATION) for block in BLOCKS
)
"""gpt-oss's."""


def compilation_of(
    kernel: Any,
    table: str,
    form: Form,
    target: Target,
    *,
    prefix: str,
    pointers: Mapping[str, str],
    integers: tuple[str, ...],
    constexprs: Mapping[str, object],
    divisible: frozenset[str],
    has_bias: bool = False,
    narrow_loads: int = 0,
    **shape: object,
) -> Compilation:
    """One form of a grouped GEMM on one target. `pointers` and `integers`: in addition to those that all have."""
    return Compilation(
        kernel=kernel,
        variant=f"{prefix} {form.name}",
        target=target,
        config=config_of(table, target, block=form.block, gated=form.is_gated, **shape),
        signature={
            **dict.fromkeys(("bias", "out"), "*bf16"),
            **pointers,
            **dict.fromkeys(("pairs", "block_experts", "block_rows", "num_blocks"), "*i32"),
            **dict.fromkeys(("columns", "inner", "row_stride", *integers), "i32"),
            **dict.fromkeys(("alpha", "limit"), "fp32"),
        },
        constexprs={
            "PAIRS_PER_ROW": 8 if form.is_gated else 1,
            "HAS_BIAS": has_bias,
            "ACTIVATION": form.gating.activation,
            **constexprs,
        },
        divisible=divisible | {"columns", "inner", "row_stride"},
        large=frozenset({"rows", "weight", "scales", "zeros", "out"}),
        has_dot=True,
        narrow_loads=narrow_loads,
    )


_MOE_GEMM_COMPILATIONS = tuple(
    compilation_of(
        moe_gemm_kernel,
        "moe_gemm",
        form,
        target,
        prefix="bf16",
        pointers=dict.fromkeys(("rows", "weight"), "*bf16"),
        integers=("expert_stride", "weight_stride", "max_blocks"),
        constexprs={"IS_WHOLE": True},
        divisible=frozenset({"expert_stride", "weight_stride"}),
        has_bias=form.gating.activation == CLAMPED_SILU,
        # A bias is read once a tile, as the sums lie.
        narrow_loads=64 if form.gating.activation == CLAMPED_SILU else 0,
        element=2,
    )
    for target in TARGETS.values()
    for form in (*FORMS, Form(128, Gating(CLAMPED_SILU)))
)

_MOE_FP8_GEMM_COMPILATIONS = tuple(
    compilation_of(
        moe_fp8_gemm_kernel,
        "moe_fp8_gemm",
        form,
        target,
        prefix="blocks" if is_blocked else "channels",
        pointers={
            "rows": "*bf16" if target.fp8 is None else target.fp8_pointer,
            "weight": "*u8" if target.fp8 is None else target.fp8_pointer,
            **dict.fromkeys(("row_scales", "scales"), "*fp32"),
        },
        integers=("num_groups",),
        constexprs={
            "IS_ROUNDED": target.fp8 is not None,
            "IS_BLOCKED": is_blocked,
            "IS_EVEN": True,
            "DEPTH": FP8_GROUP,
        },
        divisible=frozenset(),
    )
    for target in TARGETS.values()
    for form in FORMS
    # Scales of channels leave out an addition a group: where blocks fit, they do.
    for is_blocked in ((True, False) if form.block == 16 else (True,))
)

_MOE_FOUR_BIT_GEMM_COMPILATIONS = tuple(
    compilation_of(
        moe_four_bit_gemm_kernel,
        "moe_four_bit_gemm",
        form,
        target,
        prefix="mxfp4" if is_mxfp4 else "int4 g128",
        pointers={
            "rows": "*bf16",
            **dict.fromkeys(("weight", "zeros"), "*u8"),
            "scales": "*u8" if is_mxfp4 else "*bf16",
        },
        integers=("num_groups",),
        # gpt-oss has 2880 inputs.
        constexprs={"IS_MXFP4": is_mxfp4, "SUBGROUPS": 1 if is_mxfp4 else 4, "IS_EVEN": not is_mxfp4},
        divisible=frozenset(),
        # gpt-oss's have a bias.
        has_bias=is_mxfp4,
        # A scale, and a zero point, of each run of weights that a thread has, and biases.
        narrow_loads=64,
    )
    for target in TARGETS.values()
    for is_mxfp4 in (True, False)
    for form in (CLAMPED_FORMS if is_mxfp4 else FORMS)
)

_MOE_INT8_GEMM_COMPILATIONS = tuple(
    compilation_of(
        moe_int8_gemm_kernel,
        "moe_int8_gemm",
        form,
        target,
        prefix="int8",
        pointers={**dict.fromkeys(("rows", "weight"), "*i8"), **dict.fromkeys(("row_scales", "scales"), "*fp32")},
        integers=(),
        constexprs={"IS_EVEN": True},
        divisible=frozenset(),
    )
    for target in TARGETS.values()
    for form in FORMS
)

COMPILATIONS = (
    *_MOE_GEMM_COMPILATIONS,
    *_MOE_FP8_GEMM_COMPILATIONS,
    *_MOE_FOUR_BIT_GEMM_COMPILATIONS,
    *_MOE_INT8_GEMM_COMPILATIONS,
)
