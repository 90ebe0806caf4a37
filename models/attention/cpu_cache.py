"""Writes and reads the paged caches of the CPU backend, converting between the model's dtype and the cache's.

The order: conversion, reused memory for reads, keys and values by head (`PagedKV`), vectors by token.
"""

from collections.abc import Iterator, Sequence

import torch

from models.attention.cpu_plan import StepPlan
from models.ops.types import AttentionOptions, KVCacheTensor, VectorCache

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max


def to_cache(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Convert `x` to the cache's dtype; for FP8 it is divided by `scale` and clamped to the range."""
    if dtype != FP8_DTYPE:
        return x.to(dtype)
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(dtype)


def from_cache(
    stored: torch.Tensor, dtype: torch.dtype, scale: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Convert `stored` to `dtype`, in the memory of `out` if it is given. Returns `stored` itself if the dtypes are
    equal.
    """
    values = stored.to(dtype) if out is None else out.copy_(stored)
    return values.mul_(scale) if stored.dtype == FP8_DTYPE and scale != 1.0 else values


class Scratch:
    """Memory that layers and steps reuse: a new allocation would cause a page fault for each page.

    It grows to the largest use so far, which the plan bounds.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def matrices(self, rows: int, columns: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Matrices with these numbers of columns, valid until the next call for their dtype. # each [rows, columns]"""
        sizes = [rows * each for each in columns]
        if dtype not in self._buffers or self._buffers[dtype].numel() < sum(sizes):
            self._buffers[dtype] = torch.empty(sum(sizes), dtype=dtype)
        return [part.view(rows, -1) for part in torch.split(self._buffers[dtype][: sum(sizes)], sizes)]


class PagedKV:
    """One layer's K and V during a step."""

    def __init__(self, cache: KVCacheTensor, options: AttentionOptions, dtype: torch.dtype, scratch: Scratch) -> None:
        self._cache = cache
        self._options = options
        self._dtype = dtype
        self._scratch = scratch

    def write(self, k: torch.Tensor, v: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's K and V to their slots. Returns them with the rounding of the cache. # [T, Hkv, D or V]
        each

        A prefill attends to the returned values, so that its result does not depend on chunking.
        """
        cache, dtype = self._cache, self._cache.k_cache.dtype
        if plan.opened_blocks is not None:
            # A previous owner's values after the new tokens may not be finite, and masked values are multiplied by 0.
            cache.k_cache[plan.opened_blocks] = 0
            cache.v_cache[plan.opened_blocks] = 0
        stored_k, stored_v = k, v
        if dtype != self._dtype:
            k_scale, v_scale = self._options.k_scale, self._options.v_scale
            stored_k, stored_v = to_cache(k, dtype, k_scale), to_cache(v, dtype, v_scale)
            k, v = from_cache(stored_k, self._dtype, k_scale), from_cache(stored_v, self._dtype, v_scale)
        cache.k_cache[plan.write_blocks, :, plan.write_offsets] = stored_k
        cache.v_cache[plan.write_blocks, :, plan.write_offsets] = stored_v
        return k, v

    def gather(self, rows: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy pages of K and of V, each head's vectors contiguous. # [batch, heads, length, D or V] each

        `rows`: pages of K. Valid until the next call.
        """
        cache, options = self._cache, self._options
        sides = ((cache.k_cache, options.k_scale), (cache.v_cache, options.v_scale))
        pages = [side.stride(1) for side, _ in sides]
        stored = self._scratch.matrices(rows.shape[-1], pages, cache.k_cache.dtype)
        of_block, of_values = (pages_of_block(side) for side, _ in sides)
        if of_values != of_block:  # Values of another size than keys have a pool of their own.
            rows = torch.stack((rows, rows // of_block * of_values + rows % of_block))
        for (side, _), of_side, out in zip(sides, rows.expand(2, -1), stored, strict=True):
            torch.index_select(_from_first_page(side), 0, of_side, out=out)
        if cache.k_cache.dtype != self._dtype:
            outs = self._scratch.matrices(rows.shape[-1], pages, self._dtype)
            stored = [
                from_cache(x, self._dtype, scale, out) for x, (_, scale), out in zip(stored, sides, outs, strict=True)
            ]
        k, v = (
            x.view(batch, -1, length, side.stride(2))[..., : side.shape[3]]
            for x, (side, _) in zip(stored, sides, strict=True)
        )
        return k, v


def pages_of_block(cache: torch.Tensor) -> int:
    """The cache with the stride over the pages of other layers in a block. # [num_blocks, heads, block_size, D]"""
    return cache.stride(0) // cache.stride(1)


def _from_first_page(cache: torch.Tensor) -> torch.Tensor:
    """The pages from a cache's first to its last, other layers' included. # -> [pages, elements of a page]"""
    num_blocks, num_kv_heads = cache.shape[:2]
    num_pages = (num_blocks - 1) * pages_of_block(cache) + num_kv_heads
    return cache.as_strided((num_pages, cache.stride(1)), (cache.stride(1), 1))


def write_vectors(vectors: torch.Tensor, cache: VectorCache, plan: StepPlan, scale: float = 1.0) -> torch.Tensor:
    """Write the step's vectors to their slots. Returns them with the rounding of the cache. # [T, dim]"""
    if plan.opened_blocks is not None:
        # A previous owner's values after the new tokens may not be finite, and masked values are multiplied by 0.
        cache.vectors[plan.opened_blocks] = 0
    stored = to_cache(vectors, cache.vectors.dtype, scale)
    cache.vectors[plan.write_blocks, plan.write_offsets] = stored
    return from_cache(stored, vectors.dtype, scale)


def gather_vectors(cache: VectorCache, blocks: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Copy the vectors of blocks in the cache's dtype. # [n] -> [n * block_size, dim], valid until `scratch` is used
    again
    """
    vectors = cache.vectors
    num_blocks, block_size, dim = vectors.shape
    size = vectors.stride(1)
    (gathered,) = scratch.matrices(len(blocks), (block_size * size,), vectors.dtype)
    pages = vectors.as_strided((num_blocks, block_size * size), (vectors.stride(0), 1))
    torch.index_select(pages, 0, blocks, out=gathered)
    return gathered.view(-1, size)[:, :dim]


def block_and_offset(
    block_tables: torch.Tensor, positions: torch.Tensor, cache: VectorCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block of each token, and its offset in the block. # [B, max_blocks], [B, K] -> 2 x [B, K] int64"""
    block_size = cache.vectors.shape[1]
    return block_tables.gather(1, positions // block_size).long(), positions % block_size


def chunks(count: int, size: int) -> Iterator[slice]:
    """Slices of `count` rows, of at most `size` rows each, but of at least one."""
    size = max(1, size)
    return (slice(first, min(first + size, count)) for first in range(0, count, size))
