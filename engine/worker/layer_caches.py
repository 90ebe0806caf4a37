"""`LayerCaches`: sizes and makes what a model's layers declare that they keep. Used by the model runner.

Paged caches whose pages have one shape share a pool, in which a block's pages of all layers lie together: a block that
is used takes its own bytes from the system, and not a huge page of each layer's.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from engine.worker.kv_memory import zeros
from models.attention.base import AttentionBackend
from models.base import CacheSpec, KVCacheSpec, StateCacheSpec, VectorCacheSpec
from models.kernels.types import KVCacheTensor, LayerCache, StateCache, VectorCache

KV_CACHE_DTYPES = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""By the words of `kv_cache_dtype`; None: the model's."""

_Shape: TypeAlias = tuple[int, ...]

_MANY_PAGES = 64
"""From here on, one more in a block is little."""


@dataclass(slots=True)
class _Pool:
    """Where caches lie in a block, in pages: the last two dimensions of their shapes."""

    num_pages: int = 0
    """Of all the caches."""
    places: dict[tuple[str, int], tuple[int, _Shape]] = field(default_factory=dict)
    """Of each layer's first and second cache: its first page, and its pages' dimensions."""

    @property
    def stride(self) -> int:
        """Pages from block to block. An odd number spreads a page of all blocks over the sets of a processor's cache,
        which an even one, and worse a power of two, would have them share."""
        return self.num_pages | 1 if self.num_pages >= _MANY_PAGES else self.num_pages

    def add(self, name: str, part: int, shape: _Shape) -> None:
        """A cache with blocks of this shape."""
        self.places[name, part] = self.num_pages, shape[:-2]
        self.num_pages += math.prod(shape[:-2])


class LayerCaches:
    """Paged caches, whose blocks sequences share out, and states, one a slot of the worker."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        backend: AttentionBackend,
        *,
        block_size: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is the model's, which states have; `kv_dtype` that of all paged caches, None: the same."""
        self._kv_dtype = kv_dtype or dtype
        self._specs = specs
        self._backend = backend
        self._block_size = block_size
        self._num_slots = num_slots
        self._dtype = dtype
        self._device = device
        self._pools = self._lay_out()
        self.pools: list[torch.Tensor] = []
        """What `allocate` last made of paged caches. # each [num_blocks, pages, ...]"""

    @property
    def have_states(self) -> bool:
        """Whether a layer keeps more than paged vectors."""
        return any(isinstance(spec, StateCacheSpec) for spec in self._specs)

    @property
    def window(self) -> int | None:
        """Tokens that a query sees in the widest of the paged layers; None where one of them shows it all."""
        paged = [spec for spec in self._specs if not isinstance(spec, StateCacheSpec)]
        windows = [spec.sliding_window for spec in paged if isinstance(spec, KVCacheSpec)]
        known = [window for window in windows if window is not None]
        return max(known) if known and len(known) == len(paged) else None

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        itemsize = self._kv_dtype.itemsize
        return sum(pool.stride * math.prod(page) * itemsize for page, pool in self._pools.items())

    @property
    def slot_bytes(self) -> int:
        """Of one sequence's states in all layers."""
        states = [spec for spec in self._specs if isinstance(spec, StateCacheSpec)]
        return sum(spec.bytes_per_sequence(self._dtype) for spec in states)

    def allocate(self, num_blocks: int, num_slots: int | None = None) -> dict[str, LayerCache]:
        """Zeros, by layer name; states for fewer sequences than declared where `num_slots` says so."""
        parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.pools = []
        for page, pool in self._pools.items():
            memory = zeros((num_blocks, pool.stride, *page), self._kv_dtype, self._device)
            self.pools.append(memory)
            for (name, _), (first, dims) in pool.places.items():
                pages = memory[:, first : first + math.prod(dims)]
                parts[name].append(pages.view(num_blocks, *dims, *page))
        slots = self._num_slots if num_slots is None else num_slots
        return {spec.name: self._cache(spec, parts[spec.name], slots) for spec in self._specs}

    def _lay_out(self) -> dict[_Shape, _Pool]:
        """Pools by the shape of their pages."""
        pools: dict[_Shape, _Pool] = defaultdict(_Pool)
        for spec in self._specs:
            if isinstance(spec, KVCacheSpec):
                shape = self._backend.kv_cache_shape(1, self._block_size, spec.num_kv_heads, spec.head_dim)[1:]
                for part in range(2):
                    pools[shape[-2:]].add(spec.name, part, shape)
            elif isinstance(spec, VectorCacheSpec):
                shape = self._block_size, spec.dim
                pools[shape].add(spec.name, 0, shape)
        return pools

    def _cache(self, spec: CacheSpec, parts: Sequence[torch.Tensor], num_slots: int) -> LayerCache:
        match spec:
            case KVCacheSpec():
                return KVCacheTensor(*parts)
            case VectorCacheSpec():
                return VectorCache(*parts)
            case StateCacheSpec():
                return StateCache(
                    tuple(
                        zeros((num_slots, *shape), dtype or self._dtype, self._device, lower="max_num_seqs")
                        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
                    )
                )
