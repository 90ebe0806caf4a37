"""Answers of `/v1/completions`. Made by its route."""

from collections.abc import Sequence

from engine.request_state import RequestDelta, RequestState
from engine.tokenizer import Tokenizer
from server.logprobs import CompletionLogprobsWriter
from server.protocol.common import Usage
from server.protocol.completions import Completion, CompletionChoice, CompletionRequest
from server.rendering.base import Renderer, answer_head
from server.sse import CompletionFrames


class CompletionRenderer(Renderer):
    """`/v1/completions`. `echoes` holds what each choice's text begins with."""

    def __init__(
        self, request: CompletionRequest, tokenizer: Tokenizer, fingerprint: str, echoes: Sequence[str]
    ) -> None:
        self.head = answer_head("cmpl", request.model, fingerprint)
        self._echoes = echoes
        self._frames = CompletionFrames(self.head, include_usage=request.include_usage)
        self._logprobs = [CompletionLogprobsWriter(tokenizer, request.skip_special_tokens) for _ in echoes]

    def opening(self) -> bytes:
        echoes = enumerate(self._echoes)
        return b"".join(self._frames.delta(index, echo, None, None) for index, echo in echoes if echo)

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        logprobs = None if delta.logprobs is None else self._logprobs[index].write(delta.logprobs)
        return self._frames.delta(index, delta.text, logprobs, delta.finish_reason)

    def closing(self, usage: Usage) -> bytes:
        return self._frames.closing(usage)

    def whole(self, states: Sequence[RequestState], usage: Usage) -> Completion:
        return Completion(
            **self.head._asdict(), choices=[self._choice(*each) for each in enumerate(states)], usage=usage
        )

    def _choice(self, index: int, state: RequestState) -> CompletionChoice:
        logprobs = None if state.logprobs is None else self._logprobs[index].write(state.logprobs)
        return CompletionChoice(index, self._echoes[index] + state.text, logprobs, state.finish_reason)
