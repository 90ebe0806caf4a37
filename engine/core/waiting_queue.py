"""`WaitingQueue`: the sequences that wait to be scheduled, in the order in which they start."""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator

from engine.sequence import Sequence

MAX_PRIORITY = 100
"""Priorities are limited to this, positive and negative, so that no request can be served first for ever."""


class WaitingQueue:
    """Sequences by arrival time plus priority: a lower priority is served first, equal ones in order of addition.

    A step of priority weighs as much as `aging_seconds` of waiting, so that later arrivals overtake a sequence for a
    bounded time only. Preempted sequences come before all others. Adding and taking cost O(log n).
    """

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._front: deque[Sequence] = deque()
        self._heap: list[tuple[float, int, Sequence]] = []
        self._latest: dict[int, float] = {}
        """By priority, the due time of the sequence added last."""
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._front) + len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences in order."""
        yield from self._front
        for _, _, seq in sorted(self._heap):
            yield seq

    def __getitem__(self, index: int) -> Sequence:
        if index == 0 and len(self):
            return self._front[0] if self._front else self._heap[0][2]
        return list(self)[index]

    def append(self, seq: Sequence) -> None:
        """Add a new sequence."""
        priority = max(-MAX_PRIORITY, min(seq.priority, MAX_PRIORITY))
        # Not before earlier ones of its priority, even where their arrival times are later.
        due = max(seq.arrive_time + priority * self._aging_seconds, self._latest.get(priority, -math.inf))
        self._latest[priority] = due
        heapq.heappush(self._heap, (due, next(self._count), seq))

    def append_front(self, seq: Sequence) -> None:
        """Add a sequence that ran in an earlier core: after others of that kind, before new ones."""
        self._front.append(seq)

    def appendleft(self, seq: Sequence) -> None:
        """Add a preempted sequence before all others."""
        self._front.appendleft(seq)

    def popleft(self) -> Sequence:
        """Take the first sequence."""
        return self._front.popleft() if self._front else heapq.heappop(self._heap)[2]

    def only(self, wanted: Collection[Sequence]) -> "WaitingQueue":
        """A new queue of those of `wanted` that wait, in order; this one is unchanged."""
        part = WaitingQueue(self._aging_seconds)
        part._front.extend(seq for seq in self if seq in wanted)
        return part

    def keep(self, wanted: Callable[[Sequence], bool]) -> None:
        """Remove the sequences for which `wanted` is false."""
        self._front = deque(seq for seq in self._front if wanted(seq))
        kept = [entry for entry in self._heap if wanted(entry[2])]
        if len(kept) < len(self._heap):
            heapq.heapify(kept)
            self._heap = kept
