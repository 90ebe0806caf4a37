"""`Hub`: from the engine's steps to whoever waits for a request; `DeltaStream` and `Results` are what waits.

One hub a server. `server.generation` submits sequences to it; `CoreManager` calls `receive` once a step.
"""

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from engine.core_manager import EngineDeadError
from engine.messages import AddRequest, RequestOutput, StepOutputs
from engine.request_state import RequestDelta, RequestState
from server.errors import ApiError, BadRequest, EngineError
from server.metrics import Metrics

_log = logging.getLogger(__name__)


class Core(Protocol):
    """What the hub needs of `CoreManager`."""

    def add_requests(self, requests: Sequence[AddRequest]) -> None: ...

    def abort(self, request_ids: Sequence[int]) -> None: ...


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

    def __init__(self, core: Core, metrics: Metrics) -> None:
        self._core = core
        self._metrics = metrics
        self._live: dict[int, _Live] = {}
        self._ids = itertools.count()

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    def new_ids(self) -> Iterator[int]:
        """Request ids, each given once."""
        return self._ids

    def submit(self, requests: Sequence[AddRequest], states: Sequence[RequestState], consumer: Consumer) -> None:
        """Run sequences in the engine; what becomes of them goes to `consumer`, by their place in `requests`."""
        try:
            self._core.add_requests(requests)
        except EngineDeadError as error:
            raise EngineError(str(error)) from error
        for place, state in enumerate(states):
            self._live[state.request_id] = _Live(state, consumer, place)

    def cancel(self, states: Sequence[RequestState]) -> None:
        """Stop what still runs of `states`; nobody waits for it any more."""
        ids = [state.request_id for state in states if state.request_id in self._live]
        for id in ids:
            self._metrics.finished(self._live.pop(id).state, "abort")
        if ids:
            self._core.abort(ids)

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
                self.cancel([live.state])
                live.consumer.fail(EngineError(f"the output cannot be read: {error}"))
        if ended_early:
            self._core.abort(ended_early)
        if step.stats is not None:
            self._metrics.step(step.stats, generated_tokens)

    def _advance(self, live: _Live, output: RequestOutput, ended_early: list[int]) -> None:
        state = live.state
        had_tokens = bool(state.token_ids)
        delta = state.push(output)
        if not had_tokens and state.token_ids:
            self._metrics.first_token(state)
        if delta.finished:
            del self._live[state.request_id]
            self._metrics.finished(state, delta.finish_reason or "error")
            if state.stopped_early:
                ended_early.append(state.request_id)
            if delta.finish_reason in ("abort", "error"):
                live.consumer.fail(_why_failed(output))
                return
        live.consumer.put(live.place, delta)


def _why_failed(output: RequestOutput) -> ApiError:
    if output.bad_request and output.error is not None:
        return BadRequest(output.error)
    return EngineError(output.error or "the engine aborted this request")


class DeltaStream:
    """Deltas on the way to a streaming client, at most one a sequence: while the client lags, they merge."""

    def __init__(self) -> None:
        self._pending: dict[int, RequestDelta] = {}
        self._silent: dict[int, RequestDelta] = {}
        """Deltas without text: they go with the sequence's next one."""
        self._error: ApiError | None = None
        self._arrived = asyncio.Event()

    def put(self, index: int, delta: RequestDelta) -> None:
        """Add a delta; one that has nothing to tell wakes nobody."""
        waiting = self._pending.get(index)
        if waiting is not None:
            self._pending[index] = _merge(waiting, delta)
            return
        if self._silent and (waiting := self._silent.pop(index, None)) is not None:
            delta = _merge(waiting, delta)
        if delta.text or delta.finished or delta.logprobs or delta.prompt_logprobs is not None:
            self._pending[index] = delta
            self._arrived.set()
        elif delta.token_ids:
            self._silent[index] = delta

    def fail(self, error: ApiError) -> None:
        """Have `take` raise `error` once what came before it is taken."""
        self._error = error
        self._arrived.set()

    async def take(self) -> dict[int, RequestDelta]:
        """What arrived since the last call, by sequence; waits for something. Raises what `fail` was given."""
        await self._arrived.wait()
        self._arrived.clear()
        taken, self._pending = self._pending, {}
        if self._error is not None:
            self._arrived.set()
            if not taken:
                raise self._error
        return taken


def _merge(first: RequestDelta, second: RequestDelta) -> RequestDelta:
    logprobs = [*(first.logprobs or ()), *(second.logprobs or ())] or None
    return RequestDelta(
        first.text + second.text,
        first.token_ids + second.token_ids,
        logprobs,
        second.finished,
        second.finish_reason,
        second.stop_reason,
        second.error,
        first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        [*first.steps, *second.steps],
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
