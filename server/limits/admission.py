"""`Admission`: the bounded queue in front of the engine. One a server.

`server.streaming.generation` asks it for each request; the hub tells it what became of the sequences.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

from starlette.requests import ClientDisconnect

from engine.config.config import Config
from engine.messages import ModelInfo
from engine.text.io_processor import InvalidRequest
from server.errors import ApiError, NotReady, Overloaded, ShuttingDown
from server.metrics import Metrics

# [forecast] `Forecast`: when a full queue will have room, by how fast it has been emptying. Asked by
# `server.limits.admission`.

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


_KEY_SECONDS = 1.0
"""When a key with all its requests running may try again: how long these run, nobody knows."""


class Limits(NamedTuple):
    """Bounds of the queue and of each key's part; None: no bound."""

    sequences: int | None = None
    tokens: int | None = None
    requests_per_key: int | None = None


class Admission:
    """Knows which sequences are queued: submitted, and without an output so far."""

    def __init__(self, limits: Limits, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._queued: dict[int, int] = {}
        """Prompt tokens of each queued sequence, by its id."""
        self._queued_tokens = 0
        self._live_by_owner: dict[object, int] = {}
        """HTTP requests that were admitted and have not ended."""
        self._forecast = Forecast()

    @classmethod
    def of(cls, config: Config, metrics: Metrics) -> Self:
        """As the flags say. Until `open`, a bound by tokens that follows from the cache is not known."""
        settings = config.server_config
        running = config.max_num_seqs * config.parallel_config.data_parallel_size
        sequences = running if settings.max_queued_requests is None else settings.max_queued_requests
        return cls(Limits(sequences, settings.max_queued_tokens, settings.max_requests_per_key), metrics)

    def open(self, model: ModelInfo, num_replicas: int = 1) -> None:
        """The model is loaded: unless a flag says otherwise, prompts may wait that fill its KV caches once."""
        if self._limits.tokens is None:
            capacity = model.block_size * model.num_kvcache_blocks * num_replicas
            self._limits = self._limits._replace(tokens=capacity)

    @property
    def num_queued(self) -> int:
        """Sequences without an output so far."""
        return len(self._queued)

    @property
    def queued_tokens(self) -> int:
        """Tokens of their prompts."""
        return self._queued_tokens

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued and no request of any key is live."""
        return not self._queued and not self._queued_tokens and not self._live_by_owner

    # -- requests -----------------------------------------------------------------------------------------------

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Around all that comes before `admit`: counts a request that is refused there, as one sequence."""
        try:
            yield
        except (Overloaded, ClientDisconnect):
            # The one was counted by `check`; the other never asked.
            raise
        except Exception as error:
            self._metrics.received(1)
            self._metrics.rejected(_why_refused(error), 1)
            raise

    def check(self, owner: object, sequences: int) -> None:
        """Refuse what `admit` would refuse whatever its prompts are, before work is put into them.

        Raises `Overloaded`, and counts it.
        """
        refused = self._refusal(owner, sequences, 1)
        if refused is not None:
            self._metrics.received(sequences)
            self._refuse(*refused, sequences)

    def admit(self, owner: object, prompt_tokens: Sequence[int]) -> None:
        """Let a request of so many sequences in, until `release`. Raises `Overloaded`.

        `owner` is whose request it is. Each number of `prompt_tokens` is what a sequence adds to the queue. A request
        that is larger than a whole bound is let in when nothing is queued: it would never be otherwise.
        """
        sequences = len(prompt_tokens)
        self._metrics.received(sequences)
        refused = self._refusal(owner, sequences, sum(prompt_tokens))
        if refused is not None:
            self._refuse(*refused, sequences)
        self._forecast.came(self._clock(), sequences)
        self._live_by_owner[owner] = self._live_by_owner.get(owner, 0) + 1

    def release(self, owner: object) -> None:
        """An admitted request has ended."""
        live = self._live_by_owner[owner] - 1
        if live:
            self._live_by_owner[owner] = live
        else:
            del self._live_by_owner[owner]

    # -- sequences ----------------------------------------------------------------------------------------------

    def queue(self, request_id: int, prompt_tokens: int) -> None:
        """A sequence of an admitted request was submitted."""
        if not self._queued:
            self._forecast.begin(self._clock())
        self._queued[request_id] = prompt_tokens
        self._queued_tokens += prompt_tokens

    def start(self, request_id: int) -> None:
        """The first output of a sequence came."""
        self._leave(request_id, served=True)

    def drop(self, request_id: int) -> None:
        """A sequence ended, or was taken out of the core; nothing happens to one that has left the queue."""
        self._leave(request_id, served=False)

    def _leave(self, request_id: int, *, served: bool) -> None:
        tokens = self._queued.pop(request_id, None)
        if tokens is None:
            return
        self._queued_tokens -= tokens
        now = self._clock()
        if served:
            self._forecast.left(now, 1, tokens)
        if not self._queued:
            self._forecast.end(now)

    # -- refusals -----------------------------------------------------------------------------------------------

    def _refusal(self, owner: object, sequences: int, tokens: int) -> tuple[str, Overloaded] | None:
        """Why a request cannot be admitted now: the metrics' word for it, and the error; None if it can."""
        limits = self._limits
        live = self._live_by_owner.get(owner, 0)
        if limits.requests_per_key is not None and live >= limits.requests_per_key:
            whose = "without a key" if owner is None else "of this key"
            sentence = (
                f"{live} requests {whose} are running, and this server runs at most {limits.requests_per_key} at a "
                "time (max_requests_per_key)"
            )
            return "key", Overloaded(sentence, "requests", _KEY_SECONDS)
        if not self._queued:
            return None
        waiting = len(self._queued)
        most, most_tokens = limits.sequences or math.inf, limits.tokens or math.inf
        if waiting + sequences > most:
            sentence = (
                f"{waiting} requests are waiting, and with the {sequences} of this one more than {most} would, the "
                "most that this server lets wait (max_queued_requests)"
            )
            return "queue_requests", Overloaded(sentence, "requests", self._seconds(sequences, tokens))
        if self._queued_tokens + tokens > most_tokens:
            sentence = (
                f"prompts of {self._queued_tokens} tokens are waiting, and with the {tokens} of this one more than "
                f"{most_tokens} would, the most that this server lets wait (max_queued_tokens)"
            )
            return "queue_tokens", Overloaded(sentence, "tokens", self._seconds(sequences, tokens))
        return None

    def _refuse(self, reason: str, error: Overloaded, sequences: int) -> None:
        self._metrics.rejected(reason, sequences)
        raise error

    def _seconds(self, sequences: int, tokens: int) -> float:
        """Until there is room for a request of this size, which is promised to it."""
        excess = excess_tokens = 0
        if self._limits.sequences is not None:
            sequences = min(sequences, self._limits.sequences)
            excess = len(self._queued) + sequences - self._limits.sequences
        if self._limits.tokens is not None:
            tokens = min(tokens, self._limits.tokens)
            excess_tokens = self._queued_tokens + tokens - self._limits.tokens
        return self._forecast.promise(self._clock(), excess, sequences, excess_tokens, tokens)


def _why_refused(error: Exception) -> str:
    """The metrics' word for a request that was refused before it asked for admission."""
    if isinstance(error, ShuttingDown):
        return "draining"
    if isinstance(error, NotReady):
        return "not_ready"
    is_clients = isinstance(error, InvalidRequest) or (isinstance(error, ApiError) and error.status < 500)
    return "invalid" if is_clients else "error"
