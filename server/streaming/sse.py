"""Server-sent events: the response that sends them, and what renderers of answers have in common.

Events are joined from prepared bytes, since this code runs once a streamed chunk: the parts of a chunk that do not
change within a stream are encoded once; a chunk adds its text, and rarely more.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from engine.text.request_state import RequestDelta, RequestState
from server.errors import ApiError
from server.schemas.generation import AnswerHead, StreamOptions, Usage

DONE = b"data: [DONE]\n\n"
_END = b"}\n\n"

_PING_SECONDS = 5
"""Between two events that show a waiting client that its stream lives."""

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


class EventStream(EventSourceResponse):
    """sse-starlette's response for events that are encoded already.

    Events are sent without a time limit: a cancel scope would cost half as much as a chunk, and for a client that
    does not read, deltas merge.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], object] | None = None,
        ping: ServerSentEvent | None = None,
    ) -> None:
        """`on_end` is called when the response has ended, even if the client left before its first event.

        `ping` is sent every few seconds; by default a comment is, less often.
        """
        super().__init__(
            events,
            headers={"Cache-Control": "no-cache"},
            sep="\n",
            ping=None if ping is None else _PING_SECONDS,
            ping_message_factory=None if ping is None else lambda: ping,
        )
        self._events = events
        self._on_end = on_end
        self._send_body: Send | None = None
        """Sends past the layers that change only the answer's head; None: there are none to pass by."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_body = scope.get("state", {}).get("send_body")
        # A generator that was never started does not run its own `finally`.
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._on_end is not None:
                self._on_end()

    async def _stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        send_body = self._send_body or send
        async with aclosing(self._events) as events:
            async for event in events:
                await send_body({"type": "http.response.body", "body": event, "more_body": True})
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class ChunkWriter:
    """Writes the chunks of a stream: holds what every chunk repeats, and writes the stream's end."""

    object: str
    plain: bytes
    """The end of a choice that has only text."""

    def __init__(self, head: AnswerHead, options: StreamOptions | None = None, num_prompt_tokens: int = 0) -> None:
        """With `continuous_usage_stats`, each chunk reports the usage so far, which `count` advances.

        Each chunk with choices then reports more tokens than the one before, where the choice's text allows it:
        clients take the difference as the chunk's own tokens.
        """
        self._head = b"data: " + encode({"object": self.object, **head._asdict()})[:-1] + b',"choices":['
        self._include_usage = include_usage = options is not None and options.include_usage
        self.reports_usage = options is not None and include_usage and options.continuous_usage_stats
        """Whether every chunk reports the usage so far."""
        self._prompt_tokens = num_prompt_tokens
        self._completion_tokens = 0
        self._close_with(b'],"usage":null' if include_usage else b"]")
        self.count(0)
        self._plain_before = self._plain_end
        self._open: dict[int, bytes] = {}
        """For each choice that has begun, the beginning of its chunks, up to their text."""

    def count(self, completion_tokens: int) -> None:
        """Count tokens of the completion, for the usage in later chunks."""
        if self.reports_usage:
            self._plain_before = self._plain_end
            self._completion_tokens += completion_tokens
            usage = (self._prompt_tokens, self._completion_tokens, self._prompt_tokens + self._completion_tokens)
            self._close_with(b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % usage)

    def _close_with(self, members: bytes) -> None:
        self._close = members + _END
        self._plain_end = self.plain + self._close

    def closing(self, usage: Usage) -> bytes:
        """The end of the stream, after the event with the usage if the request asked for one."""
        if not self._include_usage:
            return DONE
        return b"".join((self._head, b'],"usage":', encode(usage), _END, DONE))


def error_event(body: bytes) -> bytes:
    """The last event of a stream that failed; `body` is the error object as JSON."""
    return b"data: " + body + b"\n\n"


def ending(logprobs: msgspec.Struct | None, finish_reason: str | None) -> bytes:
    """The members of a choice after its text or delta, and its end."""
    return b',"logprobs":%b,"finish_reason":%b}' % (encode(logprobs), encode(finish_reason))


class Renderer(Protocol):
    """One request's answer in its endpoint's form, as `Generation` needs it. Choices are identified by their index."""

    head: AnswerHead
    ping: ServerSentEvent | None = None
    """Sent every few seconds while the stream lives; None: a comment, which clients do not see."""

    def opening(self) -> bytes:
        """Events before the first token."""

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        """Events for more output of choice `index`."""

    def closing(self, usage: Usage) -> bytes:
        """Events after the last choice's end, the stream's own end included."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that `error` ends."""
        return error_event(error.body())

    def whole(self, states: Sequence[RequestState], usage: Usage) -> msgspec.Struct:
        """The whole answer, with one choice for each state."""


def answer_head(prefix: str, model: str, fingerprint: str) -> AnswerHead:
    """A new answer's head; its id begins with `prefix`."""
    return AnswerHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, fingerprint)
