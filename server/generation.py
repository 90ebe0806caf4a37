"""One HTTP request as sequences: fans prompts and choices out, runs them, and answers streamed or whole.

Called by the completions and chat routes with prompts that are validated and tokenised.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.messages import AddRequest
from engine.request_state import RequestDelta, RequestState
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

MAX_PROMPT_LOGPROBS = 2**22
"""Most log probabilities of prompts that one request is told: some hundred megabytes of text."""

_MANY_LOGPROBS = 4096
"""Log probabilities above this are written in a thread, so that the streams of others go on meanwhile."""


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
    each = request.sequences_per_prompt
    if each > limits.max_n:
        raise BadRequest(f"best_of is {each}; it must be at most {limits.max_n} (max_n)", param="best_of")
    if prompts * each > MAX_SEQUENCES:
        raise BadRequest(
            f"prompt holds {prompts} prompts of {each} choices each; a request may have at most "
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
        best_of: int | None = None,
    ) -> None:
        """`prompts` are requests for one sequence each; every one is run `n` times.

        The texts show `visible_token_ids` even where they skip special tokens. With `best_of`, it is run so many
        times, and answered with the `n` choices of the highest mean log probability; the parameters must ask for it.
        """
        told = n * sum(_num_prompt_logprobs(prompt) for prompt in prompts)
        if told > MAX_PROMPT_LOGPROBS:
            raise BadRequest(
                f"the prompts have {told} log probabilities to be told, of each token and its alternatives for each "
                f"choice; a request may ask for at most {MAX_PROMPT_LOGPROBS}",
                param="logprobs",
            )
        self._writes_much = told > _MANY_LOGPROBS
        ids = frontend.hub.new_ids()
        self._hub = frontend.hub
        self._kept = n
        self._n = n = best_of or n
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
                    msgspec.structs.replace(prompt, request_id=id, sampling_params=_for_choice(params, choice))
                )

    async def respond(self, http: Request, renderer: Renderer, *, stream: bool) -> Response:
        """The response, which runs the sequences. They are aborted as soon as the client is gone."""
        if stream:
            events = self.events(renderer)
            return EventStream(events)
        results = Results(len(self._states))
        try:
            self._hub.submit(self._requests, self._states, results)
            await _unless_disconnected(http, results)
        finally:
            self._end(renderer.head.id)
        if self._writes_much:
            content = await asyncio.to_thread(self._whole, renderer)
        else:
            content = self._whole(renderer)
        return Response(content, media_type="application/json")

    def _whole(self, renderer: Renderer) -> bytes:
        return msgspec.json.encode(renderer.whole(self._answered(), self._usage()))

    async def events(self, renderer: Renderer) -> AsyncGenerator[bytes, None]:
        """The stream's events, as many as have arrived at a time. What fails becomes its last event."""
        stream = DeltaStream()
        try:
            self._hub.submit(self._requests, self._states, stream)
            if opening := renderer.opening():
                yield opening
            remaining = len(self._states)
            while True:
                deltas = await stream.take()
                if self._writes_much:
                    events = await asyncio.to_thread(_chunks, renderer, deltas)
                else:
                    events = _chunks(renderer, deltas)
                remaining -= sum(delta.finished for delta in deltas.values())
                if not remaining:
                    break
                if told := b"".join(events):
                    yield told
            yield b"".join((*events, renderer.closing(self._usage())))
        except ApiError as error:
            yield renderer.failure(error)
        except Exception as error:  # noqa: BLE001 - told to the client, who waits for it
            _log.exception("stream %s failed", renderer.head.id)
            yield renderer.failure(EngineError(f"the stream failed: {error}"))
        finally:
            self._end(renderer.head.id)

    def _answered(self) -> list[RequestState]:
        """The choices to answer with; each knows its prompt's log probabilities, which only the first asked for."""
        answered: list[RequestState] = []
        for first in range(0, len(self._states), self._n):
            choices = self._states[first : first + self._n]
            for state in choices:
                state.prompt_logprobs = choices[0].prompt_logprobs
            if self._kept < self._n:
                choices = sorted(choices, key=_mean_logprob, reverse=True)[: self._kept]
            answered += choices
        return answered

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
        _log.debug(
            "%s: %d choices, %d tokens, %s, %.3f s",
            id,
            len(self._states),
            sum(len(state.token_ids) for state in self._states),
            self._states[0].finish_reason or "abort",
            time.monotonic() - self._arrival_time,
        )


def _chunks(renderer: Renderer, deltas: Mapping[int, RequestDelta]) -> list[bytes]:
    return [renderer.chunk(index, delta) for index, delta in deltas.items()]


def _num_prompt_logprobs(prompt: AddRequest) -> int:
    """Log probabilities to tell of a prompt: its tokens' and their alternatives'."""
    alternatives = prompt.sampling_params.prompt_logprobs
    return 0 if alternatives is None else len(prompt.prompt_token_ids) * (1 + alternatives)


def _for_core(params: SamplingParams) -> SamplingParams:
    """`params` without stop strings: they are the front end's, and may be megabytes for each of many choices."""
    return msgspec.structs.replace(params, stop_strings=None) if params.stop_strings else params


def _for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """`params` for choice number `choice` of a prompt, which is read for its log probabilities once."""
    if choice and params.prompt_logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    return seeded(params, choice)


def _mean_logprob(state: RequestState) -> float:
    logprobs = state.logprobs or ()
    return sum(token.logprob for token in logprobs) / max(1, len(logprobs))


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
