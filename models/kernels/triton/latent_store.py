"""A step's latents into their pages, normalised, with the rotated key behind them; and the queries' rotation.

One pass over both. Norm: Zhang and Sennrich, 2019; rotation: Su et al., 2021. Computed in float32 and rounded to the
model's type as the layers do; in an 8-bit cache then divided by its scale. Also the store of the indexer's keys.
"""

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_latent  # noqa: F401, the rows of these kernels
from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of


@triton.jit
def _cached(x, scale, limit, dtype: tl.constexpr, IS_FP8: tl.constexpr):
    """As the cache holds it, what is out of range at its end."""
    if IS_FP8:
        x = tl.minimum(tl.maximum(x / scale, -limit), limit)
    return x.to(dtype)


@triton.jit
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


@triton.jit
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


_POINTERS = dict.fromkeys(("q", "latent", "q_rope", "vectors", "weight", "rows"), "*bf16")
_INTEGERS = ("q_stride", "q_head_stride", "latent_stride", "block_stride", "num_heads", "row_stride")
_SIGNATURE = {
    **_POINTERS,
    "slots": "*i64",
    "cos": "*fp32",
    "sin": "*fp32",
    **dict.fromkeys(("eps", "scale", "limit"), "fp32"),
    **dict.fromkeys(_INTEGERS, "i32"),
}
_LATENT = {"NOPE": 128, "RANK": 512, "ROPE": 64, "RANK_TILE": 512, "HALF_TILE": 32, "IS_INTERLEAVED": True}
_VECTOR = {"DIM": 128, "TILE": 128}
COMPILATIONS = tuple(
    Compilation(
        kernel=kernel,
        variant=f"{'bf16' if cache == 'bf16' else 'fp8'} {variant}",
        target=target,
        config=config_of(name, target),
        signature={**_SIGNATURE, "vectors": f"*{cache}"},
        constexprs={"BLOCK_SIZE": 16, "IS_FP8": cache != "bf16", **shape},
        divisible=frozenset(_INTEGERS) - {"num_heads"},
        large=frozenset({"vectors"}),
        has_wide_loads=False,
        # Dimensions that are rotated together lie side by side, two to a thread.
        narrow_loads=64,
    )
    for target in TARGETS.values()
    for cache in ("bf16", {"e4m3fn": "fp8e4nv", "e4m3fnuz": "fp8e4b8", None: None}[target.fp8])
    if cache is not None
    for kernel, name, variant, shape in (
        (latent_store_kernel, "latent_store", "512+64", _LATENT),
        (vector_store_kernel, "vector_store", "128", _VECTOR),
    )
)
