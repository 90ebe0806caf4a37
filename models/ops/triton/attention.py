"""Causal attention over the paged cache: prefill of spans of tokens, and split-KV decode with its merge.

In order: one tile of attention, which both kernels share; `attention_prefill`; `attention_decode`, which splits the
keys of a row into pieces; `attention_merge`, which combines the pieces; and their composition, `paged_attention`.

A tile is online softmax (Milakov and Gimelshein, 2018) in powers of two, accumulated in registers (FlashAttention-2,
Dao, 2023): `peak` [M] is the row maximum so far, `total` [M] the sum of weights relative to it, `acc` [M, V] the
weighted sum of values, which may have another size than keys.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl

from models.ops.triton import grids as pieces
from models.ops.triton.configs import WHOLE, Config, config_of, launch_of, target_of
from models.ops.triton.grids import AttentionPlan, cdiv, next_power_of_2
from models.ops.triton.launcher import jit
from models.ops.types import AttentionOptions, KVCacheTensor

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING_YET = tl.constexpr(-1.0e30)
"""A peak below any score, and finite: a row that has seen no key keeps a total of zero."""

PIECE = tl.constexpr(pieces.PIECE)
MAX_PIECES = tl.constexpr(pieces.MAX_PIECES)
SHORT = tl.constexpr(pieces.SHORT)
LEAST_PIECE = tl.constexpr(pieces.LEAST_PIECE)


@triton.jit
def piece_length(length):
    """Tokens of each of a row's pieces but the last."""
    short = tl.where(length <= SHORT * LEAST_PIECE, LEAST_PIECE, 2 * LEAST_PIECE)
    return tl.where(
        length <= SHORT * 2 * LEAST_PIECE, short, PIECE * tl.maximum(tl.cdiv(length, PIECE * MAX_PIECES), 1)
    )


@triton.jit
def page_offsets(
    table_ptr,  # of the row
    keys,  # [N], positions that the row has
    block_stride,
    kv_head,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Where keys, and values, begin in their caches. # [N] int64"""
    blocks = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
    return blocks * block_stride + kv_head * (BLOCK_SIZE * HEAD_DIM) + (keys % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def load_dims(
    cache_ptr,
    offsets,  # [N], of vectors
    first,
    HEAD_DIM: tl.constexpr,
    D_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """WIDTH dimensions of cached vectors from `first` on. # [N, WIDTH]"""
    dims = first + tl.arange(0, WIDTH)
    offsets = offsets[:, None] + dims[None, :]
    if D_TILE != HEAD_DIM:
        return tl.load(cache_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return tl.load(cache_ptr + offsets)


@triton.jit
def attend_tile(
    q,  # [M, D_TILE]; where DEPTH is less, pointers to the queries, [M, 1]
    is_query,  # [M]
    acc,  # [M, V_TILE] float32
    peak,  # [M] float32
    total,  # [M] float32
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    first_key,
    first_seen,  # no query sees keys before it, whose blocks may belong to other rows; read where HAS_WINDOW
    end,  # keys from here on are not the row's
    positions,  # [M], of the queries
    kv_head,
    block_stride,
    v_block_stride,
    scale,  # of the products to base 2, the keys' own included; with a soft cap twice that over the cap, see `scales`
    soft_cap,  # to base 2
    window,
    head_dim,  # HEAD_DIM, as the compiler does not know it: of parts whose number it knows it would load all at once
    IS_MASKED: tl.constexpr,  # whether some query may not see all keys
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,  # whether the window is the query's own chunk of positions
    HAS_SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_TILE: tl.constexpr,
    V_DIM: tl.constexpr,
    V_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,  # dimensions of queries and keys that are multiplied at a time
):
    """`acc`, `peak` and `total` with BLOCK_N more keys."""
    keys = first_key + tl.arange(0, BLOCK_N)
    is_key = keys < end if IS_MASKED else tl.full([BLOCK_N], True, tl.int1)
    # What others store before the window, whose blocks have been given back, and past the row's end may not be finite,
    # and a weight of zero would be multiplied by it: the first key that is seen, or the last, is loaded instead. On
    # AMD masked loads are branches with a wait before each, so that memory would answer one load after another.
    loaded = tl.maximum(keys, first_seen) if HAS_WINDOW else keys
    loaded = tl.minimum(loaded, end - 1) if IS_MASKED else loaded
    offsets = page_offsets(table_ptr, loaded, block_stride, kv_head, BLOCK_SIZE, HEAD_DIM)
    v_offsets = offsets
    if V_DIM != HEAD_DIM:
        v_offsets = page_offsets(table_ptr, loaded, v_block_stride, kv_head, BLOCK_SIZE, V_DIM)
    dtype: tl.constexpr = q.dtype.element_ty if DEPTH < D_TILE else q.dtype
    if DEPTH < D_TILE:
        scores = tl.zeros([acc.shape[0], BLOCK_N], tl.float32)
        for first in range(0, head_dim, DEPTH):
            dims = first + tl.arange(0, DEPTH)
            part = tl.load(q + dims[None, :], mask=is_query[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
            k = load_dims(k_cache_ptr, offsets, first, HEAD_DIM, D_TILE, DEPTH)
            scores = tl.dot(part, tl.trans(k.to(dtype)), scores, input_precision="ieee")
        v = load_dims(v_cache_ptr, v_offsets, 0, V_DIM, V_TILE, V_TILE)
    else:
        # Values first: on AMD keys pass through LDS behind a barrier, and a load after that begins too late.
        v = load_dims(v_cache_ptr, v_offsets, 0, V_DIM, V_TILE, V_TILE)
        k = load_dims(k_cache_ptr, offsets, 0, HEAD_DIM, D_TILE, D_TILE)
        scores = tl.dot(q, tl.trans(k.to(dtype)), input_precision="ieee")
    scores = scores * scale  # [M, N]
    if HAS_SOFT_CAP:
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))  # soft_cap * tanh
    if IS_MASKED:
        is_seen = (keys[None, :] <= positions[:, None]) & is_key[None, :]
        if HAS_WINDOW:
            firsts = positions - window + 1
            if IS_CHUNKED:
                # The position of a padding query is -1.
                firsts = tl.maximum(positions, 0) // window * window
            is_seen &= keys[None, :] >= firsts[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    shrunk = tl.exp2(peak - new_peak)
    total = total * shrunk + tl.sum(weights, 1)
    acc = tl.dot(weights.to(dtype), v.to(dtype), acc * shrunk[:, None], input_precision="ieee")
    return acc, new_peak, total


# Prefill: spans of tokens, of prompts or of chunks after a cached prefix.
#
# FlashAttention-2 (Dao, 2023) over pages (Kwon et al., 2023). A program takes a tile of queries of one row, with all
# the query heads that share a KV head as further rows of the tile, so that each page is read once for all of them.


@jit(do_not_specialize=["table_stride"])  # It differs from step to step.
def attention_prefill_kernel(
    q_ptr,  # [T, Hq, D]
    out_ptr,  # [T, Hq, V], contiguous
    k_cache_ptr,  # [num_blocks, Hkv, BLOCK_SIZE, D]
    v_cache_ptr,  # [num_blocks, Hkv, BLOCK_SIZE, V]
    tiles_ptr,  # [tiles, 2] int32: row, and the first of its tokens
    query_starts_ptr,  # [B + 1] int32
    seq_lens_ptr,  # [B] int32
    tables_ptr,  # [B, max_blocks] int32
    sinks_ptr,  # [Hq]
    q_stride,
    q_head_stride,
    block_stride,
    v_block_stride,
    table_stride,
    scale,
    soft_cap,
    v_scale,
    window,
    head_dim,  # as in attend_tile
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_TILE: tl.constexpr,
    V_DIM: tl.constexpr,
    V_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr = WHOLE,  # as in attend_tile
):
    """Grid: KV heads x tiles. KV heads come first: on MI300 neighbours run on different dies, each with its own L2."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles_ptr + 2 * tile)
    first_token = tl.load(tiles_ptr + 2 * tile + 1)
    query_start = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - query_start
    length = tl.load(seq_lens_ptr + row)
    context = length - num_queries
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride

    # The tile's rows: GROUP heads of one token, then of the next.
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    members = tl.arange(0, BLOCK_M)
    tokens = first_token + members // GROUP
    heads = kv_head * GROUP + members % GROUP
    is_query = (members < TOKENS * GROUP) & (tokens < num_queries)
    positions = tl.where(is_query, context + tokens, -1)
    dims = tl.arange(0, D_TILE)
    is_element = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    v_dims = tl.arange(0, V_TILE)
    is_value = is_query[:, None] & (v_dims < V_DIM)[None, :]
    out_tokens = (query_start + tokens).to(tl.int64)
    q_rows = out_tokens[:, None] * q_stride + heads[:, None] * q_head_stride
    q = q_ptr + q_rows if DEPTH < D_TILE else tl.load(q_ptr + (q_rows + dims[None, :]), mask=is_element, other=0.0)

    acc = tl.zeros([BLOCK_M, V_TILE], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks_ptr + heads, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        peak = tl.full([BLOCK_M], NOTHING_YET, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

    first_position = context + first_token
    end = tl.minimum(first_position + TOKENS, length)
    start = 0
    first_seen = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(first_position - window + 1, 0)
        if IS_CHUNKED:
            first_seen = first_position // window * window
        start = first_seen // BLOCK_N * BLOCK_N
    else:
        # Tiles of keys that every query sees need no mask.
        start = (first_position + 1) // BLOCK_N * BLOCK_N
        for key in range(0, start, BLOCK_N):
            acc, peak, total = attend_tile(
                q, is_query, acc, peak, total, k_cache_ptr, v_cache_ptr, table_ptr, key, first_seen, end, positions,
                kv_head, block_stride, v_block_stride, scale, soft_cap, window, head_dim, False, False, False,
                HAS_SOFT_CAP, BLOCK_SIZE, HEAD_DIM, D_TILE, V_DIM, V_TILE, BLOCK_N, DEPTH,
            )  # fmt: skip
    for key in range(start, end, BLOCK_N):
        acc, peak, total = attend_tile(
            q, is_query, acc, peak, total, k_cache_ptr, v_cache_ptr, table_ptr, key, first_seen, end, positions,
            kv_head, block_stride, v_block_stride, scale, soft_cap, window, head_dim, True, HAS_WINDOW, IS_CHUNKED,
            HAS_SOFT_CAP, BLOCK_SIZE, HEAD_DIM, D_TILE, V_DIM, V_TILE, BLOCK_N, DEPTH,
        )  # fmt: skip

    out = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    out_offsets = (out_tokens * (KV_HEADS * GROUP) + heads)[:, None] * V_DIM + v_dims[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=is_value)


def scales(options: AttentionOptions) -> tuple[float, float]:
    """What `attend_tile` takes for `scale` and `soft_cap`, so that a score is multiplied once."""
    scale, log2_e = options.scale * options.k_scale, math.log2(math.e)
    if options.soft_cap is None:
        return scale * log2_e, 0.0
    return 2.0 * log2_e * scale / options.soft_cap, options.soft_cap * log2_e


def tokens_of_tile(q: torch.Tensor, kv_heads: int) -> int:
    """Tokens that one program takes of a row. # q [T, Hq, D]"""
    group = q.shape[1] // kv_heads
    config = config_of("attention_prefill", target_of(q.device), head_dim=q.shape[2], element=q.element_size())
    return _tile_rows(config, group) // group


def _tile_rows(config: Config, group: int) -> int:
    """At least one token's heads."""
    return max(config.blocks["BLOCK_M"], next_power_of_2(group))


def attention_prefill(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: KVCacheTensor,
    tiles: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend from each span's tokens to all before them and themselves, into the same places of `out`.

    q [T, Hq, D]: any strides but the last, 1; `out` [T, Hq, V] contiguous. `tiles` [tiles, 2] int32: rows, and the
    first token of each in `tokens_of_tile` of its span; tokens of no tile are left alone. `query_starts` [B + 1],
    `seq_lens` [B], `block_tables` [B, max_blocks]: int32. Caches as in `store`, the step's own K and V in them.
    """
    if len(tiles) == 0:
        return
    kv_heads, block_size, head_dim = cache.k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    target = target_of(q.device)
    config = config_of("attention_prefill", target, head_dim=head_dim, element=q.element_size())
    attention_prefill_kernel[(kv_heads, len(tiles))](
        q,
        out,
        cache.k_cache,
        cache.v_cache,
        tiles,
        query_starts,
        seq_lens,
        block_tables,
        q if sinks is None else sinks,
        q.stride(0),
        q.stride(1),
        cache.k_cache.stride(0),
        cache.v_cache.stride(0),
        block_tables.stride(0),
        *scales(options),
        options.v_scale,
        options.sliding_window or 0,
        head_dim,
        HAS_WINDOW=options.sliding_window is not None,
        IS_CHUNKED=options.is_chunked,
        HAS_SOFT_CAP=options.soft_cap is not None,
        HAS_SINKS=sinks is not None,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        D_TILE=max(16, next_power_of_2(head_dim)),
        V_DIM=cache.v_cache.shape[3],
        V_TILE=max(16, next_power_of_2(cache.v_cache.shape[3])),
        **{**config.blocks, "BLOCK_M": _tile_rows(config, group)},
        **config.options(target),
    )


# Decode: one or a few tokens a row, each row's keys split into pieces that are computed independently (split-KV).
#
# Flash-Decoding (Dao et al., 2023) over pages. The split depends on a row's length alone, so its result does not
# depend on the batch: pieces of PIECE tokens, or of a multiple of that where more than MAX_PIECES would be needed.
# Programs walk a list of pieces (a persistent grid): a captured graph has one grid for any lengths.


@jit(do_not_specialize=["table_stride", "num_pieces"])  # They differ from step to step.
def attention_decode_kernel(
    q_ptr,  # [B * QUERY_LEN, Hq, D]
    partial_ptr,  # [B, pieces, QUERY_LEN * Hq, V] float32
    partial_lse_ptr,  # [B, pieces, QUERY_LEN * Hq] float32, logarithms to base 2
    k_cache_ptr,  # [num_blocks, Hkv, BLOCK_SIZE, D]
    v_cache_ptr,  # [num_blocks, Hkv, BLOCK_SIZE, V]
    items_ptr,  # [items] int32: row * MAX_PIECES + piece
    num_items_ptr,  # [1] int32
    seq_lens_ptr,  # [B] int32
    tables_ptr,  # [B, max_blocks] int32
    q_stride,
    q_head_stride,
    block_stride,
    v_block_stride,
    table_stride,
    num_pieces,
    scale,
    soft_cap,
    window,
    head_dim,  # as in attend_tile
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_TILE: tl.constexpr,
    V_DIM: tl.constexpr,
    V_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    DEPTH: tl.constexpr = WHOLE,  # as in attend_tile
):
    """Grid: KV heads and their tiles x programs that share the items out.

    The query heads of a KV head, of all of a row's tokens, are the rows of one tile, or of several.
    """
    kv_head = tl.program_id(0) // TILES
    members = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = members // GROUP
    heads = kv_head * GROUP + members % GROUP
    is_query = tokens < QUERY_LEN
    dims = tl.arange(0, D_TILE)
    is_element = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    v_dims = tl.arange(0, V_TILE)
    is_value = is_query[:, None] & (v_dims < V_DIM)[None, :]
    q_rows = tokens[:, None] * q_stride + heads[:, None] * q_head_stride
    q_offsets = q_rows + dims[None, :]

    # The first item is loaded next to the number of them, and each later one during the one before it.
    packed = tl.load(items_ptr + tl.program_id(1))
    num_items = tl.load(num_items_ptr)
    for item in range(tl.program_id(1), num_items, tl.num_programs(1)):
        following = tl.load(items_ptr + tl.minimum(item + tl.num_programs(1), num_items - 1))
        row = packed // MAX_PIECES
        piece = packed % MAX_PIECES
        length = tl.load(seq_lens_ptr + row)
        piece_len = piece_length(length)
        end = tl.minimum((piece + 1) * piece_len, length)
        start = piece * piece_len
        first_seen = 0
        if HAS_WINDOW:
            # From the first key that the row's first query sees. None may be left: the piece then adds nothing.
            first_seen = tl.maximum(length - QUERY_LEN - window + 1, 0)
            if IS_CHUNKED:
                # A padding row has no length.
                first_seen = tl.maximum(length - QUERY_LEN, 0) // window * window
            start = tl.maximum(start, first_seen // BLOCK_N * BLOCK_N)
        positions = tl.where(is_query, length - QUERY_LEN + tokens, -1)
        if DEPTH < D_TILE:
            q = q_ptr + row.to(tl.int64) * (QUERY_LEN * q_stride) + q_rows
        else:
            q = tl.load(q_ptr + row.to(tl.int64) * (QUERY_LEN * q_stride) + q_offsets, mask=is_element, other=0.0)
        acc = tl.zeros([BLOCK_M, V_TILE], tl.float32)
        peak = tl.full([BLOCK_M], NOTHING_YET, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        table_ptr = tables_ptr + row.to(tl.int64) * table_stride
        for key in range(start, end, BLOCK_N):
            acc, peak, total = attend_tile(
                q, is_query, acc, peak, total, k_cache_ptr, v_cache_ptr, table_ptr, key, first_seen, end, positions,
                kv_head, block_stride, v_block_stride, scale, soft_cap, window, head_dim, True, HAS_WINDOW, IS_CHUNKED,
                HAS_SOFT_CAP, BLOCK_SIZE, HEAD_DIM, D_TILE, V_DIM, V_TILE, BLOCK_N, DEPTH,
            )  # fmt: skip
        is_any = total > 0
        safe = tl.where(is_any, total, 1.0)
        lse = tl.where(is_any, peak + tl.log2(safe), float("-inf"))
        partial_rows = (row * num_pieces + piece).to(tl.int64) * (QUERY_LEN * KV_HEADS * GROUP)
        partial_rows += tokens * (KV_HEADS * GROUP) + heads
        tl.store(partial_lse_ptr + partial_rows, lse, mask=is_query)
        tl.store(partial_ptr + partial_rows[:, None] * V_DIM + v_dims[None, :], acc / safe[:, None], mask=is_value)
        packed = following


def attention_decode(
    q: torch.Tensor,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    cache: KVCacheTensor,
    items: torch.Tensor,
    num_items: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    options: AttentionOptions,
    *,
    query_len: int = 1,
    max_programs: int | None = None,
) -> None:
    """Attend from the last `query_len` tokens of each row, piece by piece.

    q [B * query_len, Hq, D]: any strides but the last, 1. `partial` [B, pieces, query_len * Hq, V] and `partial_lse`
    [B, pieces, query_len * Hq], float32, get the pieces' results and the logarithms, to base 2, of their weights.
    `items` and `num_items` [1], int32: what `pieces.list_pieces` gives; `items` may be longer. `seq_lens` [B] and
    `block_tables` [B, max_blocks], int32. Caches as in `store`, the step's own K and V in them. As many programs run
    as there are items and KV heads, unless `max_programs` is less.
    """
    kv_heads, block_size, head_dim = cache.k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    rows, tiles = decode_tiles(query_len * group, head_dim)
    launch = launch_of("attention_decode", q.device, head_dim=head_dim, element=q.element_size(), rows=rows)
    programs = items.shape[0]
    if max_programs is not None:
        programs = min(programs, cdiv(max_programs, kv_heads * tiles))
    if programs == 0:
        return
    attention_decode_kernel[(kv_heads * tiles, programs)](
        q,
        partial,
        partial_lse,
        cache.k_cache,
        cache.v_cache,
        items,
        num_items,
        seq_lens,
        block_tables,
        *q.stride()[:2],
        cache.k_cache.stride(0),
        cache.v_cache.stride(0),
        block_tables.stride(0),
        partial.shape[1],
        *scales(options),
        options.sliding_window or 0,
        head_dim,
        HAS_WINDOW=options.sliding_window is not None,
        IS_CHUNKED=options.is_chunked,
        HAS_SOFT_CAP=options.soft_cap is not None,
        QUERY_LEN=query_len,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        D_TILE=max(16, next_power_of_2(head_dim)),
        V_DIM=cache.v_cache.shape[3],
        V_TILE=max(16, next_power_of_2(cache.v_cache.shape[3])),
        BLOCK_M=rows,
        TILES=tiles,
        **launch.keywords,
    )


def decode_tiles(queries: int, head_dim: int) -> tuple[int, int]:
    """Rows of a tile, and tiles, of so many queries.

    A matrix instruction has at least 16 rows; more than the most here, and registers spill.
    """
    rows = min(max(16, next_power_of_2(queries)), 64 if head_dim <= 128 else 32)
    return rows, cdiv(queries, rows)


# The merge of a row's pieces, each weighted by its share of the softmax sum.


@jit(do_not_specialize=["num_pieces"])  # It differs from step to step.
def attention_merge_kernel(
    partial_ptr,  # [B, pieces, QUERY_LEN * HEADS, D] float32
    partial_lse_ptr,  # [B, pieces, QUERY_LEN * HEADS] float32
    out_ptr,  # [B * QUERY_LEN, HEADS, D]
    seq_lens_ptr,  # [B] int32
    sinks_ptr,  # [HEADS]
    num_pieces,
    v_scale,
    HAS_SINKS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,  # pieces at a time
):
    """Grid: rows x queries of a row. The order of the sums depends on nothing but the row's length."""
    row = tl.program_id(0).to(tl.int64)
    member = tl.program_id(1)
    length = tl.load(seq_lens_ptr + row)
    count = tl.cdiv(length, piece_length(length))
    dims = tl.arange(0, D_TILE)
    acc = tl.zeros([D_TILE], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks_ptr + member % HEADS).to(tl.float32) * LOG2_E
        total = 1.0
    else:
        peak = NOTHING_YET
        total = 0.0
    for first in range(0, count, BLOCK_P):
        pieces = first + tl.arange(0, BLOCK_P)
        partial_rows = (row * num_pieces + pieces) * (QUERY_LEN * HEADS) + member
        lse = tl.load(partial_lse_ptr + partial_rows, mask=pieces < count, other=float("-inf"))
        # A piece without keys has left no values.
        is_kept = (lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(partial_ptr + partial_rows[:, None] * HEAD_DIM + dims[None, :], mask=is_kept, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.exp2(lse - new_peak)
        shrunk = tl.exp2(peak - new_peak)
        acc = acc * shrunk + tl.sum(values * weights[:, None], 0)
        total = total * shrunk + tl.sum(weights, 0)
        peak = new_peak
    out = acc * (v_scale / tl.where(total > 0, total, 1.0))
    partial_rows = (row * (QUERY_LEN * HEADS) + member) * HEAD_DIM + dims
    tl.store(out_ptr + partial_rows, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def attention_merge(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    v_scale: float,
    sinks: torch.Tensor | None = None,
    *,
    query_len: int = 1,
) -> None:
    """The rows' attention from that of their pieces, with the `sinks` [Hq] that take probability and add no value.

    `partial` and `partial_lse`: what `attention_decode` left. `out` [B * query_len, Hq, D], contiguous; a row of
    length 0 gets zeros. `seq_lens` [B] int32.
    """
    num_rows, pieces, members, head_dim = partial.shape
    attention_merge_kernel[(num_rows, members)](
        partial,
        partial_lse,
        out,
        seq_lens,
        out if sinks is None else sinks,
        pieces,
        v_scale,
        HAS_SINKS=sinks is not None,
        QUERY_LEN=query_len,
        HEADS=members // query_len,
        HEAD_DIM=head_dim,
        D_TILE=next_power_of_2(head_dim),
        **launch_of("attention_merge", out.device).keywords,
    )


# The composition that serves a step of decodes and spans.

_PROGRAMS_PER_PROCESSOR = 16
"""Of a decode with more work items than that: enough that several are resident, and few enough for an even split."""


def paged_attention(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: KVCacheTensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of a step's tokens to the keys and values that are stored.

    # q [T, Hq, D], out [T, Hq, V], sinks [Hq]
    """
    decodes, tokens = plan.num_decodes * plan.query_len, q.shape[0]
    if 0 < decodes < tokens:
        attend_decodes(q[:decodes], out[:decodes], cache, plan, options, sinks)
    elif decodes:
        attend_decodes(q, out, cache, plan, options, sinks)
    if decodes < tokens:
        attend_spans(q, out, cache, plan, options, sinks)


def attend_spans(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: KVCacheTensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> None:
    """The spans of a step, whose decodes are left alone. # q [T, Hq, D], out [T, Hq, V], of all tokens"""
    assert plan.tiles is not None
    tables = plan.block_tables
    attention_prefill(q, out, cache, plan.tiles, plan.query_starts, plan.seq_lens, tables, options, sinks)


def attend_decodes(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: KVCacheTensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> None:
    """The decodes of a step. # q [num_decodes * query_len, Hq, D], out [num_decodes * query_len, Hq, V]"""
    _, heads, value_dim = out.shape
    rows, members = plan.num_decodes, plan.query_len * heads
    partial = q.new_empty(rows, plan.max_pieces, members, value_dim, dtype=torch.float32)
    weights = q.new_empty(rows, plan.max_pieces, members, dtype=torch.float32)
    attention_decode(
        q,
        partial,
        weights,
        cache,
        plan.items,
        plan.num_items,
        plan.seq_lens,
        plan.block_tables,
        options,
        query_len=plan.query_len,
        max_programs=max_decode_programs(q.device),
    )
    attention_merge(partial, weights, out, plan.seq_lens, options.v_scale, sinks, query_len=plan.query_len)


@cache
def max_decode_programs(device: torch.device) -> int:
    """The size of the persistent grid of decodes on a device."""
    if device.type == "cpu":
        return _PROGRAMS_PER_PROCESSOR
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
