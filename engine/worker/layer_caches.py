"""`LayerCaches`: sizes and makes what a model's layers declare that they keep. Used by the model runner."""

from collections.abc import Iterable, Sequence

import torch

from engine.worker.kv_memory import zeros
from models.attention.base import AttentionBackend
from models.base import CacheSpec, KVCacheSpec, StateCacheSpec, VectorCacheSpec
from models.forward_context import KVCacheTensor, LayerCache, StateCache, VectorCache

KV_CACHE_DTYPES = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""By the words of `kv_cache_dtype`; None: the model's."""


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
        paged = [spec for spec in self._specs if not isinstance(spec, StateCacheSpec)]
        return self._block_size * sum(spec.elements_per_token * self._kv_dtype.itemsize for spec in paged)

    @property
    def slot_bytes(self) -> int:
        """Of one sequence's states in all layers."""
        states = [spec for spec in self._specs if isinstance(spec, StateCacheSpec)]
        return sum(spec.bytes_per_sequence(self._dtype) for spec in states)

    def allocate(self, num_blocks: int, num_slots: int | None = None) -> dict[str, LayerCache]:
        """Zeros, by layer name; states for fewer sequences than declared where `num_slots` says so."""
        slots = self._num_slots if num_slots is None else num_slots
        return {spec.name: self._allocate(spec, num_blocks, slots) for spec in self._specs}

    @staticmethod
    def paged(caches: Iterable[LayerCache]) -> list[torch.Tensor]:
        """The tensors of blocks among what `allocate` made. # each [num_blocks, ...]"""
        tensors = []
        for cache in caches:
            if isinstance(cache, KVCacheTensor):
                tensors += [cache.k_cache, cache.v_cache]
            elif isinstance(cache, VectorCache):
                tensors.append(cache.vectors)
        return tensors

    def _allocate(self, spec: CacheSpec, num_blocks: int, num_slots: int) -> LayerCache:
        match spec:
            case KVCacheSpec():
                shape = self._backend.kv_cache_shape(num_blocks, self._block_size, spec.num_kv_heads, spec.head_dim)
                return KVCacheTensor(*(zeros(shape, self._kv_dtype, self._device) for _ in range(2)))
            case VectorCacheSpec():
                return VectorCache(zeros((num_blocks, self._block_size, spec.dim), self._kv_dtype, self._device))
            case StateCacheSpec():
                return StateCache(
                    tuple(
                        zeros((num_slots, *shape), dtype or self._dtype, self._device, lower="max_num_seqs")
                        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
                    )
                )
