"""Answers of `/v1/responses`, whole and as typed events. Made by its route."""

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from engine.messages import TokenLogprobs
from engine.request_state import RequestDelta, RequestState
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from server.answers.parts import AnswerParser
from server.errors import ApiError
from server.logprobs import chat_logprobs
from server.protocol.chat import TokenLogprob
from server.protocol.common import AnswerHead, Usage
from server.protocol.responses import ResponsesRequest
from server.protocol.responses_answer import (
    IncompleteDetails,
    ResponseFailure,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
    ResponseUsageInput,
    ResponseUsageOutput,
    new_response,
)
from server.rendering.base import Renderer
from server.rendering.response_items import EventWriter
from server.rendering.response_output import ResponseOutput
from server.responses.items import new_id


class ResponsesRenderer(Renderer):
    """One response, generated with `params`. `on_end` is told of it as it has ended, before the client is."""

    def __init__(
        self,
        request: ResponsesRequest,
        params: SamplingParams,
        tokenizer: Tokenizer,
        fingerprint: str,
        parser: AnswerParser | None,
        on_end: Callable[[ResponseObject], None],
    ) -> None:
        self._response = new_response(request, params, new_id("resp"), int(time.time()))
        self.head = AnswerHead(self._response.id, self._response.created_at, request.model, fingerprint)
        self._tokenizer = tokenizer
        self._tokens_as_ids = request.return_tokens_as_token_ids
        self._on_end = on_end
        self._writer = EventWriter()
        self._output = ResponseOutput(self._writer, parser)
        self._is_begun = False
        self._finish_reason: str | None = None

    @property
    def status(self) -> ResponseStatus:
        return self._response.status

    def snapshot(self) -> bytes:
        """The response as it stands, as JSON."""
        self._response.output = self._output.items()
        return msgspec.json.encode(self._response)

    def opening(self) -> bytes:
        self._is_begun = True
        begun = "response.in_progress" if self._response.status == "in_progress" else "response.queued"
        return self._event("response.created") + self._event(begun)

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        begun = b""
        if self._response.status == "queued":
            self._response.status = "in_progress"
            begun = self._event("response.in_progress")
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else ()
        events = self._push(delta.steps, logprobs)
        if delta.finished:
            events += self._finish(delta.finish_reason)
        return begun + events

    def closing(self, usage: Usage) -> bytes:
        self._complete(usage)
        return self._event(f"response.{self._response.status}")

    def failure(self, error: ApiError) -> bytes:
        opening = b"" if self._is_begun else self.opening()
        self._response.error = ResponseFailure(str(error))
        self._end("failed")
        return opening + self._event("response.failed")

    def cancel(self) -> bytes:
        """The last event of a response that is cancelled."""
        opening = b"" if self._is_begun else self.opening()
        self._end("cancelled")
        return opening + self._event("response.incomplete")

    def whole(self, states: Sequence[RequestState], usage: Usage) -> ResponseObject:
        (state,) = states
        logprobs = [] if state.logprobs is None else self._logprobs(state.logprobs)
        self._push(state.steps, logprobs)
        self._finish(state.finish_reason)
        self._complete(usage)
        return self._response

    def _push(self, steps: Iterable[tuple[str, int]], logprobs: Sequence[TokenLogprob]) -> bytes:
        """The events of steps, each a text and the number of its tokens."""
        told, events = 0, b""
        for text, num_tokens in steps:
            events += self._output.push(text, num_tokens, logprobs[told : told + num_tokens])
            told += num_tokens
        return events

    def _finish(self, reason: str | None) -> bytes:
        """The end of the text."""
        self._finish_reason = reason
        return self._output.finish("incomplete" if reason == "length" else "completed")

    def _complete(self, usage: Usage) -> None:
        self._response.usage = ResponseUsage(
            usage.prompt_tokens,
            ResponseUsageInput(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            ResponseUsageOutput(self._output.reasoning_tokens),
            usage.total_tokens,
        )
        if self._finish_reason == "length":
            self._response.incomplete_details = IncompleteDetails()
            self._end("incomplete")
        else:
            self._response.completed_at = int(time.time())
            self._end("completed")

    def _end(self, status: ResponseStatus) -> None:
        self._response.status = status
        self._response.output = self._output.items("incomplete")
        self._on_end(self._response)

    def _event(self, kind: str) -> bytes:
        return self._writer.write(kind, {"response": self._response})

    def _logprobs(self, positions: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
        return chat_logprobs(self._tokenizer, positions, as_ids=self._tokens_as_ids).content
