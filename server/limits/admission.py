"""`Admission`: the bounded queue before the engine, and `QueueForecast`: when a full queue will have room again.

`Generation` asks for the admission of each request; the hub reports when its sequences are queued, start and end. A
request that is refused gets a 429 with the forecast's time.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

from starlette.requests import ClientDisconnect

from engine.config.config import Config, ServerConfig
from engine.messages import ModelInfo
from engine.text.io_processor import InvalidRequest
from server.errors import ApiError, NotReady, Overloaded, ShuttingDown
from server.limits.accounts import Accounts, Tally, has_room
from server.limits.jobs import TooManyJobs
from server.limits.owners import Owner
from server.limits.quotas import QuotaExceeded, QuotaMeter
from server.metrics import Metrics

LATEST_SECONDS = 60.0
"""OpenAI's clients ignore a longer time."""

_WINDOW_SECONDS = 10.0
"""Time constant of the drain rate: a measurement of this age counts for a third."""

_MARGIN = 1.2
"""Factor on the computed time: a queue drains in batches, and a client that returns too early is refused again."""

_SOONEST_SECONDS = 0.05

_MAX_RESERVING = 1024
"""Beyond this number, owners whose reservations have ended are forgotten. The number at most doubles between two
scans, so that the cost of scanning is constant for each refusal."""

_MIN_RETURN_SHARE = 2 / 3
"""Share of the reservations that clients must return for. Below it, the others are dropped."""

_RETURN_SECONDS = 5.0
"""Shortest time over which that share is measured: clients that round up to seconds return up to one late."""

_RETURN_SEQUENCES = 8
"""Fewest sequences that must have been due in that time: a few that do not return prove nothing."""


class QueueForecast:
    """Measures how fast the queue drains, and gives refused clients the time at which to try again.

    Only the time in which sequences wait counts: an idle queue does not show how fast a full one drains. All times are
    seconds on `time.monotonic`'s clock.
    """

    def __init__(self) -> None:
        # Until it is measured, the assumed rate is 20 requests a second of 1000 tokens each, with the weight of a
        # measurement over 0.05 s.
        self._busy_seconds, self._sequences, self._tokens = 0.05, 1.0, 1000.0
        self._busy_since: float | None = None
        self._reservations: dict[str, _RetryReservations] = {}
        """By party: an owner that is refused often waits for its own reservations, and for no other owner's."""
        self._most_reserving = _MAX_RESERVING

    def arrived(self, now: float, sequences: int, party: str = "") -> None:
        """A request of so many sequences was admitted. For a refused one, call `retry_after`."""
        if (reservations := self._reservations.get(party)) is not None:
            reservations.arrived(now, sequences)
            if not reservations.sequences:
                del self._reservations[party]

    def start_busy(self, now: float) -> None:
        """The queue is no longer empty."""
        self._busy_since = now

    def served(self, now: float, sequences: int, tokens: int) -> None:
        """Sequences left the queue because they were served."""
        self._measure(now)
        self._sequences += sequences
        self._tokens += tokens

    def end_busy(self, now: float) -> None:
        """The queue is empty."""
        self._measure(now)
        self._busy_since = None

    def retry_after(
        self,
        now: float,
        excess: int,
        sequences: int,
        excess_tokens: int,
        tokens: int,
        *,
        party: str = "",
        num_owners: int = 1,
    ) -> float:
        """Seconds until there is room for a request that is refused now, at most `LATEST_SECONDS`.

        `excess` and `excess_tokens`: what must leave the queue first. The room is reserved until that time, so that
        refused clients do not all return at once, unless too few of them return. `num_owners` share the queue: so much
        longer takes what this owner has reserved before.
        """
        self._measure(now)
        if len(self._reservations) > self._most_reserving:
            # Most of these owners never return, so that no other call would remove their reservations.
            self._reservations = {each: of for each, of in self._reservations.items() if of.ends > now}
            self._most_reserving = max(_MAX_RESERVING, 2 * len(self._reservations))
        reservations = self._reservations.setdefault(party, _RetryReservations())
        reservations.arrived(now, sequences)
        seconds = max(
            self._seconds_for(excess + num_owners * reservations.sequences, self._sequences),
            self._seconds_for(excess_tokens + num_owners * reservations.tokens, self._tokens),
            _SOONEST_SECONDS,
        )
        if seconds >= LATEST_SECONDS:
            # No reservation: a forecast over such a time is too uncertain.
            return LATEST_SECONDS
        reservations.add(now, seconds, sequences, tokens)
        return seconds

    def _measure(self, now: float) -> None:
        """Add the time since the last call to the measurement, and let earlier times fade."""
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


class _RetryReservations:
    """Room in the queue for clients that were given a time, until that time, or until too few of them return.

    Clients cannot be told apart: every arrival counts as a return while there are fewer arrivals than were due.
    """

    def __init__(self) -> None:
        self.sequences = 0
        self.tokens = 0
        self.ends = -math.inf
        """The latest of the times."""
        self._times: list[tuple[float, int, int]] = []
        """(time, sequences, tokens), a heap."""
        self._since = 0.0
        """When the two counts below began."""
        self._num_due = 0
        self._num_returned = 0

    def add(self, now: float, seconds: float, sequences: int, tokens: int) -> None:
        """Reserve room for a client that was given so many seconds."""
        if not self._times:
            self._restart_counts(now)
        heapq.heappush(self._times, (now + seconds, sequences, tokens))
        self.ends = max(self.ends, now + seconds)
        self.sequences += sequences
        self.tokens += tokens

    def arrived(self, now: float, sequences: int) -> None:
        """A request arrived, whether it is admitted or refused."""
        while self._times and self._times[0][0] <= now:
            _, due, due_tokens = heapq.heappop(self._times)
            self.sequences -= due
            self.tokens -= due_tokens
            self._num_due += due
        # Checked before this arrival counts: else each of many simultaneous arrivals would count as a return.
        if now - self._since >= _RETURN_SECONDS and self._num_due >= _RETURN_SEQUENCES:
            if self._num_returned < _MIN_RETURN_SHARE * self._num_due:
                self._times.clear()
                self.sequences = self.tokens = 0
            self._restart_counts(now)
        self._num_returned = min(self._num_returned + sequences, self._num_due)

    def _restart_counts(self, now: float) -> None:
        self._since, self._num_due, self._num_returned = now, 0, 0


_KEY_SECONDS = 1.0
"""When a key whose requests are all running may try again: it is not known how long they run."""


class Limits(NamedTuple):
    """Bounds of the queue and of each key's requests; None: no bound."""

    sequences: int | None = None
    tokens: int | None = None
    requests_per_key: int | None = None


_LEAST_SEQUENCES, _LEAST_TOKENS = 2, 256
"""What an owner may have in a queue that others fill."""


class Admission:
    """Tracks which sequences are queued: submitted, and without an output so far.

    The bounds hold for all owners together. One that fills the queue is refused first: others are still admitted, up
    to their part of a reserve (`has_room`).
    """

    def __init__(
        self,
        limits: Limits,
        metrics: Metrics,
        accounts: Accounts | None = None,
        quotas: QuotaMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`accounts` and `quotas`: default: of its own, without quotas."""
        self._limits = limits
        self._most_running = limits.sequences
        """The bound of queued sequences where no setting gives one."""
        self._capacity: int | None = None
        """That of their tokens, once the model is loaded."""
        self._metrics = metrics
        self.accounts = Accounts() if accounts is None else accounts
        self.quotas = QuotaMeter(self.accounts) if quotas is None else quotas
        self._clock = clock
        self._queued: dict[int, tuple[str, int]] = {}
        """Party and prompt tokens of each queued sequence, by its id; by a negative one of each request that waits
        for its model."""
        self._queue = Accounts()
        """What the owners have in this queue. `accounts` counts those of the server's other models too."""
        self._num_waits = 0
        self._forecast = QueueForecast()

    @classmethod
    def of(
        cls, config: Config, metrics: Metrics, accounts: Accounts | None = None, quotas: QuotaMeter | None = None
    ) -> Self:
        """With the bounds of `config`. Until `open`, a token bound that depends on the cache is not known."""
        settings = config.server_config
        running = config.max_num_seqs * config.parallel_config.data_parallel_size
        admission = cls(Limits(running), metrics, accounts, quotas)
        admission.limit(settings)
        return admission

    def limit(self, settings: ServerConfig) -> None:
        """From now on, admit requests within these bounds and quotas. What is admitted already stays so."""
        sequences, tokens = settings.max_queued_requests, settings.max_queued_tokens
        self._limits = Limits(
            self._most_running if sequences is None else sequences,
            self._capacity if tokens is None else tokens,
            settings.max_requests_per_key,
        )
        self.quotas.defaults = QuotaMeter.defaults_of(settings)

    def open(self, model: ModelInfo, num_replicas: int = 1) -> None:
        """Set the token bound, unless a flag does, to the prompt tokens that the loaded model's KV caches hold."""
        self._capacity = model.block_size * model.num_kvcache_blocks * num_replicas
        if self._limits.tokens is None:
            self._limits = self._limits._replace(tokens=self._capacity)

    @property
    def num_queued(self) -> int:
        """Sequences without an output so far."""
        return len(self._queued)

    @property
    def queued_tokens(self) -> int:
        """Tokens of their prompts."""
        return self._queue.total("queued_tokens")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued and no request of any key is live."""
        return not self._queued and not self.queued_tokens and not self.accounts.users("requests")

    # -- requests -----------------------------------------------------------------------------------------------

    def precheck(self, owner: Owner, sequences: int) -> None:
        """Refuse what `admit` would refuse with any prompts, before work is done on them.

        Raises `Overloaded`, and counts it.
        """
        refused = self._refusal(owner, sequences, 1)
        if refused is not None:
            self._metrics.received(sequences)
            self._refuse(owner, *refused, sequences)

    @contextmanager
    def waiting(self, owner: Owner) -> Iterator[None]:
        """Surrounds the time in which a request waits for its model to be loaded: it is queued, as one sequence.

        Raises `Overloaded`, and counts it.
        """
        self.precheck(owner, 1)
        self._num_waits += 1
        id = -self._num_waits
        self.queue(id, 1, owner.party)
        try:
            yield
        finally:
            self.remove(id)

    def admit(self, owner: Owner, prompt_tokens: Sequence[int]) -> Tally:
        """Admit a request until `release`; the tally to which its output is to be added. Raises `Overloaded`.

        `prompt_tokens` holds what each of its sequences adds to the queue. A request that exceeds a bound by itself is
        admitted when nothing is queued: otherwise it never would be.
        """
        sequences, tokens = len(prompt_tokens), sum(prompt_tokens)
        self._metrics.received(sequences)
        refused = self._refusal(owner, sequences, tokens)
        if refused is not None:
            self._refuse(owner, *refused, sequences)
        self._forecast.arrived(self._clock(), sequences, owner.party)
        self.accounts.change(owner.party, "requests", 1)
        tally = self.accounts.tally(owner)
        tally.requests += 1
        tally.prompt_tokens += tokens
        return tally

    def release(self, owner: Owner) -> None:
        """An admitted request has ended."""
        self.accounts.change(owner.party, "requests", -1)

    # -- sequences ----------------------------------------------------------------------------------------------

    def queue(self, request_id: int, prompt_tokens: int, party: str) -> None:
        """A sequence of an admitted request of this owner was submitted."""
        if not self._queued:
            self._forecast.start_busy(self._clock())
        self._queued[request_id] = party, prompt_tokens
        for accounts in (self._queue, self.accounts):
            accounts.change(party, "queued_sequences", 1)
            accounts.change(party, "queued_tokens", prompt_tokens)

    def first_output(self, request_id: int) -> None:
        """The first output of a sequence arrived."""
        self._dequeue(request_id, served=True)

    def remove(self, request_id: int) -> None:
        """A sequence ended or was suspended. No effect on one that has left the queue."""
        self._dequeue(request_id, served=False)

    def _dequeue(self, request_id: int, *, served: bool) -> None:
        party, tokens = self._queued.pop(request_id, (None, 0))
        if party is None:
            return
        for accounts in (self._queue, self.accounts):
            accounts.change(party, "queued_sequences", -1)
            accounts.change(party, "queued_tokens", -tokens)
        now = self._clock()
        if served:
            self._forecast.served(now, 1, tokens)
        if not self._queued:
            self._forecast.end_busy(now)

    # -- refusals -----------------------------------------------------------------------------------------------

    def _refusal(self, owner: Owner, sequences: int, tokens: int) -> tuple[str, Overloaded] | None:
        """Why a request cannot be admitted now: the metrics' reason and the error; None if it can."""
        limits, accounts, party = self._limits, self.accounts, owner.party
        live = accounts.used(party, "requests")
        if limits.requests_per_key is not None and live >= limits.requests_per_key:
            sentence = (
                f"{live} requests of this key or address are running, and this server runs at most "
                f"{limits.requests_per_key} at a time (max_requests_per_key)"
            )
            return "key", Overloaded(sentence, "requests", _KEY_SECONDS)
        try:
            self.quotas.check(owner, tokens)
        except QuotaExceeded as error:
            return "quota", error
        if not self._queued:
            return None
        waiting, most, most_tokens = len(self._queued), limits.sequences or math.inf, limits.tokens or math.inf
        queue = self._queue
        own = queue.used(party, "queued_sequences")
        owners = len(queue.users("queued_sequences")) + (not own)
        shared = f"; {own} of them are of this key or address, of {owners} that share the queue" if owners > 1 else ""
        if not has_room(own, sequences, waiting, most, owners, least=_LEAST_SEQUENCES):
            sentence = (
                f"{waiting} requests are waiting, and with the {sequences} of this one more than {most} would, the "
                f"most that this server lets wait (max_queued_requests){shared}"
            )
            return "queue_requests", Overloaded(sentence, "requests", self._seconds(owner, owners, sequences, tokens))
        own_tokens, waiting_tokens = queue.used(party, "queued_tokens"), self.queued_tokens
        if not has_room(own_tokens, tokens, waiting_tokens, most_tokens, owners, least=_LEAST_TOKENS):
            sentence = (
                f"prompts of {waiting_tokens} tokens are waiting, and with the {tokens} of this one more than "
                f"{most_tokens} would, the most that this server lets wait (max_queued_tokens){shared}"
            )
            return "queue_tokens", Overloaded(sentence, "tokens", self._seconds(owner, owners, sequences, tokens))
        return None

    def _refuse(self, owner: Owner, reason: str, error: Overloaded, sequences: int) -> None:
        self._metrics.rejected(reason, sequences)
        self.accounts.tally(owner).refused += 1
        raise error

    def _seconds(self, owner: Owner, owners: int, sequences: int, tokens: int) -> float:
        """Seconds until there is room for a request of this size; the room is reserved for it."""
        excess = excess_tokens = 0
        if self._limits.sequences is not None:
            sequences = min(sequences, self._limits.sequences)
            excess = len(self._queued) + sequences - self._limits.sequences
        if self._limits.tokens is not None:
            tokens = min(tokens, self._limits.tokens)
            excess_tokens = self.queued_tokens + tokens - self._limits.tokens
        return self._forecast.retry_after(
            self._clock(), excess, sequences, excess_tokens, tokens, party=owner.party, num_owners=owners
        )


@contextmanager
def counted_refusals(metrics: Metrics) -> Iterator[None]:
    """Surrounds all work before `Admission.admit`: counts a request that is refused there, as one sequence."""
    try:
        yield
    except ClientDisconnect:  # It did not ask for anything yet.
        raise
    except Exception as error:
        if isinstance(error, Overloaded) and not isinstance(error, TooManyJobs):  # `precheck` has counted it.
            raise
        metrics.received(1)
        metrics.rejected(_why_refused(error), 1)
        raise


def _why_refused(error: Exception) -> str:
    """The metrics' reason for a request that was refused before `admit`."""
    if isinstance(error, TooManyJobs):
        return "jobs"
    if isinstance(error, ShuttingDown):
        return "draining"
    if isinstance(error, NotReady):
        return "not_ready"
    is_clients_fault = isinstance(error, InvalidRequest) or (isinstance(error, ApiError) and error.status < 500)
    return "invalid" if is_clients_fault else "error"
