"""`WaitingQueue`: the sequences that wait to be scheduled, by owner. `FairShares`: which owner is served next.
`Holdings`: which owner holds more slots or blocks than its share.

Owners share the engine by tokens: the owner with the least service is next (virtual-time fair queueing: P. Goyal et
al., "Start-time Fair Queueing", 1996). With a single owner, the order depends on priority and arrival time alone.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Reversible, Set
from dataclasses import dataclass
from typing import TypeAlias

from engine.sequence import Sequence

MAX_PRIORITY = 100
"""Priorities are limited to this, positive and negative, so that no request can be served first for ever."""

_OWNERS_KEPT = 64
"""Number of recorded owners beyond which obsolete ones are removed."""
_CREDIT = 4096.0
"""Most unused tokens of its share that an owner may use later, with precedence over others."""
_LATEST_OWNERS = 64
"""Most owners that are compared to find the one with the least recent service."""
_MOST_OWNERS = 4096
"""Most recorded owners without a sequence."""
_NEW_OWNERS = 16
"""Number of new owners up to which each of them has the weight of a known one."""
_NEW_SERVICE = 0.25
"""Recent service of new owners, relative to the mean, in addition to their own."""
_RECENT_SECONDS = 5.0
"""Recent service is the service of the last one to two periods of this length."""


class FairShares:
    """Tokens computed for each owner, divided by its weight: the owner with the fewest is served next.

    An owner that begins to wait starts at most `_CREDIT` tokens before the owner served last. It may so use that much
    of its recent unused share at once: an occasional prompt is computed without turns of others between its chunks.
    But no owner can accumulate turns without bound.

    A client with many addresses has as many owners, each of which would start with that credit. So new owners together
    weigh at most as much as `_NEW_OWNERS` or as the known ones that were served recently, and known owners with little
    recent service precede them. An owner is new until the end of the second period in which it was served.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._now = 0.0
        """Virtual time: the largest service of an owner at the start of its turn so far."""
        self._furthest = 0.0
        """Largest service that any owner reached by its turns."""
        self._most_kept = _OWNERS_KEPT
        self._recent: dict[str, float] = {}
        """Service of each owner in the current period."""
        self._before: dict[str, float] = {}
        """Service of each owner in the previous period."""
        self._period_ends = 0.0
        self._new: set[str] = set()
        """Owners that began to wait in the current period, without a record."""
        self._new_before: set[str] = set()
        """New owners that began to wait earlier."""
        self._served_once: set[str] = set()
        """New owners that were served in an earlier period."""
        self._new_served = 0.0
        """Least virtual time of new owners."""
        self._num_new = self._num_known = 0
        """Numbers of new and of other owners with recent service."""
        self.num_changes = 0
        """Number of times at which owners stopped being new."""

    def __len__(self) -> int:
        return len(self._served)

    def served(self, owner: str) -> float:
        """Return an owner's virtual time: its tokens over its weight, but at least that at which its credit ends."""
        at = self._served.get(owner)
        if at is None:
            at = self._new_served
        elif self.is_new(owner):
            at = max(at, self._new_served)
        return max(at, self._now - _CREDIT)

    def recorded(self, owner: str) -> float:
        """Return the virtual time of an owner that waits, without the bound that all new owners, or all others, share.

        In either group, owners are in the order of `served` if they are in that of `recorded`.
        """
        return self._served[owner]

    def is_new(self, owner: str) -> bool:
        """Return whether an owner is new. It remains so at least until `num_changes` grows."""
        return owner in self._new or owner in self._new_before or owner not in self._served

    def join(self, owner: str) -> None:
        """Note that an owner begins to wait."""
        if owner not in self._served:
            self._new.add(owner)
        self._served[owner] = self.served(owner)

    def forgo(self, owner: str) -> None:
        """Note that an owner is skipped because it holds its share, so that it accumulates no turns meanwhile."""
        self._served[owner] = max(self.served(owner), self._now)

    def serve(self, owner: str, cost: float) -> None:
        """Record an owner's turn. `cost` is its number of tokens divided by its weight."""
        at = self.served(owner)
        self._note(owner, cost)
        self._now = max(self._now, at)
        self._served[owner] = at + cost
        self._furthest = max(self._furthest, at + cost)

    def catch_up(self) -> None:
        """Note that no owner waits for a turn: all owners that begin to wait later are equal."""
        self._now = max(self._now, self._furthest)
        self._new_served = min(self._new_served, self._now)

    def charge(self, owner: str, cost: float) -> None:
        """Add `cost`, tokens divided by the owner's weight, that a step computes for it without a turn."""
        self._served[owner] = self.served(owner) + cost
        self._note(owner, cost)

    def begin_step(self, now: float) -> None:
        """Set the time in seconds, on any monotonic clock."""
        if now >= self._period_ends:
            new = self._new_before & self._served.keys()
            served = (new | self._new) & self._recent.keys()
            known = served & self._served_once
            for owner in known:
                self._served[owner] = self.served(owner)
            self.num_changes += bool(known)
            self._new_before, self._new = (self._new | new) - known, set()
            self._served_once = (self._served_once | served) & self._new_before
            self._before, self._recent = self._recent, {}
            self._num_known = len((self._before.keys() & self._served.keys()) - self._new_before)
            self._num_new = len(self._before) - self._num_known
            self._period_ends = now + _RECENT_SECONDS

    def lightest(self, owners: Iterable[str]) -> str | None:
        """Return the owner among `owners` with the least recent service; None if there are none."""
        recent, before = self._recent, self._before
        of_new = _NEW_SERVICE * self._mean

        def service(owner: str) -> float:
            own = recent.get(owner, 0.0) + before.get(owner, 0.0)
            return own + of_new if self.is_new(owner) else own

        return min(owners, key=service, default=None)

    def recent(self, owner: str) -> float:
        """Return the recent service of an owner, relative to the mean of all owners. Thread-safe."""
        if not (mean := self._mean):
            return 0.0
        own = (self._recent.get(owner, 0.0) + self._before.get(owner, 0.0)) / mean
        return own + _NEW_SERVICE if self._num_known and self.is_new(owner) else own

    @property
    def _mean(self) -> float:
        """Mean recent service of all owners, of which new ones count by their weight."""
        number = self._num_known + min(self._num_new, self._weight_of_new)
        # These calls run no Python code between two entries, so another thread cannot add an entry meanwhile.
        return (sum(self._recent.values()) + sum(self._before.values())) / number if number else 0.0

    @property
    def _weight_of_new(self) -> int:
        """The most weight of all new owners together."""
        return max(self._num_known, _NEW_OWNERS)

    def _note(self, owner: str, cost: float) -> None:
        """Add to the recent service of an owner."""
        is_new, is_first = self.is_new(owner), owner not in self._recent and owner not in self._before
        self._num_new += is_first and is_new
        self._num_known += is_first and not is_new
        if is_new:
            self._new_served = max(self._new_served, self._now - _CREDIT) + cost / self._weight_of_new
        self._recent[owner] = self._recent.get(owner, 0.0) + cost

    @property
    def is_crowded(self) -> bool:
        """Whether `forget_all_but` should be called."""
        return len(self._served) > self._most_kept

    def forget_all_but(self, live: Set[str]) -> None:
        """Remove the owners that have no sequence and no service that would matter if they returned."""
        known = (self._recent.keys() | self._before.keys()) - self._new - self._new_before
        kept = {owner: at for owner, at in self._served.items() if owner in live or owner in known or at > self._now}
        if len(kept) > len(live) + _MOST_OWNERS:
            kept = {owner: at for owner, at in kept.items() if owner in live}
        self._served = kept
        self._most_kept = _OWNERS_KEPT + 2 * len(self._served)

    def reset(self) -> None:
        """Remove all owners, because nothing is left to compute."""
        self._served.clear()
        self._recent, self._before = {}, {}
        self._new, self._new_before, self._served_once = set(), set(), set()
        self._new_served = 0.0
        self._num_new = self._num_known = 0
        self._now = self._furthest = 0.0
        self._most_kept = _OWNERS_KEPT


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
        self.shares = FairShares() if shares is None else shares
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
