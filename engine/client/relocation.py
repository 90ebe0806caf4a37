"""`Relocation`: moves the requests of a replica that stays unavailable to others. Called by `CoreManager`, repeatedly.

A request that is suspected to have killed its core must not kill another replica's: it waits for its own, and the
other choices of its prompt with it. Should that take longer than a start may, other replicas try such requests, one at
a time and each alone. The crashes of a request are counted across replicas, so that moving it allows no more of them.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from engine.client.placement import Placement
from engine.client.replica import JournalEntry, Replica, RequestLocation

logger = logging.getLogger(__name__)

UNAVAILABLE_SECONDS = 3.0
"""Seconds that a replica is unavailable, while another serves, before its requests move. A small model's core serves
again sooner, so that nothing is moved; a large one's takes a minute."""


class Relocation:
    """Over all replicas, where each has a core of its own that can be lost alone."""

    def __init__(
        self, replicas: Sequence[Replica], placement: Placement, on_move: Callable[[int, int], object]
    ) -> None:
        """`on_move` is called with the number of requests that continue in a replica after tokens that they had, and
        with that replica.
        """
        self._replicas = replicas
        self._placement = placement
        self._on_move = on_move
        self._tried: JournalEntry | None = None
        """The suspect that was moved last, until it has a token or has ended."""

    def relocate_from(self, replica: Replica) -> None:
        """Move requests that have waited long enough for `replica`, which is unavailable, if another one serves."""
        serving = [each for each in self._replicas if each.is_serving]
        if not serving:
            return
        # Where all were unavailable, the first to serve again must not get all requests: others may follow at once.
        since = max(replica.supervisor.since, min(each.supervisor.since for each in serving))
        unavailable = time.monotonic() - since
        if unavailable < UNAVAILABLE_SECONDS:
            return
        movable = [entry for entry in replica.journal if entry.is_movable]
        # Choices share one list of their prompt's tokens.
        held = {id(each.request.prompt_token_ids) for each in self._entries() if _holds_back(each)}
        self._move(replica, [each for each in movable if id(each.request.prompt_token_ids) not in held], serving)
        if unavailable > replica.supervisor.longest_start and not self._is_trying():
            suspect = next((entry for entry in movable if _is_untested_suspect(entry)), None)
            if suspect is not None:
                self._tried = suspect
                self._move(replica, [suspect], serving)

    def note_step(self) -> None:
        """Move the requests that waited for the result of a suspect, if a core has reported it with a step."""
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
        """Whether a replica computes a suspect, or may have died of one and may still serve again."""
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
    """Whether the other choices of its prompt wait for its result."""
    return entry.is_suspect and (entry.is_movable or entry.location is not RequestLocation.FRONT_END)


def _is_untested_suspect(entry: JournalEntry) -> bool:
    return entry.is_suspect and not entry.paused
