"""Answers of `/v1/chat/completions`. Made by its route."""

from collections.abc import Sequence

from engine.request_state import RequestDelta, RequestState
from engine.tokenizer import Tokenizer
from server.logprobs import chat_logprobs
from server.protocol.chat import AssistantMessage, ChatChoice, ChatCompletion, ChatCompletionRequest
from server.protocol.common import Usage
from server.rendering.base import Renderer, answer_head
from server.sse import ChatFrames


class ChatRenderer(Renderer):
    """`/v1/chat/completions`."""

    def __init__(self, request: ChatCompletionRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        self.head = answer_head("chatcmpl", request.model, fingerprint)
        self._tokenizer = tokenizer
        self._frames = ChatFrames(self.head, include_usage=request.include_usage)

    def opening(self) -> bytes:
        return b""

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        logprobs = None if delta.logprobs is None else chat_logprobs(self._tokenizer, delta.logprobs)
        return self._frames.delta(index, delta.text, logprobs, delta.finish_reason)

    def closing(self, usage: Usage) -> bytes:
        return self._frames.closing(usage)

    def whole(self, states: Sequence[RequestState], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            **self.head._asdict(), choices=[self._choice(*each) for each in enumerate(states)], usage=usage
        )

    def _choice(self, index: int, state: RequestState) -> ChatChoice:
        logprobs = None if state.logprobs is None else chat_logprobs(self._tokenizer, state.logprobs)
        return ChatChoice(index, AssistantMessage(state.text), logprobs, state.finish_reason)
