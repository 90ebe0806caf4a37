"""`Hub`: from the engine's steps to whoever waits for a request, which is a `server.consumers`.

One hub a server. `server.generation` submits sequences to it; `CoreManager` calls `receive` once a step.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from engine.core_manager import EngineDeadError
from engine.messages import AddRequest, RequestOutput, StepOutputs
from engine.request_state import RequestDelta, RequestState
from server.admission import Admission, Limits
from server.errors import ApiError, BadRequest, EngineError, PoisonousRequest
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
