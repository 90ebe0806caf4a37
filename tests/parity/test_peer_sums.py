"""Sums in memory that the GPUs of all ranks read: two processes run the kernels in Triton's interpreter."""

import mmap
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import triton.language as tl

from models.ops.torch_ops import torch_norm
from models.ops.triton import peer_sums
from models.ops.triton.peer_sums import PeerMemory, flag_bytes
from models.ops.types import NormWeight
from models.parallel.peer_sums import PeerSums
from tests.parity.triton_interpreter import requires_interpreter

pytestmark = requires_interpreter
BYTES = 1 << 16


def parts_of(rank: int, shape: tuple[int, ...], call: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    # The interpreter rounds float16 as a GPU does.
    return torch.randn(shape, generator=generator).half()


def of_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs in sequence, each of which waits for the other ranks."""
    monkeypatch.setattr(peer_sums, "PROGRAMS", 3)
    monkeypatch.setattr(peer_sums, "_PROGRAMS", tl.constexpr(3))


def norm_of(width: int) -> NormWeight:
    return NormWeight(1 + 0.1 * torch.arange(width).half() / width, 1e-5, 0.0)


def run(ranks: int, compute: Callable[[PeerMemory, int], Any]) -> list[Any]:
    """The result of each rank's process over the shared memory."""
    maps = [mmap.mmap(-1, flag_bytes(ranks) + 2 * BYTES) for _ in range(ranks)]
    parts = [torch.frombuffer(each, dtype=torch.uint8) for each in maps]
    # Forked: the maps are at the same addresses, which is not required of the peers' memory.
    context = multiprocessing.get_context("fork")

    def child(rank: int, answers: Connection) -> None:
        torch.set_num_threads(1)
        answers.send(compute(PeerMemory(rank, parts), rank))

    pipes = [context.Pipe() for _ in range(1, ranks)]
    children = [context.Process(target=child, args=(rank, pipes[rank - 1][1])) for rank in range(1, ranks)]
    for each in children:
        each.start()
    try:
        return [compute(PeerMemory(0, parts), 0), *(pipe.recv() for pipe, _ in pipes)]
    finally:
        for each in children:
            each.join(60)


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize(
    ("ranks", "one_shot_bytes", "calls"),
    [(2, 1 << 19, 0), (3, 0, 0), (2, 1 << 19, 2**31 - 2)],
    ids=["one shot", "two shots", "after days"],
)
def test_all_ranks_get_the_same_bits_whichever_sums_came_before(
    ranks: int, one_shot_bytes: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_sums, "_ONE_SHOT_BYTES", one_shot_bytes)
    of_few_programs(monkeypatch)
    shapes = [(1, 32), (3, 160), (13, 64), (2, 32)]

    def compute(memory: PeerMemory, rank: int) -> list[list[float]]:
        memory._calls += calls
        return [
            memory.all_reduce(parts_of(rank, shape, call)).flatten().float().tolist()
            for call, shape in enumerate(shapes)
        ]

    found = run(ranks, compute)
    assert all(each == found[0] for each in found)
    for call, shape in enumerate(shapes):
        expected = in_order([parts_of(rank, shape, call) for rank in range(ranks)])
        assert found[0][call] == expected.flatten().float().tolist()


def test_a_sum_with_a_residual_and_a_norm_has_the_bits_of_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    of_few_programs(monkeypatch)
    shapes = [(1, 96), (7, 48)]

    def compute(memory: PeerMemory, rank: int) -> list[list[float]]:
        found = []
        for call, shape in enumerate(shapes):
            x, residual = parts_of(rank, shape, call), parts_of(9, shape, call)
            assert memory.fits_norm(x, norm_of(shape[1]))
            normed, kept = memory.add_norm(x, residual, norm_of(shape[1]))
            found += [normed.flatten().float().tolist(), kept.flatten().float().tolist()]
            # Calls of both kinds share a counter.
            found.append(memory.all_reduce(x).flatten().float().tolist())
        return found

    found = run(2, compute)
    assert found[0] == found[1]
    for call, shape in enumerate(shapes):
        summed = in_order([parts_of(rank, shape, call) for rank in range(2)])
        kept = summed + parts_of(9, shape, call)
        normed, residual, again = found[0][3 * call : 3 * call + 3]
        assert residual == kept.flatten().float().tolist()
        assert again == summed.flatten().float().tolist()
        expected = torch_norm(kept, norm_of(shape[1])).flatten().float()
        assert torch.allclose(torch.tensor(normed), expected, rtol=2**-9, atol=1e-6)


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_limit() -> None:
    memory = PeerMemory(0, [torch.zeros(flag_bytes(2) + 2 * BYTES, dtype=torch.uint8) for _ in range(2)])
    memory.limit = 3
    x = torch.ones(4, 32, dtype=torch.bfloat16)
    assert torch.equal(memory.all_reduce(x), x)


def test_what_does_not_fit_is_another_s() -> None:
    memory = PeerMemory(0, [torch.zeros(flag_bytes(2) + 2 * BYTES, dtype=torch.uint8) for _ in range(2)])
    assert memory.fits(torch.empty(BYTES // 2, dtype=torch.bfloat16))
    assert not memory.fits(torch.empty(BYTES // 2 + 16, dtype=torch.bfloat16))
    assert not memory.fits(torch.empty(16))
    assert not memory.fits(torch.empty(24, dtype=torch.bfloat16))
    assert not memory.fits(torch.empty(0, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="100 bytes hold no sum of 2 ranks"):
        PeerMemory(0, [torch.zeros(100, dtype=torch.uint8)] * 2)


class Doubled:
    """Memory of two ranks with equal values; `wrong` is added to its sums, and to norms of them."""

    limit = 7

    def __init__(self, wrong: float = 0.0, wrong_norm: float = 0.0) -> None:
        self.wrong, self.wrong_norm, self.num_norms = wrong, wrong_norm, 0

    def fits(self, x: torch.Tensor) -> bool:
        return x.dtype is torch.bfloat16

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x + self.wrong * (len(x) > 5)

    def fits_norm(self, x: torch.Tensor, norm: NormWeight) -> bool:
        return x.dtype is norm.weight.dtype

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_norms += 1
        kept = 2 * x + residual
        return torch_norm(kept, norm) + self.wrong_norm, kept


def test_sums_are_used_where_all_ranks_found_them_right() -> None:
    for wrong, reason in ((0.0, None), (5.0, "its sum of 700 rows is wrong")):
        memory = Doubled(wrong)
        sums = PeerSums(memory, lambda is_so: is_so)
        assert sums.try_out(0, torch.device("cpu"), lambda x: 2 * x) == reason
        assert memory.limit == 7
    assert PeerSums(Doubled(), lambda is_so: is_so)(torch.ones(3)) is None


@pytest.mark.parametrize(("wrong", "others"), [(0.0, True), (0.5, True), (0.0, False)])
def test_a_norm_is_fused_where_the_first_of_its_form_was_right_on_all_ranks(wrong: float, others: bool) -> None:
    memory = Doubled(wrong_norm=wrong)
    asked: list[bool] = []

    def agree(is_so: bool) -> bool:
        asked.append(is_so)
        return is_so and others

    sums = PeerSums(memory, agree)
    norm = NormWeight(torch.ones(32).bfloat16(), 1e-5, 0.0)
    x, residual = torch.randn(2, 3, 32).bfloat16()
    found = [sums.add_norm(x, residual.clone(), norm) for _ in range(3)]
    assert asked == [wrong == 0.0]
    assert all((each is not None) == (wrong == 0.0 and others) for each in found)
    assert sums.add_norm(x.float(), residual.float(), norm) is None
