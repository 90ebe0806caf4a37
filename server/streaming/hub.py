"""`Hub`: the live sequences of the server, and the consumers that their outputs go to.

`Generation` submits sequences with a consumer: a `DeltaStream` if the client streams, else a `WholeResult`.
`CoreManager` calls `Hub.receive` once a step.
"""

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.client.core_manager import CoreManager, EngineDeadError
from engine.messages import RequestOutput, StepOutputs
from engine.text.io_processor import NewSequence
from engine.text.request_state import RequestDelta, RequestState
from server.errors import ApiError, BadRequest, EngineError, PoisonousRequest
from server.limits.accounts import Tally
from server.limits.admission import Admission
from server.metrics import Metrics

_log = logging.getLogger(__name__)


class Consumer(Protocol):
    """Takes the outputs of one HTTP request's sequences, by their index."""

    def put(self, index: int, delta: RequestDelta) -> None: ...

    def fail(self, error: ApiError) -> None: ...


@dataclass(frozen=True, slots=True)
class _Live:
    state: RequestState
    consumer: Consumer
    index: int
    model: str
    """The served name of the model or adapter."""
    tally: Tally
    """Of the owner, to which the output is added."""


class Hub:
    """Owns every live sequence of the server, from `submit` to its last output or `cancel`."""

    def __init__(
        self,
        core: CoreManager,
        metrics: Metrics,
        admission: Admission,
        model_name: Callable[[int], str] = lambda adapter: "model",
        ids: Iterator[int] | None = None,
        first_replica: int = 0,
    ) -> None:
        """`model_name` returns the served name of the model or of an adapter, by its number, and raises an `ApiError`
        for an adapter that is no longer served.

        `ids`: where the core has further users, the source of ids that they share. `first_replica`: the number that
        the metrics give the core's first replica.
        """
        self._first_replica = first_replica
        self.last_end = 0.0
        """When a sequence last ended, on the monotonic clock."""
        self._model_name = model_name
        self.admission = admission
        self.metrics = metrics
        self._core = core
        self._live: dict[int, _Live] = {}
        self._ids = itertools.count() if ids is None else ids
        metrics.show_live(self._live.__len__)

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    def new_ids(self, count: int) -> list[int]:
        """Ids for new sequences."""
        return list(itertools.islice(self._ids, count))

    def submit(
        self, sequences: Sequence[NewSequence], queued_tokens: Sequence[int], consumer: Consumer, tally: Tally
    ) -> None:
        """Run sequences in the engine; their outputs go to `consumer`, by their index in `sequences`.

        `queued_tokens`: what each adds to the queue; `tally`: their owner's. Raises `EngineError` if there is no
        engine, `ModelNotFound` if their adapter has been unloaded since they were made.
        """
        requests = [sequence.request for sequence in sequences]
        names = [self._model_name(request.adapter) for request in requests]
        for request in requests:
            request.weight = tally.owner.weight
        try:
            self._core.add_requests(requests)
        except EngineDeadError as error:
            self.metrics.rejected("engine", len(sequences))
            raise EngineError(str(error)) from error
        for index, ((_, state), tokens, name) in enumerate(zip(sequences, queued_tokens, names, strict=True)):
            self._live[state.request_id] = _Live(state, consumer, index, name, tally)
            self.admission.queue(state.request_id, tokens, tally.owner.party)
        self._count(tally, len(sequences))

    def cancel(self, states: Sequence[RequestState], reason: str = "abort") -> bool:
        """Abort those of `states` that are live, for one of the metrics' reasons; whether any was.

        The consumers are not notified.
        """
        ids = self._live_ids(states)
        for id in ids:
            live, self.last_end = self._live.pop(id), time.monotonic()
            self._count(live.tally, -1)
            self.metrics.finished(live.state, reason, live.model)
            self.admission.remove(id)
        if ids:
            self._core.abort(ids)
        return bool(ids)

    def pause(self, states: Sequence[RequestState]) -> None:
        """Suspend those of `states` that are live, until `resume` or `cancel`. Outputs may still arrive.

        They leave the admission queue.
        """
        ids = self._live_ids(states)
        for id in ids:
            self.admission.remove(id)
        if ids:
            self._core.pause(ids)

    def resume(self, states: Sequence[RequestState]) -> None:
        """Continue what `pause` suspended."""
        if ids := self._live_ids(states):
            self._core.resume(ids)

    def fail_all(self, error: ApiError) -> None:
        """End every live request with `error`."""
        live = list(self._live.values())
        self.cancel([each.state for each in live])
        for each in live:
            each.consumer.fail(error)

    def core_restarted(self, resumed: int, replica: int = 0, *, died: bool = True) -> None:
        """A new engine core is ready, which continues so many requests; `died`: after one that died."""
        self.metrics.core_restarted(resumed, self._first_replica + replica, died=died)
        now = time.monotonic()
        for live in self._live.values():
            live.state.interruptions.append((f"engine {replica} restarted", now))

    def receive(self, step: StepOutputs) -> None:
        """Pass a step's outputs to their consumers, and abort in the core what reached a stop string."""
        stopped_early: list[int] = []
        generated_tokens = 0
        for output in step.outputs:
            generated_tokens += len(output.output_tokens)
            live = self._live.get(output.request_id)
            if live is None:
                continue
            try:
                self._advance(live, output, stopped_early)
            except Exception as error:  # noqa: BLE001 - reported to the client, which waits for it
                _log.exception("request %d cannot be answered", output.request_id)
                self.cancel([live.state], "error")
                live.consumer.fail(EngineError(f"the output cannot be read: {error}"))
        if stopped_early:
            self._core.abort(stopped_early)
        for id in step.preempted:
            if (live := self._live.get(id)) is not None:
                live.state.interruptions.append(("preempted", time.monotonic()))
        if step.stats is not None:
            self.metrics.step(step.stats, generated_tokens, self._first_replica + step.replica)

    def _advance(self, live: _Live, output: RequestOutput, stopped_early: list[int]) -> None:
        state = live.state
        had_tokens, last_time = bool(state.token_ids), state.last_time
        live.tally.output_tokens += len(output.output_tokens)
        delta = state.push(output)
        if had_tokens:
            if delta.token_ids:
                self.metrics.tokens_arrived(state.last_time - last_time, len(delta.token_ids))
        elif state.token_ids:
            self.metrics.first_token(state)
            self.admission.first_output(state.request_id)
        elif state.vector is not None:
            self.metrics.pooled(state)
            self.admission.first_output(state.request_id)
        if delta.finished:
            del self._live[state.request_id]
            self.last_end = state.last_time
            self._count(live.tally, -1)
            self.metrics.finished(state, delta.finish_reason or "error", live.model)
            if not had_tokens:
                self.admission.remove(state.request_id)
            if state.stopped_early:
                stopped_early.append(state.request_id)
            if delta.finish_reason in ("abort", "error"):
                live.consumer.fail(_why_failed(output))
                return
        live.consumer.put(live.index, delta)

    def _count(self, tally: Tally, sequences: int) -> None:
        self.admission.accounts.change(tally.owner.party, "sequences", sequences)

    def _live_ids(self, states: Sequence[RequestState]) -> list[int]:
        return [state.request_id for state in states if state.request_id in self._live]


def _why_failed(output: RequestOutput) -> ApiError:
    if output.bad_request and output.error is not None:
        return BadRequest(output.error)
    if output.is_poison and output.error is not None:
        return PoisonousRequest(output.error)
    return EngineError(output.error or "the engine aborted this request")


_DELTA_BYTES = 256
"""Memory of a delta without its text: the delta, its list and its token."""

_LOGPROB_BYTES = 256
"""Memory of one token's log probability."""

_ALTERNATIVE_BYTES = 80
"""Memory of each of its alternatives."""

_MIN_BACKLOG = 8
"""A client that is fewer steps late is not slow, however long the text of a step."""


class DeltaStream:
    """Deltas on their way to a streaming client, at most one a sequence: while the client lags, they merge.

    The bytes of the backlog are counted. Beyond a bound, `on_full` is called, and the sequences should pause; once
    the client has taken everything and it has been sent, `on_drained` is called.
    """

    def __init__(
        self,
        max_bytes: float,
        on_full: Callable[["DeltaStream"], object],
        on_drained: Callable[[], object],
        on_growth: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """`max_bytes`: approximate bound of the backlog, which is all but the first delta of each sequence.

        `on_growth` receives by how many bytes the backlog has become larger or smaller.
        """
        self._pending: dict[int, RequestDelta] = {}
        self._backlog: dict[int, list[RequestDelta]] = {}
        """Deltas after a pending one. They are merged when they are taken: each merging copies all of them."""
        self._textless: dict[int, list[RequestDelta]] = {}
        """Deltas without text, which are merged into the sequence's next one."""
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Of the client, while it waits: a plain future, as an event costs three times as much a chunk."""
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._on_full = on_full
        self._on_drained = on_drained
        self._on_growth = on_growth
        self._is_full = False

    def put(self, index: int, delta: RequestDelta) -> None:
        """Add a delta. One without text, log probabilities or end does not wake the client."""
        if index in self._pending:
            self._queue_delta(index, delta)
        elif delta.text or delta.finished or delta.logprobs or delta.prompt_logprobs is not None:
            if self._textless and (textless := self._textless.pop(index, None)) is not None:
                delta = _merged([*textless, delta])
            self._pending[index] = delta
            self._wake()
        elif delta.token_ids:
            self._textless.setdefault(index, []).append(delta)

    def _queue_delta(self, index: int, delta: RequestDelta) -> None:
        backlog = self._backlog.setdefault(index, [])
        backlog.append(delta)
        size = _size(delta)
        self._num_bytes += size
        self._on_growth(size)
        if self._num_bytes > self._max_bytes and len(backlog) >= _MIN_BACKLOG and not self._is_full:
            self._is_full = True
            self._on_full(self)

    def close(self) -> None:
        """The client has gone: nothing is taken any more."""
        self._on_growth(-self._num_bytes)
        self._num_bytes = 0
        self._backlog = {}

    def fail(self, error: ApiError) -> None:
        """Make `take` raise `error` after the deltas that arrived before it."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> dict[int, RequestDelta]:
        """The deltas since the last call, by sequence; waits for one. Raises the error that `fail` was given.

        A call means that the deltas taken before have been sent.
        """
        if self._is_full and not self._pending and self._error is None:
            self._is_full = False
            self._on_drained()
        if not self._pending and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken, self._pending = self._pending, {}
        if self._backlog:
            for index, backlog in self._backlog.items():
                taken[index] = _merged([taken[index], *backlog])
            self._backlog = {}
            self._on_growth(-self._num_bytes)
            self._num_bytes = 0
        if self._error is not None and not taken:
            raise self._error
        return taken


def _size(delta: RequestDelta) -> int:
    """Approximate memory of a delta in bytes, without a prompt's log probabilities, which arrive once."""
    size = _DELTA_BYTES + sys.getsizeof(delta.text)
    if delta.logprobs:
        size += len(delta.logprobs) * (_LOGPROB_BYTES + _ALTERNATIVE_BYTES * len(delta.logprobs[0].top_ids))
    return size


def _merged(deltas: Sequence[RequestDelta]) -> RequestDelta:
    last = deltas[-1]
    return RequestDelta(
        "".join([delta.text for delta in deltas]),
        [token_id for delta in deltas for token_id in delta.token_ids],
        [logprob for delta in deltas for logprob in delta.logprobs or ()] or None,
        last.finished,
        last.finish_reason,
        last.stop_reason,
        last.error,
        next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        [step for delta in deltas for step in delta.steps],
    )


class WholeResult:
    """Waits until all of a request's sequences have ended; their states then hold the results."""

    def __init__(self, count: int) -> None:
        self._remaining = count
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, index: int, delta: RequestDelta) -> None:
        """Note whether the sequence has ended."""
        self._remaining -= delta.finished
        if not self._remaining and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: ApiError) -> None:
        """Make `wait` raise `error`."""
        if not self._done.done():
            self._done.set_exception(error)

    async def wait(self) -> None:
        """Wait for the end of the last sequence. Raises the error that `fail` was given."""
        await self._done
