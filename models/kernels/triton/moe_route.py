"""Which experts a token goes to, and their weights (DeepSeek-V3, section 2.1.2). Called by the routers.

The best of a token's experts are found one after the other, of equals the lower, as the CPU's operators choose.
"""

import torch
import triton
import triton.language as tl

from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of

_LEAST = tl.constexpr(-3.4028234663852886e38)  # Less than any score, and still better than what was taken.


@triton.jit
def _rank_groups(
    choice, lanes, GROUP: tl.constexpr, GROUPS: tl.constexpr, GROUPS_TILE: tl.constexpr, PAIRS: tl.constexpr
):
    """How good each group of experts is: its best, or with PAIRS its two best together. # -> [ROWS, GROUPS_TILE]"""
    groups = tl.arange(0, GROUPS_TILE)[None, :]
    goodness = tl.full([choice.shape[0], GROUPS_TILE], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        of_group = tl.where(lanes // GROUP == group, choice, float("-inf"))
        good = tl.max(of_group, 1)
        if PAIRS:
            first = tl.argmax(of_group, 1, tie_break_left=True)
            good += tl.max(tl.where(lanes == first[:, None], float("-inf"), of_group), 1)
        goodness = tl.where(groups == group, good[:, None], goodness)
    return goodness


@triton.jit(do_not_specialize=["num_tokens"])
def moe_route_kernel(
    logits,  # [tokens, EXPERTS]
    correction,  # [EXPERTS] float32; any pointer where not HAS_CORRECTION
    weights,  # [tokens, TOP_K] float32
    ids,  # [tokens, TOP_K] int64
    stride,
    num_tokens,
    scaling_factor,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,  # EXPERTS filled up to a power of two
    TOP_K: tl.constexpr,
    TOP_K_TILE: tl.constexpr,
    SIGMOID: tl.constexpr,  # Scores are that of the logits; otherwise their softmax
    RENORMALIZE: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_TILE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS tokens with all of their scores in registers. Grid: (tiles of tokens,)."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lanes, places = tl.arange(0, TILE)[None, :], tl.arange(0, TOP_K_TILE)[None, :]
    inside = rows < num_tokens
    at = logits + tl.minimum(rows, num_tokens - 1)[:, None] * stride + lanes
    scores = tl.load(at, mask=lanes < EXPERTS, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(scores)
    else:
        shares = tl.exp(scores - tl.max(scores, 1)[:, None])
        scores = shares / tl.sum(shares, 1)[:, None]
    choice = scores
    if HAS_CORRECTION:
        choice += tl.load(correction + lanes, mask=lanes < EXPERTS, other=0.0)
    # Whatever the logits are, what is chosen is an expert: no number counts as least.
    choice = tl.where(choice > _LEAST, choice, _LEAST)
    choice = tl.where(lanes < EXPERTS, choice, float("-inf"))
    if TOP_GROUPS < GROUPS:
        GROUP: tl.constexpr = EXPERTS // GROUPS
        goodness = _rank_groups(choice, lanes, GROUP, GROUPS, GROUPS_TILE, HAS_CORRECTION)
        kept = lanes < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.argmax(goodness, 1, tie_break_left=True)[:, None]
            kept = kept | (lanes // GROUP == best)
            goodness = tl.where(tl.arange(0, GROUPS_TILE)[None, :] == best, float("-inf"), goodness)
        choice = tl.where(kept, choice, float("-inf"))
    chosen = tl.zeros([ROWS, TOP_K_TILE], tl.int32)
    chosen_weights = tl.zeros([ROWS, TOP_K_TILE], tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.argmax(choice, 1, tie_break_left=True)[:, None]
        is_best = lanes == best
        weight = tl.sum(tl.where(is_best, scores, 0.0), 1)[:, None]
        chosen = tl.where(places == place, best, chosen)
        chosen_weights = tl.where(places == place, weight, chosen_weights)
        choice = tl.where(is_best, float("-inf"), choice)
    if RENORMALIZE:
        # All scores of a token may vanish in float32.
        chosen_weights = chosen_weights / (tl.sum(chosen_weights, 1)[:, None] + 1e-20)
    out = rows[:, None] * TOP_K + places
    stored = inside[:, None] & (places < TOP_K)
    tl.store(ids + out, chosen.to(tl.int64), mask=stored)
    tl.store(weights + out, chosen_weights * scaling_factor, mask=stored)


def moe_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    sigmoid: bool,
    renormalize: bool,
    correction: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of each token's experts, the best first; as `models.layers.routing` has it, in float32.

    # [tokens, experts], [experts] float32 -> [tokens, top_k] float32, [tokens, top_k] int64
    """
    num_tokens, experts = logits.shape
    weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    ids = logits.new_empty(num_tokens, top_k, dtype=torch.int64)
    tile = next_power_of_2(experts)
    launch = launch_of("moe_route", logits.device, tile=tile)
    moe_route_kernel[(cdiv(num_tokens, launch.blocks["ROWS"]),)](
        logits,
        logits if correction is None else correction,
        weights,
        ids,
        logits.stride(0),
        num_tokens,
        scaling_factor,
        EXPERTS=experts,
        TILE=tile,
        TOP_K=top_k,
        TOP_K_TILE=next_power_of_2(top_k),
        SIGMOID=sigmoid,
        RENORMALIZE=renormalize,
        HAS_CORRECTION=correction is not None,
        GROUPS=num_groups,
        GROUPS_TILE=next_power_of_2(num_groups),
        TOP_GROUPS=top_groups,
        **launch.keywords,
    )
    return weights, ids


def _compilations() -> tuple[Compilation, ...]:
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


COMPILATIONS = _compilations()
