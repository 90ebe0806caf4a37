"""The forms of the kernels of `models.ops.triton.logits`, for each target."""

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.logits import (
    FREQUENCY,
    REPETITION,
    adjust_kernel,
    argmax_kernel,
    argmax_tile_kernel,
    logprobs_row_kernel,
    logprobs_tile_kernel,
    mask_kernel,
)
from tools.kernels.compilation import Compilation


def _compilations() -> tuple[Compilation, ...]:
    pointers = {
        **dict.fromkeys(("logits", "values", "peaks"), "*fp32"),
        **dict.fromkeys(("rows", "ids", "tokens", "best"), "*i64"),
        **dict.fromkeys(("seen", "masks"), "*i32"),
    }
    names = ("num_changes", "stride", "words", "mask_stride", "num_words", "vocab_size", "tiles")
    signature = {**pointers, **dict.fromkeys(names, "i32")}
    return tuple(
        Compilation(
            kernel=kernel,
            variant=variant,
            target=target,
            config=config_of(kernel.__name__.removesuffix("_kernel"), target),
            signature=signature,
            constexprs=constexprs,
            divisible=frozenset({"stride", "vocab_size"}),
            has_wide_loads=kernel is argmax_tile_kernel,
        )
        for target in TARGETS.values()
        for kernel, variant, constexprs in (
            (adjust_kernel, "repetition", {"KIND": REPETITION}),
            (adjust_kernel, "frequency", {"KIND": FREQUENCY}),
            (mask_kernel, "", {}),
            (argmax_tile_kernel, "", {}),
            (argmax_kernel, "", {"TILES": 32}),
        )
    )


_SAMPLING_COMPILATIONS = _compilations()

_LOGPROBS_COMPILATIONS = tuple(
    Compilation(
        kernel=kernel,
        variant="",
        target=target,
        config=config_of(kernel.__name__.removesuffix("_kernel"), target),
        signature={
            **dict.fromkeys(("logits", "peaks", "sums", "chosen", "top_logprobs"), "*fp32"),
            **dict.fromkeys(("token_ids", "best", "ranks", "top_ids"), "*i64"),
            "better": "*i32",
            **dict.fromkeys(("stride", "vocab_size", "count", "tiles"), "i32"),
        },
        constexprs=constexprs,
        divisible=frozenset({"stride", "vocab_size"}),
        has_wide_loads=kernel is logprobs_tile_kernel,
    )
    for target in TARGETS.values()
    for kernel, constexprs in (
        (logprobs_tile_kernel, {}),
        (logprobs_row_kernel, {"TILES": 64, "CANDIDATES": 2048}),
    )
)

COMPILATIONS = (*_SAMPLING_COMPILATIONS, *_LOGPROBS_COMPILATIONS)
