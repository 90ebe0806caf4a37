"""Stores of a step's keys, values and latents into the paged cache.

`as_hardware_reads` gives a layer's cache and scales in the FP8 format that the device's hardware converts. `store`
normalises and rotates queries and keys and writes K and V to their slots; `latent_store` does so for latent
attention, and `vector_store` writes the indexer's keys. Each is one pass over its inputs.
"""

import dataclasses
import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

import models.ops.triton.configs  # noqa: F401, the rows of these kernels
from models.ops.triton.configs import launch_of, target_of
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.launcher import jit
from models.ops.types import AttentionOptions, HeadNorms, KVCacheTensor, Rotation


def as_hardware_reads(
    cache: KVCacheTensor, options: AttentionOptions, device: torch.device
) -> tuple[KVCacheTensor, AttentionOptions]:
    """The same where the cache is not in FP8, or in the hardware's own.

    gfx942's (fnuz) has another bias of exponents, so its largest number is 240 instead of 448: stored is half of what
    the checkpoint's scales were made for, and scales are doubled. Raises `ValueError` where the hardware has no FP8.
    """
    if cache.k_cache.dtype is not torch.float8_e4m3fn:
        return cache, options
    target = target_of(device)
    if target.fp8 is None:
        raise ValueError(f"kv_cache_dtype is fp8, which {target.arch} does not compute; set it to auto")
    if target.fp8 == "e4m3fn":
        return cache, options
    fnuz = torch.float8_e4m3fnuz
    return KVCacheTensor(cache.k_cache.view(fnuz), cache.v_cache.view(fnuz)), _doubled(options)


@functools.lru_cache
def _doubled(options: AttentionOptions) -> AttentionOptions:
    """A layer's, the same at every step."""
    return dataclasses.replace(options, k_scale=2 * options.k_scale, v_scale=2 * options.v_scale)


def vectors_as_hardware_reads(vectors: torch.Tensor, scale: float, device: torch.device) -> tuple[torch.Tensor, float]:
    """A layer's paged vectors and their scale, as above."""
    options = AttentionOptions(scale=1.0, k_scale=scale)
    cache, options = as_hardware_reads(KVCacheTensor(vectors, vectors), options, device)
    return cache.k_cache, options.k_scale


# The store of K and V, with the norm (Zhang and Sennrich, 2019) and the rotation (Su et al., 2021) of queries and
# keys.
#
# Rotation turns pairs of dimensions `(i, i + rotary_dim / 2)`. Norm and rotation are computed in float32 and rounded
# to the model's type in between, as the layers do.


@triton.jit
def _load(x_ptr, head_offsets, has_head, dims, SIZE: tl.constexpr):
    """Some dimensions of some heads of a token. # [BLOCK_H, tile] float32"""
    mask = has_head[:, None] & (dims < SIZE)[None, :]
    return tl.load(x_ptr + head_offsets[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _weighted(x, inverse_rms, weight_ptr, offset, dims, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """Some dimensions as the norm leaves them. # [BLOCK_H, tile] float32"""
    weight = offset + tl.load(weight_ptr + dims, mask=dims < SIZE, other=0.0).to(tl.float32)
    return (x * inverse_rms[:, None] * weight[None, :]).to(DTYPE).to(tl.float32)


@triton.jit
def _store(out_ptr, x, has_head, dims, scale, limit, SIZE: tl.constexpr, IS_FP8: tl.constexpr):
    """In FP8, divided by the scale, and what is out of range at its end. # [BLOCK_H, tile]"""
    if IS_FP8:
        x = tl.minimum(tl.maximum(x / scale, -limit), limit)
    mask = has_head[:, None] & (dims < SIZE)[None, :]
    tl.store(out_ptr + dims[None, :], x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _inverse_rms(first, second, rest, eps, HEAD_DIM: tl.constexpr, REST: tl.constexpr):
    squares = tl.sum(first * first + second * second, 1)
    if REST > 0:
        squares += tl.sum(rest * rest, 1)
    return tl.rsqrt(squares / HEAD_DIM + eps)


@triton.jit
def _move_heads(
    x_ptr,
    out_ptr,  # [BLOCK_H, 1], where each head's first dimension goes
    head_offsets,
    has_head,
    weight_ptr,
    eps,
    offset,
    cos_ptr,
    sin_ptr,
    scale,
    limit,
    by,  # a factor of the result, which is computed where HAS_FACTOR
    HAS_NORM: tl.constexpr,
    IS_ROTATED_FIRST: tl.constexpr,  # whether the norm follows the rotation, which may stretch what it rotates
    HAS_ROTATION: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    IS_FP8: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
):
    """Some heads of a token, normalised and rotated, as three tiles: the halves of what rotates, and the rest.

    A pair's members are thus in one thread, and every load is of neighbours.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    dims = tl.arange(0, HALF_TILE)
    rest_dims = tl.arange(0, REST_TILE)
    first = _load(x_ptr, head_offsets, has_head, dims, HALF)
    second = _load(x_ptr + HALF, head_offsets, has_head, dims, HALF)
    rest = _load(x_ptr + 2 * HALF, head_offsets, has_head, rest_dims, REST) if REST > 0 else first
    if HAS_NORM and not IS_ROTATED_FIRST:
        inverse_rms = _inverse_rms(first, second, rest, eps, HEAD_DIM, REST)
        first = _weighted(first, inverse_rms, weight_ptr, offset, dims, DTYPE, HALF)
        second = _weighted(second, inverse_rms, weight_ptr + HALF, offset, dims, DTYPE, HALF)
        if REST > 0:
            rest = _weighted(rest, inverse_rms, weight_ptr + 2 * HALF, offset, rest_dims, DTYPE, REST)
    if HAS_ROTATION:
        in_half = dims < HALF
        cos = tl.load(cos_ptr + dims, mask=in_half, other=0.0)[None, :]
        sin = tl.load(sin_ptr + dims, mask=in_half, other=0.0)[None, :]  # of the first half: its sign is turned
        unrotated = first
        first = (first * cos + second * sin).to(DTYPE).to(tl.float32)
        second = (second * cos - unrotated * sin).to(DTYPE).to(tl.float32)
    if HAS_NORM and IS_ROTATED_FIRST:
        inverse_rms = _inverse_rms(first, second, rest, eps, HEAD_DIM, REST)
        first = _weighted(first, inverse_rms, weight_ptr, offset, dims, DTYPE, HALF)
        second = _weighted(second, inverse_rms, weight_ptr + HALF, offset, dims, DTYPE, HALF)
        if REST > 0:
            rest = _weighted(rest, inverse_rms, weight_ptr + 2 * HALF, offset, rest_dims, DTYPE, REST)
    if HAS_FACTOR:
        first *= by
        second *= by
        if REST > 0:
            rest *= by
    _store(out_ptr, first, has_head, dims, scale, limit, HALF, IS_FP8)
    _store(out_ptr + HALF, second, has_head, dims, scale, limit, HALF, IS_FP8)
    if REST > 0:
        _store(out_ptr + 2 * HALF, rest, has_head, rest_dims, scale, limit, REST, IS_FP8)


@jit
def store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,  # [T, Hq, D], contiguous
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_scales_ptr,  # [T] float32
    q_weight_ptr,
    k_weight_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    block_stride,
    v_block_stride,
    eps,
    norm_offset,
    k_scale,
    v_scale,
    limit,
    Q_HEADS: tl.constexpr,  # 0 where queries stay as they are
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # HEAD_DIM where nothing rotates
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_ROTATED_FIRST: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    HAS_Q_SCALES: tl.constexpr,
    IS_FP8: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    V_HALF: tl.constexpr,  # values are moved as two halves too, of this size; what is left is their rest
    V_HALF_TILE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """A program takes BLOCK_H heads of one token: of its queries, its keys or its values."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    Q_TILES: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_TILES: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos_ptr += token * ROTARY_DIM
    sin_ptr += token * ROTARY_DIM
    if part < Q_TILES:
        heads = part * BLOCK_H + tl.arange(0, BLOCK_H)
        by = 1.0
        if HAS_Q_SCALES:
            by = tl.load(q_scales_ptr + token)
        _move_heads(
            q_ptr + token * q_stride, q_out_ptr + (token * Q_HEADS + heads[:, None]) * HEAD_DIM,
            heads * q_head_stride, heads < Q_HEADS, q_weight_ptr, eps, norm_offset, cos_ptr, sin_ptr, 1.0, limit,
            by, HAS_NORM, IS_ROTATED_FIRST, HAS_ROTATION, HAS_Q_SCALES, False, HEAD_DIM, HALF, HALF_TILE, REST_TILE,
        )  # fmt: skip
        return
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    page = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * HEAD_DIM
    if part < Q_TILES + KV_TILES:
        heads = (part - Q_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
        _move_heads(
            k_ptr + token * k_stride, k_cache_ptr + page + heads[:, None] * (BLOCK_SIZE * HEAD_DIM),
            heads * k_head_stride, heads < KV_HEADS, k_weight_ptr, eps, norm_offset, cos_ptr, sin_ptr, k_scale, limit,
            1.0, HAS_NORM, IS_ROTATED_FIRST, HAS_ROTATION, False, IS_FP8, HEAD_DIM, HALF, HALF_TILE, REST_TILE,
        )  # fmt: skip
    else:
        heads = (part - Q_TILES - KV_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
        v_page = (slot // BLOCK_SIZE) * v_block_stride + (slot % BLOCK_SIZE) * V_DIM
        _move_heads(
            v_ptr + token * v_stride, v_cache_ptr + v_page + heads[:, None] * (BLOCK_SIZE * V_DIM),
            heads * v_head_stride, heads < KV_HEADS, k_weight_ptr, eps, norm_offset, cos_ptr, sin_ptr, v_scale, limit,
            1.0, False, False, False, False, IS_FP8, V_DIM, V_HALF, V_HALF_TILE, REST_TILE,
        )  # fmt: skip


def store(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: KVCacheTensor,
    slots: torch.Tensor,
    options: AttentionOptions,
    norms: HeadNorms | None = None,
    rotation: Rotation | None = None,
    q_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise and rotate q and k, and write k and v to their slots; the queries to attend with. # -> [T, Hq, D]

    Without k and v nothing is written. `q_scales` [T, 1] float32: factors of the queries, applied last.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, V]: any strides but the last, 1. `slots` [T] int64: block * block_size +
    offset; a token of slot -1 is kept nowhere. Caches [num_blocks, Hkv, block_size, D or V], pages contiguous, of the
    model's type or FP8, divided by the options' scales. `norms`: weights [D], then `rotation`: 2 x [T, 1, rotary_dim]
    float32.
    The queries are new where something is done to them, else the same.
    """
    num_tokens, q_heads, head_dim = q.shape
    value_dim = cache.v_cache.shape[3]
    kv_heads, block_size = 0 if k is None else k.shape[1], cache.k_cache.shape[2]
    is_changed = norms is not None or rotation is not None or q_scales is not None
    q_out = q.new_empty(num_tokens, q_heads, head_dim) if is_changed else q
    if num_tokens == 0 or (k is None and not is_changed):
        return q_out
    k, v = q if k is None else k, q if v is None else v
    rotary_dim = head_dim if rotation is None else rotation[0].shape[-1]
    cos, sin = (slots, slots) if rotation is None else rotation
    weights = (q, k) if norms is None else (norms.q.weight, norms.k.weight)
    cache_dtype = cache.k_cache.dtype
    launch = launch_of("store", q.device)
    block_h = min(launch.blocks["BLOCK_H"], next_power_of_2(max(q_heads, kv_heads)))
    q_tiles = cdiv(q_heads, block_h) if is_changed else 0
    store_kernel[(num_tokens, q_tiles + 2 * cdiv(kv_heads, block_h))](
        q,
        k,
        v,
        q_out,
        cache.k_cache,
        cache.v_cache,
        slots,
        cos,
        sin,
        slots if q_scales is None else q_scales,
        *weights,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cache.k_cache.stride(0),
        cache.v_cache.stride(0),
        0.0 if norms is None else norms.q.eps,
        0.0 if norms is None else norms.q.offset,
        options.k_scale,
        options.v_scale,
        torch.finfo(cache_dtype).max,
        Q_HEADS=q_heads if is_changed else 0,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        V_DIM=value_dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_SIZE=block_size,
        HAS_NORM=norms is not None,
        IS_ROTATED_FIRST=options.is_rotated_first,
        HAS_ROTATION=rotation is not None,
        HAS_Q_SCALES=q_scales is not None,
        IS_FP8=cache_dtype.itemsize == 1,
        **store_tiles(head_dim, rotary_dim, value_dim),
        **{**launch.keywords, "BLOCK_H": block_h},
    )
    return q_out


@functools.cache
def store_tiles(head_dim: int, rotary_dim: int, value_dim: int) -> Mapping[str, int]:
    rest = max(1, head_dim - rotary_dim)
    # Values as large as keys are moved by the same code.
    half = rotary_dim // 2 if value_dim == head_dim else value_dim // 2
    return {
        "HALF_TILE": next_power_of_2(rotary_dim // 2),
        "REST_TILE": next_power_of_2(rest),
        "V_HALF": half,
        "V_HALF_TILE": next_power_of_2(half),
    }


# The store of normalised latents, each followed by its rotated key, and the rotation of the queries; also the store of
# the indexer's keys.
#
# Computed in float32 and rounded to the model's type as the layers do; for an 8-bit cache then divided by its scale.


@triton.jit
def _cached(x, scale, limit, dtype: tl.constexpr, IS_FP8: tl.constexpr):
    """As the cache holds it, what is out of range at its end."""
    if IS_FP8:
        x = tl.minimum(tl.maximum(x / scale, -limit), limit)
    return x.to(dtype)


@jit
def latent_store_kernel(
    q,  # [T, H, NOPE + ROPE]
    latent,  # [T, RANK + ROPE]
    q_rope,  # [T, H, ROPE]
    vectors,  # [blocks, BLOCK_SIZE, RANK + ROPE]
    slots,  # [T] int64, block * BLOCK_SIZE + offset; -1: kept nowhere
    weight,  # [RANK]
    cos,  # [T, ROPE] float32
    sin,  # [T, ROPE] float32, negative for the first half
    eps,
    scale,  # Of the cache
    limit,  # The largest number that it holds
    q_stride,
    q_head_stride,
    latent_stride,
    block_stride,
    num_heads,
    BLOCK_SIZE: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,  # Half of ROPE, filled up to a power of two
    IS_INTERLEAVED: tl.constexpr,
    IS_FP8: tl.constexpr,
    HEADS: tl.constexpr,
):
    """The latent of one token, or HEADS of its queries. Grid: (T, 1 + tiles of heads)."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = ROPE // 2
    pairs = tl.arange(0, HALF_TILE)
    has_pair = pairs < HALF
    # Neighbours are put apart as they are read: keys and queries come out as halves, and their products are the same.
    first = pairs * 2 if IS_INTERLEAVED else pairs
    apart: tl.constexpr = 1 if IS_INTERLEAVED else HALF
    angles = token * ROPE + pairs
    cos_first = tl.load(cos + angles, mask=has_pair, other=0.0)
    cos_second = tl.load(cos + angles + HALF, mask=has_pair, other=0.0)
    sin_first = tl.load(sin + angles, mask=has_pair, other=0.0)
    sin_second = tl.load(sin + angles + HALF, mask=has_pair, other=0.0)
    if tl.program_id(1) > 0:
        heads = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        mask = (heads < num_heads)[:, None] & has_pair[None, :]
        at = q + token * q_stride + heads[:, None] * q_head_stride + NOPE + first[None, :]
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(at + apart, mask=mask, other=0.0).to(tl.float32)
        to = q_rope + (token * num_heads + heads[:, None]) * ROPE + pairs[None, :]
        tl.store(to, (x * cos_first + y * sin_first).to(q_rope.dtype.element_ty), mask=mask)
        tl.store(to + HALF, (y * cos_second + x * sin_second).to(q_rope.dtype.element_ty), mask=mask)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    ranks = tl.arange(0, RANK_TILE)
    has_rank = ranks < RANK
    row = latent + token * latent_stride
    values = tl.load(row + ranks, mask=has_rank, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / RANK + eps)
    values = values * tl.load(weight + ranks, mask=has_rank, other=0.0).to(tl.float32)
    x = tl.load(row + RANK + first, mask=has_pair, other=0.0).to(tl.float32)
    y = tl.load(row + RANK + first + apart, mask=has_pair, other=0.0).to(tl.float32)
    rotated_x, rotated_y = x * cos_first + y * sin_first, y * cos_second + x * sin_second
    model: tl.constexpr = latent.dtype.element_ty
    cache: tl.constexpr = vectors.dtype.element_ty
    to = vectors + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (RANK + ROPE)
    tl.store(to + ranks, _cached(values.to(model).to(tl.float32), scale, limit, cache, IS_FP8), mask=has_rank)
    to += RANK + pairs
    tl.store(to, _cached(rotated_x.to(model).to(tl.float32), scale, limit, cache, IS_FP8), mask=has_pair)
    tl.store(to + HALF, _cached(rotated_y.to(model).to(tl.float32), scale, limit, cache, IS_FP8), mask=has_pair)


@jit
def vector_store_kernel(
    rows,  # [T, DIM]
    vectors,  # [blocks, BLOCK_SIZE, DIM]
    slots,  # [T] int64, as above
    scale,
    limit,
    row_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """One token's vector as it is. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    dims = tl.arange(0, TILE)
    values = tl.load(rows + token * row_stride + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    to = vectors + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * DIM + dims
    tl.store(to, _cached(values, scale, limit, vectors.dtype.element_ty, IS_FP8), mask=dims < DIM)


def latent_store(
    q: torch.Tensor,
    latent: torch.Tensor,
    vectors: torch.Tensor,
    slots: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float],
    rotation: tuple[torch.Tensor, torch.Tensor],
    is_interleaved: bool,
    scale: float,
) -> torch.Tensor:
    """Normalise latents, rotate the heads' shared key, and write both to the cache; the rotated part of queries.

    q [T, H, nope + rope], latent [T, rank + rope], vectors [blocks, block_size, rank + rope], slots [T] int64: block *
    block_size + offset, -1 for a token that is kept nowhere. `norm`: weight [rank] and epsilon. `rotation`: cosines
    and signed sines, 2 x [T, 1, rope] float32. `is_interleaved`: whether rotated dimensions are neighbouring pairs,
    not halves. `scale`: what an 8-bit cache's numbers are multiplied by. # -> [T, H, rope]
    """
    num_tokens, heads, dim = q.shape
    weight, eps = norm
    cos, sin = rotation
    rank, rope = len(weight), cos.shape[-1]
    out = q.new_empty(num_tokens, heads, rope)
    launch = launch_of("latent_store", q.device)
    latent_store_kernel[(num_tokens, 1 + cdiv(heads, launch.blocks["HEADS"]))](
        q,
        latent,
        out,
        vectors,
        slots,
        weight,
        cos,
        sin,
        eps,
        scale,
        torch.finfo(vectors.dtype).max,
        *q.stride()[:2],
        latent.stride(0),
        vectors.stride(0),
        heads,
        BLOCK_SIZE=vectors.shape[1],
        NOPE=dim - rope,
        RANK=rank,
        ROPE=rope,
        RANK_TILE=next_power_of_2(rank),
        HALF_TILE=next_power_of_2(rope // 2),
        IS_INTERLEAVED=is_interleaved,
        IS_FP8=vectors.dtype.itemsize == 1,
        **launch.keywords,
    )
    return out


def vector_store(rows: torch.Tensor, vectors: torch.Tensor, slots: torch.Tensor, scale: float = 1.0) -> None:
    """Write vectors to the cache as they are. # [T, dim], [blocks, block_size, dim], [T] int64 as above"""
    launch = launch_of("vector_store", rows.device)
    vector_store_kernel[(len(rows),)](
        rows,
        vectors,
        slots,
        scale,
        torch.finfo(vectors.dtype).max,
        rows.stride(0),
        vectors.stride(0),
        BLOCK_SIZE=vectors.shape[1],
        DIM=rows.shape[1],
        TILE=next_power_of_2(rows.shape[1]),
        IS_FP8=vectors.dtype.itemsize == 1,
        **launch.keywords,
    )
