"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1.2) over paged latents, and DeepSeek-V3.2's indexer.

Two algorithms compute the same attention. The absorbed one, for decodes and for tokens that select positions, moves
queries into the latent space, where one latent is the key and the value of all heads. A program takes a tile of one
query's heads over a run of latents; the run length depends on the token's context alone, so a result does not depend
on the batch. Runs are then merged (Flash-Decoding, Dao et al., 2023). The expanded one, for prompts, attends to keys
and values per head. The indexer scores positions, of which absorbed attention takes the best instead of all.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import models.ops.triton.configs  # noqa: F401, the rows of these kernels
from models.ops.triton.configs import WHOLE, launch_of
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.launcher import jit

MAX_PARTIAL_ELEMENTS = 1 << 26
"""Of the runs' results that are in memory at a time: 256 MiB. One token over a long context may need more."""
MAX_RUNS = tl.constexpr(64)
"""Of a token, whose runs are longer where it sees more."""


SHORT_RUNS = tl.constexpr(16)
"""The most runs of a token that sees few latents, which are shorter: of one token few programs would run otherwise."""


@triton.jit
def _run_length(length, RUN: tl.constexpr):
    """By the token's own number of latents alone."""
    short = tl.where(length <= SHORT_RUNS * (RUN // 4), RUN // 4, RUN // 2)
    return tl.where(length <= SHORT_RUNS * (RUN // 2), short, RUN * tl.maximum(tl.cdiv(length, RUN * MAX_RUNS), 1))


def most_runs(length: int, run: int) -> int:
    """Runs that a token of at most so many latents may have: one of fewer may have more. `run`: RUN of the kernel."""
    short, most = int(SHORT_RUNS.value), int(MAX_RUNS.value)
    return min(most, max(min(short, cdiv(length, run // 4)), cdiv(length, run)))


@triton.jit
def _load_part(rows, has_row, first, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """TILE numbers of some rows from `first` on, 0 behind the first WIDTH. # pointers [N, 1], [N] -> [N, TILE]"""
    columns = first + tl.arange(0, TILE)[None, :]
    return tl.load(rows + columns, mask=has_row[:, None] & (columns < WIDTH), other=0.0)


@triton.jit
def _load_latents(rows, first, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The same of rows that are all there."""
    columns = first + tl.arange(0, TILE)[None, :]
    if WIDTH % TILE == 0:
        return tl.load(rows + columns)
    return tl.load(rows + columns, mask=columns < WIDTH, other=0.0)


# What differs from step to step; the tokens of a step may begin anywhere in their tensors.
@jit(
    do_not_specialize=["table_stride", "num_runs"],
    do_not_specialize_on_alignment=["token_rows", "token_lens", "selected"],
)
def latent_attention_kernel(
    q,  # [T, H, RANK]
    q_rope,  # [T, H, ROPE]
    vectors,  # [blocks, BLOCK_SIZE, RANK + ROPE], 8-bit or of q's type
    block_tables,  # [rows, max_blocks] int32
    token_rows,  # [T] int32, the block table of each token
    token_lens,  # [T] int32, latents that each sees
    selected,  # [T, num_selected] int64, -1 for none; any pointer where not IS_SPARSE
    partial,  # [T, H, runs, RANK] float32
    partial_lse,  # [T, H, runs] float32, base 2
    score_scale,  # Of the scores, to base 2, and of what the cache holds
    value_scale,  # Of what the cache holds
    q_stride,
    q_head_stride,
    rope_stride,
    rope_head_stride,
    block_stride,
    table_stride,
    num_selected,
    num_heads,
    num_runs,
    rank,  # RANK, as the compiler does not know it: of parts whose number it knows it would load all at once
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_TILE: tl.constexpr,  # RANK and ROPE filled up to powers of two
    ROPE_TILE: tl.constexpr,
    HEADS: tl.constexpr,  # Of one program
    KEYS: tl.constexpr,  # Latents at a time
    RUN: tl.constexpr,  # Latents of one program; a part of it where there are few, or a multiple where there are many
    IS_SPARSE: tl.constexpr,
    DEPTH: tl.constexpr = WHOLE,  # Of the latents' numbers, how many are multiplied with queries at a time
):
    """A tile [HEADS, RANK] of one token's attention to one run. Grid: (runs, tiles of heads, T)."""
    run, token = tl.program_id(0), tl.program_id(2)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    length = num_selected if IS_SPARSE else tl.load(token_lens + token)
    width = _run_length(length, RUN)
    first = run * width
    if first >= length:
        return
    last = tl.minimum(first + width, length)
    table = block_tables + tl.load(token_rows + token).to(tl.int64) * table_stride

    ranks = tl.arange(0, RANK_TILE)
    has_rank, has_head = ranks < RANK, heads < num_heads
    dtype: tl.constexpr = q.dtype.element_ty
    queries = q + token.to(tl.int64) * q_stride + heads[:, None] * q_head_stride
    if DEPTH >= RANK_TILE:
        q_latent = _load_part(queries, has_head, 0, RANK, RANK_TILE)
    rope_queries = q_rope + token.to(tl.int64) * rope_stride + heads[:, None] * rope_head_stride
    q_keys = _load_part(rope_queries, has_head, 0, ROPE, ROPE_TILE)

    # A row's maximum begins at a finite number: a run of which nothing is seen then has no NaN in it.
    highest = tl.full([HEADS], -1.0e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    attended = tl.zeros([HEADS, RANK_TILE], tl.float32)
    for start in range(first, last, KEYS):
        positions = start + tl.arange(0, KEYS)
        seen = positions < last
        # For a latent that is not seen another latent of the row is loaded, and multiplied by a weight of zero. Masked
        # loads would be branches on AMD, with a wait before each.
        positions = tl.minimum(positions, last - 1)
        if IS_SPARSE:
            positions = tl.load(selected + token.to(tl.int64) * num_selected + positions)
            seen &= positions >= 0
            positions = tl.maximum(positions, 0)
        block = tl.load(table + positions // BLOCK_SIZE)
        at = vectors + block.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * (RANK + ROPE)
        at = at[:, None]
        # One tile in two parts: the latents, both keys and values, and the key that all heads share.
        if DEPTH < RANK_TILE:
            scores = tl.zeros([HEADS, KEYS], tl.float32)
            for begin in range(0, rank, DEPTH):
                queries_part = _load_part(queries, has_head, begin, RANK, DEPTH)
                part = _load_latents(at, begin, RANK, DEPTH).to(dtype)
                scores = tl.dot(queries_part, tl.trans(part), scores, input_precision="ieee")
            keys = _load_latents(at + RANK, 0, ROPE, ROPE_TILE).to(dtype)
            scores = tl.dot(q_keys, tl.trans(keys), scores, input_precision="ieee")
            latents = _load_latents(at, 0, RANK, RANK_TILE).to(dtype)
        else:
            latents = _load_latents(at, 0, RANK, RANK_TILE).to(dtype)
            keys = _load_latents(at + RANK, 0, ROPE, ROPE_TILE).to(dtype)
            scores = tl.dot(q_keys, tl.trans(keys), input_precision="ieee")
            scores = tl.dot(q_latent, tl.trans(latents), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], scores * score_scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(shares, 1)
        attended = attended * shrink[:, None]
        attended = tl.dot(shares.to(latents.dtype), latents, attended, input_precision="ieee")
        highest = higher

    lse = tl.where(total > 0.0, highest + tl.log2(total), float("-inf"))
    attended = attended * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    index = (token.to(tl.int64) * num_heads + heads) * num_runs + run
    tl.store(partial_lse + index, lse, mask=has_head)
    tl.store(partial + index[:, None] * RANK + ranks[None, :], attended, mask=has_head[:, None] & has_rank[None, :])


@jit(do_not_specialize=["num_runs"], do_not_specialize_on_alignment=["token_lens"])
def merge_latent_runs_kernel(
    partial,  # [T, H, runs, RANK] float32
    partial_lse,  # [T, H, runs] float32, base 2
    token_lens,  # [T] int32, or any pointer where every token has `num_seen` latents
    out,  # [T, H, RANK]
    num_heads,
    num_runs,
    num_seen,  # Latents of every token; 0: as token_lens says
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    RUN: tl.constexpr,
):
    """One head of one token: its runs' results by what their scores weigh, in their order. Grid: (T, H)."""
    token, head = tl.program_id(0), tl.program_id(1)
    length = num_seen
    if num_seen == 0:
        length = tl.load(token_lens + token)
    ranks = tl.arange(0, RANK_TILE)
    has_rank = ranks < RANK
    index = (token.to(tl.int64) * num_heads + head) * num_runs
    highest, total = -1.0e30, 0.0
    merged = tl.zeros([RANK_TILE], tl.float32)
    for run in range(tl.cdiv(length, _run_length(length, RUN))):
        lse = tl.load(partial_lse + index + run)
        part = tl.load(partial + (index + run) * RANK + ranks, mask=has_rank, other=0.0)
        higher = tl.maximum(highest, lse)
        shrink, share = tl.exp2(highest - higher), tl.exp2(lse - higher)
        merged = merged * shrink + part * share
        total = total * shrink + share
        highest = higher
    merged = merged / tl.where(total > 0.0, total, 1.0)
    at = out + (token.to(tl.int64) * num_heads + head) * RANK + ranks
    tl.store(at, merged.to(out.dtype.element_ty), mask=has_rank)


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    vectors: torch.Tensor,
    block_tables: torch.Tensor,
    token_rows: torch.Tensor,
    token_lens: torch.Tensor,
    *,
    longest: int,
    scale: float,
    cache_scale: float = 1.0,
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each token's heads attend to in the latents' space; softmax and sums in float32. # -> [T, H, rank]

    q [T, H, rank], absorbed; q_rope [T, H, rope], rotated; vectors [blocks, block_size, rank + rope], times
    `cache_scale` where they are 8-bit; block_tables [rows, max_blocks] int32; token_rows [T] int32, each token's among
    them; token_lens [T] int32, how many latents it sees, `longest` the most of these. `scale` is the scores'. With
    `selected` [T, K] int64 a token sees the latents at those positions, -1 for none, and `token_lens` is not read.
    """
    num_tokens, num_heads, rank = q.shape
    if rank % 16:
        # A product's result has strides by the number of tokens, and kernels are compiled by which 16 divides.
        q = q.contiguous()
    shape = {"heads": num_heads, "sparse": selected is not None, "element": q.element_size()}
    launch = launch_of("latent_attention", q.device, **shape)
    merge = launch_of("merge_latent_runs", q.device)
    run = launch.blocks["RUN"]
    num_runs = most_runs(longest if selected is None else selected.shape[1], run)
    out = q.new_empty(num_tokens, num_heads, rank)
    rank_tile = max(16, next_power_of_2(rank))
    rope = q_rope.shape[2]
    step = max(1, MAX_PARTIAL_ELEMENTS // (num_heads * num_runs * rank))
    tokens = (q, q_rope, token_rows, token_lens, out)
    for first in range(0, num_tokens, step):
        some = slice(first, min(first + step, num_tokens))
        count = some.stop - first
        # Most steps are one part: slices of the whole would take the host longer than the launch.
        q_part, rope_part, rows_part, lens_part, out_part = (
            tokens if count == num_tokens else [each[some] for each in tokens]
        )
        partial = q.new_empty(count, num_heads, num_runs, rank, dtype=torch.float32)
        lse = q.new_empty(count, num_heads, num_runs, dtype=torch.float32)
        chosen = block_tables if selected is None else selected[some].contiguous()
        latent_attention_kernel[(num_runs, cdiv(num_heads, launch.blocks["HEADS"]), count)](
            q_part,
            rope_part,
            vectors,
            block_tables,
            rows_part,
            lens_part,
            chosen,
            partial,
            lse,
            scale * cache_scale * math.log2(math.e),
            cache_scale,
            *q.stride()[:2],
            *q_rope.stride()[:2],
            vectors.stride(0),
            block_tables.stride(0),
            0 if selected is None else selected.shape[1],
            num_heads,
            num_runs,
            rank,
            BLOCK_SIZE=vectors.shape[1],
            RANK=rank,
            ROPE=rope,
            RANK_TILE=rank_tile,
            ROPE_TILE=max(16, next_power_of_2(rope)),
            IS_SPARSE=selected is not None,
            **launch.keywords,
        )
        merge_latent_runs_kernel[(count, num_heads)](
            partial,
            lse,
            lens_part,
            out_part,
            num_heads,
            num_runs,
            0 if selected is None else selected.shape[1],
            RANK=rank,
            RANK_TILE=rank_tile,
            RUN=run,
            **merge.keywords,
        )
    return out


# Prefill over expanded latents: a head's key is its expansion followed by the rotated key that all heads share.
#
# In DeepSeek-V3's shape a query and a key cost 320 multiplications a head expanded, and 1088 in the latent space;
# expanding a latent costs 131072, which about 170 queries save. So prompts expand and decodes do not. Long contexts
# are expanded in pieces to bound memory; a query's softmax state is carried from piece to piece, as it is from tile to
# tile (FlashAttention-2, Dao, 2023).


class Piece(NamedTuple):
    """Some keys of one row, to which its queries attend: a row of the kernel's table."""

    first_query: int
    num_queries: int
    first_key: int
    """Among the expanded latents."""
    num_keys: int
    offset: int
    """The first query sees the piece's keys up to this one, the next one more; below 0: none yet."""
    is_first: bool
    is_last: bool
    """Of its row's pieces, which follow one another, each in a launch of its own."""


@triton.jit
def _load_tile(rows, has_row, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The first WIDTH numbers of some rows, and 0 up to TILE. # pointers [N, 1], [N] -> [N, TILE]"""
    columns = tl.arange(0, TILE)[None, :]
    return tl.load(rows + columns, mask=has_row[:, None] & (columns < WIDTH), other=0.0)


@triton.jit
def _attend_keys(
    q_nope,  # [QUERIES, NOPE_TILE]
    q_rope,  # [QUERIES, ROPE_TILE]
    attended,  # [QUERIES, VALUE_TILE] float32
    highest,  # [QUERIES] float32
    total,  # [QUERIES] float32
    expanded,  # Of the piece's first key and this head
    shared,
    begin,
    end,
    num_keys,
    last_seen,  # [QUERIES], the last key of the piece that each query sees
    scale,
    key_stride,
    shared_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    NOPE_TILE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """The softmax of a tile of queries, carried over the keys from `begin` to `end`."""
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        exists = keys < num_keys
        rows = expanded + keys[:, None].to(tl.int64) * key_stride
        k_nope = _load_tile(rows, exists, NOPE, NOPE_TILE)
        k_rope = _load_tile(shared + keys[:, None].to(tl.int64) * shared_stride, exists, ROPE, ROPE_TILE)
        scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        scores = tl.dot(q_nope, tl.trans(k_nope), scores, input_precision="ieee") * scale
        if IS_MASKED:
            seen = exists[None, :] & (keys[None, :] <= last_seen[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(shares, 1)
        v = _load_tile(rows + NOPE, exists, VALUE, VALUE_TILE)
        attended = tl.dot(shares.to(v.dtype), v, attended * shrink[:, None], input_precision="ieee")
        highest = higher
    return attended, highest, total


@jit
def latent_prefill_kernel(
    q,  # [T, H, NOPE]
    rotated,  # [T, H, ROPE], the rest of each query
    expanded,  # [keys, H, NOPE + VALUE]
    shared,  # [keys, ROPE], a row every shared_stride
    pieces,  # [P, 7] int32, see Piece
    out,  # [T, H, VALUE]
    carried,  # [T, H, VALUE] float32, between the pieces of a row
    carried_softmax,  # [T, H, 2] float32, highest score and total
    scale,  # Of the scores, to base 2
    q_stride,
    q_head_stride,
    rope_stride,
    rope_head_stride,
    key_stride,
    shared_stride,
    num_heads,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    NOPE_TILE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A tile [QUERIES, VALUE] of one head over one piece of its row's keys. Grid: (tiles of queries, H, P)."""
    head = tl.program_id(1)
    piece = pieces + tl.program_id(2) * 7
    first_query, num_queries = tl.load(piece), tl.load(piece + 1)
    first_key, num_keys = tl.load(piece + 2), tl.load(piece + 3)
    offset, is_first, is_last = tl.load(piece + 4), tl.load(piece + 5), tl.load(piece + 6)
    # The last tiles have the most keys: they begin first.
    tile = tl.cdiv(num_queries, QUERIES) - 1 - tl.program_id(0)
    if tile < 0:
        return
    queries = tile * QUERIES + tl.arange(0, QUERIES)
    has_query = queries < num_queries
    rows = (first_query + queries).to(tl.int64)
    q_nope = _load_tile(q + rows[:, None] * q_stride + head * q_head_stride, has_query, NOPE, NOPE_TILE)
    q_rope = _load_tile(rotated + rows[:, None] * rope_stride + head * rope_head_stride, has_query, ROPE, ROPE_TILE)

    index = rows * num_heads + head
    is_carried = has_query & (is_first == 0)
    values = tl.arange(0, VALUE_TILE)
    has_value = has_query[:, None] & (values < VALUE)[None, :]
    highest = tl.load(carried_softmax + index * 2, mask=is_carried, other=-1.0e30)
    total = tl.load(carried_softmax + index * 2 + 1, mask=is_carried, other=0.0)
    at = carried + index[:, None] * VALUE
    attended = _load_tile(at, is_carried, VALUE, VALUE_TILE)

    expanded += first_key.to(tl.int64) * key_stride + head * (NOPE + VALUE)
    shared += first_key.to(tl.int64) * shared_stride
    # A query sees the keys up to its own position; whole tiles that the first query sees need no mask.
    last_seen = queries + offset
    seen_by_all = tl.minimum(tl.maximum(tile * QUERIES + offset + 1, 0), num_keys) // KEYS * KEYS
    seen_by_one = tl.minimum(tl.maximum(tl.minimum((tile + 1) * QUERIES, num_queries) + offset, 0), num_keys)
    attended, highest, total = _attend_keys(
        q_nope, q_rope, attended, highest, total, expanded, shared, 0, seen_by_all, num_keys, last_seen, scale,
        key_stride, shared_stride, NOPE, ROPE, VALUE, NOPE_TILE, ROPE_TILE, VALUE_TILE, KEYS, False,
    )  # fmt: skip
    attended, highest, total = _attend_keys(
        q_nope, q_rope, attended, highest, total, expanded, shared, seen_by_all, seen_by_one, num_keys, last_seen,
        scale, key_stride, shared_stride, NOPE, ROPE, VALUE, NOPE_TILE, ROPE_TILE, VALUE_TILE, KEYS, True,
    )  # fmt: skip

    if is_last != 0:
        attended = attended / total[:, None]
        tl.store(out + index[:, None] * VALUE + values[None, :], attended.to(out.dtype.element_ty), mask=has_value)
    else:
        tl.store(carried_softmax + index * 2, highest, mask=has_query)
        tl.store(carried_softmax + index * 2 + 1, total, mask=has_query)
        tl.store(at + values[None, :], attended, mask=has_value)


def latent_prefill(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    expanded: torch.Tensor,
    shared: torch.Tensor,
    pieces: torch.Tensor,
    out: torch.Tensor,
    carried: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    longest: int,
    scale: float,
) -> None:
    """Attend to one piece of each of some rows; whose last it is has its result in `out`. Sums are float32.

    q [T, H, nope]; q_rope [T, H, rope], rotated; expanded [keys, H, nope + v]; shared [keys, rope], the rotated key of
    all heads; pieces [P, 7] int32, each a `Piece`; `longest` the most queries of one; out [T, H, v]; `carried`
    [T, H, v] and [T, H, 2] float32, for rows of several pieces: None where each has one.
    """
    _, num_heads, nope = q.shape
    rope, value = shared.shape[1], out.shape[2]
    launch = launch_of("latent_prefill", q.device, element=q.element_size())
    nothing = out.new_empty(1, dtype=torch.float32)
    sums, softmax = carried or (nothing, nothing)
    latent_prefill_kernel[(cdiv(longest, launch.blocks["QUERIES"]), num_heads, len(pieces))](
        q,
        q_rope,
        expanded,
        shared,
        pieces,
        out,
        sums,
        softmax,
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        expanded.stride(0),
        shared.stride(0),
        num_heads,
        NOPE=nope,
        ROPE=rope,
        VALUE=value,
        NOPE_TILE=max(16, next_power_of_2(nope)),
        ROPE_TILE=max(16, next_power_of_2(rope)),
        VALUE_TILE=max(16, next_power_of_2(value)),
        **launch.keywords,
    )


# Scores of the lightning indexer over its paged keys (DeepSeek-V3.2, 2025): small heads whose weighted scores select
# the positions to attend to.
#
# Scores of each head in memory would be larger than the result by the number of heads; a tile of them is weighted and
# summed in registers instead.


# What differs from step to step; the tokens of a step may begin anywhere in their tensors.
@jit(
    do_not_specialize=["table_stride", "score_stride", "width"],
    do_not_specialize_on_alignment=["token_rows", "token_lens"],
)
def indexer_scores_kernel(
    q,  # [T, H, DIM]
    weights,  # [T, H] float32
    vectors,  # [blocks, BLOCK_SIZE, DIM]
    block_tables,  # [rows, max_blocks] int32
    token_rows,  # [T] int32, the block table of each token
    token_lens,  # [T] int32, keys that each sees
    scores,  # [T, width] float32
    num_heads,
    block_stride,
    table_stride,
    score_stride,
    width,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    HEADS: tl.constexpr,  # All of them, filled up to a power of two
    KEYS: tl.constexpr,
):
    """Scores of one token for KEYS keys, minus infinity where it sees none. Grid: (tiles of keys, T)."""
    token = tl.program_id(1)
    positions = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    length = tl.load(token_lens + token)
    at = scores + token.to(tl.int64) * score_stride + positions
    if tl.program_id(0) * KEYS >= length:
        tl.store(at, tl.full([KEYS], float("-inf"), tl.float32), mask=positions < width)
        return
    heads, dims = tl.arange(0, HEADS), tl.arange(0, DIM_TILE)
    has_head, has_dim, seen = heads < num_heads, dims < DIM, positions < length
    table = block_tables + tl.load(token_rows + token).to(tl.int64) * table_stride
    block = tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0)
    rows = vectors + block.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * DIM
    keys = tl.load(rows[:, None] + dims[None, :], mask=seen[:, None] & has_dim[None, :], other=0.0)
    index = token.to(tl.int64) * num_heads + heads
    queries = tl.load(q + index[:, None] * DIM + dims[None, :], mask=has_head[:, None] & has_dim[None, :], other=0.0)
    weight = tl.load(weights + index, mask=has_head, other=0.0)
    by_head = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
    summed = tl.sum(tl.maximum(by_head, 0.0) * weight[:, None], 0)
    tl.store(at, tl.where(seen, summed, float("-inf")), mask=positions < width)


def indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    vectors: torch.Tensor,
    block_tables: torch.Tensor,
    token_rows: torch.Tensor,
    token_lens: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """The sum over heads of `weights * relu(q . key)`, minus infinity for what is not seen. # -> [T, width] float32

    q [T, H, dim], weights [T, H] float32, vectors [blocks, block_size, dim], block_tables [rows, max_blocks] int32,
    token_rows [T] int32, token_lens [T] int32: of which row each token is, and how many of its keys it sees.
    """
    num_tokens, num_heads, dim = q.shape
    launch = launch_of("indexer_scores", q.device)
    scores = q.new_empty(num_tokens, width, dtype=torch.float32)
    indexer_scores_kernel[(cdiv(width, launch.blocks["KEYS"]), num_tokens)](
        q.contiguous(),
        weights.contiguous(),
        vectors,
        block_tables,
        token_rows,
        token_lens,
        scores,
        num_heads,
        vectors.stride(0),
        block_tables.stride(0),
        scores.stride(0),
        width,
        BLOCK_SIZE=vectors.shape[1],
        DIM=dim,
        DIM_TILE=max(16, next_power_of_2(dim)),
        HEADS=max(16, next_power_of_2(num_heads)),
        **launch.keywords,
    )
    return scores
