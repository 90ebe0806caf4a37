"""The KV cache's memory on a CPU: zeroed, of every dtype, aligned, and committed a little ahead of its use."""

import ctypes
import mmap
from types import SimpleNamespace

import pytest
import torch

from engine.runner import kv_cache as committed
from engine.runner.kv_cache import RESERVE, PageCommitter, zeros
from models.ops.memory import HUGE_PAGE

BLOCKS = 64
PAGES = 160
"""Bytes of each pool, which no other allocation fills."""
AHEAD = RESERVE // HUGE_PAGE
THREADS = 2


@pytest.fixture
def pools() -> list[torch.Tensor]:
    return [zeros((BLOCKS, PAGES * HUGE_PAGE // BLOCKS), torch.uint8, torch.device("cpu")) for _ in range(2)]


def resident(pool: torch.Tensor) -> int:
    """Bytes for which the system has allocated memory."""
    pages = (ctypes.c_ubyte * (pool.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(pool.data_ptr()), ctypes.c_size_t(pool.nbytes), pages) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def test_pages_are_committed_a_little_ahead_of_use_and_no_further(pools: list[torch.Tensor]) -> None:
    blocks = PageCommitter(pools, THREADS)
    while blocks.commit_idle():
        pass
    assert [resident(pool) for pool in pools] == [AHEAD // 2 * HUGE_PAGE] * 2


def test_at_the_start_and_under_load_less_is_committed(pools: list[torch.Tensor]) -> None:
    blocks = PageCommitter(pools, THREADS)
    blocks.commit_initial()
    assert [resident(pool) for pool in pools] == [AHEAD // 8 * HUGE_PAGE] * 2
    assert not blocks.is_short
    blocks.use(BLOCKS // 32 - 1)
    assert blocks.is_short
    for _ in range(1000):
        blocks.commit_after_step(0.1)
    assert [resident(pool) for pool in pools] == [(AHEAD // 8 + PAGES // 32) * HUGE_PAGE] * 2


def test_blocks_that_are_used_before_they_are_committed_are_committed_at_once(pools: list[torch.Tensor]) -> None:
    blocks = PageCommitter(pools, THREADS)
    blocks.use(BLOCKS // 8 - 1)
    assert [resident(pool) for pool in pools] == [PAGES // 8 * HUGE_PAGE] * 2


def test_the_whole_cache_is_the_most(pools: list[torch.Tensor]) -> None:
    blocks = PageCommitter(pools, THREADS)
    blocks.use(BLOCKS - 1)
    assert not blocks.is_short
    assert not blocks.commit_idle()


def test_without_a_cache_there_is_nothing_to_commit() -> None:
    assert not PageCommitter([], THREADS).is_short


@pytest.mark.parametrize(
    ("step_seconds", "allowed"),
    [pytest.param(0.06, 0.01, id="a share of short steps"), pytest.param(2.0, 0.02, id="20 ms after long ones")],
)
def test_a_page_that_takes_longer_than_its_share_is_paid_off_by_later_steps(
    pools: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, step_seconds: float, allowed: float
) -> None:
    page_seconds, steps = 0.07, 100
    times = iter(range(10_000))
    monkeypatch.setattr(committed, "time", SimpleNamespace(perf_counter=lambda: page_seconds * next(times)))
    blocks = PageCommitter(pools, THREADS)
    counts = [0]
    monkeypatch.setattr(blocks, "_commit_some", lambda reserve: counts.append(counts.pop() + 1))
    by_step = [(blocks.commit_after_step(step_seconds), counts[0])[1] for _ in range(steps)]
    assert by_step[0] == 1
    assert by_step[1] == 1, "one at a time"
    assert steps * allowed - page_seconds <= by_step[-1] * page_seconds <= steps * allowed + page_seconds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cache_is_zeroed_writable_and_aligned(dtype: torch.dtype) -> None:
    cache = zeros((3, 2, 16, 8), dtype, torch.device("cpu"))
    assert (tuple(cache.shape), cache.dtype) == ((3, 2, 16, 8), dtype)
    assert cache.data_ptr() % 64 == 0
    assert not cache.any()
    cache[1, 0, 3] = 2.5
    assert cache.sum().item() == 2.5 * 8


def test_memory_is_taken_only_where_it_is_written() -> None:
    cache = zeros((2**10, 2**10, 256), torch.float32, torch.device("cpu"))
    assert resident(cache) < 2**24
    cache[:16] = 1.0
    assert 2**24 <= resident(cache) < 2**26


@pytest.mark.parametrize("num_elements", [2**46, 2**100])
def test_memory_that_the_system_refuses_is_an_error_that_names_the_fields(num_elements: int) -> None:
    with pytest.raises(ValueError, match="lower cpu_kvcache_gib or num_kvcache_blocks"):
        zeros((num_elements,), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"lower max_num_seqs$"):
        zeros((num_elements,), torch.float32, torch.device("cpu"), lower="max_num_seqs")
