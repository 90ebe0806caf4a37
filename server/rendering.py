"""The two endpoints' answers, streamed and whole, from the sequences of one request. Called by `server.generation`."""

import time
import uuid
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.request_state import RequestDelta, RequestState
from engine.tokenizer import Tokenizer
from server.logprobs import CompletionLogprobsWriter, chat_logprobs
from server.protocol.chat import AssistantMessage, ChatChoice, ChatCompletion
from server.protocol.common import Usage
from server.protocol.completions import Completion, CompletionChoice
from server.sse import ChatFrames, CompletionFrames


class Renderer(Protocol):
    """One request's answer in its endpoint's form."""

    @property
    def id(self) -> str: ...

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
        self, tokenizer: Tokenizer, model: str, fingerprint: str, echoes: list[str], *, include_usage: bool, skip: bool
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._fingerprint = fingerprint
        self._echoes = echoes
        self._frames = CompletionFrames(self.id, self._created, model, fingerprint, include_usage=include_usage)
        self._logprobs = [CompletionLogprobsWriter(tokenizer, skip, len(echo)) for echo in echoes]

    def opening(self) -> bytes:
        echoes = enumerate(self._echoes)
        return b"".join(self._frames.delta(index, echo, None, None) for index, echo in echoes if echo)

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        logprobs = None if delta.logprobs is None else self._logprobs[index].write(delta.logprobs)
        return self._frames.delta(index, delta.text, logprobs, delta.finish_reason)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._frames.usage(usage)

    def whole(self, states: Sequence[RequestState], usage: Usage) -> Completion:
        choices = [
            CompletionChoice(
                index,
                self._echoes[index] + state.text,
                None if state.logprobs is None else self._logprobs[index].write(state.logprobs),
                state.finish_reason,
            )
            for index, state in enumerate(states)
        ]
        return Completion(
            id=self.id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )


class ChatRenderer:
    """`/v1/chat/completions`."""

    def __init__(self, tokenizer: Tokenizer, model: str, fingerprint: str, *, include_usage: bool) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer
        self._frames = ChatFrames(self.id, self._created, model, fingerprint, include_usage=include_usage)

    def opening(self) -> bytes:
        return b""

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        logprobs = None if delta.logprobs is None else chat_logprobs(self._tokenizer, delta.logprobs)
        return self._frames.delta(index, delta.text, logprobs, delta.finish_reason)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._frames.usage(usage)

    def whole(self, states: Sequence[RequestState], usage: Usage) -> ChatCompletion:
        choices = [
            ChatChoice(
                index,
                AssistantMessage(state.text),
                None if state.logprobs is None else chat_logprobs(self._tokenizer, state.logprobs),
                state.finish_reason,
            )
            for index, state in enumerate(states)
        ]
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )
