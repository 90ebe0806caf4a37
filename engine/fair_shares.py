"""`FairShares`: the service of each owner of shared work, which determines the owner that is served next.

Service is measured in units of the work: tokens of the engine, or seconds of a thread. The owner with the least
service is next (virtual-time fair queueing: P. Goyal et al., "Start-time Fair Queueing", 1996).
"""

import math
from collections.abc import Iterable, Set

_OWNERS_RECORDED = 64
"""Number of recorded owners beyond which obsolete ones are removed."""
_MOST_OWNERS = 4096
"""Most recorded owners without a sequence."""
_NEW_OWNERS = 16
"""Number of new owners up to which each of them has the weight of a known one."""
_NEW_SERVICE = 0.25
"""Recent service of new owners, relative to the mean, in addition to their own."""
_RECENT_SECONDS = 5.0
"""Recent service is the service of the last one to two periods of this length."""


class FairShares:
    """The service of each owner, divided by its weight: the owner with the least is served next.

    An owner that begins to wait starts at most `credit` before the owner served last. It may so use that much of its
    recent unused share at once: an occasional prompt is computed without turns of others between its chunks. But no
    owner can accumulate turns without bound.

    A client with many addresses has as many owners, each of which would start with that credit. So new owners together
    weigh at most as much as `_NEW_OWNERS` or as the known ones that were served recently, and known owners with little
    recent service precede them. An owner is new until the end of the second period in which it was served.
    """

    def __init__(self, credit: float) -> None:
        """`credit`: the most unused service of its share that an owner may use later, with precedence over others."""
        self._credit = credit
        self._served: dict[str, float] = {}
        self._now = 0.0
        """Virtual time: the largest service of an owner at the start of its turn so far."""
        self._furthest = 0.0
        """Largest service that any owner reached by its turns."""
        self._most_recorded = _OWNERS_RECORDED
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
        """Return an owner's virtual time: its service over its weight, but at least that at which its credit ends."""
        at = self._served.get(owner)
        if at is None:
            at = self._new_served
        elif self.is_new(owner):
            at = max(at, self._new_served)
        return max(at, self._now - self._credit)

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
        """Record an owner's turn. `cost` is its service divided by its weight."""
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
        """Add `cost`, service divided by the owner's weight, that it got without a turn."""
        self._served[owner] = self.served(owner) + cost
        self._note(owner, cost)

    def set_time(self, now: float) -> None:
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
            is_past = now >= self._period_ends + _RECENT_SECONDS
            self._before, self._recent = {} if is_past else self._recent, {}
            self._num_known = len((self._before.keys() & self._served.keys()) - self._new_before)
            self._num_new = len(self._before) - self._num_known
            self._period_ends = now + _RECENT_SECONDS

    def from_lightest(self, owners: Iterable[str]) -> list[str]:
        """Return `owners` in the order of their recent service, the one with the least first."""
        recent, before = self._recent, self._before
        of_new = _NEW_SERVICE * self._mean

        def service(owner: str) -> float:
            own = recent.get(owner, 0.0) + before.get(owner, 0.0)
            return own + of_new if self.is_new(owner) else own

        return sorted(owners, key=service)

    def least_recent(self) -> float:
        """Return the least `recent` of known owners that were served recently; infinite if none was. Thread-safe."""
        recent, before = self._recent.copy(), self._before.copy()
        known = (each for each in recent.keys() | before.keys() if not self.is_new(each))
        least = min((recent.get(each, 0.0) + before.get(each, 0.0) for each in known), default=math.inf)
        mean = self._mean
        return least / mean if mean else math.inf

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
            self._new_served = max(self._new_served, self._now - self._credit) + cost / self._weight_of_new
        self._recent[owner] = self._recent.get(owner, 0.0) + cost

    @property
    def is_crowded(self) -> bool:
        """Whether `forget_all_but` should be called."""
        return len(self._served) > self._most_recorded

    def forget_all_but(self, live: Set[str]) -> None:
        """Remove the owners that have no sequence and no service that would matter if they returned."""
        known = (self._recent.keys() | self._before.keys()) - self._new - self._new_before
        served = {owner: at for owner, at in self._served.items() if owner in live or owner in known or at > self._now}
        if len(served) > len(live) + _MOST_OWNERS:
            served = {owner: at for owner, at in served.items() if owner in live}
        self._served = served
        self._most_recorded = _OWNERS_RECORDED + 2 * len(self._served)

    def restart(self, owner: str) -> None:
        """Make all owners equal, because nothing is left to compute when `owner` begins to wait.

        Recent service counts further, so that owners whose work comes in bursts are not the lightest at the start of
        each. That of `owner` does not: what it uses of an idle engine delays no other. It does not become new by that.
        """
        is_new, was_served = self.is_new(owner), owner in self._recent or owner in self._before
        self._num_new -= was_served and is_new
        self._num_known -= was_served and not is_new
        for service in (self._recent, self._before):
            service.pop(owner, None)
        known = self._recent.keys() | self._before.keys() | (set() if is_new else {owner})
        self._served = dict.fromkeys(self._served.keys() & known, 0.0)
        self._new_served = self._now = self._furthest = 0.0
        self._most_recorded = _OWNERS_RECORDED
