"""`PagedKV`: one layer's K and V during a step, written to and gathered from their pages. Used by the CPU backend."""

from collections.abc import Iterator

import torch

from models.attention.cpu_plan import StepPlan
from models.ops.types import AttentionOptions, KVCacheTensor, VectorCache

# [cache_dtype] Conversion between the model's type and the cache's, where they differ. Used by attention backends.

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max


def to_cache(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """`x` as the cache holds it: in 8 bits divided by `scale`, and what is out of range at its end."""
    if dtype != FP8_DTYPE:
        return x.to(dtype)
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(dtype)


def restored(stored: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """What `stored` means, as `dtype`; the same tensor where that is how it is stored."""
    values = stored.to(dtype)
    return values.mul_(scale) if stored.dtype == FP8_DTYPE and scale != 1.0 else values


def from_cache(stored: torch.Tensor, scale: float, out: torch.Tensor) -> torch.Tensor:
    """What `stored` means, in the type and memory of `out`."""
    out.copy_(stored)
    return out.mul_(scale) if stored.dtype == FP8_DTYPE and scale != 1.0 else out


class Scratch:
    """Memory kept between layers and steps: fresh memory would be faulted in page by page each time.

    Grows to the largest use so far, which the plan bounds.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def two(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Two matrices of `dtype`, valid until the next call for it. # 2 x [rows, columns]"""
        size = rows * columns
        if dtype not in self._buffers or self._buffers[dtype].numel() < 2 * size:
            self._buffers[dtype] = torch.empty(2 * size, dtype=dtype)
        buffer = self._buffers[dtype]
        return buffer[:size].view(rows, columns), buffer[size : 2 * size].view(rows, columns)


class PagedKV:
    """Whatever type the cache has, K and V go in and come out in the model's."""

    def __init__(self, cache: KVCacheTensor, options: AttentionOptions, dtype: torch.dtype, scratch: Scratch) -> None:
        self._cache = cache
        self._options = options
        self._dtype = dtype
        self._scratch = scratch

    def write(self, k: torch.Tensor, v: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the step's K and V into their slots; what will be read back of them. # 2 x [T, Hkv, D]

        A prompt attends to that as well: it must not matter whether it was computed in one step or in chunks.
        """
        cache, dtype = self._cache, self._cache.k_cache.dtype
        if plan.opened_blocks is not None:
            # What an earlier owner left behind the new tokens may not be finite, and masked values are multiplied by
            # 0.
            cache.k_cache[plan.opened_blocks] = 0
            cache.v_cache[plan.opened_blocks] = 0
        stored_k, stored_v = k, v
        if dtype != self._dtype:
            k_scale, v_scale = self._options.k_scale, self._options.v_scale
            stored_k, stored_v = to_cache(k, dtype, k_scale), to_cache(v, dtype, v_scale)
            k, v = (
                from_cache(stored, scale, torch.empty(stored.shape, dtype=self._dtype))
                for stored, scale in ((stored_k, k_scale), (stored_v, v_scale))
            )
        cache.k_cache[plan.write_blocks, :, plan.write_offsets] = stored_k
        cache.v_cache[plan.write_blocks, :, plan.write_offsets] = stored_v
        return k, v

    def gather(self, rows: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K's and V's pages, each head's vectors in a row; valid until the next call. # [batch, heads, length, D]"""
        cache = self._cache
        block_size, head_dim = cache.k_cache.shape[2:]
        page = block_size * head_dim
        k, v = self._scratch.two(len(rows), page, cache.k_cache.dtype)
        torch.index_select(_from_first_page(cache.k_cache), 0, rows, out=k)
        torch.index_select(_from_first_page(cache.v_cache), 0, rows, out=v)
        if k.dtype != self._dtype:
            k_out, v_out = self._scratch.two(len(rows), page, self._dtype)
            k, v = from_cache(k, self._options.k_scale, k_out), from_cache(v, self._options.v_scale, v_out)
        shape = batch, -1, length, head_dim
        return k.view(shape), v.view(shape)


def pages_of_block(cache: torch.Tensor) -> int:
    """Pages from a block to the next, other layers' included. # [num_blocks, heads, block_size, D]"""
    return cache.stride(0) // (cache.shape[2] * cache.shape[3])


def _from_first_page(cache: torch.Tensor) -> torch.Tensor:
    """The pages from a cache's first to its last, other layers' included. # -> [pages, block_size * D]"""
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    num_pages = (num_blocks - 1) * pages_of_block(cache) + num_kv_heads
    return cache.as_strided((num_pages, block_size * head_dim), (block_size * head_dim, 1))


# [cpu_pages] Reads and writes of paged vectors. Used by the CPU backend's latent attention and its indexer.


class PageReader:
    """Gathers pages into memory kept between layers and steps: fresh memory would be faulted in each time."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def gather(self, cache: VectorCache, blocks: torch.Tensor) -> torch.Tensor:
        """The vectors of some blocks in a row, as stored; valid until the next call. # [n] -> [n * block_size, dim]"""
        num_blocks, block_size, dim = cache.vectors.shape
        size = len(blocks) * block_size * dim
        if self._buffer.numel() < size or self._buffer.dtype != cache.vectors.dtype:
            self._buffer = torch.empty(size, dtype=cache.vectors.dtype)
        gathered = self._buffer[:size].view(len(blocks), block_size * dim)
        torch.index_select(cache.vectors.view(num_blocks, -1), 0, blocks, out=gathered)
        return gathered.view(-1, dim)


def chunks(count: int, size: int) -> Iterator[slice]:
    """`count` rows, at most `size` at a time, and one where even that is too many."""
    size = max(1, size)
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def write_vectors(vectors: torch.Tensor, cache: VectorCache, plan: StepPlan, scale: float = 1.0) -> torch.Tensor:
    """Put the step's vectors into their slots, in 8 bits divided by `scale`; what they will mean there. # [T, dim]"""
    if plan.opened_blocks is not None:
        # What an earlier owner left behind the new tokens may not be finite, and masked values are multiplied by 0.
        cache.vectors[plan.opened_blocks] = 0
    stored = to_cache(vectors, cache.vectors.dtype, scale)
    cache.vectors[plan.write_blocks, plan.write_offsets] = stored
    return restored(stored, vectors.dtype, scale)


def token_places(
    block_tables: torch.Tensor, positions: torch.Tensor, cache: VectorCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks in which tokens lie, and where in them. # [B, max_blocks], [B, K] -> 2 x [B, K] int64"""
    block_size = cache.vectors.shape[1]
    return block_tables.gather(1, positions // block_size).long(), positions % block_size
