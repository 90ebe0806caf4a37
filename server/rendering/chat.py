"""Answers of `/v1/chat/completions`. Made by its route."""

from collections.abc import Callable, Sequence

import msgspec

from engine.messages import TokenLogprobs
from engine.request_state import RequestDelta, RequestState
from engine.tokenizer import Tokenizer
from server.answers.assembly import AnswerInParts
from server.answers.parts import AnswerParser
from server.logprobs import chat_logprobs, prompt_logprobs
from server.protocol.chat import AssistantMessage, ChatChoice, ChatCompletion, ChatCompletionRequest, ChatLogprobs
from server.protocol.common import CompletionTokensDetails, PromptLogprobs, Usage
from server.rendering.base import Renderer, answer_head
from server.rendering.chat_frames import ChatFrames
from server.sse import encode


class ChatRenderer(Renderer):
    """One chat's choices. `new_parser` makes a choice's parser, or None where all that the model writes is content."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        tokenizer: Tokenizer,
        fingerprint: str,
        new_parser: Callable[[], AnswerParser | None],
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self.head = answer_head("chatcmpl", request.model, fingerprint)
        self._tokenizer = tokenizer
        self._request = request
        self._prompt_token_ids = list(prompt_token_ids)
        counted_from = len(prompt_token_ids) if request.continuous_usage else None
        self._frames = ChatFrames(self.head, include_usage=request.include_usage, counted_from=counted_from)
        self._echo = (request.messages[-1].text or "") if request.echo else ""
        self._answers = [_answer(new_parser()) for _ in range(request.n)]
        self._called_by_name = not isinstance(request.tool_choice, str)

    def opening(self) -> bytes:
        prompt = b""
        if self._request.return_token_ids:
            prompt = self._frames.of_prompt(b',"prompt_token_ids":' + encode(self._prompt_token_ids))
        echoes = range(len(self._answers)) if self._echo else ()
        return prompt + b"".join(self._frames.delta(index, self._echo, None, None) for index in echoes)

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        if delta.prompt_logprobs is None:
            return self._answer_chunk(index, delta)
        prompt = self._frames.of_prompt(b',"prompt_logprobs":' + encode(self._of_prompt(delta.prompt_logprobs)))
        return prompt + self._answer_chunk(index, delta)

    def _answer_chunk(self, index: int, delta: RequestDelta) -> bytes:
        self._frames.count(len(delta.token_ids))
        logprobs = self._logprobs(delta.logprobs)
        members = b',"token_ids":' + encode(delta.token_ids) if self._request.return_token_ids else b""
        answer = self._answers[index]
        if answer is None:
            return self._frames.delta(index, delta.text, logprobs, delta.finish_reason, members, delta.stop_reason)
        parts = answer.push(delta.steps, last=delta.finished)
        events = self._frames.parts(index, parts, logprobs, members)
        if delta.finish_reason is not None:
            reason = self._finish_reason(delta.finish_reason, answer)
            events += self._frames.end(index, reason, delta.stop_reason)
        return events

    def closing(self, usage: Usage) -> bytes:
        return self._frames.closing(self._with_reasoning(usage))

    def whole(self, states: Sequence[RequestState], usage: Usage) -> ChatCompletion:
        choices = [self._choice(*each) for each in enumerate(states)]
        completion = ChatCompletion(**self.head._asdict(), choices=choices, usage=self._with_reasoning(usage))
        if self._request.prompt_logprobs is not None:
            completion.prompt_logprobs = self._of_prompt(states[0].prompt_logprobs or [])
        if self._request.return_token_ids:
            completion.prompt_token_ids = self._prompt_token_ids
            for choice, state in zip(choices, states, strict=True):
                choice.token_ids = state.token_ids
        return completion

    def _choice(self, index: int, state: RequestState) -> ChatChoice:
        answer, reason = self._answers[index], state.finish_reason
        assert reason is not None
        if answer is None:
            message = AssistantMessage(content=self._echo + state.text)
        else:
            answer.push_all(state)
            message, reason = answer.message(self._echo), self._finish_reason(reason, answer)
        choice = ChatChoice(index, message, self._logprobs(state.logprobs), reason)
        if state.stop_reason is not None:
            choice.stop_reason = state.stop_reason
        return choice

    def _finish_reason(self, reason: str, answer: AnswerInParts) -> str:
        """OpenAI says `stop`, not `tool_calls`, of a call that the request asked for by name."""
        if reason == "stop" and answer.calls and not self._called_by_name:
            return "tool_calls"
        return reason

    def _of_prompt(self, positions: list[TokenLogprobs]) -> PromptLogprobs:
        return prompt_logprobs(self._tokenizer, positions, self._request.prompt_logprobs or 0)

    def _logprobs(self, positions: list[TokenLogprobs] | None) -> ChatLogprobs | None:
        if positions is None:
            return None
        return chat_logprobs(self._tokenizer, positions, as_ids=self._request.return_tokens_as_token_ids)

    def _with_reasoning(self, usage: Usage) -> Usage:
        """`usage`, which also counts the reasoning's tokens where the answers are taken apart."""
        answers = [answer for answer in self._answers if answer is not None]
        if not answers:
            return usage
        details = CompletionTokensDetails(sum(answer.reasoning_tokens for answer in answers))
        return msgspec.structs.replace(usage, completion_tokens_details=details)


def _answer(parser: AnswerParser | None) -> AnswerInParts | None:
    return None if parser is None else AnswerInParts(parser)
