"""The forms of the kernels of `models.ops.triton.state_space`, for each target."""

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.gated_delta import dot_precision
from models.ops.triton.state_space import (
    group_norm_kernel,
    keep_last_inputs_kernel,
    short_conv_kernel,
    short_conv_step_kernel,
    state_space_span_kernel,
    state_space_step_kernel,
)
from tools.kernels.compilation import Compilation

_CONV = {
    **dict.fromkeys(("x", "before", "after", "weight", "bias", "inputs", "out"), "*bf16"),
    **dict.fromkeys(("slots", "slots_after"), "*i64"),
    **dict.fromkeys(("spans", "starts", "token_rows"), "*i32"),
    **dict.fromkeys(("first_token", "stride", "gate_stride", "slot_stride", "num_channels"), "i32"),
}
_GATED = {"IS_GATED": True, "HAS_BIAS": False, "HAS_SILU": False, "TAPS": 3}
_MAMBA = {"IS_GATED": False, "HAS_BIAS": True, "HAS_SILU": True, "TAPS": 4}

_CONV_COMPILATIONS = tuple(
    Compilation(
        kernel=kernel,
        variant=f"{'gated' if flags is _GATED else 'silu'} {what}",
        target=target,
        config=config_of("short_conv", target),
        signature=_CONV,
        constexprs={k: flags[k] for k in ("TAPS", "IS_GATED")} if more is None else {**flags, **more},
        divisible=frozenset({"stride", "gate_stride", "slot_stride", "num_channels"}),
        large=frozenset({"inputs"}),
    )
    for target in TARGETS.values()
    for flags in (_GATED, _MAMBA)
    for kernel, what, more in (
        (short_conv_step_kernel, "decode", {"HAS_STARTS": False}),
        (short_conv_step_kernel, "drafts", {"HAS_STARTS": True}),
        (short_conv_kernel, "spans", {}),
        (keep_last_inputs_kernel, "last inputs", None),
    )
)

_STATE = {
    **dict.fromkeys(("x", "dt", "out"), "*bf16"),
    **dict.fromkeys(("a_log", "d", "dt_bias", "states"), "*fp32"),
    **dict.fromkeys(("slots", "after"), "*i64"),
    **dict.fromkeys(("spans", "starts"), "*i32"),
    **dict.fromkeys(("dt_stride", "num_heads", "num_channels"), "i32"),
    **dict.fromkeys(("least", "most"), "fp32"),
}

_STATE_COMPILATIONS = tuple(
    Compilation(
        kernel=kernel,
        variant=f"{what}bf16 {key}x{value}",
        target=target,
        config=config_of(name, target, keys=key),
        signature=_STATE,
        constexprs={"KEY": key, "VALUE": value, "GROUP": 8, "KEY_TILE": key}
        | ({"PRECISION": dot_precision(target)} if name == "state_space_span" else {"HAS_STARTS": what == "drafts "}),
        divisible=frozenset({"num_channels"}),
        large=frozenset({"states"}),
        has_dot=name == "state_space_span" and (target.has_float32_matrices or target.backend == "cuda"),
        narrow_loads=24,
    )
    for target in TARGETS.values()
    for kernel, name, what in (
        (state_space_step_kernel, "state_space_step", ""),
        (state_space_step_kernel, "state_space_step", "drafts "),
        (state_space_span_kernel, "state_space_span", ""),
    )
    for key, value in ((128, 64), (256, 64))
)

_NORM_COMPILATIONS = tuple(
    Compilation(
        kernel=group_norm_kernel,
        variant=variant,
        target=target,
        config=config_of("group_norm", target),
        signature={
            **dict.fromkeys(("x", "gate", "weight", "out"), "*bf16"),
            **dict.fromkeys(("stride", "gate_stride", "num_groups", "size"), "i32"),
            "eps": "fp32",
        },
        constexprs={"HAS_NORM": has_norm, "IS_GATED_FIRST": True},
        divisible=frozenset({"stride", "gate_stride", "size"}),
    )
    for target in TARGETS.values()
    for variant, has_norm in (("gated", False), ("normed", True))
)

COMPILATIONS = (*_CONV_COMPILATIONS, *_STATE_COMPILATIONS, *_NORM_COMPILATIONS)
"""Every form in which a kernel is compiled ahead of time: one module for each module of kernels."""
