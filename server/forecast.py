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
        self._promises: list[tuple[float, int, int]] = []
        """(time, sequences, tokens) of those who were told to come, a heap by time."""
        self._promised_sequences = 0
        self._promised_tokens = 0

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
        taken until their time has come, so that they do not all come at once.
        """
        self._measure(now)
        while self._promises and self._promises[0][0] <= now:
            _, kept_sequences, kept_tokens = heapq.heappop(self._promises)
            self._promised_sequences -= kept_sequences
            self._promised_tokens -= kept_tokens
        seconds = max(
            self._seconds_for(excess + self._promised_sequences, self._sequences),
            self._seconds_for(excess_tokens + self._promised_tokens, self._tokens),
            _SOONEST_SECONDS,
        )
        if seconds >= LATEST_SECONDS:
            # No promise: what is that far away nobody can foresee.
            return LATEST_SECONDS
        heapq.heappush(self._promises, (now + seconds, sequences, tokens))
        self._promised_sequences += sequences
        self._promised_tokens += tokens
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
