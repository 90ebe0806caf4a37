"""The KV cache: `LayerCaches` allocates the caches that layers declare; `PageCommitter` commits host pages in advance.

Paged caches with pages of one shape share a pool, in which the pages of a block in all layers are adjacent: a block in
use takes only its own bytes from the system, rather than a huge page for each layer.

A cache in host memory grows page by page as blocks are first written. Where pages are large, or a virtual machine must
get them from its host, a step that first writes new blocks of many sequences would take several times longer.
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
"""Number of pages in a block from which one padding page costs little."""

RESERVE = 128 << 20
"""Bytes committed beyond those that sequences have used, while the engine is idle."""
_UNDER_LOAD = RESERVE // 4
"""Bytes committed in advance while steps run: one page may take as long as ten steps of a small model."""
_MOST_THREADS = 4
"""Pages that are committed at a time while idle; an arriving request waits for them."""
_SHARE = 1 / 6
"""The largest share of the steps' time that is spent on committing pages."""
_MOST_SECONDS = 0.02
"""The most seconds spent on committing after one step, which bounds the delay after a long step."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14."""


@dataclass(slots=True)
class _Pool:
    """The layout of a block as pages; a page is the last two dimensions of a cache's shape."""

    num_pages: int = 0
    """Pages of all caches in a block."""
    offsets: dict[tuple[str, int], tuple[int, _Shape]] = field(default_factory=dict)
    """By layer and cache (first or second): the first page, and the dimensions over pages."""

    @property
    def stride(self) -> int:
        """Pages from one block to the next. An odd number spreads the same page of all blocks over all sets of a
        processor's cache; an even number, above all a power of two, would map them to few sets."""
        return self.num_pages | 1 if self.num_pages >= _MANY_PAGES else self.num_pages

    def add(self, name: str, part: int, shape: _Shape) -> None:
        """Add a cache with blocks of this shape."""
        self.offsets[name, part] = self.num_pages, shape[:-2]
        self.num_pages += math.prod(shape[:-2])


class LayerCaches:
    """Allocates paged caches, whose blocks sequences use, and recurrent states, one per slot."""

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
        """`dtype`: the model's, which states have. `kv_dtype`: that of all paged caches; None for `dtype`.

        `states_per_slot`: states of a sequence in each recurrent layer: one plus one for each draft that a step
        verifies.
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
        """The pools of paged caches from the last `allocate`. # each [num_blocks, pages, ...]"""

    @property
    def have_states(self) -> bool:
        """Whether a layer has recurrent states."""
        return any(isinstance(spec, StateCacheSpec) for spec in self._specs)

    @property
    def window(self) -> int | None:
        """The widest attention window of the paged layers, in tokens; None if a layer has no window."""
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
        """Allocate zeroed caches by layer name, with states for `num_slots` sequences, or for the declared number."""
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
                    size = self._backend.stored_size(dim, self._kv_dtype)
                    shape = self._backend.kv_cache_shape(1, self._block_size, spec.num_kv_heads, size)[1:]
                    pools[shape[-2:]].add(spec.name, part, shape)
            elif isinstance(spec, VectorCacheSpec):
                size = spec.dim
                if spec.is_latent:
                    size = self._backend.stored_size(size, self._kv_dtype, is_latent=True)
                shape = spec.vectors_per_block(self._block_size), size
                pools[shape].add(spec.name, 0, shape)
        return pools

    def _cache(self, spec: CacheSpec, parts: Sequence[torch.Tensor], num_slots: int) -> LayerCache:
        match spec:
            case KVCacheSpec():
                dims = spec.head_dim, spec.value_dim or spec.head_dim
                return KVCacheTensor(
                    *(
                        part if self._backend.stored_size(dim, self._kv_dtype) == dim else part[..., :dim]
                        for part, dim in zip(parts, dims, strict=True)
                    )
                )
            case VectorCacheSpec():
                return VectorCache(parts[0][..., : spec.dim])
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
    """Allocate a zeroed tensor; on a CPU the system commits its pages when they are first written.

    `torch.zeros` would write every page. Attention multiplies masked values by 0, so the memory must be finite.
    Raises `ValueError` when the host refuses the memory; `lower` names the settings that reduce it.
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
    """Commits the pages of pools in ascending order of the blocks that use them."""

    def __init__(self, pools: Iterable[torch.Tensor], num_threads: int) -> None:
        """`pools`: [num_blocks, ...] in host memory, each aligned to a huge page."""
        self._pages = [
            (first / pool.nbytes * len(pool), pool.data_ptr() + first, min(HUGE_PAGE, pool.nbytes - first))
            for pool in pools
            for first in range(0, pool.nbytes, HUGE_PAGE)
        ]
        """First block, address and size of each page; pools may differ in size."""
        self._pages.sort()
        self._used = 0
        self._next = 0
        self._credit = 0.0
        self._is_released = False
        # The threads inherit this thread's affinity, which may be a single CPU.
        self._num_threads = min(num_threads, _MOST_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="commit")
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def use(self, highest_block: int) -> None:
        """Commit missing pages of all blocks up to `highest_block`, which a step will use, by all threads at once.

        Blocks are first allocated in ascending order. Without this call pages would be committed one by one when they
        are first written, while other threads wait.
        """
        self._is_released = False
        while self._used < len(self._pages) and self._pages[self._used][0] < highest_block + 1:
            self._used += 1
        self._commit(self._used - self._next)

    def commit_initial(self) -> None:
        """Commit the bytes that should be committed in advance under load."""
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
        """Commit a few pages while no step runs. Returns whether more are missing."""
        return self._commit_some(RESERVE)

    @property
    def is_short(self) -> bool:
        """Whether less is committed in advance than should be under load."""
        return self._missing(_UNDER_LOAD) > 0

    def _missing(self, reserve: int) -> int:
        if self._is_released:
            return 0
        return min(self._used + reserve // HUGE_PAGE, len(self._pages)) - self._next

    def release(self) -> None:
        """Return all pages, with their content, to the system. No page is committed again before a step uses one."""
        for _, address, size in self._pages:
            self._madvise(address, size, mmap.MADV_DONTNEED)
        self._used = self._next = 0
        self._is_released = True

    def _commit_some(self, reserve: int) -> bool:
        """Commit the next pages, one per thread, while other threads run. Returns whether more are missing."""
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
