"""`WaitingQueue`: the sequences that wait to be scheduled, by owner. `Holdings`: which owner holds more than its share
of slots or blocks.

Owners share the engine by tokens (`engine.fair_shares`). With a single owner, the order depends on priority and
arrival time alone.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, KeysView, Reversible
from dataclasses import dataclass
from typing import TypeAlias

from engine.fair_shares import FairShares
from engine.sequence import Sequence

MAX_PRIORITY = 100
"""Priorities are limited to this, positive and negative, so that no request can be served first for ever."""

CREDIT_TOKENS = 4096.0
"""Most unused tokens of its share that an owner may use later, with precedence over others."""
_LATEST_OWNERS = 64
"""Most owners that are compared to find the one with the least recent service."""


class _OwnerQueue:
    """Sequences of one owner, ordered by arrival time plus weighted priority. Preempted ones precede all others."""

    def __init__(self, owner: str, aging_seconds: float, count: Iterator[int]) -> None:
        self.owner = owner
        self._aging_seconds = aging_seconds
        self._count = count
        self.front: deque[Sequence] = deque()
        self._heap: list[tuple[float, int, Sequence]] = []
        self._latest: dict[int, float] = {}
        """Due time of the sequence added last, by priority."""

    def __len__(self) -> int:
        return len(self.front) + len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.front
        for _, _, seq in sorted(self._heap):
            yield seq

    @property
    def first(self) -> Sequence:
        return self.front[0] if self.front else self._heap[0][2]

    def append(self, seq: Sequence) -> None:
        priority = max(-MAX_PRIORITY, min(seq.priority, MAX_PRIORITY))
        # Not before earlier-added sequences of its priority, even if their arrival times are later.
        due = max(seq.arrive_time + priority * self._aging_seconds, self._latest.get(priority, -math.inf))
        self._latest[priority] = due
        heapq.heappush(self._heap, (due, next(self._count), seq))

    def popleft(self) -> Sequence:
        return self.front.popleft() if self.front else heapq.heappop(self._heap)[2]

    def keep(self, wanted: Callable[[Sequence], bool]) -> None:
        self.front = deque(seq for seq in self.front if wanted(seq))
        kept = [entry for entry in self._heap if wanted(entry[2])]
        if len(kept) < len(self._heap):
            heapq.heapify(kept)
            self._heap = kept


_Entry: TypeAlias = tuple[float, int, _OwnerQueue]
_Order: TypeAlias = list[_Entry]


class WaitingQueue:
    """Waiting sequences by owner, ordered by arrival time plus weighted priority: a lower priority is served first.

    One unit of priority weighs as much as `aging_seconds` of waiting, so later sequences can overtake a sequence only
    for a bounded time. Sequences with equal priorities are served in the order of addition, and an owner's preempted
    sequences before all its others. `shares` determines the owner that is served next. Adding and taking cost O(log
    n).
    """

    def __init__(self, aging_seconds: float, shares: FairShares | None = None) -> None:
        self._aging_seconds = aging_seconds
        self.shares = FairShares(CREDIT_TOKENS) if shares is None else shares
        self._queues: dict[str, _OwnerQueue] = {}
        self._orders: tuple[_Order, _Order] = [], []
        """Heaps of the queues of known and of new owners, ordered by the owner's recorded service when the queue was
        pushed. Service only grows. Emptied queues may still be in the heaps."""
        self._num_changes = 0
        """`shares.num_changes` when the heaps were filled."""
        self._size = 0
        self._count = itertools.count()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences, grouped by owner."""
        for owner in sorted(self._queues, key=self.shares.served):
            yield from self._queues[owner]

    def __getitem__(self, index: int) -> Sequence:
        if index == 0:
            owner = self.next_owner()
            if owner is None:
                raise IndexError("no sequence waits")
            return self._queues[owner].first
        return list(self)[index]

    @property
    def owners(self) -> KeysView[str]:
        """Owners of waiting sequences."""
        return self._queues.keys()

    def next_owner(self, passed_over: Collection[str] = ()) -> str | None:
        """Return the owner to serve next that is not in `passed_over`; None if no other owner waits."""
        if self._num_changes != self.shares.num_changes:
            # Owners in the heap of new ones are known now.
            self._num_changes = self.shares.num_changes
            for order in self._orders:
                order.clear()
            for queue in self._queues.values():
                self._push(queue)
        firsts = [self._first(order, passed_over) for order in self._orders]
        return min((owner for owner in firsts if owner is not None), key=self.shares.served, default=None)

    def _first(self, order: _Order, passed_over: Collection[str]) -> str | None:
        """Return the owner to serve next of one heap, and correct the heap as far as that needs."""
        aside, found = list[_Entry](), None
        while order and found is None:
            at, _, queue = order[0]
            if self._queues.get(queue.owner) is not queue:
                heapq.heappop(order)
            elif (recorded := self.shares.recorded(queue.owner)) > at:
                heapq.heapreplace(order, (recorded, next(self._count), queue))
            elif queue.owner in passed_over:
                aside.append(heapq.heappop(order))
            else:
                found = queue.owner
        for entry in aside:
            heapq.heappush(order, entry)
        return found

    def _push(self, queue: _OwnerQueue) -> None:
        """Add an owner's queue to the heap of its group."""
        order = self._orders[self.shares.is_new(queue.owner)]
        heapq.heappush(order, (self.shares.recorded(queue.owner), next(self._count), queue))

    @property
    def latest_owners(self) -> Iterator[str]:
        """Iterate over the waiting owners, beginning with the one that began to wait last."""
        return itertools.islice(reversed(self._queues), _LATEST_OWNERS)

    def first_of(self, owner: str) -> Sequence:
        """Return the next sequence of a waiting owner, without taking it."""
        return self._queues[owner].first

    def append(self, seq: Sequence) -> None:
        """Add a new sequence."""
        self._queue_of(seq).append(seq)

    def append_front(self, seq: Sequence) -> None:
        """Add a sequence that ran in an earlier core: after earlier such sequences, before new ones of its owner."""
        self._queue_of(seq).front.append(seq)

    def appendleft(self, seq: Sequence) -> None:
        """Add a preempted sequence before all others of its owner."""
        self._queue_of(seq).front.appendleft(seq)

    def popleft(self) -> Sequence:
        """Take the first sequence of the owner to serve next."""
        owner = self.next_owner()
        if owner is None:
            raise IndexError("no sequence waits")
        return self.take(owner)

    def take(self, owner: str) -> Sequence:
        """Take an owner's first sequence."""
        queue = self._queues[owner]
        seq = queue.popleft()
        self._size -= 1
        if not queue:
            del self._queues[owner]
        return seq

    def only(self, wanted: Collection[Sequence]) -> "WaitingQueue":
        """Return a new queue with the waiting sequences among `wanted`, in order. This queue is not changed."""
        part = WaitingQueue(self._aging_seconds, self.shares)
        for seq in self:
            if seq in wanted:
                part.append_front(seq)
        return part

    def keep(self, wanted: Callable[[Sequence], bool]) -> None:
        """Remove the sequences for which `wanted` is false."""
        for owner, queue in list(self._queues.items()):
            queue.keep(wanted)
            if not queue:
                del self._queues[owner]
        self._size = sum(map(len, self._queues.values()))

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every waiting owner is in the order exactly once, and the size is right."""
        entries = itertools.chain(*self._orders)
        ordered = sorted(queue.owner for _, _, queue in entries if self._queues.get(queue.owner) is queue)
        if ordered != sorted(self._queues):
            raise AssertionError(f"owners that wait are {sorted(self._queues)}, but the order has {ordered}")
        if self._size != sum(map(len, self._queues.values())):
            raise AssertionError(f"the queue counts {self._size} sequences")

    def _queue_of(self, seq: Sequence) -> _OwnerQueue:
        """Return the owner's queue for a sequence to be added; create it if there is none."""
        self._size += 1
        queue = self._queues.get(seq.owner)
        if queue is None:
            if not self._queues:
                for order in self._orders:
                    order.clear()
            queue = self._queues[seq.owner] = _OwnerQueue(seq.owner, self._aging_seconds, self._count)
            self.shares.join(seq.owner)
            self._push(queue)
        return queue


@dataclass(slots=True)
class Holding:
    """The shares of all slots and of all blocks that an owner's running sequences hold."""

    weight: float
    sequences: int = 0
    slots: float = 0.0
    blocks: float = 0.0
    share: float = 1.0
    """Its fair share, by weight, among the owners that have sequences."""

    @property
    def part(self) -> float:
        """The larger of the two shares."""
        return max(self.slots, self.blocks)

    @property
    def in_shares(self) -> float:
        return self.part / self.share


_NOTHING = Holding(1.0)


class Holdings:
    """The holdings of each owner's running sequences. A block that several sequences share counts for each of them.

    `running` is in order of admission; `num_slots` and `num_blocks` are the totals.
    """

    def __init__(self, running: Reversible[Sequence], waiting: WaitingQueue, num_slots: int, num_blocks: int) -> None:
        self._running, self._waiting = running, waiting
        self._by_owner = {owner: Holding(waiting.first_of(owner).weight) for owner in waiting.owners}
        for seq in running:
            holding = self._by_owner.get(seq.owner)
            if holding is None:
                holding = self._by_owner[seq.owner] = Holding(seq.weight)
            holding.sequences += 1
            holding.slots += 1 / num_slots
            holding.blocks += (len(seq.block_table) - seq.num_released_blocks) / num_blocks
        total = sum(holding.weight for holding in self._by_owner.values())
        for holding in self._by_owner.values():
            holding.share = holding.weight / total

    def __getitem__(self, owner: str) -> Holding:
        return self._by_owner.get(owner, _NOTHING)

    def newest_of_largest(self, above: float) -> Sequence | None:
        """Return the newest sequence of the owner with the largest holding, if that exceeds `above` fair shares.

        An owner's only sequence is never returned: two owners would otherwise preempt each other for ever in a single
        slot.
        """
        over = [owner for owner, each in self._by_owner.items() if each.sequences > 1 and each.in_shares > above]
        if not over:
            return None
        owner = max(over, key=lambda owner: self._by_owner[owner].in_shares)
        return next(seq for seq in reversed(self._running) if seq.owner == owner)

    def newest_of_most_blocks(self) -> Sequence:
        """Return the newest sequence of the owner that holds the most blocks relative to its share.

        It is preempted when a decode needs a block, so that no owner below its share loses blocks to another's growth.
        """
        return max(
            reversed(self._running), key=lambda seq: self._by_owner[seq.owner].blocks / self._by_owner[seq.owner].share
        )

    def wait_with(self, owner: str) -> set[str]:
        """Return the owners that must wait when an owner's sequence found no slot or blocks; empty means all owners.

        An owner that holds its share waits alone. With an owner that holds less, other owners that hold something wait
        too, so that smaller sequences do not always take the freed blocks. Owners that hold nothing wait for it only
        if it holds nothing either.
        """
        if self[owner].in_shares >= 1.0:
            return {owner}
        if not self[owner].sequences:
            return set()
        return {each for each in self._waiting.owners if self._by_owner[each].sequences}
