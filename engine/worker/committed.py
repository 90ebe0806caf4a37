"""`CommittedBlocks`: has the system commit a host's KV cache a little ahead of its use. Owned by the model runner.

A cache grows page by page as blocks are first written. Where pages are large, or a virtual machine's host has yet to
find them, the step that opens a new block for many sequences would otherwise take several times its neighbours' time.
"""

import ctypes
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from models.host_memory import HUGE_PAGE

_log = logging.getLogger(__name__)

RESERVE = 128 << 20
"""Bytes committed past what sequences have used, while nothing runs."""
_UNDER_LOAD = RESERVE // 4
"""The same while something does: a page may take as long as ten steps of a small model, so no more than is needed."""
_MOST_THREADS = 4
"""A request that arrives waits for as many pages."""
_SHARE = 1 / 6
"""Of the steps' time, at most spent on it."""
_MOST_SECONDS = 0.02
"""After one step: the next must not wait for what a long prompt would allow."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14."""


class CommittedBlocks:
    """Pages of the pools of blocks, in the order in which ascending blocks use them."""

    def __init__(self, pools: Iterable[torch.Tensor], num_threads: int) -> None:
        """`pools` [num_blocks, ...] on the host, each beginning with a huge page."""
        self._pages = [
            (first / pool.nbytes * len(pool), pool.data_ptr() + first, min(HUGE_PAGE, pool.nbytes - first))
            for pool in pools
            for first in range(0, pool.nbytes, HUGE_PAGE)
        ]
        """Each with the block in which it begins, as pools may differ in size."""
        self._pages.sort()
        self._used = 0
        self._next = 0
        self._credit = 0.0
        # They run where this thread may: with a core of its own, that is one.
        self._num_threads = min(num_threads, _MOST_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="commit")
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def use(self, highest_block: int) -> None:
        """Blocks up to this one are in use; those a sequence never had are given out in ascending order.

        What is missing of them is committed at once, by all threads: written to first, pages would be found one by
        one, with the other threads waiting.
        """
        while self._used < len(self._pages) and self._pages[self._used][0] < highest_block + 1:
            self._used += 1
        self._commit(self._used - self._next)

    def at_start(self) -> None:
        """Commit what should be there under load."""
        while self._commit_some(_UNDER_LOAD):
            pass

    def after_step(self, seconds: float) -> None:
        """Spend a share of a step's time on missing pages; one that takes longer is paid off by later steps."""
        self._credit = min(self._credit, 0.0) + min(seconds * _SHARE, _MOST_SECONDS)
        while self._credit > 0 and self.is_behind:
            start = time.perf_counter()
            self._commit_some(_UNDER_LOAD)
            self._credit -= time.perf_counter() - start

    def at_rest(self) -> bool:
        """Commit a little while there is nothing else to do; whether more is missing."""
        return self._commit_some(RESERVE)

    @property
    def is_behind(self) -> bool:
        """Whether a page is missing of what should be there under load."""
        return self._missing(_UNDER_LOAD) > 0

    def _missing(self, reserve: int) -> int:
        return min(self._used + reserve // HUGE_PAGE, len(self._pages)) - self._next

    def _commit_some(self, reserve: int) -> bool:
        """Have the system find the next pages, one a thread; whether more is missing. Other threads run meanwhile."""
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
