"""Server-sent events of the two streamed endpoints, rendered from prepared bytes. Hot: one call a streamed chunk.

All of a chunk that does not change within a stream is JSON already; a chunk adds its text, and rarely more.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec
from sse_starlette import EventSourceResponse
from starlette.types import Message, Send

from server.protocol.common import AnswerHead, Usage

DONE = b"data: [DONE]\n\n"
_END = b"}\n\n"

_encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


class EventStream(EventSourceResponse):
    """sse-starlette's response over frames that are bytes already.

    No time limit is put around each send: a cancel scope costs half of what a chunk costs here, and a client that
    does not read only lets its own deltas merge.
    """

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"}, sep="\n")

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        await send(message)


class Frames(Protocol):
    """Renders one stream's chunks."""

    def delta(self, index: int, text: str, logprobs: msgspec.Struct | None, finish_reason: str | None) -> bytes:
        """The event (or events) that tell what choice `index` gained."""

    def closing(self, usage: Usage) -> bytes:
        """The end of the stream."""


class _Stream:
    """What every chunk of a stream repeats."""

    object: str

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        self._head = b"data: " + _encode({"object": self.object, **head._asdict()})[:-1] + b',"choices":['
        self._include_usage = include_usage
        self._close = (b'],"usage":null' if include_usage else b"]") + _END
        self._open: dict[int, bytes] = {}
        """Each choice's chunk up to its text."""

    def closing(self, usage: Usage) -> bytes:
        """The end of the stream; before it, if it was asked for, the event without choices that tells the usage."""
        if not self._include_usage:
            return DONE
        return b"".join((self._head, b'],"usage":', _encode(usage), _END, DONE))


class CompletionFrames(_Stream):
    """Chunks of `/v1/completions`."""

    object = "text_completion"

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        super().__init__(head, include_usage=include_usage)
        self._plain_end = b',"logprobs":null,"finish_reason":null}' + self._close

    def delta(self, index: int, text: str, logprobs: msgspec.Struct | None, finish_reason: str | None) -> bytes:
        opening = self._open.get(index)
        if opening is None:
            opening = self._open[index] = self._head + b'{"index":%d,"text":' % index
        if logprobs is None and finish_reason is None:
            return b"".join((opening, _encode(text), self._plain_end))
        ending = _ending(logprobs, finish_reason)
        return b"".join((opening, _encode(text), ending, self._close))


class ChatFrames(_Stream):
    """Chunks of `/v1/chat/completions`: a choice's first one names its role, its last one is empty but for the end."""

    object = "chat.completion.chunk"

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        super().__init__(head, include_usage=include_usage)
        self._plain_end = b'},"logprobs":null,"finish_reason":null}' + self._close

    def delta(self, index: int, text: str, logprobs: msgspec.Struct | None, finish_reason: str | None) -> bytes:
        opening = self._open.get(index)
        if opening is not None and logprobs is None and finish_reason is None:
            return b"".join((opening, _encode(text), self._plain_end))
        events = []
        if opening is None:
            choice = self._head + b'{"index":%d,"delta":{' % index
            opening = self._open[index] = choice + b'"content":'
            events.append(choice + b'"role":"assistant","content":"","refusal":null' + self._plain_end)
        if text or logprobs is not None:
            ending = b"}" + _ending(logprobs, None)
            events.append(b"".join((opening, _encode(text), ending, self._close)))
        if finish_reason is not None:
            end = opening.removesuffix(b'"content":') + b"}" + _ending(None, finish_reason)
            events.append(end + self._close)
        return b"".join(events)


def error_event(body: bytes) -> bytes:
    """The last event of a stream that failed; `body` is the error object as JSON."""
    return b"data: " + body + b"\n\n"


def _ending(logprobs: msgspec.Struct | None, finish_reason: str | None) -> bytes:
    return b',"logprobs":%b,"finish_reason":%b}' % (_encode(logprobs), _encode(finish_reason))
