"""The two endpoints' answers, streamed and whole, from the sequences of one request. Called by `server.generation`."""

import time
import uuid
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.request_state import RequestDelta, RequestState
from engine.tokenizer import Tokenizer
from server.logprobs import CompletionLogprobsWriter, chat_logprobs
from server.protocol.chat import AssistantMessage, ChatChoice, ChatCompletion, ChatCompletionRequest
from server.protocol.common import AnswerHead, Usage
from server.protocol.completions import Completion, CompletionChoice, CompletionRequest
from server.sse import ChatFrames, CompletionFrames


class Renderer(Protocol):
    """One request's answer in its endpoint's form."""

    head: AnswerHead

    def opening(self) -> bytes:
        """Events before the first token."""

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        """Events for what choice `index` gained."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event that tells the usage."""

    def whole(self, states: Sequence[RequestState], usage: Usage) -> msgspec.Struct:
        """The answer at once, a choice a state."""


class CompletionRenderer:
    """`/v1/completions`. `echoes` holds what each choice's text begins with."""

    def __init__(
        self, request: CompletionRequest, tokenizer: Tokenizer, fingerprint: str, echoes: Sequence[str]
    ) -> None:
        self.head = _head("cmpl", request.model, fingerprint)
        self._echoes = echoes
        self._frames = CompletionFrames(self.head, include_usage=request.include_usage)
        self._logprobs = [CompletionLogprobsWriter(tokenizer, request.skip_special_tokens) for _ in echoes]

    def opening(self) -> bytes:
        echoes = enumerate(self._echoes)
        return b"".join(self._frames.delta(index, echo, None, None) for index, echo in echoes if echo)

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        logprobs = None if delta.logprobs is None else self._logprobs[index].write(delta.logprobs)
        return self._frames.delta(index, delta.text, logprobs, delta.finish_reason)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._frames.usage(usage)

    def whole(self, states: Sequence[RequestState], usage: Usage) -> Completion:
        return Completion(
            **self.head._asdict(), choices=[self._choice(*each) for each in enumerate(states)], usage=usage
        )

    def _choice(self, index: int, state: RequestState) -> CompletionChoice:
        logprobs = None if state.logprobs is None else self._logprobs[index].write(state.logprobs)
        return CompletionChoice(index, self._echoes[index] + state.text, logprobs, state.finish_reason)


class ChatRenderer:
    """`/v1/chat/completions`."""

    def __init__(self, request: ChatCompletionRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        self.head = _head("chatcmpl", request.model, fingerprint)
        self._tokenizer = tokenizer
        self._frames = ChatFrames(self.head, include_usage=request.include_usage)

    def opening(self) -> bytes:
        return b""

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        logprobs = None if delta.logprobs is None else chat_logprobs(self._tokenizer, delta.logprobs)
        return self._frames.delta(index, delta.text, logprobs, delta.finish_reason)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._frames.usage(usage)

    def whole(self, states: Sequence[RequestState], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            **self.head._asdict(), choices=[self._choice(*each) for each in enumerate(states)], usage=usage
        )

    def _choice(self, index: int, state: RequestState) -> ChatChoice:
        logprobs = None if state.logprobs is None else chat_logprobs(self._tokenizer, state.logprobs)
        return ChatChoice(index, AssistantMessage(state.text), logprobs, state.finish_reason)


def _head(prefix: str, model: str, fingerprint: str) -> AnswerHead:
    return AnswerHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, fingerprint)
