"""`ResponsesRenderer`: renders answers of `/v1/responses`, complete or as typed events.

It passes each part that the parser finds to `ResponseOutput`, which opens and closes items: `OpenMessage`,
`OpenReasoning`, `OpenCall` and `OpenCustomCall`. An item encodes its events with an `EventWriter`. If the answer is a
compaction, `CompactionOutput` replaces `ResponseOutput`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeAlias, cast

import msgspec

from engine.messages import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.request_state import RequestDelta, RequestState
from engine.text.tokenizer import Tokenizer
from server.errors import ApiError, BadRequest, EngineError
from server.parsing.freeform import FreeformInput
from server.parsing.parser import (
    AnswerParser,
    ArgumentsPart,
    Part,
    ReasoningPart,
    ReasoningTokens,
    TextPart,
    ToolCallPart,
)
from server.responses.store import new_id
from server.responses.tools import Called, ToolTable, echoed
from server.schemas.chat import TokenLogprob
from server.schemas.generation import AnswerHead, Usage
from server.schemas.response_objects import (
    CompactedResponse,
    CompactionItem,
    CustomCallItem,
    FunctionCallItem,
    IncompleteDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
    ResponseUsageInput,
    ResponseUsageOutput,
)
from server.schemas.responses import ResponsesRequest
from server.sealing import Kind
from server.streaming.logprobs import chat_logprobs
from server.streaming.sse import Renderer, encode

SealText: TypeAlias = Callable[[Kind, str], str]
"""Encrypts a text for the owner of a request."""

_FAILURES: dict[str | None, str] = {each: each for each in ("rate_limit_exceeded", "context_length_exceeded")}
"""Error codes that failed responses use unchanged."""


_BLOCK_BYTES = 2**16
"""Number of bytes of encoded log probabilities from which on they are joined to one block."""

_APART = b"\0"
"""Stands for a `LogprobList` in encoded JSON, which otherwise has no zero bytes."""


class LogprobList:
    """The JSON of a growing list of log probabilities, in blocks.

    Five of the last events have the whole list, and so has each response to a client that polls: encoding it each time
    took the event loop a tenth of a second. The blocks are encoded once, and copied only as a part of what is sent.
    """

    __slots__ = ("_blocks", "_joined", "_lock", "_num_joined", "_recent_bytes")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the other attributes: a thread may append while the event loop reads or joins. It is not held while
        many entries are joined."""
        self._joined: bytes | None = None
        """The whole list with its brackets, which replaces the blocks; None until `joined` and after `append`."""
        self._blocks: list[bytes] = []
        """JSON of the entries, without brackets."""
        self._num_joined = 0
        self._recent_bytes = 0

    def append(self, entries: bytes) -> None:
        """Append the entries of a list, as JSON."""
        with self._lock:
            if self._joined is not None:
                self._blocks, self._joined = [self._joined[1:-1]] if len(self._joined) > 2 else [], None
                self._num_joined = len(self._blocks)
            self._blocks.append(entries[1:-1])
            self._recent_bytes += len(entries)
            if self._recent_bytes >= _BLOCK_BYTES:
                self._blocks[self._num_joined :] = [b",".join(self._blocks[self._num_joined :])]
                self._num_joined += 1
                self._recent_bytes = 0

    def parts(self) -> list[bytes]:
        """Return the JSON of the list, in parts."""
        with self._lock:
            return self._present_parts()

    def _present_parts(self) -> list[bytes]:
        if self._joined is not None:
            return [self._joined]
        parts = [b"["]
        for block in self._blocks:
            parts += (block, b",")
        return [*parts[:-1], b"]"] if len(parts) > 1 else [b"[]"]

    def joined(self) -> bytes:
        """Return the JSON of the list, which is then its only part, unless a thread appends meanwhile."""
        parts = self.parts()
        joined = b"".join(parts)
        with self._lock:
            if self._present_parts() == parts:
                self._joined, self._blocks, self._num_joined = joined, [], 0
        return joined


def encode_in_parts(value: object) -> list[bytes]:
    """Encode `value` as JSON in parts, without copies of its `LogprobList`s.

    Joining the parts releases the interpreter's lock if they are large, unlike copies by the encoder.
    """
    lists: list[LogprobList] = []

    def mark(found: object) -> msgspec.Raw:
        assert isinstance(found, LogprobList)
        lists.append(found)
        return msgspec.Raw(_APART)

    parts = msgspec.json.encode(value, enc_hook=mark).split(_APART)
    if not lists:
        return parts
    return [*chain.from_iterable((part, *found.parts()) for part, found in zip(parts, lists, strict=False)), parts[-1]]


class EventWriter:
    """Encodes the events of a stream and numbers them."""

    def __init__(self) -> None:
        self._next_number = 0

    def write(self, kind: str, fields: Mapping[str, object]) -> bytes:
        """Encode one event with `fields`."""
        return b"".join(self.write_in_parts(kind, fields))

    def write_in_parts(self, kind: str, fields: Mapping[str, object]) -> list[bytes]:
        """As `write`, in parts: with log probabilities an event has megabytes."""
        parts = encode_in_parts(fields)
        parts[0] = self.prepare(kind) + parts[0][1:]
        parts[-1] = parts[-1][:-1] + self._end()
        return parts

    @staticmethod
    def prepare(kind: str) -> bytes:
        """Return the bytes that every event of a kind begins with, up to its fields."""
        return b'event: %b\ndata: {"type":"%b",' % (kind.encode(), kind.encode())

    def finish(self, event: bytes) -> bytes:
        """Append the sequence number and the end to `event`."""
        return event + self._end()

    def _end(self) -> bytes:
        number = self._next_number
        self._next_number = number + 1
        return b',"sequence_number":%d}\n\n' % number


class OpenItem:
    """An incomplete item: its text so far, and its events. `index` is its index in the response."""

    delta_event: str
    done_event: str
    has_content: bool

    def __init__(self, writer: EventWriter, index: int, id: str) -> None:
        self._writer = writer
        self.index = index
        self.id = id
        self._texts: list[str] = []
        position: dict[str, object] = {"item_id": id, "output_index": index}
        if self.has_content:
            position["content_index"] = 0
        self._position = position
        self._delta = writer.prepare(self.delta_event) + encode(position)[1:-1] + b',"delta":'

    def so_far(self, status: ItemStatus) -> OutputItem:
        """Return the item so far."""
        raise NotImplementedError

    def part(self) -> msgspec.Struct:
        """Return the content part so far."""
        raise NotImplementedError

    def done_fields(self) -> dict[str, object]:
        """Return the fields of the event that ends the text, without its indices."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """Return the first events."""
        added = {"output_index": self.index, "item": self.so_far("in_progress")}
        events = self._writer.write("response.output_item.added", added)
        if self.has_content:
            events += self._writer.write("response.content_part.added", {**self._position, "part": self.part()})
        return events

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """Return the event for more text."""
        self._texts.append(text)
        return self._writer.finish(self._delta + encode(text))

    def whole(self, status: ItemStatus) -> OutputItem:
        """Return the complete item."""
        return self.so_far(status)

    def closing(self, status: ItemStatus) -> tuple[OutputItem, bytes]:
        """Return the complete item and its last events."""
        item = self.whole(status)
        write = self._writer.write_in_parts
        events = write(self.done_event, {**self._position, **self.done_fields()})
        if self.has_content:
            events += write("response.content_part.done", {**self._position, "part": self.part()})
        events += write("response.output_item.done", {"output_index": self.index, "item": item})
        return item, b"".join(events)

    @property
    def _text(self) -> str:
        return "".join(self._texts)


class OpenMessage(OpenItem):
    """A message with text of the answer."""

    delta_event = "response.output_text.delta"
    done_event = "response.output_text.done"
    has_content = True

    def __init__(self, writer: EventWriter, index: int) -> None:
        super().__init__(writer, index, new_id("msg"))
        self._logprobs = LogprobList()

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        self._texts.append(text)
        if not logprobs:
            return self._writer.finish(b'%b%b,"logprobs":[]' % (self._delta, encode(text)))
        encoded = encode(logprobs)
        self._logprobs.append(encoded)
        return self._writer.finish(b'%b%b,"logprobs":%b' % (self._delta, encode(text), encoded))

    def so_far(self, status: ItemStatus) -> OutputItem:
        content = (self.part(),) if self._texts or status != "in_progress" else ()
        return MessageItem(id=self.id, role="assistant", content=content, status=status)

    def whole(self, status: ItemStatus) -> OutputItem:
        self._logprobs.joined()
        return self.so_far(status)

    def part(self) -> OutputText:
        return OutputText(self._text, (), cast("tuple[TokenLogprob, ...]", self._logprobs))

    def done_fields(self) -> dict[str, object]:
        return {"text": self._text, "logprobs": self._logprobs}


class OpenReasoning(OpenItem):
    """An item with reasoning of the model."""

    delta_event = "response.reasoning_text.delta"
    done_event = "response.reasoning_text.done"
    has_content = True

    def __init__(self, writer: EventWriter, index: int, seal: SealText | None) -> None:
        """If `seal` is given, the complete item also has the text in encrypted form."""
        super().__init__(writer, index, new_id("rs"))
        self._seal = seal

    def so_far(self, status: ItemStatus) -> ReasoningItem:
        content = (self.part(),) if self._texts or status != "in_progress" else ()
        return ReasoningItem(id=self.id, content=content, status=status)

    def whole(self, status: ItemStatus) -> OutputItem:
        item = self.so_far(status)
        if self._seal is None:
            return item
        return msgspec.structs.replace(item, encrypted_content=self._seal("reasoning", self._text))

    def part(self) -> ReasoningText:
        return ReasoningText(self._text)

    def done_fields(self) -> dict[str, object]:
        return {"text": self._text}


class OpenCall(OpenItem):
    """An item with a function call."""

    delta_event = "response.function_call_arguments.delta"
    done_event = "response.function_call_arguments.done"
    has_content = False

    def __init__(self, writer: EventWriter, index: int, call_id: str, called: Called) -> None:
        super().__init__(writer, index, new_id("fc"))
        self._call_id = call_id
        self._name = called.name
        self._namespace = _optional(called.namespace)

    def so_far(self, status: ItemStatus) -> OutputItem:
        return FunctionCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            arguments=self._text,
            namespace=self._namespace,
            status=status,
        )

    def done_fields(self) -> dict[str, object]:
        return {"name": self._name, "arguments": self._text}


class OpenCustomCall(OpenItem):
    """An item with a call of a custom tool: its input is the text in the arguments that the model writes."""

    delta_event = "response.custom_tool_call_input.delta"
    done_event = "response.custom_tool_call_input.done"
    has_content = False

    def __init__(self, writer: EventWriter, index: int, call_id: str, called: Called) -> None:
        super().__init__(writer, index, new_id("ctc"))
        self._call_id = call_id
        self._name = called.name
        self._namespace = _optional(called.namespace)
        self._input = FreeformInput()

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        free = self._input.push(text)
        return super().add(free) if free else b""

    def so_far(self, status: ItemStatus) -> OutputItem:
        return CustomCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            input=self._text,
            namespace=self._namespace,
            status=status,
        )

    def closing(self, status: ItemStatus) -> tuple[OutputItem, bytes]:
        left = self._input.finish()
        events = super().add(left) if left else b""
        item, closing = super().closing(status)
        return item, events + closing

    def done_fields(self) -> dict[str, object]:
        return {"input": self._text}


def _optional(namespace: str | None) -> str | msgspec.UnsetType:
    return msgspec.UNSET if namespace is None else namespace


class ResponseOutput:
    """The items of a response. A part of another kind closes the open item and opens a new one."""

    def __init__(
        self, writer: EventWriter, parser: AnswerParser | None, tools: ToolTable, seal: SealText | None
    ) -> None:
        """Without a parser, all text is content. `seal` encrypts reasoning, if the request asks for that."""
        self._writer = writer
        self._parser = parser
        self._tools = tools
        self._seal = seal
        self._open: OpenItem | None = None
        self._closed: list[OutputItem] = []
        self._logprobs: list[TokenLogprob] = []
        """Log probabilities of tokens whose text the parser has not returned yet."""
        self._reasoning_tokens = ReasoningTokens()

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens."""
        return self._reasoning_tokens.count

    def push(self, text: str, num_tokens: int, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """Return the events for `text`, which has `num_tokens` tokens."""
        if self._parser is None:
            return self._add_text(text, logprobs) if text or logprobs else b""
        self._logprobs += logprobs
        parts = self._parser.push(text)
        self._reasoning_tokens.add(parts, num_tokens)
        return self._take(parts)

    def finish(self, status: ItemStatus) -> bytes:
        """Return the events after the last text. An answer without items gets an empty message."""
        events = b""
        if self._parser is not None:
            parts = self._parser.finish(cut_off=status == "incomplete")
            self._reasoning_tokens.add(parts, 0)
            events = self._take(parts)
        if self._open is None and not self._closed:
            events += self._begin(OpenMessage(self._writer, 0))
        return b"".join((events, self._close(status)))

    def items(self, status: ItemStatus = "in_progress") -> list[OutputItem]:
        """Return the items so far, with `LogprobList`s. `status` is the status of the open item, which a thread may be
        closing meanwhile."""
        open, closed = self._open, list(self._closed)
        return closed if open is None or open.index < len(closed) else [*closed, open.so_far(status)]

    def _take(self, parts: Sequence[Part]) -> bytes:
        return b"".join([self._event(part) for part in parts])

    def _event(self, part: Part) -> bytes:
        if isinstance(part, TextPart):
            logprobs, self._logprobs = self._logprobs, []
            return self._add_text(part.text, logprobs)
        self._logprobs.clear()
        if isinstance(part, ReasoningPart):
            begun = b""
            if not isinstance(self._open, OpenReasoning):
                begun = self._begin(OpenReasoning(self._writer, self._next_index, self._seal))
            assert self._open is not None
            return begun + self._open.add(part.text)
        if isinstance(part, ToolCallPart):
            called = self._tools.called(part.name)
            kind = OpenCustomCall if called.kind == "custom" else OpenCall
            return self._begin(kind(self._writer, self._next_index, part.id, called))
        assert isinstance(part, ArgumentsPart)
        assert isinstance(self._open, OpenCall | OpenCustomCall)
        return self._open.add(part.json)

    def _add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        if isinstance(self._open, OpenMessage):
            return self._open.add(text, logprobs)
        message = OpenMessage(self._writer, self._next_index)
        return b"".join((self._begin(message), message.add(text, logprobs)))

    @property
    def _next_index(self) -> int:
        return len(self._closed) + (self._open is not None)

    def _begin(self, item: OpenItem) -> bytes:
        closing = self._close("completed")
        self._open = item
        return b"".join((closing, item.opening()))

    def _close(self, status: ItemStatus) -> bytes:
        if self._open is None:
            return b""
        item, events = self._open.closing(status)
        self._closed.append(item)
        self._open = None
        return events


_LIMITING = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "logit_bias",
        "max_output_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
    }
)
"""Fields of a request that can prevent the model from writing a summary."""


class CompactionOutput(ResponseOutput):
    """One item with the encrypted text of the answer. Reasoning and calls are dropped."""

    def __init__(
        self,
        writer: EventWriter,
        parser: AnswerParser | None,
        tools: ToolTable,
        seal: SealText,
        limits: Sequence[str] = (),
    ) -> None:
        """`limits` lists set fields of the request that can have prevented the model from writing text."""
        super().__init__(writer, parser, tools, seal)
        self._seal_summary = seal
        self._limits = limits
        self._summary: list[str] = []

    def push(self, text: str, num_tokens: int, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        return self._keep([TextPart(text)] if self._parser is None else self._parser.push(text), num_tokens)

    def finish(self, status: ItemStatus) -> bytes:
        """Return the events of the item. Without text, raises `BadRequest` if there are limits, else `EngineError`."""
        if self._parser is not None:
            self._keep(self._parser.finish(cut_off=status == "incomplete"), 0)
        summary = "".join(self._summary).strip()
        if not summary and self._limits:
            raise BadRequest(
                f"the model wrote no summary of the conversation within {', '.join(self._limits)}; leave them out",
                param=self._limits[0],
            )
        if not summary:
            raise EngineError("the model wrote no summary of the conversation; send the request again")
        item = CompactionItem(id=new_id("cmp"), encrypted_content=self._seal_summary("compaction", summary))
        self._closed.append(item)
        kinds = ("response.output_item.added", "response.output_item.done")
        return b"".join([self._writer.write(kind, {"output_index": 0, "item": item}) for kind in kinds])

    def _keep(self, parts: Sequence[Part], num_tokens: int) -> bytes:
        self._reasoning_tokens.add(parts, num_tokens)
        self._summary += [part.text for part in parts if isinstance(part, TextPart)]
        return b""


class ResponsesRenderer(Renderer):
    """Renders one response, generated with `params`. `on_end` receives the ended response, with
    `LogprobList`s, before the client does."""

    repeats_logprobs = True

    def __init__(
        self,
        request: ResponsesRequest,
        params: SamplingParams,
        tokenizer: Tokenizer,
        fingerprint: str,
        parser: AnswerParser | None,
        tools: ToolTable,
        seal: SealText,
        on_end: Callable[[ResponseObject], None],
    ) -> None:
        self._response = _new_response(request, params, new_id("resp"), int(time.time()))
        self.head = AnswerHead(self._response.id, self._response.created_at, request.model, fingerprint)
        self._tokenizer = tokenizer
        self._tokens_as_ids = request.return_tokens_as_token_ids
        self._on_end = on_end
        self._writer = EventWriter()
        self._output = (
            CompactionOutput(self._writer, parser, tools, seal, sorted(request.model_fields_set & _LIMITING))
            if request.compacts
            else ResponseOutput(self._writer, parser, tools, seal if request.wants_sealed_reasoning else None)
        )
        self._is_begun = False
        self._finish_reason: str | None = None

    @property
    def status(self) -> ResponseStatus:
        return self._response.status

    def snapshot(self) -> list[bytes]:
        """Return the response so far as JSON, in parts."""
        return encode_in_parts(msgspec.structs.replace(self._response, output=self._output.items()))

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
        events = [begun, self._push(delta.steps, logprobs)]
        if delta.finished:
            events.append(self._finish(delta.finish_reason))
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        self._complete(usage)
        return self._event(f"response.{self._response.status}")

    def failure(self, error: ApiError) -> bytes:
        opening = b"" if self._is_begun else self.opening()
        self._response.error = _failure(error)
        self._end("failed")
        return opening + self._event("response.failed")

    def cancel(self) -> bytes:
        """Return the last event of a cancelled response."""
        opening = b"" if self._is_begun else self.opening()
        self._end("cancelled")
        return opening + self._event("response.incomplete")

    def whole(self, states: Sequence[RequestState], usage: Usage) -> ResponseObject:
        (state,) = states
        logprobs = [] if state.logprobs is None else self._logprobs(state.logprobs)
        self._push(state.steps, logprobs)
        self._finish(state.finish_reason)
        self._complete(usage)
        return msgspec.structs.replace(self._response, output=joined_items(self._response.output))

    def _push(self, steps: Iterable[tuple[str, int]], logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return the events for steps, each a text and its number of tokens."""
        first, events = 0, b""
        for text, num_tokens in steps:
            events += self._output.push(text, num_tokens, logprobs[first : first + num_tokens])
            first += num_tokens
        return events

    def _finish(self, reason: str | None) -> bytes:
        """Return the events for the end of the text."""
        # A summary that the token limit truncated is still used.
        self._finish_reason = None if isinstance(self._output, CompactionOutput) else reason
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


def joined_items(items: Iterable[OutputItem]) -> list[OutputItem]:
    """Return the items with JSON in place of their `LogprobList`s."""
    return [_joined(item) for item in items]


def _joined(item: OutputItem) -> OutputItem:
    if not isinstance(item, MessageItem):
        return item
    content = tuple(
        msgspec.structs.replace(part, logprobs=msgspec.Raw(part.logprobs.joined()))
        if isinstance(part, OutputText) and isinstance(part.logprobs, LogprobList)
        else part
        for part in item.content
    )
    return msgspec.structs.replace(item, content=content)


class CompactionRenderer(Renderer):
    """Renders the answer to a compaction request: the retained messages, and the compaction item."""

    def __init__(self, renderer: ResponsesRenderer, retained: Sequence[MessageItem]) -> None:
        """`renderer` renders the response that contains the compaction item."""
        self.head = renderer.head
        self._renderer = renderer
        self._retained = retained

    def opening(self) -> bytes:
        return self._renderer.opening()

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        return self._renderer.chunk(index, delta)

    def closing(self, usage: Usage) -> bytes:
        return self._renderer.closing(usage)

    def whole(self, states: Sequence[RequestState], usage: Usage) -> CompactedResponse:
        response = self._renderer.whole(states, usage)
        assert response.usage is not None
        return CompactedResponse(
            id=response.id,
            created_at=response.created_at,
            output=[*self._retained, *response.output],
            usage=response.usage,
        )


def failed_stream(request: ResponsesRequest, error: ApiError) -> bytes:
    """Return the complete stream of a response that failed with `error` before it began."""
    response = _new_response(request, SamplingParams(), new_id("resp"), int(time.time()))
    writer = EventWriter()
    created = writer.write("response.created", {"response": response})
    response.status, response.error = "failed", _failure(error)
    return created + writer.write("response.failed", {"response": response})


def _failure(error: ApiError) -> ResponseFailure:
    return ResponseFailure(str(error), _FAILURES.get(error.code, "server_error"))


def _new_response(request: ResponsesRequest, params: SamplingParams, id: str, created_at: int) -> ResponseObject:
    """Create a response that has not begun, with the settings of `request` and the defaults in `params`."""
    choice = request.tool_choice
    form = request.text.format
    return ResponseObject(
        id=id,
        created_at=created_at,
        status="queued" if request.background else "in_progress",
        background=request.background,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata,
        model=request.model,
        parallel_tool_calls=request.parallel_tool_calls,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": request.reasoning.effort, "summary": None},
        safety_identifier=request.safety_identifier,
        store=request.store,
        temperature=params.temperature,
        text={
            "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True),
            "verbosity": request.text.verbosity or "medium",
        },
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        tools=[each for tool in request.tools if (each := echoed(tool)) is not None],
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p if request.top_p is None else request.top_p,
        truncation=request.truncation,
        user=request.user,
    )
