"""A step's K and V into their pages, with what comes before: norms of queries and keys, and their rotation.

One pass over the step's q, k and v. Norm: Zhang and Sennrich, 2019; rotation: Su et al., 2021, of pairs of dimensions
`(i, i + rotary_dim / 2)`. Both are computed in float32 and rounded to the model's type in between, as the layers do.
"""

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, Target, config_of
from models.kernels.triton.configs_dense import launch_of
from models.kernels.types import AttentionOptions, HeadNorms, KVCacheTensor, Rotation


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
    HAS_NORM: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
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
    if REST > 0:
        rest = _load(x_ptr + 2 * HALF, head_offsets, has_head, rest_dims, REST)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        inverse_rms = tl.rsqrt(squares / HEAD_DIM + eps)
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
    _store(out_ptr, first, has_head, dims, scale, limit, HALF, IS_FP8)
    _store(out_ptr + HALF, second, has_head, dims, scale, limit, HALF, IS_FP8)
    if REST > 0:
        _store(out_ptr + 2 * HALF, rest, has_head, rest_dims, scale, limit, REST, IS_FP8)


@triton.jit
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
    q_weight_ptr,
    k_weight_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    block_stride,
    eps,
    norm_offset,
    k_scale,
    v_scale,
    limit,
    Q_HEADS: tl.constexpr,  # 0 where queries stay as they are
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # HEAD_DIM where nothing rotates
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    IS_FP8: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
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
        _move_heads(
            q_ptr + token * q_stride, q_out_ptr + (token * Q_HEADS + heads[:, None]) * HEAD_DIM,
            heads * q_head_stride, heads < Q_HEADS, q_weight_ptr, eps, norm_offset, cos_ptr, sin_ptr, 1.0, limit,
            HAS_NORM, HAS_ROTATION, False, HEAD_DIM, HALF, HALF_TILE, REST_TILE,
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
            HAS_NORM, HAS_ROTATION, IS_FP8, HEAD_DIM, HALF, HALF_TILE, REST_TILE,
        )  # fmt: skip
    else:
        heads = (part - Q_TILES - KV_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
        _move_heads(
            v_ptr + token * v_stride, v_cache_ptr + page + heads[:, None] * (BLOCK_SIZE * HEAD_DIM),
            heads * v_head_stride, heads < KV_HEADS, k_weight_ptr, eps, norm_offset, cos_ptr, sin_ptr, v_scale, limit,
            False, False, IS_FP8, HEAD_DIM, HALF, HALF_TILE, REST_TILE,
        )  # fmt: skip


def store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCacheTensor,
    slots: torch.Tensor,
    options: AttentionOptions,
    norms: HeadNorms | None = None,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Normalise and rotate q and k, and write k and v to their slots; the queries to attend with. # -> [T, Hq, D]

    q [T, Hq, D], k and v [T, Hkv, D]: any strides but the last, 1. `slots` [T] int64: block * block_size + offset; a
    token of slot -1 is kept nowhere. Caches [num_blocks, Hkv, block_size, D], pages contiguous, of the model's type
    or FP8, divided by the options' scales. `norms`: weights [D], then `rotation`: 2 x [T, 1, rotary_dim] float32.
    The queries are new where something is done to them, else the same.
    """
    num_tokens, q_heads, head_dim = q.shape
    kv_heads, block_size = cache.k_cache.shape[1:3]
    is_changed = norms is not None or rotation is not None
    q_out = q.new_empty(num_tokens, q_heads, head_dim) if is_changed else q
    if num_tokens == 0:
        return q_out
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
        *weights,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cache.k_cache.stride(0),
        0.0 if norms is None else norms.q.eps,
        0.0 if norms is None else norms.q.offset,
        options.k_scale,
        options.v_scale,
        torch.finfo(cache_dtype).max,
        Q_HEADS=q_heads if is_changed else 0,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_SIZE=block_size,
        HAS_NORM=norms is not None,
        HAS_ROTATION=rotation is not None,
        IS_FP8=cache_dtype.itemsize == 1,
        **_tiles(head_dim, rotary_dim),
        **{**launch.keywords, "BLOCK_H": block_h},
    )
    return q_out


@functools.cache
def _tiles(head_dim: int, rotary_dim: int) -> Mapping[str, int]:
    rest = max(1, head_dim - rotary_dim)
    return {"HALF_TILE": next_power_of_2(rotary_dim // 2), "REST_TILE": next_power_of_2(rest)}


_STRIDES = ("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride", "block_stride")
_SCALARS = ("eps", "norm_offset", "k_scale", "v_scale", "limit")


def _compilation(variant: str, target: Target, cache_type: str, head_dim: int, rotary_dim: int) -> Compilation:
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_out_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16")
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache_type)
    pointers |= {"slots_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    return Compilation(
        kernel=store_kernel,
        variant=variant,
        target=target,
        config=config_of("store", target),
        signature=pointers | dict.fromkeys(_STRIDES, "i32") | dict.fromkeys(_SCALARS, "fp32"),
        constexprs={
            "Q_HEADS": 32,
            "KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": rotary_dim,
            "BLOCK_SIZE": 16,
            "HAS_NORM": True,
            "HAS_ROTATION": True,
            "IS_FP8": "fp8" in cache_type,
            **_tiles(head_dim, rotary_dim),
        },
        divisible=frozenset(_STRIDES),
        large=frozenset({"k_cache_ptr", "v_cache_ptr"}),
        # A thread may have one dimension of each norm's weight, in the three tiles of a head.
        narrow_loads=6,
    )


COMPILATIONS = tuple(
    compilation
    for target in TARGETS.values()
    for compilation in (
        _compilation("bf16 d128", target, "*bf16", 128, 128),
        _compilation("bf16 d80, 32 of it rotated", target, "*bf16", 80, 32),
        *((_compilation("FP8 d128", target, target.fp8_pointer, 128, 128),) if target.fp8 else ()),
    )
)
