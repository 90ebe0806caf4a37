"""Reads and writes of paged vectors. Used by the CPU backend's latent attention and its indexer."""

from collections.abc import Iterator

import torch

from models.attention.cache_dtype import restored, to_cache
from models.attention.cpu_plan import StepPlan
from models.kernels.types import VectorCache


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
