"""`ResponseOutput`: from a parser's parts to the items of a response and their events. Used by `ResponsesRenderer`."""

from collections.abc import Sequence

from server.answers.assembly import ReasoningTokens
from server.answers.parts import AnswerParser, ArgumentsPart, Part, ReasoningPart, TextPart, ToolCallPart
from server.protocol.chat import TokenLogprob
from server.protocol.responses_items import ItemStatus, OutputItem
from server.rendering.response_items import EventWriter, OpenCall, OpenItem, OpenMessage, OpenReasoning


class ResponseOutput:
    """Opens an item where a part of another kind begins, and closes the one before it."""

    def __init__(self, writer: EventWriter, parser: AnswerParser | None) -> None:
        """Without a parser, all text is the answer's."""
        self._writer = writer
        self._parser = parser
        self._open: OpenItem | None = None
        self._closed: list[OutputItem] = []
        self._logprobs: list[TokenLogprob] = []
        """Of tokens whose text the parser holds back."""
        self._reasoning_tokens = ReasoningTokens()

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning."""
        return self._reasoning_tokens.count

    def push(self, text: str, num_tokens: int, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """The events of `text`, which `num_tokens` tokens wrote."""
        if self._parser is None:
            return self._add_text(text, logprobs) if text or logprobs else b""
        self._logprobs += logprobs
        parts = self._parser.push(text)
        self._reasoning_tokens.add(parts, num_tokens)
        return self._take(parts)

    def finish(self, status: ItemStatus) -> bytes:
        """The events behind the last text. An answer without any item has a message without text."""
        events = b""
        if self._parser is not None:
            left = self._parser.finish()
            self._reasoning_tokens.add(left, 0)
            events = self._take(left)
        if self._open is None and not self._closed:
            events += self._begin(OpenMessage(self._writer, 0))
        return events + self._close(status)

    def items(self, status: ItemStatus = "in_progress") -> list[OutputItem]:
        """The items so far; `status` is that of the open one."""
        return self._closed if self._open is None else [*self._closed, self._open.so_far(status)]

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
                begun = self._begin(OpenReasoning(self._writer, self._next_index))
            assert self._open is not None
            return begun + self._open.add(part.text)
        if isinstance(part, ToolCallPart):
            return self._begin(OpenCall(self._writer, self._next_index, part.id, part.name))
        assert isinstance(part, ArgumentsPart)
        assert isinstance(self._open, OpenCall)
        return self._open.add(part.json)

    def _add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        if isinstance(self._open, OpenMessage):
            return self._open.add(text, logprobs)
        message = OpenMessage(self._writer, self._next_index)
        return self._begin(message) + message.add(text, logprobs)

    @property
    def _next_index(self) -> int:
        return len(self._closed) + (self._open is not None)

    def _begin(self, item: OpenItem) -> bytes:
        closing = self._close("completed")
        self._open = item
        return closing + item.opening()

    def _close(self, status: ItemStatus) -> bytes:
        if self._open is None:
            return b""
        item, events = self._open.closing(status)
        self._closed.append(item)
        self._open = None
        return events
