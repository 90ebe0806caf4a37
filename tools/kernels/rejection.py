"""The forms of the kernels of `models.ops.triton.rejection`, for each target."""

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.rejection import (
    RUN,
    draw_leftover_kernel,
    keep_equal_kernel,
    keep_likely_kernel,
    weigh_leftover_kernel,
)
from tools.kernels.compilation import Compilation


def _compilations() -> tuple[Compilation, ...]:
    signature = {
        **dict.fromkeys(("target", "proposed"), "*fp32"),
        **dict.fromkeys(("sampled", "drafts", "keys", "positions", "kept", "masses"), "*i64"),
        **dict.fromkeys(("first_drafts", "num_kept"), "*i32"),
        **dict.fromkeys(("num_rows", "places", "vocab_size", "runs"), "i32"),
    }
    return tuple(
        Compilation(
            kernel=kernel,
            variant="",
            target=target,
            config=config_of(name, target),
            signature=signature,
            constexprs=constexprs,
            divisible=frozenset({"vocab_size"}),
            large=frozenset({"target", "proposed"}),
            has_wide_loads=kernel is weigh_leftover_kernel,
        )
        for target in TARGETS.values()
        for kernel, name, constexprs in (
            (keep_equal_kernel, "keep_equal", {"PLACES": 8}),
            (keep_likely_kernel, "keep_likely", {}),
            (weigh_leftover_kernel, "weigh", {"RUN": RUN}),
            (draw_leftover_kernel, "keep_likely", {"RUN": RUN, "RUNS": 1024}),
        )
    )


COMPILATIONS = _compilations()
