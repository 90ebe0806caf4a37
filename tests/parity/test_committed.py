"""What of a KV cache the system has committed, before and while sequences use it."""

import ctypes
import mmap

import pytest
import torch

from engine.worker import committed
from engine.worker.committed import PAGE, CommittedBlocks
from engine.worker.kv_memory import zeros

BLOCKS = 64
PAGES = 24
"""Of each cache, which no one else's memory fills."""
AHEAD = 2 + 8
"""Pages: one of each cache, and some to spare."""


@pytest.fixture
def caches() -> list[torch.Tensor]:
    return [zeros((BLOCKS, PAGES * PAGE // BLOCKS), torch.uint8, torch.device("cpu")) for _ in range(2)]


def resident(cache: torch.Tensor) -> int:
    """Bytes that the system has given memory to."""
    pages = (ctypes.c_ubyte * (cache.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(cache.data_ptr()), ctypes.c_size_t(cache.nbytes), pages) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def commit_all(blocks: CommittedBlocks) -> int:
    count = 0
    while blocks.is_behind:
        blocks.commit_page()
        count += 1
    return count


def test_pages_are_committed_a_little_ahead_of_use_and_no_further(caches: list[torch.Tensor]) -> None:
    blocks = CommittedBlocks(caches, BLOCKS)
    assert commit_all(blocks) == AHEAD
    # A range that is not aligned to huge pages may touch one more.
    assert AHEAD * PAGE <= sum(map(resident, caches)) <= (AHEAD + 2) * PAGE
    blocks.use(BLOCKS // 2 - 1)
    assert commit_all(blocks) == AHEAD
    assert all(resident(cache) <= (PAGES // 2 + AHEAD) * PAGE for cache in caches)


def test_the_whole_cache_is_the_most(caches: list[torch.Tensor]) -> None:
    blocks = CommittedBlocks(caches, BLOCKS)
    blocks.use(BLOCKS - 1)
    assert not blocks.is_behind


def test_without_a_cache_there_is_nothing_to_commit() -> None:
    assert not CommittedBlocks([], BLOCKS).is_behind


def test_a_page_that_takes_longer_than_its_share_is_paid_off_by_later_steps(
    caches: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr(committed.time, "perf_counter", lambda: float(next(seconds)))
    blocks = CommittedBlocks(caches, BLOCKS)
    done = 0
    counts = []
    monkeypatch.setattr(blocks, "commit_page", lambda: counts.append(done))
    for _ in range(12):
        done += 1
        blocks.after_step(1.0)
    assert counts == [1, 7], "a page of a second every six seconds of steps"
