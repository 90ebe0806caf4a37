"""The forms of the kernels of `models.ops.triton.sampling`, for each target."""

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.sampling import BUCKETS, draw_kernel, gather_kernel, weigh_kernel
from tools.kernels.compilation import Compilation


def _compilations() -> tuple[Compilation, ...]:
    signature = {
        **dict.fromkeys(("logits", "peaks"), "*fp32"),
        **dict.fromkeys(("columns", "parts", "candidates", "tokens"), "*i64"),
        **dict.fromkeys(("counts", "found"), "*i32"),
        **dict.fromkeys(("stride", "vocab_size", "num_draws", "tiles"), "i32"),
    }
    buckets = {"BUCKETS": BUCKETS}
    return tuple(
        Compilation(
            kernel=kernel,
            variant=variant,
            target=target,
            config=config_of(name, target),
            signature=signature,
            constexprs=constexprs,
            divisible=frozenset({"stride", "vocab_size"}),
            has_wide_loads=kernel is not draw_kernel,
        )
        for target in TARGETS.values()
        for kernel, name, variant, constexprs in (
            (weigh_kernel, "weigh", "", buckets),
            (gather_kernel, "weigh", "", {"ROOM": config_of("draw", target).blocks["ROOM"], **buckets}),
            (draw_kernel, "draw", "filtered", {"TILES": 64, "HAS_FILTERED": True, **buckets}),
            (draw_kernel, "draw", "plain", {"TILES": 64, "HAS_FILTERED": False, **buckets}),
        )
    )


COMPILATIONS = _compilations()
