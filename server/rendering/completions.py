"""Answers of `/v1/completions`. Made by its route."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.messages import TokenLogprobs
from engine.request_state import RequestDelta, RequestState
from engine.tokenizer import Tokenizer
from server.logprobs import CompletionLogprobsWriter, prompt_logprobs
from server.protocol.common import PromptLogprobs, Usage
from server.protocol.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from server.rendering.base import Renderer, answer_head
from server.rendering.completion_frames import CompletionFrames
from server.sse import encode


class ShownPrompt(NamedTuple):
    """What the choices of a prompt may show of it."""

    token_ids: list[int]
    echo: str
    """What their texts begin with."""


class CompletionRenderer(Renderer):
    """`/v1/completions`: `request.n` choices of each of `prompts`."""

    def __init__(
        self, request: CompletionRequest, tokenizer: Tokenizer, fingerprint: str, prompts: Sequence[ShownPrompt]
    ) -> None:
        self.head = answer_head("cmpl", request.model, fingerprint)
        self._request = request
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._logprobs = [
            CompletionLogprobsWriter(tokenizer, request.skip_special_tokens, request.return_tokens_as_token_ids)
            for _ in range(len(prompts) * request.n)
        ]
        counted_from = sum(len(prompt.token_ids) for prompt in prompts) if request.continuous_usage else None
        self._frames = CompletionFrames(self.head, include_usage=request.include_usage, counted_from=counted_from)
        self._text_only = request.logprobs is None and not request.return_token_ids and not request.continuous_usage
        self._held: dict[int, list[tuple[int, RequestDelta]]] = {}
        """By prompt, chunks of the choices that came before the prompt's log probabilities, which go first."""
        if request.prompt_alternatives is not None:
            self._text_only = False
            self._held = {number: [] for number in range(len(prompts))}

    def opening(self) -> bytes:
        shown = [number for number in range(len(self._prompts)) if number not in self._held]
        return b"".join(self._open_choices(number, []) for number in shown)

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        if self._text_only and delta.stop_reason is None:
            return self._frames.delta(index, delta.text, None, delta.finish_reason)
        number = index // self._request.n
        held = self._held.get(number)
        if held is None:
            return self._full_chunk(index, delta)
        held.append((index, delta))
        if delta.prompt_logprobs is None:
            return b""
        del self._held[number]
        opening = self._open_choices(number, delta.prompt_logprobs)
        return opening + b"".join(self._full_chunk(*each) for each in held)

    def closing(self, usage: Usage) -> bytes:
        return self._frames.closing(usage)

    def whole(self, states: Sequence[RequestState], usage: Usage) -> Completion:
        choices = [self._choice(*each) for each in enumerate(states)]
        return Completion(**self.head._asdict(), choices=choices, usage=usage)

    def _open_choices(self, number: int, positions: list[TokenLogprobs]) -> bytes:
        """The events that tell of a prompt, one for each of its choices; none where nothing of it is to be told."""
        request, prompt = self._request, self._prompts[number]
        members = b""
        if request.prompt_logprobs is not None:
            members += b',"prompt_logprobs":' + encode(self._of_prompt(positions))
        if request.return_token_ids:
            members += b',"prompt_token_ids":%b,"token_ids":[]' % encode(prompt.token_ids)
        if not prompt.echo and not members and (not request.echo or request.logprobs is None):
            return b""
        first = number * request.n
        return b"".join(
            self._frames.delta(index, prompt.echo, self._echoed(index, positions), None, members)
            for index in range(first, first + request.n)
        )

    def _full_chunk(self, index: int, delta: RequestDelta) -> bytes:
        request = self._request
        self._frames.count(len(delta.token_ids))
        asked = request.logprobs is not None and delta.logprobs
        logprobs = self._logprobs[index].write(delta.logprobs or ()) if asked else None
        members = b',"token_ids":' + encode(delta.token_ids) if request.return_token_ids else b""
        if delta.stop_reason is not None:
            members += b',"stop_reason":' + encode(delta.stop_reason)
        return self._frames.delta(index, delta.text, logprobs, delta.finish_reason, members)

    def _choice(self, index: int, state: RequestState) -> CompletionChoice:
        request, prompt = self._request, self._prompts[index // self._request.n]
        logprobs = None
        if request.logprobs is not None:
            logprobs = self._echoed(index, state.prompt_logprobs or [])
            logprobs = _joined(logprobs, self._logprobs[index].write(state.logprobs or ()))
        choice = CompletionChoice(index, prompt.echo + state.text, logprobs, state.finish_reason)
        if state.stop_reason is not None:
            choice.stop_reason = state.stop_reason
        if request.prompt_logprobs is not None:
            choice.prompt_logprobs = self._of_prompt(state.prompt_logprobs or [])
        if request.return_token_ids:
            choice.prompt_token_ids, choice.token_ids = prompt.token_ids, state.token_ids
        return choice

    def _echoed(self, index: int, positions: list[TokenLogprobs]) -> CompletionLogprobs | None:
        """Log probabilities of the prompt, where the request wants them before the generated tokens' own."""
        request, prompt = self._request, self._prompts[index // self._request.n]
        if not request.echo or request.logprobs is None:
            return None
        return self._logprobs[index].write_prompt(prompt.echo, prompt.token_ids[0], positions, request.logprobs)

    def _of_prompt(self, positions: list[TokenLogprobs]) -> PromptLogprobs:
        return prompt_logprobs(self._tokenizer, positions, self._request.prompt_logprobs or 0)


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs) -> CompletionLogprobs:
    if first is None:
        return second
    return CompletionLogprobs(
        *(a + b for a, b in zip(msgspec.structs.astuple(first), msgspec.structs.astuple(second), strict=True))
    )
