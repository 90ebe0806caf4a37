"""`Hub`: holds the live sequences of a model, and passes the engine's outputs to their consumers.

`Generation` submits sequences with a consumer: a `DeltaStream` if the client streams, else a `WholeResult`.
`CoreManager` calls `Hub.receive` once per step.
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
from engine.messages import RequestOutput, StepOutputs, TokenLogprobs
from engine.text.io_processor import NewSequence
from engine.text.request_state import RequestDelta, RequestState
from server.errors import ApiError, BadRequest, EngineError, PoisonousRequest
from server.limits.accounts import Tally
from server.limits.admission import Admission
from server.limits.jobs import FairPool
from server.metrics import Metrics
from server.streaming.logprob_room import LogprobRoom, num_logprob_bytes

_log = logging.getLogger(__name__)


class Consumer(Protocol):
    """Receives the outputs of one HTTP request's sequences, by their index."""

    def put(self, index: int, delta: RequestDelta) -> None: ...

    def fail(self, error: ApiError) -> None: ...


@dataclass(frozen=True, slots=True)
class _Live:
    state: RequestState
    consumer: Consumer
    index: int
    model: str
    """Served name of the model or adapter."""
    tally: Tally
    """Tally of the owner, which counts the output tokens."""


class Hub:
    """Owns every live sequence of a model, from `submit` to its last output or `cancel`."""

    def __init__(
        self,
        core: CoreManager,
        metrics: Metrics,
        admission: Admission,
        answers: FairPool,
        model_name: Callable[[int], str] = lambda adapter: "model",
        ids: Iterator[int] | None = None,
        first_replica: int = 0,
    ) -> None:
        """`answers` renders large answers.

        `model_name` returns the served name of an adapter by its number, or of the model for 0. It raises an
        `ApiError` for an adapter that is no longer served.

        `ids` generates ids of sequences; pass it if other users of the core share the ids. `first_replica` is the
        number in metrics of the core's first replica.
        """
        self._first_replica = first_replica
        self.last_end = 0.0
        """Time at which a sequence last ended, on the monotonic clock."""
        self._model_name = model_name
        self.admission = admission
        self.logprobs = LogprobRoom(admission.accounts)
        self.answers = answers
        self.metrics = metrics
        self._core = core
        self._live: dict[int, _Live] = {}
        self._ids = itertools.count() if ids is None else ids
        metrics.show_live(self._live.__len__)

    @property
    def num_live(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._live)

    def new_ids(self, count: int) -> list[int]:
        """Return ids for `count` new sequences."""
        return list(itertools.islice(self._ids, count))

    def submit(
        self, sequences: Sequence[NewSequence], queued_tokens: Sequence[int], consumer: Consumer, tally: Tally
    ) -> None:
        """Submit sequences to the engine. `consumer` receives their outputs, by their index in `sequences`.

        `queued_tokens` has the tokens that each adds to the admission queue; `tally` is their owner's. Raises
        `EngineError` if there is no engine, `ModelNotFound` if their adapter has been unloaded in the meantime.
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
        for index, ((_, state), name) in enumerate(zip(sequences, names, strict=True)):
            self._live[state.request_id] = _Live(state, consumer, index, name, tally)
        ids = [request.request_id for request in requests]
        self.admission.queue(dict(zip(ids, queued_tokens, strict=True)), tally.owner.party)
        self._count(tally, len(sequences))

    def cancel(self, states: Sequence[RequestState], reason: str = "abort") -> bool:
        """Abort those of `states` that are live. Returns whether any was. `reason` is a label of metrics.

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
        """Suspend those of `states` that are live, until `resume` or `cancel`. Some outputs may still follow.

        They leave the admission queue.
        """
        ids = self._live_ids(states)
        for id in ids:
            self.admission.remove(id)
        if ids:
            self._core.pause(ids)

    def resume(self, states: Sequence[RequestState]) -> None:
        """Continue the sequences that `pause` suspended."""
        if ids := self._live_ids(states):
            self._core.resume(ids)

    def fail_all(self, error: ApiError) -> None:
        """End every live request with `error`."""
        live = list(self._live.values())
        self.cancel([each.state for each in live])
        for each in live:
            each.consumer.fail(error)

    def core_restarted(self, resumed: int, replica: int = 0, *, died: bool = True) -> None:
        """Note that a new engine core is ready and continues `resumed` requests. `died`: whether its predecessor
        died."""
        self.metrics.core_restarted(resumed, self._first_replica + replica, died=died)
        now = time.monotonic()
        for live in self._live.values():
            live.state.interruptions += ((f"engine {replica} restarted", now),)

    def receive(self, step: StepOutputs) -> None:
        """Pass a step's outputs to their consumers, and abort in the core the sequences that reached a stop string."""
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
                live.state.interruptions += (("preempted", time.monotonic()),)
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
            self.metrics.prompt_computed(state)
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
"""Bytes of a delta without its text: the object, its list and its token."""

_MIN_BACKLOG = 8
"""Least backlog in steps for which a client counts as slow, however long the text of a step is."""


class DeltaStream:
    """Queue of deltas for a streaming client. It returns one delta per sequence: waiting deltas are merged.

    The backlog is counted in bytes. Beyond a bound, `on_full` is called, which should pause the sequences. When all
    deltas have been taken and sent, `on_drained` is called.
    """

    def __init__(
        self,
        max_bytes: Callable[[], float],
        on_full: Callable[["DeltaStream"], object],
        on_drained: Callable[[], object],
        on_growth: Callable[[int], object] = lambda num_bytes: None,
        on_end: Callable[[], object] = lambda: None,
        count: int = 1,
    ) -> None:
        """`max_bytes` returns the present, approximate bound of the backlog, which has all waiting deltas but the
        first per sequence.

        `on_growth` is called with the change of the backlog in bytes, and `on_end` when all of the `count` sequences
        have ended, or the stream has failed: nothing but the client is waited for then.
        """
        self._pending: dict[int, RequestDelta] = {}
        self._backlog: dict[int, list[RequestDelta]] = {}
        """Deltas that follow a pending one. They are merged only when they are taken, because each merge copies
        all."""
        self._textless: dict[int, list[RequestDelta]] = {}
        """Deltas without text, which are merged into the sequence's next delta."""
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Future that `take` waits for. An `asyncio.Event` would take three times as long per chunk."""
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._on_full = on_full
        self._on_drained = on_drained
        self._on_growth = on_growth
        self._on_end = on_end
        self._remaining = count
        self._is_full = False

    def put(self, index: int, delta: RequestDelta) -> None:
        """Add a delta. A delta without text, log probabilities or finish reason does not wake `take`."""
        if index in self._pending:
            self._queue_delta(index, delta)
        elif delta.text or delta.finished or delta.logprobs or delta.prompt_logprobs is not None:
            if self._textless and (textless := self._textless.pop(index, None)) is not None:
                delta = _merged([*textless, delta])
            self._pending[index] = delta
            self._wake()
        elif delta.token_ids:
            self._textless.setdefault(index, []).append(delta)
        if delta.finished:
            self._remaining -= 1
            if not self._remaining:
                self._on_end()

    def _queue_delta(self, index: int, delta: RequestDelta) -> None:
        backlog = self._backlog.setdefault(index, [])
        backlog.append(delta)
        size = _size(delta)
        self._num_bytes += size
        self._on_growth(size)
        if len(backlog) >= _MIN_BACKLOG and not self._is_full and self._num_bytes > self._max_bytes():
            self._is_full = True
            self._on_full(self)

    def close(self) -> None:
        """Drop the backlog: the client has gone, or reads too slowly, and the sequences have ended or will."""
        self._on_growth(-self._num_bytes)
        self._num_bytes = 0
        self._backlog = {}

    def fail(self, error: ApiError) -> None:
        """Make `take` raise `error` after it has returned the earlier deltas."""
        self._error = error
        self._wake()
        self._on_end()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> dict[int, RequestDelta]:
        """Wait for a delta, and return the deltas since the last call, by index of the sequence. Raises `fail`'s
        error.

        The caller has sent the deltas of the last call before it calls again.
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
    """Return the approximate bytes of a delta, without prompt log probabilities, which a stream has only once."""
    return _DELTA_BYTES + sys.getsizeof(delta.text) + num_logprob_bytes(delta.logprobs)


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

    def __init__(
        self,
        count: int,
        check_logprobs: Callable[[Sequence[TokenLogprobs]], None] = lambda positions: None,
        end: Callable[[], object] = lambda: None,
    ) -> None:
        """`check_logprobs` is called with further log probabilities. If it raises an `ApiError` before the last
        sequence has ended, `end` is called, which should end the sequences, and `wait` raises the error."""
        self._remaining = count
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._check_logprobs = check_logprobs
        self._end = end

    def put(self, index: int, delta: RequestDelta) -> None:
        """Note whether the sequence has ended."""
        self._remaining -= delta.finished
        if delta.logprobs:
            try:
                self._check_logprobs(delta.logprobs)
            except ApiError as error:
                if self._remaining:
                    self._end()
                    self.fail(error)
        if not self._remaining and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: ApiError) -> None:
        """Make `wait` raise `error`."""
        if not self._done.done():
            self._done.set_exception(error)

    async def wait(self) -> None:
        """Wait for the end of the last sequence. Raises the error that `fail` was given."""
        await self._done
