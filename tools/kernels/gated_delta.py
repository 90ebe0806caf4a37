"""The forms of the kernels of `models.ops.triton.gated_delta`, for each target."""

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.gated_delta import (
    delta_conv_kernel,
    delta_conv_step_kernel,
    delta_inverse_kernel,
    dot_precision,
    gated_delta_span_kernel,
    gated_delta_step_kernel,
    gated_norm_kernel,
    keep_inputs_kernel,
)
from tools.kernels.compilation import Compilation

_SIGNATURE = {
    **dict.fromkeys(("projected", "weight", "inputs", "out"), "*bf16"),
    **dict.fromkeys(("slots", "after"), "*i64"),
    **dict.fromkeys(("spans", "starts"), "*i32"),
    "token_rows": "*i32",
    **dict.fromkeys(("first_token", "stride", "slot_stride", "num_key_heads", "num_channels"), "i32"),
}

_SHAPE = {"KEY": 128, "VALUES": 256, "COLUMNS": 512, "TAPS": 4}

_DELTA_CONV_COMPILATIONS = tuple(
    Compilation(
        kernel=kernel,
        variant=variant,
        target=target,
        config=config_of("delta_conv", target),
        signature=_SIGNATURE,
        constexprs={**_SHAPE, **more},
        divisible=frozenset({"stride", "slot_stride", "num_channels"}),
        large=frozenset({"inputs"}),
        # The weight and the slots have a channel's taps side by side: loads of neighbouring channels lie apart.
        has_wide_loads=False,
        narrow_loads=64,
    )
    for target in TARGETS.values()
    for kernel, variant, more in (
        (delta_conv_step_kernel, "decode 512x4", {"HAS_STARTS": False}),
        (delta_conv_step_kernel, "drafts 512x4", {"HAS_STARTS": True}),
        (delta_conv_kernel, "spans 512x4", {}),
        (keep_inputs_kernel, "512x4", {}),
    )
)

_STEP = dict.fromkeys(("convolved", "ba", "a_log", "dt_bias", "out"), "*bf16")

_NORM = dict.fromkeys(("read", "projected", "weight", "out"), "*bf16")

_GATED_DELTA_COMPILATIONS = tuple(
    compilation
    for target in TARGETS.values()
    for compilation in (
        *(
            Compilation(
                kernel=gated_delta_step_kernel,
                variant=f"{variant} bf16 128x128",
                target=target,
                config=config_of("gated_delta_step", target),
                signature={**_STEP, "states": "*fp32", "slots": "*i64", "starts": "*i32", "after": "*i64"}
                | dict.fromkeys(("ba_stride", "num_heads", "num_channels"), "i32"),
                constexprs={"KEY": 128, "VALUE": 128, "GROUP": 2, "KEY_TILE": 128, "HAS_STARTS": variant == "drafts"},
                divisible=frozenset({"num_channels"}),
                large=frozenset({"states"}),
                # Two gates and, of the token's channels, what one thread has.
                narrow_loads=24,
            )
            for variant in ("decode", "drafts")
        ),
        Compilation(
            kernel=gated_norm_kernel,
            variant="bf16 128",
            target=target,
            config=config_of("gated_norm", target),
            signature={**_NORM, "stride": "i32", "num_heads": "i32", "eps": "fp32"},
            constexprs={"KEY": 128, "VALUE": 128, "GROUP": 2, "VALUE_TILE": 128},
            divisible=frozenset({"stride"}),
            has_wide_loads=False,
        ),
    )
)

_GATED_DELTA_SPAN_COMPILATIONS = tuple(
    Compilation(
        kernel=kernel,
        variant="bf16 128x128",
        target=target,
        config=config_of(name, target),
        signature={
            **dict.fromkeys(("convolved", "ba", "a_log", "dt_bias", "out"), "*bf16"),
            **dict.fromkeys(("decays", "inverses", "states"), "*fp32"),
            "chunks": "*i32",
            "spans": "*i32",
            "slots": "*i64",
            **dict.fromkeys(("ba_stride", "num_heads", "num_channels"), "i32"),
        },
        constexprs={"KEY": 128, "GROUP": 2, "KEY_TILE": 128, "PRECISION": dot_precision(target)}
        | ({"VALUE": 128} if name == "gated_delta_span" else {}),
        divisible=frozenset({"num_channels"}),
        large=frozenset({"states", "inverses"}),
        # NVIDIA's take it rounded.
        has_dot=target.has_float32_matrices or target.backend == "cuda",
        narrow_loads=16,
    )
    for target in TARGETS.values()
    for kernel, name in ((delta_inverse_kernel, "delta_inverse"), (gated_delta_span_kernel, "gated_delta_span"))
)

COMPILATIONS = (*_DELTA_CONV_COMPILATIONS, *_GATED_DELTA_COMPILATIONS, *_GATED_DELTA_SPAN_COMPILATIONS)
