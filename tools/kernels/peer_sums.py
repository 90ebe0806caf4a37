"""The forms of the kernels of `models.ops.triton.peer_sums`, for each target."""

from typing import Any

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.grids import next_power_of_2
from models.ops.triton.peer_sums import flag_bytes, peer_sum_kernel, peer_sum_norm_kernel
from tools.kernels.compilation import Compilation


def _memory(size: int) -> dict[str, Any]:
    return {"RANK": 1, "SIZE": size, "FLAG_BYTES": flag_bytes(size), "HALF_BYTES": 8 << 20}


COMPILATIONS = (
    *(
        Compilation(
            kernel=peer_sum_kernel,
            variant=f"{dtype} {size} ranks{', two shots' if is_two_shot else ''}",
            target=target,
            config=config_of("peer_sum", target),
            signature={
                **dict.fromkeys(("x", "out"), f"*{dtype}"),
                "peers": "*i64",
                **dict.fromkeys(("num_steps", "limit"), "i32"),
                "calls": "*i64",
            },
            constexprs={**_memory(size), "IS_TWO_SHOT": is_two_shot},
        )
        for target in TARGETS.values()
        for dtype, size, is_two_shot in (("bf16", 2, False), ("bf16", 8, False), ("bf16", 8, True), ("fp16", 4, True))
    ),
    *(
        Compilation(
            kernel=peer_sum_norm_kernel,
            variant=f"{dtype} {width} {size} ranks",
            target=target,
            config=config_of("peer_sum_norm", target, size=width),
            signature={
                **dict.fromkeys(("x", "residual", "weight", "out"), f"*{dtype}"),
                "peers": "*i64",
                **dict.fromkeys(("num_rows", "limit"), "i32"),
                "calls": "*i64",
                "eps": "fp32",
            },
            constexprs={**_memory(size), "WIDTH": width, "ELEMENTS": next_power_of_2(width), "OFFSET": 0.0},
        )
        for target in TARGETS.values()
        for dtype, width, size in (("bf16", 4096, 2), ("bf16", 7168, 8), ("fp16", 8192, 4))
    ),
)
