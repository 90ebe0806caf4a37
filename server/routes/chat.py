"""`POST /v1/chat/completions`: the route, the renderer of its answers, and the writer of their streamed chunks."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
from fastapi import Request, Response

from engine.messages import TokenLogprobs
from engine.text.io_processor import NewSequence
from engine.text.request_state import RequestDelta, RequestState
from engine.text.tokenizer import Tokenizer
from server.endpoints import ENDPOINTS, EndpointFamily
from server.frontend import Frontend
from server.limits.owners import Owner
from server.parsing.freeform import FreeformInput
from server.parsing.parser import (
    AnswerInParts,
    AnswerParser,
    ArgumentsPart,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
)
from server.request_builder import (
    accept,
    chat_sequences,
    check_request_limits,
    holder_of_stream,
    prepare_chat,
    resumed,
)
from server.schemas.chat import (
    AnsweredToolCall,
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
)
from server.schemas.chat_tools import CustomTool, NamedTool
from server.schemas.generation import CompletionTokensDetails, PromptLogprobs, Usage
from server.streaming.generation import Generation
from server.streaming.logprobs import chat_logprobs, prompt_logprobs
from server.streaming.sse import ChunkWriter, Renderer, answer_head, encode, ending, in_slices


class CustomCallPart(ToolCallPart, frozen=True):
    """The beginning of a call of a custom tool."""


class InputPart(msgspec.Struct, frozen=True):
    """A further piece of the input of call `index`, a call of a custom tool."""

    index: int
    text: str


ChatPart: TypeAlias = Part | InputPart


class CustomCalls:
    """Converts calls of custom tools in the answer of one choice: their arguments become free text."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the names of the request's custom tools."""
        self._names = names
        self._input: FreeformInput | None = None
        """Input of the last call, if its tool is a custom tool."""
        self._index = 0

    def read(self, parts: Iterable[Part], *, last: bool) -> Iterator[ChatPart]:
        """Yield `parts`, with calls of custom tools converted. `last`: whether these are the last parts."""
        for part in parts:
            if isinstance(part, ToolCallPart):
                yield from self._finish()
                if part.name in self._names:
                    self._input, self._index = FreeformInput(), part.index
                    yield CustomCallPart(part.index, part.id, part.name)
                    continue
            elif isinstance(part, ArgumentsPart) and self._input is not None:
                if text := self._input.push(part.json):
                    yield InputPart(part.index, text)
                continue
            yield part
        if last:
            yield from self._finish()

    def _finish(self) -> Iterator[InputPart]:
        if self._input is not None and (text := self._input.finish()):
            yield InputPart(self._index, text)
        self._input = None


class ChatChunkWriter(ChunkWriter):
    """Encodes chat chunks. A choice's first chunk has its role, its last one only the finish reason.

    If each chunk reports the usage so far, the finish reason is in the chunk of the last text.
    """

    object = "chat.completion.chunk"
    plain = b'},"logprobs":null,"finish_reason":null}'
    has_functions = False
    """Whether calls are written as `function_call`, because the request has `functions`."""

    def delta(
        self,
        index: int,
        text: str,
        logprobs: msgspec.Struct | None,
        finish_reason: str | None,
        members: bytes = b"",
        stop_reason: int | str | None = None,
    ) -> bytes:
        """Return the events for more output of choice `index`, if all of it is content.

        `members` are further JSON members of the choice, each preceded by a comma.
        """
        opening = self._open.get(index)
        if opening is not None and logprobs is None and finish_reason is None and not members:
            return b"".join((opening, b'"content":', encode(text), self._plain_end))
        events = [] if opening is not None else [self.begin(index, b'""')]
        has_output = bool(text) or logprobs is not None or bool(members)
        if has_output and finish_reason is not None and self.reports_usage:
            stopped = members + _stopped(stop_reason)
            return b"".join(
                (*events, self._event(index, b'"content":' + encode(text), logprobs, stopped, finish_reason))
            )
        if has_output:
            events.append(self._event(index, b'"content":' + encode(text), logprobs, members))
        if finish_reason is not None:
            events.append(self.end(index, finish_reason, stop_reason))
        return b"".join(events)

    def parts(
        self, index: int, parts: Iterable[ChatPart], logprobs: msgspec.Struct | None, members: bytes = b""
    ) -> bytes:
        """Return the events for further parts of choice `index`. The first event has `logprobs` and `members`."""
        events = []
        for part in parts:
            if index not in self._open:
                events.append(self.begin(index, b'""' if isinstance(part, TextPart) else b"null"))
            events.append(self._event(index, self._member(part), logprobs, members))
            logprobs, members = None, b""
        if logprobs is not None or members:
            if index not in self._open:
                events.append(self.begin(index, b'""'))
            events.append(self._event(index, b"", logprobs, members))
        return b"".join(events)

    def begin(self, index: int, content: bytes) -> bytes:
        """Return the first event of a choice. `content` is `""`, or `null` if the choice does not begin with
        content."""
        self._open[index] = opening = self._head + b'{"index":%d,"delta":{' % index
        return b"".join((opening, b'"role":"assistant","content":', content, b',"refusal":null', self._plain_before))

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None = None) -> bytes:
        """Return the last event of a choice."""
        begun = b"" if index in self._open else self.begin(index, b'""')
        return b"".join(
            (begun, self._open[index], b"}", _stopped(stop_reason), ending(None, finish_reason), self._close)
        )

    def of_prompt(self, members: bytes) -> bytes:
        """Return an event without choices, whose `members` describe the prompt."""
        return b"".join((self._head, b"]", members, self._close.removeprefix(b"]")))

    def _member(self, part: ChatPart) -> bytes:
        """Encode a part as a member of a delta."""
        match part:
            case TextPart():
                return b'"content":' + encode(part.text)
            case ReasoningPart():
                text = encode(part.text)
                return b'"reasoning_content":%b,"reasoning":%b' % (text, text)
            case CustomCallPart():
                called = {"name": part.name, "input": ""}
            case ToolCallPart():
                called = {"name": part.name, "arguments": ""}
            case ArgumentsPart():
                called = {"arguments": part.json}
            case InputPart():
                called = {"input": part.text}
        if self.has_functions:
            return b'"function_call":' + encode(called)
        kind = "custom" if isinstance(part, CustomCallPart | InputPart) else "function"
        call: dict[str, Any] = {"index": part.index}
        if isinstance(part, ToolCallPart):
            call |= {"id": part.id, "type": kind}
        return b'"tool_calls":[%b]' % encode({**call, kind: called})

    def _event(
        self,
        index: int,
        member: bytes,
        logprobs: msgspec.Struct | None,
        members: bytes,
        finish_reason: str | None = None,
    ) -> bytes:
        if logprobs is None and not members and finish_reason is None:
            return b"".join((self._open[index], member, self._plain_end))
        return b"".join((self._open[index], member, b"}", members, ending(logprobs, finish_reason), self._close))


def _stopped(stop_reason: int | str | None) -> bytes:
    return b"" if stop_reason is None else b',"stop_reason":' + encode(stop_reason)


class ChatRenderer(Renderer):
    """Renders the choices of one chat.

    `new_parser` creates the parser of one choice; it returns None if all output text is content.
    """

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
        self._chunks = ChatChunkWriter(self.head, request.stream_options, len(prompt_token_ids))
        self._echo = (request.messages[-1].text or "") if request.echo else ""
        self._answers = [_answer(new_parser()) for _ in range(request.n)]
        self._chunks.has_functions = request.functions is not None
        self._called_by_name = isinstance(request.tool_choice, NamedTool)
        self._custom_tools = frozenset(tool.custom.name for tool in request.tools if isinstance(tool, CustomTool))
        self._custom_calls = (
            [CustomCalls(self._custom_tools) for _ in range(request.n)] if self._custom_tools else None
        )

    def opening(self) -> bytes:
        prompt = b""
        if self._request.return_token_ids:
            prompt = self._chunks.of_prompt(b',"prompt_token_ids":' + encode(self._prompt_token_ids))
        echoes = range(len(self._answers)) if self._echo else ()
        return prompt + b"".join(self._chunks.delta(index, self._echo, None, None) for index in echoes)

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        if delta.prompt_logprobs is None:
            return self._answer_chunk(index, delta)
        encoded = encode(in_slices(self._of_prompt(delta.prompt_logprobs)))
        prompt = self._chunks.of_prompt(b',"prompt_logprobs":' + encoded)
        return prompt + self._answer_chunk(index, delta)

    def _answer_chunk(self, index: int, delta: RequestDelta) -> bytes:
        self._chunks.count(len(delta.token_ids))
        logprobs = self._logprobs(delta.logprobs)
        members = b',"token_ids":' + encode(delta.token_ids) if self._request.return_token_ids else b""
        answer = self._answers[index]
        if answer is None:
            return self._chunks.delta(index, delta.text, logprobs, delta.finish_reason, members, delta.stop_reason)
        found = answer.push(delta.steps, last=delta.finished, cut_off=delta.finish_reason == "length")
        calls = self._custom_calls
        parts = found if calls is None else calls[index].read(found, last=delta.finished)
        events = self._chunks.parts(index, parts, logprobs, members)
        if delta.finish_reason is not None:
            reason = self._finish_reason(delta.finish_reason, answer)
            events += self._chunks.end(index, reason, delta.stop_reason)
        return events

    def closing(self, usage: Usage) -> bytes:
        return self._chunks.closing(self._with_reasoning(usage))

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
            message = answer.message(self._echo, self._custom_tools)
            reason = self._finish_reason(reason, answer)
            if message.tool_calls and self._chunks.has_functions:
                call = message.tool_calls[0]
                assert isinstance(call, AnsweredToolCall)
                message.function_call, message.tool_calls = call.function, msgspec.UNSET
        choice = ChatChoice(index, message, self._logprobs(state.logprobs), reason)
        if state.stop_reason is not None:
            choice.stop_reason = state.stop_reason
        return choice

    def _finish_reason(self, reason: str, answer: AnswerInParts) -> str:
        """Return `reason`, or `tool_calls` where OpenAI reports it: not if the request forced a call by name."""
        if reason == "stop" and answer.calls and not self._called_by_name:
            return "function_call" if self._chunks.has_functions else "tool_calls"
        return reason

    def _of_prompt(self, positions: list[TokenLogprobs]) -> PromptLogprobs:
        return prompt_logprobs(self._tokenizer, positions, self._request.prompt_logprobs or 0)

    def _logprobs(self, positions: list[TokenLogprobs] | None) -> ChatLogprobs | None:
        if positions is None:
            return None
        return chat_logprobs(self._tokenizer, positions, as_ids=self._request.return_tokens_as_token_ids)

    def _with_reasoning(self, usage: Usage) -> Usage:
        """Return `usage` with the number of reasoning tokens, which is 0 if the answers are not parsed."""
        details = CompletionTokensDetails(sum(each.reasoning_tokens for each in self._answers if each is not None))
        return msgspec.structs.replace(usage, completion_tokens_details=details)


def _answer(parser: AnswerParser | None) -> AnswerInParts | None:
    return None if parser is None else AnswerInParts(parser)


endpoints = ENDPOINTS.register("chat")(EndpointFamily())

_EXAMPLE = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_completion_tokens": 32,
}


async def prepare(
    request: ChatCompletionRequest, frontend: Frontend, owner: Owner, arrival_time: float
) -> tuple[list[NewSequence], ChatRenderer]:
    """Create the sequences and the renderer for a chat. Raises `BadRequest` and other `ApiError`s."""
    check_request_limits(request, frontend)
    chat = await prepare_chat(request, frontend, owner)
    sequences = chat_sequences(request, chat, frontend, owner, arrival_time)
    tokenizer = frontend.loaded.processor.tokenizer
    return sequences, ChatRenderer(request, tokenizer, frontend.fingerprint, chat.new_parser, chat.prompt.token_ids)


@endpoints.post("/v1/chat/completions", ChatCompletion, request=ChatCompletionRequest, example=_EXAMPLE, streams=True)
async def create_chat_completion(http: Request) -> Response:
    """Answer a chat."""
    arrival_time = time.monotonic()
    if (rest := resumed(http)) is not None:
        return rest
    async with accept(http, ChatCompletionRequest) as (request, frontend, owner):
        frontend.admission.precheck(owner, request.n)
        sequences, renderer = await prepare(request, frontend, owner, arrival_time)
        generation = Generation(
            frontend.hub, frontend.config, sequences, request.n, owner=owner, timeout=request.timeout
        )
    return await generation.respond(http, renderer, stream=request.stream, held_by=holder_of_stream(http, request))
