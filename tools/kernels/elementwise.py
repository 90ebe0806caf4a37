"""The forms of the kernels of `models.ops.triton.elementwise`, for each target."""

from typing import Any

from models.ops.triton.configs import TARGETS, Target, config_of
from models.ops.triton.elementwise import ADD_NORM, NORM_ADD, PLAIN, gated_kernel, rms_norm_kernel
from models.ops.triton.grids import next_power_of_2
from models.ops.types import CLAMPED_SILU, GELU, GELU_TANH, RELU_SQUARED, SILU
from models.ops.weight_formats import FP8_GROUP
from tools.kernels.compilation import Compilation


def _memory_of_codes(target: Target, dtype: str, *, rounds: bool) -> dict[str, str]:
    """The pointers for what is rounded to FP8 as well; those of the result where nothing is."""
    if not rounds:
        return dict.fromkeys(("codes", "scales"), f"*{dtype}")
    return {"codes": target.fp8_pointer, "scales": "*fp32"}


def _rounding(target: Target, *, rounds: bool) -> dict[str, float | int]:
    return {"LARGEST": target.fp8_max if rounds else 0.0, "DEPTH": FP8_GROUP}


def _compilations() -> tuple[Compilation, ...]:
    modes: dict[str, Any] = {"": PLAIN, " add": ADD_NORM, " after": NORM_ADD}
    forms = [(dtype, 4096, mode, False, False) for dtype in ("bf16", "fp16") for mode in modes]
    forms += [("bf16", size, " add", False, False) for size in (896, 2048, 8192, 16384)]
    forms += [("bf16", 128, "", False, False), ("bf16", 4096, " add", True, False), ("bf16", 128, "", True, False)]
    # 7168 and 1536 are DeepSeek-V3's hidden size, and the rank of its queries' latents.
    forms += [("bf16", size, " add", False, True) for size in (4096, 7168)] + [("bf16", 1536, "", False, True)]
    return tuple(
        Compilation(
            kernel=rms_norm_kernel,
            variant=f"{dtype} {size}{mode}" + (" centred" if is_centred else "") + (" to FP8" if rounds else ""),
            target=target,
            config=config_of("rms_norm", target, size=size),
            signature={
                **dict.fromkeys(("x", "residual", "weight", "bias", "out"), f"*{dtype}"),
                **_memory_of_codes(target, dtype, rounds=rounds),
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
                **_rounding(target, rounds=rounds),
            },
            divisible=frozenset({"x_stride", "residual_stride"}),
            # A weight of few numbers is read by each thread once, and so is a bias.
            narrow_loads=int(size < 256) * (16 if is_centred else 1),
        )
        for target in TARGETS.values()
        for dtype, size, mode, is_centred, rounds in forms
        if target.fp8 is not None or not rounds
    )


_RMS_NORM_COMPILATIONS = _compilations()

_GATED_COMPILATIONS = tuple(
    Compilation(
        kernel=gated_kernel,
        variant=f"{dtype} {name}" + (" to FP8" if rounds else ""),
        target=target,
        config=config_of("gated", target, rounds=rounds),
        signature={
            **dict.fromkeys(("gates", "ups", "out"), f"*{dtype}"),
            **_memory_of_codes(target, dtype, rounds=rounds),
            **dict.fromkeys(("stride", "up_stride", "features"), "i32"),
            **dict.fromkeys(("alpha", "limit"), "fp32"),
        },
        constexprs={
            "ACTIVATION": activation,
            "IS_GATED": name != "squared ReLU alone",
            **_rounding(target, rounds=rounds),
        },
        divisible=frozenset({"stride", "up_stride", "features"}),
    )
    for target in TARGETS.values()
    for dtype, name, activation, rounds in (
        ("bf16", "silu", SILU, False),
        ("fp16", "silu", SILU, False),
        ("bf16", "gelu", GELU_TANH, False),
        ("bf16", "clamped", CLAMPED_SILU, False),
        ("bf16", "exact gelu", GELU, False),
        ("bf16", "squared ReLU alone", RELU_SQUARED, False),
        ("bf16", "silu", SILU, True),
    )
    if target.fp8 is not None or not rounds
)

COMPILATIONS = (*_RMS_NORM_COMPILATIONS, *_GATED_COMPILATIONS)
