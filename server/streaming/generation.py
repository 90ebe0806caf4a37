"""One HTTP request as sequences: fans prompts and choices out, runs them, and answers streamed or whole.

Called by the completions and chat routes with prompts that are validated and tokenised.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.messages import AddRequest
from engine.sampling_params import SamplingParams
from engine.text.request_state import RequestDelta, RequestState
from server.errors import ApiError, BadRequest, EngineError, RequestTimeout, SlowReader
from server.frontend import Frontend
from server.schemas.generation import PromptTokensDetails, Usage, seeded
from server.streaming.hub import Consumer, DeltaStream, Results
from server.streaming.sse import EventStream, Renderer

_log = logging.getLogger(__name__)

MAX_PROMPT_LOGPROBS = 2**22
"""Most log probabilities of prompts that one request is told: some hundred megabytes of text."""

_MANY_LOGPROBS = 4096
"""Log probabilities above this are written in a thread, so that the streams of others go on meanwhile."""


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
        *,
        owner: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """`prompts` are requests for one sequence each; every one is run `n` times.

        The texts show `visible_token_ids` even where they skip special tokens. With `best_of`, it is run so many
        times, and answered with the `n` choices of the highest mean log probability; the parameters must ask for it.
        `owner` is whose request it is, and `timeout` the seconds that it may take.
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
        self._owner = owner
        self._settings = frontend.config.server_config
        timeouts = [each for each in (timeout, self._settings.request_timeout) if each is not None]
        self._timeout = min(timeouts, default=None)
        self._deadline: asyncio.TimerHandle | None = None
        self._id: str | None = None
        """The answer's, once the sequences are submitted and until they are ended."""
        self._requests: list[AddRequest] = []
        self._prompt_tokens: list[int] = []
        """What each sequence adds to the queue. Choices of a prompt share its blocks, so it is computed once."""
        self._states: list[RequestState] = []
        for prompt in prompts:
            params = _for_core(prompt.sampling_params)
            for choice, id in zip(range(n), ids, strict=False):
                request = msgspec.structs.replace(prompt, request_id=id)
                state = frontend.processor.start(request, arrival_time, visible_token_ids)
                self._states.append(state)
                shares = choice and frontend.config.enable_prefix_caching
                self._prompt_tokens.append(0 if shares else len(prompt.prompt_token_ids))
                self._requests.append(
                    msgspec.structs.replace(prompt, request_id=id, sampling_params=_for_choice(params, choice))
                )

    async def respond(self, http: Request, renderer: Renderer, *, stream: bool) -> Response:
        """The response, which runs the sequences. They are aborted as soon as the client is gone.

        Raises `Overloaded` and other `ApiError`s, a stream only before it begins.
        """
        if stream:
            return EventStream(self.events(renderer), self.end)
        results = Results(len(self._states))
        self._begin(renderer, results)
        try:
            await _unless_disconnected(http, results)
        finally:
            self.end()
        if self._writes_much:
            content = await asyncio.to_thread(self._whole, renderer)
        else:
            content = self._whole(renderer)
        return Response(content, media_type="application/json")

    def _whole(self, renderer: Renderer) -> bytes:
        return msgspec.json.encode(renderer.whole(self._answered(), self._usage()))

    def events(self, renderer: Renderer) -> AsyncGenerator[bytes, None]:
        """Submit the sequences, and tell of them: the stream's events, as many as have arrived at a time.

        Raises `Overloaded` and other `ApiError`s; what fails later becomes the last event. Who calls this calls `end`
        as well, whether or not it takes any event.
        """
        stream = DeltaStream(self._settings.stream_buffer_bytes, self._on_full, self._on_room)
        self._begin(renderer, stream)
        return self._events(renderer, stream)

    async def _events(self, renderer: Renderer, stream: DeltaStream) -> AsyncGenerator[bytes, None]:
        try:
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
            self.end()

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

    # -- begin and end ------------------------------------------------------------------------------------------

    def _begin(self, renderer: Renderer, consumer: Consumer) -> None:
        """Submit the sequences, if they are admitted. Raises `ApiError`, and then leaves nothing behind."""
        hub, count = self._hub, len(self._states)
        seconds = math.inf if self._timeout is None else self._arrival_time + self._timeout - time.monotonic()
        if seconds <= 0:
            hub.metrics.received(count)
            hub.metrics.rejected("timeout", count)
            raise self._too_late()
        hub.admission.admit(self._owner, self._prompt_tokens)
        try:
            hub.submit(self._requests, self._states, consumer, self._prompt_tokens)
        except BaseException:
            hub.admission.release(self._owner)
            raise
        self._id = renderer.head.id
        if seconds < math.inf:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._on_deadline, consumer)

    def _on_deadline(self, consumer: Consumer) -> None:
        """End what still runs. Where nothing does, the answer waits for a slow reader, and is not late."""
        if self._hub.cancel(self._states, "timeout"):
            consumer.fail(self._too_late())

    def _too_late(self) -> RequestTimeout:
        return RequestTimeout(
            f"the request was not done within {self._timeout:g} s, its timeout; ask for less, or for more time"
        )

    def _on_full(self, stream: Consumer) -> None:
        """The reader of `stream` is slow."""
        action = self._settings.slow_readers
        self._hub.metrics.slow_reader(action)
        if action == "pause":
            self._hub.pause(self._states)
        elif self._hub.cancel(self._states):
            stream.fail(
                SlowReader(
                    "the stream was read too slowly: this server holds at most about "
                    f"{self._settings.stream_buffer_bytes} bytes for a reader (stream_buffer_bytes)"
                )
            )

    def _on_room(self) -> None:
        """The reader has caught up: what was paused goes on."""
        self._hub.resume(self._states)

    def end(self) -> None:
        """Abort what still runs, and log the request; the second time, nothing."""
        if self._id is None:
            return
        id, self._id = self._id, None
        if self._deadline is not None:
            self._deadline.cancel()
        self._hub.cancel(self._states)
        self._hub.admission.release(self._owner)
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
