"""The forms of the kernels of `models.ops.triton.expert_routing`, for each target."""

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.expert_routing import (
    moe_combine_kernel,
    moe_count_kernel,
    moe_place_kernel,
    moe_route_kernel,
    moe_scan_kernel,
)
from models.ops.triton.grids import next_power_of_2
from tools.kernels.compilation import Compilation


def _route_compilations() -> tuple[Compilation, ...]:
    softmax = {"EXPERTS": 128, "TOP_K": 8, "SIGMOID": False, "HAS_CORRECTION": False, "GROUPS": 1, "TOP_GROUPS": 1}
    grouped = {"EXPERTS": 256, "TOP_K": 8, "SIGMOID": True, "HAS_CORRECTION": True, "GROUPS": 8, "TOP_GROUPS": 4}
    many = {**softmax, "EXPERTS": 512, "TOP_K": 10}
    return tuple(
        Compilation(
            kernel=moe_route_kernel,
            variant=variant,
            target=target,
            config=config_of("moe_route", target, tile=form["EXPERTS"]),
            signature={
                **dict.fromkeys(("logits", "correction", "weights"), "*fp32"),
                "ids": "*i64",
                **dict.fromkeys(("stride", "num_tokens"), "i32"),
                "scaling_factor": "fp32",
            },
            constexprs={
                **form,
                "TILE": form["EXPERTS"],
                "TOP_K_TILE": next_power_of_2(form["TOP_K"]),
                "GROUPS_TILE": form["GROUPS"],
                "RENORMALIZE": True,
            },
            divisible=frozenset({"stride"}),
            has_wide_loads=form["EXPERTS"] > 128,
        )
        for target in TARGETS.values()
        for variant, form in (("128 softmax", softmax), ("512 softmax", many), ("256 in 8 groups", grouped))
    )


_MOE_ROUTE_COMPILATIONS = _route_compilations()


def _sort_compilations() -> tuple[Compilation, ...]:
    integers = {**dict.fromkeys(("num_pairs", "num_experts", "num_chunks"), "i32"), "ids": "*i64"}
    names = ("counts", "totals", "before", "pairs_out", "block_experts", "block_rows", "num_blocks")
    signature = {**integers, **dict.fromkeys(names, "*i32")}
    whole = {"EXPERTS": 256, "BLOCK": 16, "IS_WHOLE": True}
    chunked = {"EXPERTS": 256, "BLOCK": 64, "IS_WHOLE": False}
    return tuple(
        Compilation(
            kernel=kernel,
            variant=variant,
            target=target,
            config=config_of(name, target),
            signature=signature,
            constexprs=constexprs,
            has_wide_loads=False,
        )
        for target in TARGETS.values()
        for kernel, name, variant, constexprs in (
            (moe_count_kernel, "moe_place", "256", {"EXPERTS": 256}),
            (moe_scan_kernel, "moe_scan", "256", {"EXPERTS": 256}),
            (moe_place_kernel, "moe_place", "whole", whole),
            (moe_place_kernel, "moe_place", "chunk", chunked),
        )
    )


_MOE_SORT_COMPILATIONS = _sort_compilations()

_MOE_COMBINE_COMPILATIONS = tuple(
    Compilation(
        kernel=moe_combine_kernel,
        variant=variant,
        target=target,
        config=config_of("moe_combine", target),
        signature={
            **dict.fromkeys(("products", "shared", "out"), "*bf16"),
            **dict.fromkeys(("weights", "gate"), "*fp32"),
            "ids": "*i64",
            **dict.fromkeys(("size", "shared_stride", "num_experts"), "i32"),
        },
        constexprs={"TOP_K": 8, "HAS_SHARED": has_shared, "HAS_GATE": has_shared},
        divisible=frozenset({"size", "shared_stride"}),
        large=frozenset({"products"}),
    )
    for target in TARGETS.values()
    for variant, has_shared in (("bf16", False), ("bf16 shared", True))
)

COMPILATIONS = (*_MOE_ROUTE_COMPILATIONS, *_MOE_SORT_COMPILATIONS, *_MOE_COMBINE_COMPILATIONS)
