"""Ranks and replicas as threads of one process, of which one computes at a time, and their collectives."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from models.attention import context as forward_context
from models.ops.types import NormWeight
from models.parallel.tensor_parallel import ExpertParallel, TensorParallel, TokenExchange

Result = TypeVar("Result")

_turn = threading.Lock()
"""Held by the thread that computes, as the operators require, while the others wait in a collective."""


def without_turn(wait: Callable[[], Result]) -> Result:
    """Return the result of `wait`, while another thread may compute."""
    # The step is a global of the process, and each thread is in one of its own.
    step, cache = forward_context._current, forward_context._kv_cache_data
    _turn.release()
    try:
        return wait()
    finally:
        _turn.acquire()
        forward_context._current, forward_context._kv_cache_data = step, cache


class Meeting:
    """A barrier of `size` threads, at which each learns the values of all."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=300)
        self._brought: tuple[list[Any], list[Any]] = [None] * size, [None] * size
        """The current round and the previous one, which slow threads may still read when others enter again."""
        self._times = [0] * size
        self.size = size

    def bring(self, number: int, value: Any) -> list[Any]:
        """The values of all, by index."""
        brought = self._brought[self._times[number] % 2]
        self._times[number] += 1
        brought[number] = value
        self._wait()
        return list(brought)

    def _wait(self) -> None:
        without_turn(self._barrier.wait)


class ThreadCollectives:
    """See `models.parallel.tensor_parallel.Collectives`."""

    are_captured = True

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self.num_sums = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        first, *others = self._meeting.bring(self._rank, x.clone())
        total: torch.Tensor = first.clone()
        for other in others:
            total += other
        return total

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._meeting.bring(self._rank, x.clone())
        return torch.cat(parts, -1) if self._rank == 0 else x

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight) -> None:
        """See `Collectives`."""

    def broadcast(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._meeting.bring(self._rank, token_ids.clone())[0].clone()  # type: ignore[no-any-return]

    def capturing(self) -> AbstractContextManager[None]:
        """See `Collectives`."""
        return nullcontext()


class ThreadExchange(TokenExchange):
    """See `models.parallel.tensor_parallel.TokenExchange`. Others get copies, since the first to continue reuses its
    rows."""

    are_captured = True

    def __init__(self, meeting: Meeting, replica: int) -> None:
        super().__init__(replica, meeting.size)
        self.meeting = meeting

    def _all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.bring(self._replica, rows.clone()))

    def _all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        parts = self.meeting.bring(self._replica, rows.clone().chunk(self._num_replicas))
        return torch.cat([theirs[self._replica] for theirs in parts])

    def agree(self, num_tokens: int) -> tuple[int, ...]:
        """The number of tokens that each replica computes next."""
        return tuple(self.meeting.bring(self._replica, num_tokens))


def thread_ranks(size: int, num_replicas: int = 1, *, spread_experts: bool = False) -> list[list[TensorParallel]]:
    """The barriers of `ranks` ranks in each of `replicas` replicas, for threads that `at_once` runs."""
    columns = [Meeting(num_replicas) for _ in range(size)]
    made = []
    for replica in range(num_replicas):
        meeting = Meeting(size)
        made.append(
            [
                TensorParallel(
                    rank,
                    size,
                    ThreadCollectives(meeting, rank) if size > 1 else None,
                    _experts(replica, num_replicas, columns[rank]) if spread_experts else None,
                )
                for rank in range(size)
            ]
        )
    return made


def _experts(replica: int, num_replicas: int, column: Meeting) -> ExpertParallel:
    return ExpertParallel(replica, num_replicas, ThreadExchange(column, replica) if num_replicas > 1 else None)


def at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """The result of each call; a thread runs each, all of them at the same time."""

    def call_in_turn(call: Callable[[], Result]) -> Result:
        with _turn:
            return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(call_in_turn, calls))
