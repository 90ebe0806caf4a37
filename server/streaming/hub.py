"""`Hub`: from the engine's steps to whoever waits for a request, which is a `server.streaming.hub`.

One hub a server. `server.streaming.generation` submits sequences to it; `CoreManager` calls `receive` once a step.
"""

import asyncio
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from engine.client.core_manager import EngineDeadError
from engine.messages import AddRequest, RequestOutput, StepOutputs
from engine.text.request_state import RequestDelta, RequestState
from server.errors import ApiError, BadRequest, EngineError, PoisonousRequest
from server.limits.admission import Admission, Limits
from server.metrics import Metrics

_log = logging.getLogger(__name__)


class Core(Protocol):
    """What the hub needs of `CoreManager`."""

    def add_requests(self, requests: Sequence[AddRequest]) -> None: ...

    def abort(self, request_ids: Sequence[int]) -> None: ...

    def pause(self, request_ids: Sequence[int]) -> None: ...

    def resume(self, request_ids: Sequence[int]) -> None: ...


class Consumer(Protocol):
    """One HTTP request's side of its sequences, which it knows by their index."""

    def put(self, index: int, delta: RequestDelta) -> None: ...

    def fail(self, error: ApiError) -> None: ...


class _Live(NamedTuple):
    state: RequestState
    consumer: Consumer
    place: int


class Hub:
    """Owns every live sequence of the server, from `submit` to its last output or `cancel`."""

    def __init__(self, core: Core, metrics: Metrics, admission: Admission | None = None) -> None:
        """`admission` is told of the sequences; default: one that knows no bounds."""
        self.admission = Admission(Limits(), metrics) if admission is None else admission
        self.metrics = metrics
        self._core = core
        self._live: dict[int, _Live] = {}
        self._ids = itertools.count()
        metrics.show_live(self._live.__len__)

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    def new_ids(self) -> Iterator[int]:
        """Request ids, each given once."""
        return self._ids

    def submit(
        self,
        requests: Sequence[AddRequest],
        states: Sequence[RequestState],
        consumer: Consumer,
        prompt_tokens: Sequence[int] | None = None,
    ) -> None:
        """Run sequences in the engine; what becomes of them goes to `consumer`, by their place in `requests`.

        `prompt_tokens`: what each adds to the queue; default: its whole prompt. Raises `EngineError` where there is
        no engine.
        """
        try:
            self._core.add_requests(requests)
        except EngineDeadError as error:
            self.metrics.rejected("engine", len(requests))
            raise EngineError(str(error)) from error
        for place, state in enumerate(states):
            self._live[state.request_id] = _Live(state, consumer, place)
            tokens = state.num_prompt_tokens if prompt_tokens is None else prompt_tokens[place]
            self.admission.queue(state.request_id, tokens)

    def cancel(self, states: Sequence[RequestState], reason: str = "abort") -> bool:
        """Stop what still runs of `states`, for one of the metrics' reasons; whether anything did.

        Nobody is told of it.
        """
        ids = self._live_ids(states)
        for id in ids:
            self.metrics.finished(self._live.pop(id).state, reason)
            self.admission.drop(id)
        if ids:
            self._core.abort(ids)
        return bool(ids)

    def pause(self, states: Sequence[RequestState]) -> None:
        """Take out of the core what still runs of `states`, until `resume` or `cancel`. Outputs may still come.

        What of it was queued is in nobody's way any more.
        """
        ids = self._live_ids(states)
        for id in ids:
            self.admission.drop(id)
        if ids:
            self._core.pause(ids)

    def resume(self, states: Sequence[RequestState]) -> None:
        """Go on with what `pause` stopped."""
        if ids := self._live_ids(states):
            self._core.resume(ids)

    def fail_all(self, error: ApiError) -> None:
        """End every live request with `error`."""
        live = list(self._live.values())
        self.cancel([each.state for each in live])
        for each in live:
            each.consumer.fail(error)

    def receive(self, step: StepOutputs) -> None:
        """Hand a step's outputs to those who wait for them, and end in the core what reached a stop string."""
        ended_early: list[int] = []
        generated_tokens = 0
        for output in step.outputs:
            generated_tokens += len(output.output_tokens)
            live = self._live.get(output.request_id)
            if live is None:
                continue
            try:
                self._advance(live, output, ended_early)
            except Exception as error:  # noqa: BLE001 - told to the client, who waits for it
                _log.exception("request %d cannot be answered", output.request_id)
                self.cancel([live.state], "error")
                live.consumer.fail(EngineError(f"the output cannot be read: {error}"))
        if ended_early:
            self._core.abort(ended_early)
        if step.stats is not None:
            self.metrics.step(step.stats, generated_tokens, step.replica)

    def _advance(self, live: _Live, output: RequestOutput, ended_early: list[int]) -> None:
        state = live.state
        had_tokens = bool(state.token_ids)
        delta = state.push(output)
        if not had_tokens and state.token_ids:
            self.metrics.first_token(state)
            self.admission.start(state.request_id)
        if delta.finished:
            del self._live[state.request_id]
            self.metrics.finished(state, delta.finish_reason or "error")
            if not had_tokens:
                self.admission.drop(state.request_id)
            if state.stopped_early:
                ended_early.append(state.request_id)
            if delta.finish_reason in ("abort", "error"):
                live.consumer.fail(_why_failed(output))
                return
        live.consumer.put(live.place, delta)

    def _live_ids(self, states: Sequence[RequestState]) -> list[int]:
        return [state.request_id for state in states if state.request_id in self._live]


def _why_failed(output: RequestOutput) -> ApiError:
    if output.bad_request and output.error is not None:
        return BadRequest(output.error)
    if output.is_poison and output.error is not None:
        return PoisonousRequest(output.error)
    return EngineError(output.error or "the engine aborted this request")


# [consumers] What waits for a request's sequences: `DeltaStream` for a stream, `Results` for an answer at once.
#
# Made by `server.streaming.generation`, filled by the hub.

_DELTA_BYTES = 256
"""Of a delta's objects without its text: the delta, its list and its token."""

_LOGPROB_BYTES = 256
"""Of one token's log probability."""

_ALTERNATIVE_BYTES = 80
"""Of each alternative beside it."""

_FEWEST_STEPS = 8
"""A client that is so few steps behind is not slow, however much a step brings."""


class DeltaStream:
    """Deltas on the way to a streaming client, at most one a sequence: while the client lags, they merge.

    What it leaves lying is counted. Past a bound `on_full` is called, and `on_room` once all of it was taken and has
    gone out; in between, whoever fills the stream should stop.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        on_full: Callable[["DeltaStream"], object] | None = None,
        on_room: Callable[[], object] | None = None,
    ) -> None:
        """`max_bytes`: about so many may lie here besides the first delta of each sequence."""
        self._pending: dict[int, RequestDelta] = {}
        self._behind: dict[int, list[RequestDelta]] = {}
        """What came behind a pending delta; merged only when it is taken, as each merging copies all."""
        self._silent: dict[int, list[RequestDelta]] = {}
        """Deltas without text: they go with the sequence's next one."""
        self._error: ApiError | None = None
        self._arrived = asyncio.Event()
        self._num_bytes = 0
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._on_full = on_full
        self._on_room = on_room
        self._is_full = False

    def put(self, index: int, delta: RequestDelta) -> None:
        """Add a delta; one that has nothing to tell wakes nobody."""
        if index in self._pending:
            self._put_behind(index, delta)
        elif delta.text or delta.finished or delta.logprobs or delta.prompt_logprobs is not None:
            if self._silent and (silent := self._silent.pop(index, None)) is not None:
                delta = _merged([*silent, delta])
            self._pending[index] = delta
            self._arrived.set()
        elif delta.token_ids:
            self._silent.setdefault(index, []).append(delta)

    def _put_behind(self, index: int, delta: RequestDelta) -> None:
        behind = self._behind.setdefault(index, [])
        behind.append(delta)
        self._num_bytes += _size(delta)
        if self._num_bytes > self._max_bytes and len(behind) >= _FEWEST_STEPS and not self._is_full:
            self._is_full = True
            if self._on_full is not None:
                self._on_full(self)

    def fail(self, error: ApiError) -> None:
        """Have `take` raise `error` once what came before it is taken."""
        self._error = error
        self._arrived.set()

    async def take(self) -> dict[int, RequestDelta]:
        """What arrived since the last call, by sequence; waits for something. Raises what `fail` was given.

        The call says that what was taken before has gone out.
        """
        if self._is_full and not self._pending and self._error is None:
            self._is_full = False
            if self._on_room is not None:
                self._on_room()
        await self._arrived.wait()
        self._arrived.clear()
        taken, self._pending = self._pending, {}
        if self._behind:
            for index, behind in self._behind.items():
                taken[index] = _merged([taken[index], *behind])
            self._behind = {}
            self._num_bytes = 0
        if self._error is not None:
            self._arrived.set()
            if not taken:
                raise self._error
        return taken


def _size(delta: RequestDelta) -> int:
    """Bytes that a delta takes, about. Those of a prompt's log probabilities, which come once, do not count."""
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


class Results:
    """Waits until all of a request's sequences have ended; their states then hold the answer."""

    def __init__(self, count: int) -> None:
        self._remaining = count
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, index: int, delta: RequestDelta) -> None:
        """Count the sequence's end."""
        self._remaining -= delta.finished
        if not self._remaining and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: ApiError) -> None:
        """Have `wait` raise `error`."""
        if not self._done.done():
            self._done.set_exception(error)

    async def wait(self) -> None:
        """Until the last sequence ended. Raises what `fail` was given."""
        await self._done
