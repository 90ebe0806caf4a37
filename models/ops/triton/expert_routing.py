"""Routing around the grouped GEMMs: `moe_route` chooses experts, `moe_sort` orders pairs, `moe_combine` sums results.

Routing (DeepSeek-V3, 2024, section 2.1.2) takes a token's best experts one after the other, the lower id of equal
ones, as the CPU operators do.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.ops import triton as kernels
from models.ops.triton.configs import launch_of
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.launcher import jit

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


@jit(do_not_specialize=["num_tokens"])
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
    lanes, slots = tl.arange(0, TILE)[None, :], tl.arange(0, TOP_K_TILE)[None, :]
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
    for slot in tl.static_range(TOP_K):
        best = tl.argmax(choice, 1, tie_break_left=True)[:, None]
        is_best = lanes == best
        weight = tl.sum(tl.where(is_best, scores, 0.0), 1)[:, None]
        chosen = tl.where(slots == slot, best, chosen)
        chosen_weights = tl.where(slots == slot, weight, chosen_weights)
        choice = tl.where(is_best, float("-inf"), choice)
    if RENORMALIZE:
        # All scores of a token may vanish in float32.
        chosen_weights = chosen_weights / (tl.sum(chosen_weights, 1)[:, None] + 1e-20)
    out = rows[:, None] * TOP_K + slots
    stored = inside[:, None] & (slots < TOP_K)
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


# Sorting of (token, expert) pairs by expert, in blocks that belong to one expert each: the rows of the grouped GEMM.
#
# A counting sort in three launches, or in one where the pairs are few. The host reads nothing back: the tables have
# room for the largest possible number of blocks, and programs past the last block return. The sort is stable, so the
# result is deterministic.


class SortedPairs(NamedTuple):
    """Pairs by expert; pair `i` is token `i // top_k`'s."""

    pairs: torch.Tensor
    """In blocks; what lies past a block's rows is undefined. # [max_blocks * block] int32"""
    block_experts: torch.Tensor  # [max_blocks] int32, undefined past the last block
    block_rows: torch.Tensor  # [max_blocks] int32, pairs of a block
    num_blocks: torch.Tensor  # [1] int32
    max_blocks: int
    block: int
    ids: torch.Tensor
    """The experts that were sorted. # [tokens, top_k] int64"""


@triton.jit
def _experts_of(ids, pairs, num_pairs, num_experts):
    """The experts of some pairs; `num_experts` for pairs that are none, or of experts held elsewhere."""
    experts = tl.load(ids + pairs, mask=pairs < num_pairs, other=num_experts)
    return tl.minimum(experts, num_experts).to(tl.int32)


@jit(do_not_specialize=["num_pairs"])
def moe_count_kernel(
    ids,  # [num_pairs] int64
    counts,  # [chunks, EXPERTS] int32
    num_pairs,
    num_experts,
    EXPERTS: tl.constexpr,  # A power of two over num_experts, so that the last stands for none
    CHUNK: tl.constexpr,
):
    """How many pairs of one chunk each expert has. Grid: (chunks,)."""
    pairs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    of_chunk = tl.histogram(_experts_of(ids, pairs, num_pairs, num_experts), EXPERTS)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), of_chunk)


@jit(do_not_specialize=["num_chunks"])
def moe_scan_kernel(
    counts,  # [chunks, EXPERTS] int32, which become how many pairs of an expert earlier chunks have
    totals,  # [EXPERTS] int32
    num_chunks,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,  # Experts of one program
    CHUNKS: tl.constexpr,  # At a time
):
    """Running sums down the columns of LANES experts. Grid: (EXPERTS / LANES,)."""
    experts = tl.program_id(0) * LANES + tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.int32)
    for first in range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)[:, None]
        at = counts + chunks * EXPERTS + experts[None, :]
        some = tl.load(at, mask=chunks < num_chunks, other=0)
        tl.store(at, tl.cumsum(some, 0) - some + total[None, :], mask=chunks < num_chunks)
        total += tl.sum(some, 0)
    tl.store(totals + experts, total)


@jit(do_not_specialize=["num_pairs"])
def moe_place_kernel(
    ids,  # [num_pairs] int64
    before,  # [chunks, EXPERTS] int32; any pointer where IS_WHOLE
    totals,  # [EXPERTS] int32; any pointer where IS_WHOLE
    pairs_out,
    block_experts,
    block_rows,
    num_blocks,
    num_pairs,
    num_experts,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,  # Pairs of a block
    CHUNK: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # All pairs are in this chunk, which counts them itself
):
    """Puts a chunk's pairs where they belong, and names every so many a block's expert. Grid: (chunks,)."""
    chunk = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    experts = _experts_of(ids, chunk * CHUNK + lanes, num_pairs, num_experts)
    every = tl.arange(0, EXPERTS)
    of_chunk = tl.histogram(experts, EXPERTS)
    if IS_WHOLE:
        total = of_chunk
        earlier = tl.zeros([EXPERTS], tl.int32)
    else:
        total = tl.load(totals + every)
        earlier = tl.load(before + chunk * EXPERTS + every)
    total = tl.where(every < num_experts, total, 0)
    blocks = (total + BLOCK - 1) // BLOCK
    first_block = tl.cumsum(blocks, 0) - blocks

    # In the chunk's own order by expert, a pair's position is its expert's first and how far it is behind that.
    ordered = tl.sort(experts * CHUNK + lanes)
    expert = ordered // CHUNK
    first = first_block * BLOCK + earlier - (tl.cumsum(of_chunk, 0) - of_chunk)
    position = tl.gather(first, expert, 0) + lanes
    tl.store(pairs_out + position, chunk * CHUNK + ordered % CHUNK, mask=expert < num_experts)

    for nth in range(chunk, tl.max(blocks, 0), tl.num_programs(0)):
        has_nth = nth < blocks
        tl.store(block_experts + first_block + nth, every, mask=has_nth)
        tl.store(block_rows + first_block + nth, tl.minimum(total - nth * BLOCK, BLOCK), mask=has_nth)
    if chunk == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))


def block_of(num_pairs: int, num_experts: int) -> int:
    """Pairs of a block: about what an expert has if they are spread evenly, so that few rows are multiplied idly."""
    if kernels.is_invariant():
        # Larger blocks may take other instructions, whose sums may be rounded otherwise.
        return 16
    each = num_pairs / num_experts
    return 16 if each <= 16 else 64 if each <= 128 else 128


def moe_sort(ids: torch.Tensor, num_experts: int, block: int) -> SortedPairs:
    """Sorts pairs by expert, stably, into blocks of `block` rows. # ids [tokens, top_k] int64

    Ids of `num_experts` and more are of experts that this rank does not hold: their pairs are left out.
    """
    num_pairs = ids.numel()
    tile = next_power_of_2(num_experts + 1)
    max_blocks = num_pairs // block + min(num_experts, num_pairs)
    table = cdiv(max_blocks, 4) * 4  # Each of them aligned to 16 bytes: a kernel is compiled for that.
    sizes = [max_blocks * block, table, table, 1]
    pairs, block_experts, block_rows, num_blocks = ids.new_empty(sum(sizes), dtype=torch.int32).split_with_sizes(sizes)
    out = SortedPairs(pairs, block_experts, block_rows, num_blocks, max_blocks, block, ids)
    launch = launch_of("moe_place", ids.device)
    chunk = launch.blocks["CHUNK"]
    num_chunks = cdiv(num_pairs, chunk)
    counts = totals = out.pairs
    if num_chunks > 1:
        counts = ids.new_empty(num_chunks * tile, dtype=torch.int32)
        totals = ids.new_empty(tile, dtype=torch.int32)
        moe_count_kernel[(num_chunks,)](ids, counts, num_pairs, num_experts, EXPERTS=tile, **launch.keywords)
        scan = launch_of("moe_scan", ids.device)
        lanes = min(tile, scan.blocks["LANES"])
        moe_scan_kernel[(tile // lanes,)](
            counts, totals, num_chunks, EXPERTS=tile, **{**scan.keywords, "LANES": lanes}
        )
    moe_place_kernel[(num_chunks,)](
        ids,
        counts,
        totals,
        *out[:4],
        num_pairs,
        num_experts,
        EXPERTS=tile,
        BLOCK=block,
        IS_WHOLE=num_chunks == 1,
        **launch.keywords,
    )
    return out


# The weighted sum of each token's experts, in the order of its experts: no sum depends on which program finishes
# first.


@jit
def moe_combine_kernel(
    products,  # [tokens * TOP_K, size]
    weights,  # [tokens, TOP_K] float32
    ids,  # [tokens, TOP_K] int64
    shared,  # [tokens, size]; any pointer where not HAS_SHARED
    gate,  # [tokens] float32; any pointer where not HAS_GATE
    out,  # [tokens, size]
    size,
    shared_stride,
    num_experts,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    COLUMNS: tl.constexpr,  # Of one program
):
    """A run of one token's columns in float32. Grid: (tokens, runs)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    total = tl.zeros([COLUMNS], tl.float32)
    for nth in tl.static_range(TOP_K):
        pair = token * TOP_K + nth
        # Products of experts that are held elsewhere were never made.
        is_here = tl.load(ids + pair) < num_experts
        product = tl.load(products + pair * size + columns, mask=inside & is_here, other=0.0)
        total += product.to(tl.float32) * tl.load(weights + pair)
    if HAS_SHARED:
        # The sum is rounded before the shared output is added, as where ranks add up theirs in between.
        total = total.to(out.dtype.element_ty).to(tl.float32)
        added = tl.load(shared + token * shared_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            added = (added * tl.sigmoid(tl.load(gate + token))).to(out.dtype.element_ty).to(tl.float32)
        total += added
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=inside)


def moe_combine(
    products: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sum(weights * products)` of each token in float32, plus `shared` or, by `gate`'s sigmoid, a part of it.

    # [tokens * top_k, size], [tokens, top_k] float32, [tokens, top_k] int64, [tokens, size], [tokens, 1] float32

    Ids of `num_experts` and more count for nothing. # -> [tokens, size]
    """
    num_tokens, top_k = ids.shape
    size = products.shape[1]
    out = products.new_empty(num_tokens, size)
    launch = launch_of("moe_combine", products.device)
    moe_combine_kernel[(num_tokens, cdiv(size, launch.blocks["COLUMNS"]))](
        products,
        weights,
        ids,
        products if shared is None else shared,
        weights if gate is None else gate,
        out,
        size,
        0 if shared is None else shared.stride(0),
        num_experts,
        TOP_K=top_k,
        HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None,
        **launch.keywords,
    )
    return out
