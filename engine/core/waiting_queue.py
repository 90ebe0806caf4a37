"""`WaitingQueue`: the sequences that wait for the scheduler, in the order in which they start."""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator

from engine.sequence import Sequence

MAX_PRIORITY = 100
"""Priorities beyond this, either way, count as this: nobody can ask to be served before everybody for ever."""


class WaitingQueue:
    """Sequences by arrival time plus priority: a lower priority is served first, equal ones in order of addition.

    A step of priority weighs as much as `aging_seconds` of waiting, so whoever waits is passed by newcomers for a
    bounded time only. Preempted sequences are in front of all others. Adding and taking cost O(log n).
    """

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._front: deque[Sequence] = deque()
        self._heap: list[tuple[float, int, Sequence]] = []
        self._latest: dict[int, float] = {}
        """By priority, where the sequence added last stands."""
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._front) + len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        """In order."""
        yield from self._front
        for _, _, seq in sorted(self._heap):
            yield seq

    def __getitem__(self, index: int) -> Sequence:
        if index == 0 and len(self):
            return self._front[0] if self._front else self._heap[0][2]
        return list(self)[index]

    def append(self, seq: Sequence) -> None:
        """Add a sequence that arrived."""
        priority = max(-MAX_PRIORITY, min(seq.priority, MAX_PRIORITY))
        # Not before the one of its priority that was added before it, whatever their clocks say.
        due = max(seq.arrive_time + priority * self._aging_seconds, self._latest.get(priority, -math.inf))
        self._latest[priority] = due
        heapq.heappush(self._heap, (due, next(self._count), seq))

    def append_front(self, seq: Sequence) -> None:
        """Add a sequence that ran before it arrived, in front of those that did not, behind those that did."""
        self._front.append(seq)

    def appendleft(self, seq: Sequence) -> None:
        """Put a preempted sequence in front of all others."""
        self._front.appendleft(seq)

    def popleft(self) -> Sequence:
        """Take the first sequence."""
        return self._front.popleft() if self._front else heapq.heappop(self._heap)[2]

    def only(self, wanted: Collection[Sequence]) -> "WaitingQueue":
        """A queue of those of `wanted` that wait, in their order; this one stays as it is."""
        part = WaitingQueue(self._aging_seconds)
        part._front.extend(seq for seq in self if seq in wanted)
        return part

    def keep(self, wanted: Callable[[Sequence], bool]) -> None:
        """Drop the sequences that are not wanted any more."""
        self._front = deque(seq for seq in self._front if wanted(seq))
        kept = [entry for entry in self._heap if wanted(entry[2])]
        if len(kept) < len(self._heap):
            heapq.heapify(kept)
            self._heap = kept
