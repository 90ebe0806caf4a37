"""One HTTP request as sequences: fans prompts and choices out, runs them, and answers streamed or whole.

Called by the completions and chat routes with prompts that are validated and tokenised.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.messages import AddRequest
from engine.request_state import RequestState
from engine.sampling_params import SamplingParams
from server.errors import ApiError, BadRequest, EngineError
from server.frontend import Frontend
from server.protocol.common import PromptTokensDetails, SamplingFields, Usage, seeded
from server.rendering.base import Renderer
from server.sse import EventStream
from server.streams import DeltaStream, Results

_log = logging.getLogger(__name__)

MAX_SEQUENCES = 2048
"""Most sequences one request may fan out to."""


def check_limits(request: SamplingFields, prompts: int, frontend: Frontend) -> None:
    """Raise `BadRequest` for what this server's configuration does not allow."""
    limits = frontend.config.server_config
    if request.n > limits.max_n:
        raise BadRequest(f"n is {request.n}; it must be at most {limits.max_n} (max_n)", param="n")
    if len(request.stop) > limits.max_stop_strings:
        raise BadRequest(
            f"stop holds {len(request.stop)} strings; it may hold {limits.max_stop_strings} (max_stop_strings)",
            param="stop",
        )
    if prompts * request.n > MAX_SEQUENCES:
        raise BadRequest(
            f"prompt holds {prompts} prompts of {request.n} choices each; a request may have at most "
            f"{MAX_SEQUENCES} choices in all",
            param="prompt",
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is set, but only a request with stream true has any", param="stream_options")


class Generation:
    """The sequences of one request: choice `i` of prompt `p` is number `p * n + i`."""

    def __init__(
        self,
        frontend: Frontend,
        prompts: Sequence[AddRequest],
        n: int,
        arrival_time: float,
        visible_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`prompts` are requests for one sequence each; every one is run `n` times.

        The texts show `visible_token_ids` even where they skip special tokens.
        """
        ids = frontend.hub.new_ids()
        self._hub = frontend.hub
        self._n = n
        self._arrival_time = arrival_time
        self._requests: list[AddRequest] = []
        self._states: list[RequestState] = []
        for prompt in prompts:
            params = _for_core(prompt.sampling_params)
            for choice, id in zip(range(n), ids, strict=False):
                request = msgspec.structs.replace(prompt, request_id=id)
                state = frontend.processor.start(request, arrival_time, visible_token_ids)
                self._states.append(state)
                self._requests.append(
                    msgspec.structs.replace(prompt, request_id=id, sampling_params=seeded(params, choice))
                )

    async def respond(self, http: Request, renderer: Renderer, *, stream: bool) -> Response:
        """The response, which runs the sequences. They are aborted as soon as the client is gone."""
        if stream:
            events = self._events(renderer)
            return EventStream(events)
        results = Results(len(self._states))
        try:
            self._hub.submit(self._requests, self._states, results)
            await _unless_disconnected(http, results)
        finally:
            self._end(renderer.head.id)
        answer = renderer.whole(self._states, self._usage())
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _events(self, renderer: Renderer) -> AsyncIterator[bytes]:
        """The stream's events, as many as have arrived at a time. What fails becomes its last event."""
        stream = DeltaStream()
        try:
            self._hub.submit(self._requests, self._states, stream)
            if opening := renderer.opening():
                yield opening
            remaining = len(self._states)
            while True:
                deltas = await stream.take()
                events = [renderer.chunk(index, delta) for index, delta in deltas.items()]
                remaining -= sum(delta.finished for delta in deltas.values())
                if not remaining:
                    break
                yield b"".join(events)
            yield b"".join((*events, renderer.closing(self._usage())))
        except ApiError as error:
            yield renderer.failure(error)
        except Exception as error:  # noqa: BLE001 - told to the client, who waits for it
            _log.exception("stream %s failed", renderer.head.id)
            yield renderer.failure(EngineError(f"the stream failed: {error}"))
        finally:
            self._end(renderer.head.id)

    def _usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        firsts = self._states[:: self._n]
        prompt_tokens = sum(state.num_prompt_tokens for state in firsts)
        completion_tokens = sum(len(state.token_ids) for state in self._states)
        cached = PromptTokensDetails(sum(state.num_cached_tokens for state in firsts))
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached)

    def _end(self, id: str) -> None:
        """Abort what still runs, and log the request."""
        self._hub.cancel(self._states)
        _log.info(
            "%s: %d choices, %d tokens, %s, %.3f s",
            id,
            len(self._states),
            sum(len(state.token_ids) for state in self._states),
            self._states[0].finish_reason or "abort",
            time.monotonic() - self._arrival_time,
        )


def _for_core(params: SamplingParams) -> SamplingParams:
    """`params` without stop strings: they are the front end's, and may be megabytes for each of many choices."""
    return msgspec.structs.replace(params, stop_strings=None) if params.stop_strings else params


async def _unless_disconnected(http: Request, results: Results) -> None:
    """Wait for `results`. Raises `ClientDisconnect` if the client leaves first."""
    answered = asyncio.ensure_future(results.wait())
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((answered, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise ClientDisconnect
        answered.result()
    finally:
        answered.cancel()
        gone.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
