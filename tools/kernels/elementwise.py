"""The forms of the kernels of `models.ops.triton.elementwise`, for each target."""

from typing import Any

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.elementwise import ADD_NORM, NORM_ADD, PLAIN, gated_kernel, rms_norm_kernel
from models.ops.triton.grids import next_power_of_2
from models.ops.types import CLAMPED_SILU, GELU, GELU_TANH, RELU_SQUARED, SILU
from tools.kernels.compilation import Compilation


def _compilations() -> tuple[Compilation, ...]:
    modes: dict[str, Any] = {"": PLAIN, " add": ADD_NORM, " after": NORM_ADD}
    forms = [(dtype, 4096, mode, False) for dtype in ("bf16", "fp16") for mode in modes]
    forms += [("bf16", size, " add", False) for size in (896, 2048, 8192, 16384)] + [("bf16", 128, "", False)]
    forms += [("bf16", 4096, " add", True), ("bf16", 128, "", True)]
    return tuple(
        Compilation(
            kernel=rms_norm_kernel,
            variant=f"{dtype} {size}{mode}" + (" centred" if is_centred else ""),
            target=target,
            config=config_of("rms_norm", target, size=size),
            signature={
                **dict.fromkeys(("x", "residual", "weight", "bias", "out"), f"*{dtype}"),
                **dict.fromkeys(("x_stride", "residual_stride", "num_rows"), "i32"),
                **dict.fromkeys(("eps", "x_scale", "sum_scale"), "fp32"),
            },
            constexprs={
                "SIZE": size,
                "TILE": next_power_of_2(size),
                "OFFSET": 0.0,
                "MODE": modes[mode],
                "HAS_BIAS": is_centred,
                "IS_CENTRED": is_centred,
                "IS_SCALED": is_centred,
                "WEIGHT_ROWS": 8 if is_centred and size < 256 else 1,
            },
            divisible=frozenset({"x_stride", "residual_stride"}),
            # A weight of few numbers is read by each thread once, and so is a bias.
            narrow_loads=int(size < 256) * (16 if is_centred else 1),
        )
        for target in TARGETS.values()
        for dtype, size, mode, is_centred in forms
    )


_RMS_NORM_COMPILATIONS = _compilations()

_GATED_COMPILATIONS = tuple(
    Compilation(
        kernel=gated_kernel,
        variant=f"{dtype} {name}",
        target=target,
        config=config_of("gated", target),
        signature={
            **dict.fromkeys(("gates", "ups", "out"), f"*{dtype}"),
            **dict.fromkeys(("stride", "up_stride", "features"), "i32"),
            **dict.fromkeys(("alpha", "limit"), "fp32"),
        },
        constexprs={"ACTIVATION": activation, "IS_GATED": name != "squared ReLU alone"},
        divisible=frozenset({"stride", "up_stride", "features"}),
    )
    for target in TARGETS.values()
    for dtype, name, activation in (
        ("bf16", "silu", SILU),
        ("fp16", "silu", SILU),
        ("bf16", "gelu", GELU_TANH),
        ("bf16", "clamped", CLAMPED_SILU),
        ("bf16", "exact gelu", GELU),
        ("bf16", "squared ReLU alone", RELU_SQUARED),
    )
)

COMPILATIONS = (*_RMS_NORM_COMPILATIONS, *_GATED_COMPILATIONS)
