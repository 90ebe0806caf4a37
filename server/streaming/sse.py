"""Server-sent events, rendered from prepared bytes. Hot: one call a streamed chunk.

All of a chunk that does not change within a stream is JSON already; a chunk adds its text, and rarely more.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from engine.text.request_state import RequestDelta, RequestState
from server.errors import ApiError
from server.schemas.generation import AnswerHead, Usage

DONE = b"data: [DONE]\n\n"
_END = b"}\n\n"

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


class EventStream(EventSourceResponse):
    """sse-starlette's response over frames that are bytes already.

    Events are sent as they are, and without a time limit: a cancel scope costs half of what a chunk costs here,
    and a client that does not read only lets its own deltas merge.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[], object] | None = None) -> None:
        """`on_end` is called when the response has ended, also where the client left before its first event."""
        super().__init__(events, headers={"Cache-Control": "no-cache"}, sep="\n")
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A generator that was never begun runs no `finally` of its own.
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._on_end is not None:
                self._on_end()

    async def _stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class PreparedFrames:
    """What every chunk of a stream repeats, and the stream's end."""

    object: str
    plain: bytes
    """The end of a choice that has nothing but its text."""

    def __init__(self, head: AnswerHead, *, include_usage: bool, counted_from: int | None = None) -> None:
        """With `counted_from`, the prompts' tokens, each chunk tells the usage so far, which `count` keeps.

        Of chunks with choices, each then tells more tokens than the one before, wherever the choice's text allows it:
        clients take the difference for the chunk's own.
        """
        self._head = b"data: " + encode({"object": self.object, **head._asdict()})[:-1] + b',"choices":['
        self._include_usage = include_usage
        self._prompt_tokens = counted_from
        self._completion_tokens = 0
        self._close_with(b'],"usage":null' if include_usage else b"]")
        self.count(0)
        self._plain_before = self._plain_end
        self._open: dict[int, bytes] = {}
        """Each begun choice's chunk up to what it gained."""

    def count(self, completion_tokens: int) -> None:
        """The chunks to come tell of so many more tokens, where they tell the usage."""
        if self._prompt_tokens is not None:
            self._plain_before = self._plain_end
            self._completion_tokens += completion_tokens
            told = (self._prompt_tokens, self._completion_tokens, self._prompt_tokens + self._completion_tokens)
            self._close_with(b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % told)

    def _close_with(self, members: bytes) -> None:
        self._close = members + _END
        self._plain_end = self.plain + self._close

    def closing(self, usage: Usage) -> bytes:
        """The end of the stream; before it, if it was asked for, the event without choices that tells the usage."""
        if not self._include_usage:
            return DONE
        return b"".join((self._head, b'],"usage":', encode(usage), _END, DONE))


def error_event(body: bytes) -> bytes:
    """The last event of a stream that failed; `body` is the error object as JSON."""
    return b"data: " + body + b"\n\n"


def ending(logprobs: msgspec.Struct | None, finish_reason: str | None) -> bytes:
    """The members of a choice behind its text or delta, and its end."""
    return b',"logprobs":%b,"finish_reason":%b}' % (encode(logprobs), encode(finish_reason))


# [base] `Renderer`: what `server.streaming.generation` needs of an endpoint's answer.


class Renderer(Protocol):
    """One request's answer in its endpoint's form. Choices are known by their index."""

    head: AnswerHead

    def opening(self) -> bytes:
        """Events before the first token."""

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        """Events for what choice `index` gained."""

    def closing(self, usage: Usage) -> bytes:
        """Events behind the last choice's end, the stream's own end included."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that `error` ends."""
        return error_event(error.body())

    def whole(self, states: Sequence[RequestState], usage: Usage) -> msgspec.Struct:
        """The answer at once, a choice a state."""


def answer_head(prefix: str, model: str, fingerprint: str) -> AnswerHead:
    """A new answer's head; its id begins with `prefix`."""
    return AnswerHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, fingerprint)
