"""`CommittedBlocks`: has the system commit a host's KV cache a little ahead of its use. Owned by the model runner.

A cache grows page by page as blocks are first written. Where pages are large, or a virtual machine's host has yet to
find them, the step that opens a new block for many sequences would otherwise take several times its neighbours' time.
"""

import ctypes
import logging
import time
from collections.abc import Iterable

import torch

_log = logging.getLogger(__name__)

PAGE = 2 << 20
"""Bytes committed at a time: a huge page."""
_SPARE = 8
"""Pages kept committed past what sequences have used, besides one of each cache: a new block may need all of them."""
_SHARE = 1 / 6
"""Of the steps' time, at most spent on it."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14."""


class CommittedBlocks:
    """Pages of all layers' caches, in the order in which ascending blocks use them."""

    def __init__(self, caches: Iterable[torch.Tensor], num_blocks: int) -> None:
        """`caches` [num_blocks, ...] on the host."""
        caches = list(caches)
        self._num_blocks = num_blocks
        self._ahead = len(caches) + _SPARE
        self._pages = [
            (first / cache.nbytes, cache.data_ptr() + first, min(PAGE, cache.nbytes - first))
            for cache in caches
            for first in range(0, cache.nbytes, PAGE)
        ]
        """Each with the share of its cache that precedes it, as layers may differ in size."""
        self._pages.sort()
        self._used = 0
        self._next = 0
        self._credit = 0.0
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def use(self, highest_block: int) -> None:
        """Blocks up to this one are in use; those a sequence never had are given out in ascending order."""
        share = (highest_block + 1) / self._num_blocks
        while self._used < len(self._pages) and self._pages[self._used][0] < share:
            self._used += 1
        self._next = max(self._next, self._used)

    def after_step(self, seconds: float) -> None:
        """Spend a share of a step's time on missing pages; one that takes longer is paid off by later steps."""
        self._credit = min(self._credit, 0.0) + seconds * _SHARE
        while self._credit > 0 and self.is_behind:
            start = time.perf_counter()
            self.commit_page()
            self._credit -= time.perf_counter() - start

    @property
    def is_behind(self) -> bool:
        """Whether a page is missing."""
        return self._next < min(self._used + self._ahead, len(self._pages))

    def commit_page(self) -> None:
        """Have the system find the next page. Other threads run meanwhile."""
        _, address, size = self._pages[self._next]
        if self._madvise(address, size, _POPULATE_WRITE):
            _log.debug("the KV cache's pages are committed when they are written: %d", ctypes.get_errno())
            self._next = len(self._pages)
            return
        self._next += 1
