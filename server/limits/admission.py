"""`Admission`: bounds the requests that wait for the engine. `QueueForecast`: predicts when a full queue has room.
`KeyShares`: shares served connections among API keys. `OpenFiles`: shares open files among owners.

`Generation` asks for the admission of each request; the hub reports when each sequence is queued, has its first output
and ends. A refused request gets a 429 with the predicted time in `Retry-After`.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, Self

from starlette.requests import ClientDisconnect

from engine.config.config import Config
from engine.config.server import ServerConfig
from engine.messages import ModelInfo
from engine.text.io_processor import InvalidRequest
from server.errors import ApiError, NotReady, Overloaded, RequestTimeout, ShuttingDown
from server.limits.accounts import Accounts, Tally, has_room
from server.limits.jobs import TooManyJobs
from server.limits.owners import Owner
from server.limits.quotas import QuotaExceeded, QuotaMeter
from server.metrics import Metrics

LATEST_SECONDS = 60.0
"""Largest time that a refused client is given, in seconds: OpenAI's clients ignore a longer one."""

_WINDOW_SECONDS = 10.0
"""Time constant of the moving average of the drain rate: a measurement of this age has a weight of about 1/3."""

_MARGIN = 1.2
"""Factor on the predicted time: a queue drains in batches, and a client that retries too early is refused again."""

_SOONEST_SECONDS = 0.05

_MAX_RESERVING = 1024
"""Beyond this number of owners, expired reservations are dropped. The number at most doubles between two scans, so
that the amortised cost of scanning is constant per refusal."""

_MIN_RETURN_SHARE = 2 / 3
"""Least share of due reservations whose clients must retry. Below it, the owner's other reservations are dropped."""

_RETURN_SECONDS = 5.0
"""Shortest time over which that share is measured: clients that round up to seconds retry up to one second late."""

_RETURN_SEQUENCES = 8
"""Fewest sequences that must have been due in that time: the share of a smaller number is noise."""

_SHARE_OF_FREE = 2
"""Number of served connections that a key may hold for each free one that is not reserved: 7 / 12 of all connections
if no other key has requests."""

_LAST_PARTS = 8
"""1 / 8 of the served connections are reserved for keys that hold none."""

_KEY_SECONDS = 1.0
"""Retry time of an owner that has its most requests, connections or open files: how long it needs those is not
known."""


class QueueForecast:
    """Measures how fast the queue drains, and computes after how long a refused client should retry.

    Only the time in which the queue is not empty is measured: an empty queue does not show how fast a full one drains.
    All times are seconds on `time.monotonic`'s clock.
    """

    def __init__(self) -> None:
        # The initial rate is 20 requests a second of 1000 tokens each, with the weight of a measurement over 0.05 s.
        self._busy_seconds, self._sequences, self._tokens = 0.05, 1.0, 1000.0
        self._busy_since: float | None = None
        self._reservations: dict[str, _RetryReservations] = {}
        """Reservations by party: an owner that is refused often waits after its own reservations only."""
        self._most_reserving = _MAX_RESERVING

    def admitted(self, now: float, sequences: int, party: str = "") -> None:
        """Note that a request of `sequences` sequences was admitted. For a refused one, call `retry_after` instead."""
        if (reservations := self._reservations.get(party)) is not None:
            reservations.note_request(now, sequences)
            if not reservations.sequences:
                del self._reservations[party]

    def start_busy(self, now: float) -> None:
        """Start the clock of the measurement: the queue is no longer empty."""
        self._busy_since = now

    def served(self, now: float, sequences: int, tokens: int) -> None:
        """Count `sequences` with `tokens` prompt tokens that left the queue because the engine served them."""
        self._measure(now)
        self._sequences += sequences
        self._tokens += tokens

    def end_busy(self, now: float) -> None:
        """Stop the clock of the measurement: the queue is empty."""
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
        """Return the seconds until there is room for a request that is refused now, at most `LATEST_SECONDS`.

        `excess` and `excess_tokens` are the sequences and tokens that must leave the queue first. The room is reserved
        until that time, so that refused clients do not all retry at once, unless too few of them do. `num_owners`
        share the queue, so the owner's earlier reservations take `num_owners` times as long to drain.
        """
        self._measure(now)
        if len(self._reservations) > self._most_reserving:
            # Most of these owners never retry, so no other call would remove their reservations.
            self._reservations = {each: of for each, of in self._reservations.items() if of.ends > now}
            self._most_reserving = max(_MAX_RESERVING, 2 * len(self._reservations))
        reservations = self._reservations.setdefault(party, _RetryReservations())
        reservations.note_request(now, sequences)
        seconds = max(
            self._seconds_for(excess + num_owners * reservations.sequences, self._sequences),
            self._seconds_for(excess_tokens + num_owners * reservations.tokens, self._tokens),
            _SOONEST_SECONDS,
        )
        if seconds >= LATEST_SECONDS:
            # Reserve nothing: a prediction this far ahead is too uncertain.
            return LATEST_SECONDS
        reservations.add(now, seconds, sequences, tokens)
        return seconds

    def _measure(self, now: float) -> None:
        """Add the time since the last call to the moving averages, and decay their earlier part."""
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
    """Room in the queue reserved for refused clients, each until its retry time, or until too few clients retry.

    Clients cannot be distinguished: every request counts as a retry while there are fewer requests than due retries.
    """

    def __init__(self) -> None:
        self.sequences = 0
        self.tokens = 0
        self.ends = -math.inf
        """The latest of the retry times."""
        self._times: list[tuple[float, int, int]] = []
        """Heap of (retry time, sequences, tokens)."""
        self._since = 0.0
        """Time at which the two counts below began."""
        self._num_due = 0
        self._num_returned = 0

    def add(self, now: float, seconds: float, sequences: int, tokens: int) -> None:
        """Reserve room for a client that should retry after `seconds`."""
        if not self._times:
            self._restart_counts(now)
        heapq.heappush(self._times, (now + seconds, sequences, tokens))
        self.ends = max(self.ends, now + seconds)
        self.sequences += sequences
        self.tokens += tokens

    def note_request(self, now: float, sequences: int) -> None:
        """Count a request, admitted or refused, as a possible retry."""
        while self._times and self._times[0][0] <= now:
            _, due, due_tokens = heapq.heappop(self._times)
            self.sequences -= due
            self.tokens -= due_tokens
            self._num_due += due
        # Checked before this request counts: else each of many simultaneous requests would count as a retry.
        if now - self._since >= _RETURN_SECONDS and self._num_due >= _RETURN_SEQUENCES:
            if self._num_returned < _MIN_RETURN_SHARE * self._num_due:
                self._times.clear()
                self.sequences = self.tokens = 0
            self._restart_counts(now)
        self._num_returned = min(self._num_returned + sequences, self._num_due)

    def _restart_counts(self, now: float) -> None:
        self._since, self._num_due, self._num_returned = now, 0, 0


class Limits(NamedTuple):
    """Bounds of the queue, and of each key's requests. None means no bound."""

    sequences: int | None = None
    tokens: int | None = None
    requests_per_key: int | None = None


_LEAST_SEQUENCES, _LEAST_TOKENS = 2, 256
"""The sequences and tokens that an owner may always have in a queue that other owners fill."""


class Admission:
    """Admits requests, and tracks the queued sequences: those that were submitted and have no output so far.

    The bounds hold for all owners together. An owner that fills the queue is refused first: other owners are still
    admitted, up to their part of a reserve (`has_room`).
    """

    def __init__(
        self,
        limits: Limits,
        metrics: Metrics,
        accounts: Accounts | None = None,
        quotas: QuotaMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """By default, `accounts` is a new object, and `quotas` checks nothing."""
        self._limits = limits
        self._most_running = limits.sequences
        """Bound of queued sequences where no setting gives one."""
        self._capacity: int | None = None
        """Bound of queued tokens where no setting gives one; None until the model is loaded."""
        self._metrics = metrics
        self.accounts = Accounts() if accounts is None else accounts
        self.quotas = QuotaMeter(self.accounts) if quotas is None else quotas
        self._clock = clock
        self._queued: dict[int, tuple[str, int]] = {}
        """Party and prompt tokens of each queued sequence, by its id. A request that waits for its model to load has a
        negative id."""
        self._queue = Accounts()
        """Each owner's use of this queue. `accounts` includes the queues of the server's other models."""
        self._num_waits = 0
        self._forecast = QueueForecast()

    @classmethod
    def of(
        cls, config: Config, metrics: Metrics, accounts: Accounts | None = None, quotas: QuotaMeter | None = None
    ) -> Self:
        """Create it with the bounds of `config`. A token bound that depends on the KV cache is unknown before
        `open`."""
        settings = config.server_config
        running = config.max_num_seqs * config.parallel_config.data_parallel_size
        admission = cls(Limits(running), metrics, accounts, quotas)
        admission.limit(settings)
        return admission

    def limit(self, settings: ServerConfig) -> None:
        """Apply new bounds to later requests. Requests that are admitted already stay admitted."""
        sequences, tokens = settings.max_queued_requests, settings.max_queued_tokens
        self._limits = Limits(
            self._most_running if sequences is None else sequences,
            self._capacity if tokens is None else tokens,
            settings.max_requests_per_key,
        )

    def open(self, model: ModelInfo, num_replicas: int = 1) -> None:
        """Set the token bound, unless a setting does, to the prompt tokens that the loaded model's KV caches hold."""
        self._capacity = model.block_size * model.num_kvcache_blocks * num_replicas
        if self._limits.tokens is None:
            self._limits = self._limits._replace(tokens=self._capacity)

    @property
    def num_queued(self) -> int:
        """Number of sequences without an output so far."""
        return len(self._queued)

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens of the queued sequences."""
        return self._queue.total("queued_tokens")

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is queued and no admitted request is live."""
        return not self._queued and not self.queued_tokens and not self.accounts.users("requests")

    # -- requests -----------------------------------------------------------------------------------------------

    def precheck(self, owner: Owner, sequences: int) -> None:
        """Refuse a request that `admit` would refuse whatever its prompts are, before work is done on them.

        Raises `Overloaded`, and counts the refusal.
        """
        refused = self._refusal(owner, sequences, 1)
        if refused is not None:
            self._metrics.received(sequences)
            self.refuse(owner, *refused, sequences)

    @contextmanager
    def waiting(self, owner: Owner) -> Iterator[None]:
        """Queue a request as one sequence while it waits for its model to be loaded.

        Raises `Overloaded`, and counts the refusal.
        """
        self.precheck(owner, 1)
        self._num_waits += 1
        id = -self._num_waits
        self.queue({id: 1}, owner.party)
        try:
            yield
        finally:
            self.remove(id)

    def admit(self, owner: Owner, prompt_tokens: Sequence[int]) -> Tally:
        """Admit a request until `release`, and return the tally that counts its output. Raises `Overloaded`.

        `prompt_tokens` has the number of tokens that each of its sequences adds to the queue. A request that exceeds a
        bound by itself is admitted when nothing is queued: otherwise it never would be.
        """
        sequences, tokens = len(prompt_tokens), sum(prompt_tokens)
        self._metrics.received(sequences)
        refused = self._refusal(owner, sequences, tokens)
        if refused is not None:
            self.refuse(owner, *refused, sequences)
        self._forecast.admitted(self._clock(), sequences, owner.party)
        self.accounts.change(owner.party, "requests", 1)
        tally = self.accounts.tally(owner)
        tally.requests += 1
        tally.prompt_tokens += tokens
        return tally

    def release(self, owner: Owner) -> None:
        """Note that an admitted request has ended."""
        self.accounts.change(owner.party, "requests", -1)

    # -- sequences ----------------------------------------------------------------------------------------------

    def queue(self, prompt_tokens: Mapping[int, int], party: str) -> None:
        """Note that the sequences of an admitted request, by their ids, were submitted to the engine."""
        if not self._queued:
            self._forecast.start_busy(self._clock())
        self._queued.update((id, (party, tokens)) for id, tokens in prompt_tokens.items())
        for accounts in (self._queue, self.accounts):
            accounts.change(party, "queued_sequences", len(prompt_tokens))
            accounts.change(party, "queued_tokens", sum(prompt_tokens.values()))

    def first_output(self, request_id: int) -> None:
        """Note that the first output of a sequence was received."""
        self._dequeue(request_id, served=True)

    def remove(self, request_id: int) -> None:
        """Note that a sequence ended or was suspended. No effect if it has left the queue."""
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
        """Return the label for metrics and the error if a request cannot be admitted now, else None."""
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

    def refuse(self, owner: Owner, reason: str, error: Overloaded, sequences: int) -> NoReturn:
        """Count a request as refused for `reason`, and raise `error`."""
        self._metrics.rejected(reason, sequences)
        self.accounts.tally(owner).refused += 1
        raise error

    def _seconds(self, owner: Owner, owners: int, sequences: int, tokens: int) -> float:
        """Return the seconds until there is room for a request of this size, and reserve that room."""
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


class KeyShares:
    """Shares the connections that may be served among the holders of API keys.

    `Connections` bounds their number before a key is known. With that bound alone, one key could hold all of them by
    streams or by readers of a stored response, which wait in no queue.

    A part of the connections, 1 / `_LAST_PARTS`, is reserved for keys that hold none. Of the rest, a key may hold at
    most `_SHARE_OF_FREE` times as many as are free at the time (a dynamic threshold: Choudhury and Hahne, IEEE/ACM
    Transactions on Networking, 1998). When several keys take as many as they can, they hold equal numbers, and some
    connections stay free.
    """

    def __init__(self, most: int, accounts: Accounts, note_refused: Callable[[str], object]) -> None:
        """`most` connections may be served at a time. `note_refused` is called with `key` for each refused request."""
        self._most = most
        self._accounts = accounts
        self._note_refused = note_refused

    def begin(self, owner: Owner, *, is_bounded: bool = True) -> None:
        """Count a request of the owner's key until `end`.

        Raises `Overloaded` if the key holds too many already, unless the request is not to be bounded.
        """
        held = self._accounts.used(owner.party, "served_requests")
        free = self._most - self._accounts.total("served_requests")
        reserved = max(self._most // _LAST_PARTS, 1)
        if is_bounded and held >= _SHARE_OF_FREE * (free - reserved) and (held or free <= 0):
            self._note_refused("key")
            self._accounts.tally(owner).refused += 1
            raise Overloaded(
                f"{held} requests of this key are served, and {self._most} of all clients may be at a time "
                f"(max_connections), of which {max(free, 0)} are kept free for other keys",
                "requests",
                _KEY_SECONDS,
            )
        self._accounts.change(owner.party, "served_requests", 1)

    def end(self, owner: Owner) -> None:
        """Note that a request was answered, or that its client has gone."""
        self._accounts.change(owner.party, "served_requests", -1)


class OpenFiles:
    """Shares the files that uploads and downloads hold open among owners.

    A slow client needs two descriptors: its connection's and its file's. Without a bound, those of one owner could use
    up all, so that no further connection could be accepted. An owner may hold as many files as are free at the time.
    """

    def __init__(self, most: int, accounts: Accounts) -> None:
        """`most` files may be open at a time."""
        self._most = most
        self._accounts = accounts

    @contextmanager
    def hold(self, owner: Owner) -> Iterator[None]:
        """Count one file of the owner's within the context. Raises `Overloaded` if the owner holds too many."""
        held = self._accounts.used(owner.party, "open_files")
        free = self._most - self._accounts.total("open_files")
        if held >= free:
            self._accounts.tally(owner).refused += 1
            remedy = "end one, or read and send them faster" if held else "try again later"
            raise Overloaded(
                f"{held} uploads and downloads of this key or address are in progress, and {self._most} of all "
                f"clients may be at a time (ulimit -n); {remedy}",
                "requests",
                _KEY_SECONDS,
            )
        self._accounts.change(owner.party, "open_files", 1)
        try:
            yield
        finally:
            self._accounts.change(owner.party, "open_files", -1)


@contextmanager
def counted_refusals(metrics: Metrics) -> Iterator[None]:
    """Count a request, as one sequence, that is refused within this context: by the work before `Admission.admit`."""
    try:
        yield
    except ClientDisconnect:  # The request was not complete.
        raise
    except Exception as error:
        if isinstance(error, Overloaded) and not isinstance(error, TooManyJobs):  # `precheck` has counted it.
            raise
        metrics.received(1)
        metrics.rejected(_why_refused(error), 1)
        raise


def _why_refused(error: Exception) -> str:
    """Return the label for metrics of a request that was refused before `admit`."""
    if isinstance(error, TooManyJobs):
        return "jobs"
    if isinstance(error, ShuttingDown):
        return "draining"
    if isinstance(error, NotReady):
        return "not_ready"
    if isinstance(error, RequestTimeout):
        return "timeout"
    is_clients_fault = isinstance(error, InvalidRequest) or (isinstance(error, ApiError) and error.status < 500)
    return "invalid" if is_clients_fault else "error"
