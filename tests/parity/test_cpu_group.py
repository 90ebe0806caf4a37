"""The CPU ranks' collectives in shared memory: the same bits on every rank, and a step that any rank may leave."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from models.errors import CollectiveAborted
from models.ops.cpu.collectives import SharedMemoryCollectives
from models.ops.cpu.runtime import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="the operators were not built")

WAIT_SECONDS = 300
CHUNK_BYTES = 256 << 10


class Ranks:
    """Ranks of a group, each on a thread: calls of the library run in parallel."""

    def __init__(self, size: int) -> None:
        library = load_library()
        assert library is not None
        descriptor = os.memfd_create("test")
        self.groups = [SharedMemoryCollectives(library, rank, size, descriptor) for rank in range(size)]
        os.close(descriptor)
        self.threads = ThreadPoolExecutor(size)

    def all(self, call: Callable[[SharedMemoryCollectives, int], torch.Tensor]) -> list[torch.Tensor]:
        """The result of each rank's call."""
        calls = [self.threads.submit(call, group, rank) for rank, group in enumerate(self.groups)]
        return [each.result(WAIT_SECONDS) for each in calls]


@pytest.fixture(params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param)
    yield made
    made.threads.shutdown()


def part(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (7, 1001), (9, CHUNK_BYTES // 16)])
def test_sums_are_made_in_the_order_of_ranks_on_each(ranks: Ranks, shape: tuple[int, int], dtype: torch.dtype) -> None:
    size = len(ranks.groups)
    expected = part(0, *shape, dtype=dtype).float()
    for rank in range(1, size):
        expected = expected + part(rank, *shape, dtype=dtype).float()
    for found in ranks.all(lambda group, rank: group.all_reduce(part(rank, *shape, dtype=dtype))):
        assert found.dtype is dtype
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (5, 77), (3, CHUNK_BYTES // 8 + 3)])
def test_rank_0_gathers_columns_side_by_side(ranks: Ranks, shape: tuple[int, int]) -> None:
    found = ranks.all(lambda group, rank: group.gather(part(rank, *shape)))
    parts = [part(rank, *shape) for rank in range(len(found))]
    assert torch.equal(found[0], torch.cat(parts, -1))
    assert all(torch.equal(mine, own) for mine, own in zip(found[1:], parts[1:], strict=True))


def test_many_collectives_follow_each_other_without_mixing(ranks: Ranks) -> None:
    def work(group: SharedMemoryCollectives, rank: int) -> torch.Tensor:
        totals = []
        for step in range(1, 40):
            group.begin_step(step)
            for count in range(step % 3 + 1):
                totals.append(group.all_reduce(torch.full((1, 5), float(step * 10 + count + rank))))
        return torch.cat(totals)

    found = ranks.all(work)
    assert all(torch.equal(found[0], other) for other in found[1:])
    size = len(found)
    assert found[0][0, 0] == size * 10 * 1 + sum(range(size))


def test_ranks_that_wait_are_let_go_and_meet_again_in_the_next_step(ranks: Ranks) -> None:
    def work(group: SharedMemoryCollectives, rank: int) -> torch.Tensor:
        last = len(ranks.groups) - 1
        group.begin_step(1)
        group.all_reduce(torch.ones(1, 4))
        if rank == last:
            group.abort()
        else:
            with pytest.raises(CollectiveAborted, match="another rank has left"):
                group.all_reduce(torch.ones(1, 4))
            with pytest.raises(CollectiveAborted):
                group.gather(torch.ones(1, 4))
        return torch.tensor(rank)

    ranks.all(work)

    def next_step(group: SharedMemoryCollectives, rank: int) -> torch.Tensor:
        group.begin_step(2)
        return group.all_reduce(torch.full((1, 4), float(rank + 1)))

    size = len(ranks.groups)
    for found in ranks.all(next_step):
        assert found.tolist() == [[size * (size + 1) / 2] * 4]


def test_a_rank_that_comes_late_to_a_step_that_was_left_does_not_wait() -> None:
    ranks = Ranks(2)
    ranks.groups[0].begin_step(5)
    ranks.groups[0].abort()
    ranks.groups[1].begin_step(5)
    with pytest.raises(CollectiveAborted):
        ranks.groups[1].all_reduce(torch.ones(1, 4))
    ranks.threads.shutdown()
