"""The forms of the kernels of `models.ops.triton.token_scans`, for each target."""

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.token_scans import delta_rule_kernel, selective_scan_kernel
from tools.kernels.compilation import Compilation

_ROWS = {
    **dict.fromkeys(("slots", "after"), "*i64"),
    **dict.fromkeys(("spans", "starts"), "*i32"),
}
_FORMS = (
    ("decode", {"IS_SPAN": False, "HAS_STARTS": False}),
    ("drafts", {"IS_SPAN": False, "HAS_STARTS": True}),
    ("spans", {"IS_SPAN": True, "HAS_STARTS": False}),
)
_RULE = {
    **dict.fromkeys(("x", "a", "b", "out"), "*bf16"),
    **dict.fromkeys(("a_log", "dt_bias", "states"), "*fp32"),
    **_ROWS,
    **dict.fromkeys(("x_stride", "a_stride", "b_stride", "num_heads"), "i32"),
    "most": "fp32",
}
_SCAN = {
    **dict.fromkeys(("x", "dt", "b", "c", "out"), "*bf16"),
    **dict.fromkeys(("a_log", "d", "dt_bias", "states"), "*fp32"),
    **_ROWS,
    **dict.fromkeys(("x_stride", "dt_stride", "b_stride", "c_stride", "num_channels"), "i32"),
}

_RULE_COMPILATIONS = tuple(
    Compilation(
        kernel=delta_rule_kernel,
        variant=f"{'by key ' if decays > 1 else ''}{what} bf16 128x128",
        target=target,
        config=config_of("delta_rule", target),
        signature=_RULE,
        constexprs={"KEY": 128, "VALUE": 128, "GROUP": 1, "DECAYS": decays, "KEY_TILE": 128, **flags},
        divisible=frozenset({"x_stride", "a_stride"}),
        large=frozenset({"states"}),
        narrow_loads=24,
    )
    for target in TARGETS.values()
    for decays in (1, 128)
    for what, flags in _FORMS
)
_SCAN_COMPILATIONS = tuple(
    Compilation(
        kernel=selective_scan_kernel,
        variant=f"{what} bf16 16",
        target=target,
        config=config_of("selective_scan", target),
        signature=_SCAN,
        constexprs={"STATE": 16, "STATE_TILE": 16, **flags},
        divisible=frozenset({"x_stride", "dt_stride", "b_stride", "c_stride", "num_channels"}),
        large=frozenset({"states"}),
        narrow_loads=24,
    )
    for target in TARGETS.values()
    for what, flags in _FORMS
)

COMPILATIONS = (*_RULE_COMPILATIONS, *_SCAN_COMPILATIONS)
"""Every form in which a kernel is compiled ahead of time: one module for each module of kernels."""
