"""Pairs of a token and one of its experts, by expert, in blocks that no two experts share: rows of the grouped GEMM.

A counting sort in three launches, or one where the pairs are few. Nothing is read back by the host: room is for the
most blocks there can be, and those that are too many stay idle. Equal pairs keep their order, so the result is always
the same.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of


class SortedPairs(NamedTuple):
    """Pairs by expert; pair `i` is token `i // top_k`'s."""

    pairs: torch.Tensor
    """In blocks; what lies past a block's rows is undefined. # [max_blocks * block] int32"""
    block_experts: torch.Tensor  # [max_blocks] int32, undefined past the last block
    block_rows: torch.Tensor  # [max_blocks] int32, pairs of a block
    num_blocks: torch.Tensor  # [1] int32
    max_blocks: int
    block: int


@triton.jit
def _experts_of(ids, pairs, num_pairs, num_experts):
    """The experts of some pairs; `num_experts` for pairs that are none, or of experts held elsewhere."""
    experts = tl.load(ids + pairs, mask=pairs < num_pairs, other=num_experts)
    return tl.minimum(experts, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs"])
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


@triton.jit(do_not_specialize=["num_chunks"])
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


@triton.jit(do_not_specialize=["num_pairs"])
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

    # In the chunk's own order by expert, a pair's place is its expert's first and how far it is behind that.
    ordered = tl.sort(experts * CHUNK + lanes)
    expert = ordered // CHUNK
    first = first_block * BLOCK + earlier - (tl.cumsum(of_chunk, 0) - of_chunk)
    place = tl.gather(first, expert, 0) + lanes
    tl.store(pairs_out + place, chunk * CHUNK + ordered % CHUNK, mask=expert < num_experts)

    for nth in range(chunk, tl.max(blocks, 0), tl.num_programs(0)):
        has_nth = nth < blocks
        tl.store(block_experts + first_block + nth, every, mask=has_nth)
        tl.store(block_rows + first_block + nth, tl.minimum(total - nth * BLOCK, BLOCK), mask=has_nth)
    if chunk == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))


def block_of(num_pairs: int, num_experts: int) -> int:
    """Pairs of a block: about what an expert has if they are spread evenly, so that few rows are multiplied idly."""
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
    out = SortedPairs(pairs, block_experts, block_rows, num_blocks, max_blocks, block)
    place = launch_of("moe_place", ids.device)
    chunk = place.blocks["CHUNK"]
    num_chunks = cdiv(num_pairs, chunk)
    counts = totals = out.pairs
    if num_chunks > 1:
        counts = ids.new_empty(num_chunks * tile, dtype=torch.int32)
        totals = ids.new_empty(tile, dtype=torch.int32)
        moe_count_kernel[(num_chunks,)](ids, counts, num_pairs, num_experts, EXPERTS=tile, **place.keywords)
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
        **place.keywords,
    )
    return out


def _compilations() -> tuple[Compilation, ...]:
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


COMPILATIONS = _compilations()
