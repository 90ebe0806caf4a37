"""One tile of attention: some queries against some keys of the paged cache. Shared by the prefill and decode kernels.

Online softmax (Milakov and Gimelshein, 2018) in powers of two, accumulated in registers as FlashAttention-2 does
(Dao, 2023). `peak` [M] is the largest score so far, `total` [M] the sum of weights under it, `acc` [M, D] the weighted
sum of values.
"""

import triton
import triton.language as tl

from models.kernels.triton import pieces

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING_YET = tl.constexpr(-1.0e30)
"""A peak below any score, and finite: a row that has seen no key keeps a total of zero."""

PIECE = tl.constexpr(pieces.PIECE)
MAX_PIECES = tl.constexpr(pieces.MAX_PIECES)


@triton.jit
def piece_length(length):
    """Tokens of each of a row's pieces but the last."""
    return PIECE * tl.maximum(tl.cdiv(length, PIECE * MAX_PIECES), 1)


@triton.jit
def page_offsets(
    table_ptr,  # of the row
    keys,  # [N], positions
    is_key,  # [N]
    block_stride,
    kv_head,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Where keys, and values, begin in their caches. # [N] int64"""
    blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    return blocks * block_stride + kv_head * (BLOCK_SIZE * HEAD_DIM) + (keys % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def load_dims(
    cache_ptr,
    offsets,  # [N], of vectors
    is_key,  # [N]
    first,
    IS_MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """WIDTH dimensions of cached vectors from `first` on. # [N, WIDTH]"""
    dims = first + tl.arange(0, WIDTH)
    offsets = offsets[:, None] + dims[None, :]
    # What lies past a row's end may be not finite, and its weight of zero is multiplied by it.
    if D_TILE != HEAD_DIM:
        loaded = tl.load(cache_ptr + offsets, mask=is_key[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif IS_MASKED:
        loaded = tl.load(cache_ptr + offsets, mask=is_key[:, None], other=0.0)
    else:
        loaded = tl.load(cache_ptr + offsets)
    return loaded


@triton.jit
def attend_tile(
    q,  # [M, D_TILE]; where DEPTH is less, pointers to the queries, [M, 1]
    is_query,  # [M]
    acc,  # [M, D_TILE] float32
    peak,  # [M] float32
    total,  # [M] float32
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    first_key,
    end,  # keys from here on are not the row's
    positions,  # [M], of the queries
    kv_head,
    block_stride,
    scale,  # of the products, the keys' own included; over the soft cap where there is one
    soft_cap,
    window,
    head_dim,  # HEAD_DIM, as the compiler does not know it: of parts whose number it knows it would load all at once
    IS_MASKED: tl.constexpr,  # whether some query may not see all keys
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,  # dimensions of queries and keys that are multiplied at a time
):
    """`acc`, `peak` and `total` with BLOCK_N more keys."""
    keys = first_key + tl.arange(0, BLOCK_N)
    is_key = keys < end if IS_MASKED else tl.full([BLOCK_N], True, tl.int1)
    offsets = page_offsets(table_ptr, keys, is_key, block_stride, kv_head, BLOCK_SIZE, HEAD_DIM)
    dtype: tl.constexpr = q.dtype.element_ty if DEPTH < D_TILE else q.dtype
    if DEPTH < D_TILE:
        scores = tl.zeros([acc.shape[0], BLOCK_N], tl.float32)
        for first in range(0, head_dim, DEPTH):
            dims = first + tl.arange(0, DEPTH)
            part = tl.load(q + dims[None, :], mask=is_query[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
            k = load_dims(k_cache_ptr, offsets, is_key, first, IS_MASKED, HEAD_DIM, D_TILE, DEPTH)
            scores = tl.dot(part, tl.trans(k.to(dtype)), scores, input_precision="ieee")
        v = load_dims(v_cache_ptr, offsets, is_key, 0, IS_MASKED, HEAD_DIM, D_TILE, D_TILE)
    else:
        k = load_dims(k_cache_ptr, offsets, is_key, 0, IS_MASKED, HEAD_DIM, D_TILE, D_TILE)
        v = load_dims(v_cache_ptr, offsets, is_key, 0, IS_MASKED, HEAD_DIM, D_TILE, D_TILE)
        scores = tl.dot(q, tl.trans(k.to(dtype)), input_precision="ieee")
    scores = scores * scale  # [M, N]
    if HAS_SOFT_CAP:
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E)) + 1.0))  # soft_cap * tanh(scores)
    scores *= LOG2_E
    if IS_MASKED:
        is_seen = (keys[None, :] <= positions[:, None]) & is_key[None, :]
        if HAS_WINDOW:
            is_seen &= keys[None, :] > positions[:, None] - window
        scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    shrunk = tl.exp2(peak - new_peak)
    total = total * shrunk + tl.sum(weights, 1)
    acc = tl.dot(weights.to(dtype), v.to(dtype), acc * shrunk[:, None], input_precision="ieee")
    return acc, new_peak, total
