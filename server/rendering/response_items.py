"""The open item of a streamed response: message, reasoning or function call, and the events that it goes through.

Hot: a delta costs the encoding of its text. Used by `ResponseOutput`.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from server.protocol.chat import TokenLogprob
from server.protocol.responses_items import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from server.responses.items import new_id
from server.sse import encode


class EventWriter:
    """Numbers a stream's events, and frames them."""

    def __init__(self) -> None:
        self._next_number = 0

    def write(self, kind: str, fields: Mapping[str, object]) -> bytes:
        """One event of `fields`."""
        return self.finish(self.prepare(kind) + encode(fields)[1:-1])

    @staticmethod
    def prepare(kind: str) -> bytes:
        """What every event of a kind begins with, up to its fields."""
        return b'event: %b\ndata: {"type":"%b",' % (kind.encode(), kind.encode())

    def finish(self, event: bytes) -> bytes:
        """`event` with its number and end."""
        number = self._next_number
        self._next_number = number + 1
        return b'%b,"sequence_number":%d}\n\n' % (event, number)


class OpenItem(Protocol):
    """An item that is being written."""

    def opening(self) -> bytes:
        """Its first events."""

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """The event of more of its text."""

    def closing(self, status: ItemStatus) -> tuple[OutputItem, bytes]:
        """The item, and its last events."""

    def so_far(self, status: ItemStatus) -> OutputItem:
        """The item as it stands."""


class _Open:
    """What the kinds of items share. `index` is the item's place in the response."""

    delta_event: str
    done_event: str
    has_content: bool

    def __init__(self, writer: EventWriter, index: int, id: str) -> None:
        self._writer = writer
        self.index = index
        self.id = id
        self._texts: list[str] = []
        place: dict[str, object] = {"item_id": id, "output_index": index}
        if self.has_content:
            place["content_index"] = 0
        self._place = place
        self._delta = writer.prepare(self.delta_event) + encode(place)[1:-1] + b',"delta":'

    def so_far(self, status: ItemStatus) -> OutputItem:
        raise NotImplementedError

    def part(self) -> msgspec.Struct:
        """The content part as it stands."""
        raise NotImplementedError

    def done_fields(self) -> dict[str, object]:
        """What the event that ends the text tells besides its place."""
        raise NotImplementedError

    def opening(self) -> bytes:
        added = {"output_index": self.index, "item": self.so_far("in_progress")}
        events = self._writer.write("response.output_item.added", added)
        if self.has_content:
            events += self._writer.write("response.content_part.added", {**self._place, "part": self.part()})
        return events

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        self._texts.append(text)
        return self._writer.finish(self._delta + encode(text))

    def closing(self, status: ItemStatus) -> tuple[OutputItem, bytes]:
        item = self.so_far(status)
        events = [self._writer.write(self.done_event, {**self._place, **self.done_fields()})]
        if self.has_content:
            events.append(self._writer.write("response.content_part.done", {**self._place, "part": self.part()}))
        events.append(self._writer.write("response.output_item.done", {"output_index": self.index, "item": item}))
        return item, b"".join(events)

    @property
    def _text(self) -> str:
        return "".join(self._texts)


class OpenMessage(_Open):
    """The answer's text."""

    delta_event = "response.output_text.delta"
    done_event = "response.output_text.done"
    has_content = True

    def __init__(self, writer: EventWriter, index: int) -> None:
        super().__init__(writer, index, new_id("msg"))
        self._logprobs: list[TokenLogprob] = []

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        self._texts.append(text)
        if not logprobs:
            return self._writer.finish(b'%b%b,"logprobs":[]' % (self._delta, encode(text)))
        self._logprobs += logprobs
        return self._writer.finish(b'%b%b,"logprobs":%b' % (self._delta, encode(text), encode(logprobs)))

    def so_far(self, status: ItemStatus) -> OutputItem:
        content = [self.part()] if self._texts or status != "in_progress" else []
        return MessageItem(id=self.id, role="assistant", content=[*content], status=status)

    def part(self) -> OutputText:
        return OutputText(self._text, [], list(self._logprobs))

    def done_fields(self) -> dict[str, object]:
        return {"text": self._text, "logprobs": self._logprobs}


class OpenReasoning(_Open):
    """What the model thinks."""

    delta_event = "response.reasoning_text.delta"
    done_event = "response.reasoning_text.done"
    has_content = True

    def __init__(self, writer: EventWriter, index: int) -> None:
        super().__init__(writer, index, new_id("rs"))

    def so_far(self, status: ItemStatus) -> OutputItem:
        content = [self.part()] if self._texts or status != "in_progress" else []
        return ReasoningItem(id=self.id, content=content, status=status)

    def part(self) -> ReasoningText:
        return ReasoningText(self._text)

    def done_fields(self) -> dict[str, object]:
        return {"text": self._text}


class OpenCall(_Open):
    """A function call."""

    delta_event = "response.function_call_arguments.delta"
    done_event = "response.function_call_arguments.done"
    has_content = False

    def __init__(self, writer: EventWriter, index: int, call_id: str, name: str) -> None:
        super().__init__(writer, index, new_id("fc"))
        self._call_id = call_id
        self._name = name

    def so_far(self, status: ItemStatus) -> OutputItem:
        return FunctionCallItem(
            id=self.id, call_id=self._call_id, name=self._name, arguments=self._text, status=status
        )

    def done_fields(self) -> dict[str, object]:
        return {"name": self._name, "arguments": self._text}
