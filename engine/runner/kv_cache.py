"""The KV cache: `LayerCaches` allocates what layers declare; `PageCommitter` commits a host's cache ahead of its use.

Paged caches whose pages have one shape share a pool, in which a block's pages of all layers lie together: a block in
use takes only its own bytes from the system, and not a huge page for each layer.

A cache on the host grows page by page as blocks are first written. Where pages are large, or a virtual machine's host
has yet to find them, the step that opens a new block for many sequences would take several times as long as others.
"""

import ctypes
import logging
import math
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from engine.runner.device import oom_at_start
from models.attention.backend import AttentionBackend
from models.layers.base import CacheSpec, KVCacheSpec, StateCacheSpec, VectorCacheSpec
from models.ops.memory import HUGE_PAGE, aligned_zeros
from models.ops.types import KVCacheTensor, LayerCache, StateCache, VectorCache

KV_CACHE_DTYPES = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""By value of `kv_cache_dtype`; None: the model's dtype."""

_Shape: TypeAlias = tuple[int, ...]

_log = logging.getLogger(__name__)

_MANY_PAGES = 64
"""From this number of pages in a block, one more costs little."""

RESERVE = 128 << 20
"""Bytes committed ahead of what sequences have used, while nothing runs."""
_UNDER_LOAD = RESERVE // 4
"""The same while steps run: a page may take as long as ten steps of a small model."""
_MOST_THREADS = 4
"""Pages that are committed at a time, for which an arriving request waits."""
_SHARE = 1 / 6
"""Largest share of the steps' time that is spent on committing."""
_MOST_SECONDS = 0.02
"""Most seconds of it after one step: a long prompt must not delay the next step by its share."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14."""


@dataclass(slots=True)
class _Pool:
    """The layout of a block: caches as pages, which are the last two dimensions of their shapes."""

    num_pages: int = 0
    """Pages of all caches in a block."""
    offsets: dict[tuple[str, int], tuple[int, _Shape]] = field(default_factory=dict)
    """By layer and cache (first or second): its first page, and its pages' dimensions."""

    @property
    def stride(self) -> int:
        """Pages from block to block. An odd number spreads a page of all blocks over the sets of a processor's cache,
        which an even one, and worse a power of two, would have them share."""
        return self.num_pages | 1 if self.num_pages >= _MANY_PAGES else self.num_pages

    def add(self, name: str, part: int, shape: _Shape) -> None:
        """A cache with blocks of this shape."""
        self.offsets[name, part] = self.num_pages, shape[:-2]
        self.num_pages += math.prod(shape[:-2])


class LayerCaches:
    """Paged caches, whose blocks are given to sequences, and states, one for each slot."""

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
        states_per_slot: int = 1,
    ) -> None:
        """`dtype` is the model's, which states have; `kv_dtype` that of all paged caches, None: the same.

        `states_per_slot`: states of a sequence in each layer that keeps some: one, and one more for each draft that a
        step verifies.
        """
        self.states_per_slot = states_per_slot
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
        """Bytes of one block in all layers."""
        itemsize = self._kv_dtype.itemsize
        return sum(pool.stride * math.prod(page) * itemsize for page, pool in self._pools.items())

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's states in all layers."""
        states = [spec for spec in self._specs if isinstance(spec, StateCacheSpec)]
        return self.states_per_slot * sum(spec.bytes_per_sequence(self._dtype) for spec in states)

    def allocate(self, num_blocks: int, num_slots: int | None = None) -> dict[str, LayerCache]:
        """Zeros, by layer name; states for fewer sequences than declared where `num_slots` says so."""
        parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.pools = []
        for page, pool in self._pools.items():
            memory = zeros((num_blocks, pool.stride, *page), self._kv_dtype, self._device)
            self.pools.append(memory)
            for (name, _), (first, dims) in pool.offsets.items():
                pages = memory[:, first : first + math.prod(dims)]
                parts[name].append(pages.view(num_blocks, *dims, *page))
        slots = self._num_slots if num_slots is None else num_slots
        return {spec.name: self._cache(spec, parts[spec.name], slots) for spec in self._specs}

    def _lay_out(self) -> dict[_Shape, _Pool]:
        """Pools by the shape of their pages."""
        pools: dict[_Shape, _Pool] = defaultdict(_Pool)
        for spec in self._specs:
            if isinstance(spec, KVCacheSpec):
                for part, dim in enumerate((spec.head_dim, spec.value_dim or spec.head_dim)):
                    shape = self._backend.kv_cache_shape(1, self._block_size, spec.num_kv_heads, dim)[1:]
                    pools[shape[-2:]].add(spec.name, part, shape)
            elif isinstance(spec, VectorCacheSpec):
                shape = spec.vectors_per_block(self._block_size), spec.dim
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
                        zeros(
                            (num_slots * self.states_per_slot, *shape),
                            dtype or self._dtype,
                            self._device,
                            lower="max_num_seqs",
                        )
                        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
                    )
                )


def zeros(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    lower: str = "cpu_kvcache_gib or num_kvcache_blocks",
) -> torch.Tensor:
    """A zeroed tensor; on CPU the system commits its pages when they are first written.

    `torch.zeros` would touch every page. Attention multiplies masked values by 0, so memory must hold finite numbers.
    Raises `ValueError` when the host refuses the memory; `lower` names the fields that reduce it.
    """
    if device.type != "cpu":
        with oom_at_start(
            f"a KV cache tensor of {math.prod(shape) * dtype.itemsize / 2**30:.2f} GiB",
            "lower gpu_memory_utilization or num_kvcache_blocks",
        ):
            return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        pages = aligned_zeros(num_bytes)
    except (OSError, OverflowError) as error:
        raise ValueError(f"the system refused {num_bytes} bytes for the KV cache ({error}); lower {lower}") from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class PageCommitter:
    """Commits pages of the pools of blocks in the order in which ascending blocks use them."""

    def __init__(self, pools: Iterable[torch.Tensor], num_threads: int) -> None:
        """`pools` [num_blocks, ...] on the host, each beginning with a huge page."""
        self._pages = [
            (first / pool.nbytes * len(pool), pool.data_ptr() + first, min(HUGE_PAGE, pool.nbytes - first))
            for pool in pools
            for first in range(0, pool.nbytes, HUGE_PAGE)
        ]
        """Block in which it begins, address and size of each page; pools may differ in size."""
        self._pages.sort()
        self._used = 0
        self._next = 0
        self._credit = 0.0
        self._is_released = False
        # They may run on this thread's CPUs only, which may be one.
        self._num_threads = min(num_threads, _MOST_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="commit")
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def use(self, highest_block: int) -> None:
        """Commit what is missing of the blocks up to this one, which a step will use, by all threads at once.

        Blocks are first given out in ascending order. When written to first, pages would be committed one by one,
        with the other threads waiting.
        """
        self._is_released = False
        while self._used < len(self._pages) and self._pages[self._used][0] < highest_block + 1:
            self._used += 1
        self._commit(self._used - self._next)

    def commit_initial(self) -> None:
        """Commit as much as should be committed under load."""
        while self._commit_some(_UNDER_LOAD):
            pass

    def commit_after_step(self, seconds: float) -> None:
        """Spend a share of a step's time on missing pages; a page that takes longer uses the share of later steps."""
        self._credit = min(self._credit, 0.0) + min(seconds * _SHARE, _MOST_SECONDS)
        while self._credit > 0 and self.is_short:
            start = time.perf_counter()
            self._commit_some(_UNDER_LOAD)
            self._credit -= time.perf_counter() - start

    def commit_idle(self) -> bool:
        """Commit a little while no step runs; whether more is missing."""
        return self._commit_some(RESERVE)

    @property
    def is_short(self) -> bool:
        """Whether less is committed than should be under load."""
        return self._missing(_UNDER_LOAD) > 0

    def _missing(self, reserve: int) -> int:
        if self._is_released:
            return 0
        return min(self._used + reserve // HUGE_PAGE, len(self._pages)) - self._next

    def release(self) -> None:
        """Give all pages back to the system, with what they hold. None is committed again before a step uses one."""
        for _, address, size in self._pages:
            self._madvise(address, size, mmap.MADV_DONTNEED)
        self._used = self._next = 0
        self._is_released = True

    def _commit_some(self, reserve: int) -> bool:
        """Commit the next pages, one a thread, while other threads run; whether more is missing."""
        self._commit(min(self._num_threads, self._missing(reserve)))
        return self._missing(reserve) > 0

    def _commit(self, count: int) -> None:
        if count <= 0:
            return
        pages = self._pages[self._next : self._next + count]
        self._next += count
        if not all([self._populate(pages[0])] if count == 1 else self._threads.map(self._populate, pages)):
            _log.debug("the KV cache's pages are committed when they are written")
            self._next = len(self._pages)

    def _populate(self, page: tuple[float, int, int]) -> bool:
        _, address, size = page
        return bool(self._madvise(address, size, _POPULATE_WRITE) == 0)
