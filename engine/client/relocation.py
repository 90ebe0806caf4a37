"""`Relocation`: has requests of a replica that stays away go on in others. Asked by `CoreManager`, again and again.

A request that may have killed the core that had it is not to kill another replica's: it waits for its own, and the
other choices of its prompt with it. Should that take longer than a start may, others try such requests, one at a time
and each alone. The deaths that it was in are counted on wherever it is, so it ends with as many as without.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from engine.client.journal import Entry, Place
from engine.client.placement import Placement
from engine.client.replica import Replica

_log = logging.getLogger(__name__)

AWAY_SECONDS = 3.0
"""That a replica is away, while another serves, before its requests move. A small model's core is back sooner, and
nothing need be moved; a large one's takes a minute."""


class Relocation:
    """Over all replicas, where each lives by itself."""

    def __init__(
        self, replicas: Sequence[Replica], placement: Placement, on_move: Callable[[int, int], object]
    ) -> None:
        """`on_move` is called with the number of requests that a replica goes on with behind tokens that they had, and
        with that replica.
        """
        self._replicas = replicas
        self._placement = placement
        self._on_move = on_move
        self._tried: Entry | None = None
        """The suspect that was moved last, until it is known what it does."""

    def look_after(self, replica: Replica) -> None:
        """Move what shall wait no longer for `replica`, which is away; nothing while no other serves."""
        serving = [each for each in self._replicas if each.is_serving]
        if not serving:
            return
        # Where all were away, the first one back is not to be given everybody's: the others may be back as soon.
        since = max(replica.supervisor.since, min(each.supervisor.since for each in serving))
        away = time.monotonic() - since
        if away < AWAY_SECONDS:
            return
        movable = [entry for entry in replica.journal if entry.may_move]
        # Choices share one list of their prompt's tokens.
        held = {id(each.request.prompt_token_ids) for each in self._entries() if _holds_back(each)}
        self._move(replica, [each for each in movable if id(each.request.prompt_token_ids) not in held], serving)
        if away > replica.supervisor.longest_start and not self._is_trying():
            suspect = next((entry for entry in movable if _is_to_be_tried(entry)), None)
            if suspect is not None:
                self._tried = suspect
                self._move(replica, [suspect], serving)

    def note_step(self) -> None:
        """A core has told of a step. Who waits until it is known what a suspect does need not wait any longer."""
        tried = self._tried
        if tried is None or (tried.is_suspect and self._is_live(tried)):
            return
        self._tried = None
        for replica in self._replicas:
            if not replica.is_serving:
                self.look_after(replica)

    def _is_live(self, entry: Entry) -> bool:
        return any(entry.request.request_id in replica.live for replica in self._replicas)

    def _entries(self) -> Iterator[Entry]:
        for replica in self._replicas:
            yield from replica.journal

    def _is_trying(self) -> bool:
        """Whether some replica computes a suspect, or has died and may be back: its last step may have been one."""
        now = time.monotonic()
        for replica in self._replicas:
            if not replica.is_serving:
                if now - replica.supervisor.since <= replica.supervisor.longest_start:
                    return True
            elif any(map(_is_to_be_tried, replica.journal)):
                return True
        return False

    def _move(self, source: Replica, entries: Sequence[Entry], among: Sequence[Replica]) -> None:
        if not entries:
            return
        source.journal.give_away(entries)
        by_id = {entry.request.request_id: entry for entry in entries}
        chosen = self._placement.move([entry.request for entry in entries], [each.number for each in among])
        for number, requests in chosen.items():
            target, moved = self._replicas[number], [by_id[request.request_id] for request in requests]
            resumed = sum(bool(entry.token_ids) for entry in moved)
            _log.warning(
                "%s is away: %d of its requests go on in %s, %d others begin there",
                source.supervisor.name,
                resumed,
                target.supervisor.name,
                len(moved) - resumed,
            )
            self._on_move(resumed, number)
            target.take_over(moved)


def _holds_back(entry: Entry) -> bool:
    """Whether the other choices of its prompt wait until it is known what it does."""
    return entry.is_suspect and (entry.may_move or entry.place is not Place.HERE)


def _is_to_be_tried(entry: Entry) -> bool:
    return entry.is_suspect and not entry.paused
