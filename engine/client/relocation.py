"""`Relocation`: moves requests of a replica that stays unavailable to other replicas. `CoreManager` calls it
repeatedly.

A request that is suspected to have crashed its core must not crash another replica's core: it waits for its own
replica, together with the other choices of its prompt. If that takes longer than a start may, other replicas try such
requests one at a time. The crashes of a request are counted across replicas, so that moving it does not allow more of
them.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from engine.client.placement import Placement
from engine.client.replica import JournalEntry, Replica, RequestLocation

logger = logging.getLogger(__name__)

UNAVAILABLE_SECONDS = 3.0
"""Seconds for which a replica must be unavailable, while another serves, before its requests move. The core of a small
model restarts faster, so nothing is moved; that of a large model takes a minute."""


class Relocation:
    """Moves requests between replicas that do not compute in lockstep, so that one core can fail alone."""

    def __init__(
        self, replicas: Sequence[Replica], placement: Placement, on_move: Callable[[int, int], object]
    ) -> None:
        """`on_move` is called with the number of requests with tokens that continue in a replica, and with its
        number."""
        self._replicas = replicas
        self._placement = placement
        self._on_move = on_move
        self._tried: JournalEntry | None = None
        """The suspected request that was moved last, until it has a further token or has ended."""

    def relocate_from(self, replica: Replica) -> None:
        """Move the requests that have waited long enough for the unavailable `replica`, if another one serves."""
        serving = [each for each in self._replicas if each.is_serving]
        if not serving:
            return
        # If all were unavailable, the first one to serve again must not get all requests: others may follow soon.
        since = max(replica.supervisor.since, min(each.supervisor.since for each in serving))
        unavailable = time.monotonic() - since
        if unavailable < UNAVAILABLE_SECONDS:
            return
        movable = [entry for entry in replica.journal if entry.is_movable]
        # The choices of a prompt share its list of tokens.
        held = {id(each.request.prompt_token_ids) for each in self._entries() if _holds_back(each)}
        self._move(replica, [each for each in movable if id(each.request.prompt_token_ids) not in held], serving)
        if unavailable > replica.supervisor.longest_start and not self._is_trying():
            suspect = next((entry for entry in movable if _is_untested_suspect(entry)), None)
            if suspect is not None:
                self._tried = suspect
                self._move(replica, [suspect], serving)

    def note_step(self) -> None:
        """Move the requests that waited for a suspected request, if a core's step has shown that it is harmless."""
        tried = self._tried
        if tried is None or (tried.is_suspect and self._is_live(tried)):
            return
        self._tried = None
        for replica in self._replicas:
            if not replica.is_serving:
                self.relocate_from(replica)

    def _is_live(self, entry: JournalEntry) -> bool:
        return any(entry.request.request_id in replica.live for replica in self._replicas)

    def _entries(self) -> Iterator[JournalEntry]:
        for replica in self._replicas:
            yield from replica.journal

    def _is_trying(self) -> bool:
        """Return whether a replica computes a suspected request, or may have crashed on it and is being restarted."""
        now = time.monotonic()
        for replica in self._replicas:
            if not replica.is_serving:
                if now - replica.supervisor.since <= replica.supervisor.longest_start:
                    return True
            elif any(map(_is_untested_suspect, replica.journal)):
                return True
        return False

    def _move(self, source: Replica, entries: Sequence[JournalEntry], among: Sequence[Replica]) -> None:
        if not entries:
            return
        source.journal.export_entries(entries)
        by_id = {entry.request.request_id: entry for entry in entries}
        chosen = self._placement.move([entry.request for entry in entries], [each.number for each in among])
        for number, requests in chosen.items():
            target, moved = self._replicas[number], [by_id[request.request_id] for request in requests]
            resumed = sum(bool(entry.token_ids) for entry in moved)
            logger.warning(
                "%s is unavailable: %d of its requests continue in %s, %d others begin there",
                source.supervisor.name,
                resumed,
                target.supervisor.name,
                len(moved) - resumed,
            )
            self._on_move(resumed, number)
            target.take_over(moved)


def _holds_back(entry: JournalEntry) -> bool:
    """Return whether the other choices of its prompt wait for its result."""
    return entry.is_suspect and (entry.is_movable or entry.location is not RequestLocation.FRONT_END)


def _is_untested_suspect(entry: JournalEntry) -> bool:
    return entry.is_suspect and not entry.paused
