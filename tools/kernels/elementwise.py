"""The forms of the kernels of `models.ops.triton.elementwise`, for each target."""

from typing import Any

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.elementwise import ADD_NORM, NORM_ADD, PLAIN, gated_kernel, rms_norm_kernel
from models.ops.triton.grids import next_power_of_2
from models.ops.types import CLAMPED_SILU, GELU_TANH, SILU
from tools.kernels.compilation import Compilation


def _compilations() -> tuple[Compilation, ...]:
    modes: dict[str, Any] = {"": PLAIN, " add": ADD_NORM, " after": NORM_ADD}
    forms = [(dtype, 4096, mode) for dtype in ("bf16", "fp16") for mode in modes]
    forms += [("bf16", size, " add") for size in (896, 2048, 8192, 16384)] + [("bf16", 128, "")]
    return tuple(
        Compilation(
            kernel=rms_norm_kernel,
            variant=f"{dtype} {size}{mode}",
            target=target,
            config=config_of("rms_norm", target, size=size),
            signature={
                **dict.fromkeys(("x", "residual", "weight", "out"), f"*{dtype}"),
                **dict.fromkeys(("x_stride", "residual_stride", "num_rows"), "i32"),
                "eps": "fp32",
            },
            constexprs={
                "SIZE": size,
                "TILE": next_power_of_2(size),
                "OFFSET": 0.0,
                "MODE": modes[mode],
            },
            divisible=frozenset({"x_stride", "residual_stride"}),
            narrow_loads=int(size < 256),  # A weight of few numbers is read by each thread once.
        )
        for target in TARGETS.values()
        for dtype, size, mode in forms
    )


_RMS_NORM_COMPILATIONS = _compilations()

_GATED_COMPILATIONS = tuple(
    Compilation(
        kernel=gated_kernel,
        variant=f"{dtype} {name}",
        target=target,
        config=config_of("gated", target),
        signature={
            **dict.fromkeys(("gate_up", "out"), f"*{dtype}"),
            **dict.fromkeys(("stride", "features"), "i32"),
            **dict.fromkeys(("alpha", "limit"), "fp32"),
        },
        constexprs={"ACTIVATION": activation},
        divisible=frozenset({"stride", "features"}),
    )
    for target in TARGETS.values()
    for dtype, name, activation in (
        ("bf16", "silu", SILU),
        ("fp16", "silu", SILU),
        ("bf16", "gelu", GELU_TANH),
        ("bf16", "clamped", CLAMPED_SILU),
    )
)

COMPILATIONS = (*_RMS_NORM_COMPILATIONS, *_GATED_COMPILATIONS)
