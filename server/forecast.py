"""`Forecast`: when a full queue will have room, by how fast it has been emptying. Asked by `server.admission`."""

import heapq
import math

LATEST_SECONDS = 60.0
"""Clients of OpenAI's ignore a later time than this."""

_WINDOW_SECONDS = 10.0
"""How far back the rate is measured: what is older than this counts for a third."""

_MARGIN = 1.2
"""Times the computed time: a queue empties by batches, and whoever comes too early is turned away once more."""

_SOONEST_SECONDS = 0.05

_LEAST_KEPT = 2 / 3
"""The share of promises that clients must come for. Where it is less, the others are not expected any more."""

_KEPT_SECONDS = 5.0
"""That it is measured over, at least: who rounds a time up to whole seconds comes up to one late."""

_KEPT_SEQUENCES = 8
"""That must have been expected in that time: a few that stay away prove nothing."""


class Forecast:
    """Measures the drain rate, and hands out the times at which who was refused may come again.

    Only the time in which something waits counts: an idle queue tells nothing of how fast a full one empties. All
    times are seconds on `time.monotonic`'s clock.
    """

    def __init__(self) -> None:
        # What a server is taken for that has not let anybody through: 20 requests a second of 1000 tokens each. It
        # weighs as much as half a tenth of a second's measuring.
        self._busy_seconds, self._sequences, self._tokens = 0.05, 1.0, 1000.0
        self._busy_since: float | None = None
        self._promised = _Promised()

    def came(self, now: float, sequences: int) -> None:
        """A request of so many sequences was let in; `promise` tells of one that was not."""
        self._promised.came(now, sequences)

    def begin(self, now: float) -> None:
        """Something waits from now on."""
        self._busy_since = now

    def left(self, now: float, sequences: int, tokens: int) -> None:
        """Sequences left the queue because they were served."""
        self._measure(now)
        self._sequences += sequences
        self._tokens += tokens

    def end(self, now: float) -> None:
        """Nothing waits any more."""
        self._measure(now)
        self._busy_since = None

    def promise(self, now: float, excess: int, sequences: int, excess_tokens: int, tokens: int) -> float:
        """Seconds until there is room for a request that is refused now, at most `LATEST_SECONDS`.

        `excess` and `excess_tokens`: what must leave the queue before. Room that was promised to others counts as
        taken until their time has come, so that they do not all come at once; unless too few of them do come.
        """
        self._measure(now)
        self._promised.came(now, sequences)
        seconds = max(
            self._seconds_for(excess + self._promised.sequences, self._sequences),
            self._seconds_for(excess_tokens + self._promised.tokens, self._tokens),
            _SOONEST_SECONDS,
        )
        if seconds >= LATEST_SECONDS:
            # No promise: what is that far away nobody can foresee.
            return LATEST_SECONDS
        self._promised.add(now, seconds, sequences, tokens)
        return seconds

    def _measure(self, now: float) -> None:
        """Let the time since the last call count, and what was before it count less."""
        if self._busy_since is None:
            return
        passed, self._busy_since = now - self._busy_since, now
        fading = math.exp(-passed / _WINDOW_SECONDS)
        self._sequences *= fading
        self._tokens *= fading
        self._busy_seconds = self._busy_seconds * fading + passed

    def _seconds_for(self, amount: int, drained: float) -> float:
        if amount <= 0:
            return 0.0
        return _MARGIN * amount * self._busy_seconds / drained if drained > 1e-9 else math.inf


class _Promised:
    """Room that is kept for those who were told to come, until their time has come, or too few of them do.

    Who it is that comes, nobody knows: while fewer have come than were told to, whoever does is one of those.
    """

    def __init__(self) -> None:
        self.sequences = 0
        self.tokens = 0
        self._times: list[tuple[float, int, int]] = []
        """(time, sequences, tokens), a heap."""
        self._since = 0.0
        """When the two counts below began."""
        self._due = 0
        self._kept = 0

    def add(self, now: float, seconds: float, sequences: int, tokens: int) -> None:
        """Somebody was told to come in so many seconds."""
        if not self._times:
            self._count_anew(now)
        heapq.heappush(self._times, (now + seconds, sequences, tokens))
        self.sequences += sequences
        self.tokens += tokens

    def came(self, now: float, sequences: int) -> None:
        """Somebody came, and was let in or not."""
        while self._times and self._times[0][0] <= now:
            _, due, due_tokens = heapq.heappop(self._times)
            self.sequences -= due
            self.tokens -= due_tokens
            self._due += due
        # Before this one counts: of many that come at once each would stand for one that stayed away.
        if now - self._since >= _KEPT_SECONDS and self._due >= _KEPT_SEQUENCES:
            if self._kept < _LEAST_KEPT * self._due:
                self._times.clear()
                self.sequences = self.tokens = 0
            self._count_anew(now)
        self._kept = min(self._kept + sequences, self._due)

    def _count_anew(self, now: float) -> None:
        self._since, self._due, self._kept = now, 0, 0
