"""Server-sent events: the response that sends them, and the base classes of renderers.

This code runs once per streamed chunk. So the parts of a chunk that do not change within a stream are encoded once,
and each chunk is joined from these bytes and its text.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, ClassVar, Protocol, Self, TypeVar

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.text.request_state import RequestDelta, RequestState
from server.errors import ApiError
from server.schemas.generation import AnswerHead, StreamOptions, Usage

DONE = b"data: [DONE]\n\n"
_END = b"}\n\n"

_PING_SECONDS, _COMMENT_SECONDS = 5.0, 15.0
"""Seconds between two pings, which show a waiting client that its stream is alive, and between two comments."""

_COMMENT = ServerSentEvent(comment="ping", sep="\n")
"""Ping that clients ignore, but that keeps proxies from closing the connection."""

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode

PIECE_BYTES = 2**18
"""Most bytes of an answer that one message sends. A copy and a system call of tens of megabytes, which log
probabilities may have, would delay all other clients."""

_SLICE = 64
"""Entries of a list that are encoded at a time, in `in_slices`."""


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block and raise `ClientDisconnect` when the client disconnects. The body must have been read.

    So work of disconnected clients that waits for a thread is dropped instead of being done.
    """
    task = asyncio.current_task()
    assert task is not None
    is_inside = True
    is_gone = False

    def give_up(watch: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if is_inside and not watch.cancelled():
            is_gone = True
            task.cancel()

    watch = asyncio.create_task(_wait_for_disconnect(receive))
    watch.add_done_callback(give_up)
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone or task.cancelling() > 1:
            raise
        watch.result()  # Raises the error of a failed `receive`.
        raise ClientDisconnect from None
    finally:
        is_inside = False
        watch.cancel()
        if is_gone:  # Also if the block answered its cancellation with another exception.
            task.uncancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(EventSourceResponse):
    """sse-starlette's response for encoded events, sent by two tasks and a timer in place of four tasks.

    Events are sent without a time limit: if a client does not read, deltas are merged.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], object] | None = None,
        ping: ServerSentEvent | None = None,
    ) -> None:
        """`on_end` is called when the response has ended, even if the client disconnected before the first event.

        `ping` is an event that is sent every few seconds; by default a comment is sent, less often.
        """
        super().__init__(
            events,
            headers={"Cache-Control": "no-cache"},
            ping=_COMMENT_SECONDS if ping is None else _PING_SECONDS,
        )
        self._events = events
        self._on_end = on_end
        self._ping_event = (ping or _COMMENT).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Replaces the base's tasks for events, pings, the disconnect and the server's end, and their cancel scopes.
        # `send_body` sends directly, without the middleware that changes only the head.
        send_body: Send = scope.get("state", {}).get("send_body") or send
        try:
            # A generator that was never started does not run its own `finally`; `aclosing` only ends it.
            with suppress(ClientDisconnect):
                async with while_connected(receive), aclosing(self._events) as events:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    if scope["method"] != "HEAD":
                        with _Pings(self._ping_event, self.ping_interval, scope, send_body) as pings:
                            async for event in events:
                                if len(event) <= PIECE_BYTES:
                                    await send_body({"type": "http.response.body", "body": event, "more_body": True})
                                else:
                                    await pings.send_event(event)
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if self._on_end is not None:
                self._on_end()


class _Pings:
    """Sends a ping repeatedly within the context, but never within an event, from a timer: most streams end before the
    first is due."""

    def __init__(self, ping: bytes, seconds: float, scope: Scope, send: Send) -> None:
        self._message: Message = {"type": "http.response.body", "body": ping, "more_body": True}
        self._seconds = seconds
        self._scope, self._send = scope, send
        self._is_within_event = False

    def __enter__(self) -> Self:
        self._start()
        return self

    async def send_event(self, event: bytes) -> None:
        """Send a large event without pings between its pieces."""
        self._is_within_event = True
        await _send_in_pieces((event,), self._scope, self._send)
        self._is_within_event = False

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._ping)

    def _ping(self) -> None:
        self._start()
        if self._is_within_event:
            return
        sending = self._send(self._message).__await__()
        # A send that waits means that the client reads nothing at present, so that it needs no ping.
        with suppress(StopIteration):
            next(sending)
            sending.close()


def as_json(answer: msgspec.Struct) -> Response:
    """Return a response 200 with `answer` as the body."""
    return json_response(encode(answer))


def json_response(*parts: bytes) -> Response:
    """Return a response 200 whose body is JSON, the concatenation of `parts`. It is sent in pieces if it is large."""
    if sum(map(len, parts)) > PIECE_BYTES:
        return _LargeResponse(parts)
    return Response(b"".join(parts), media_type="application/json")


class _LargeResponse(Response):
    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_in_pieces(self._parts, scope, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_in_pieces(parts: Sequence[bytes], scope: Scope, send: Send) -> None:
    """Send a part of a body, the concatenation of `parts`. Other clients are served between its pieces.

    The connection is notified of the bytes, all of which stay in memory until the last is sent: where much is held for
    clients that hardly read, some must end.
    """
    state = scope.get("state", {})
    hold: Callable[[int, str], object] = state.get("hold_answer", _hold_nothing)
    party = state["owner"].party if "owner" in state else ""
    hold(sum(map(len, parts)), party)
    try:
        for piece in _pieces(parts):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
    finally:
        hold(0, party)


def _pieces(parts: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the concatenation of `parts` in pieces of at most `PIECE_BYTES`."""
    waiting: list[bytes] = []
    num_bytes = 0
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            piece = part[start : start + PIECE_BYTES]
            if num_bytes + len(piece) > PIECE_BYTES:
                yield b"".join(waiting)
                waiting, num_bytes = [], 0
            waiting.append(piece)
            num_bytes += len(piece)
    yield b"".join(waiting)


def _hold_nothing(num_bytes: int, party: str) -> None:
    pass


class ChunkWriter:
    """Encodes the chunks of a stream. It stores the bytes that all chunks share, and also encodes the stream's end."""

    object: str
    plain: bytes
    """The bytes that follow the text in a choice that has only text."""

    def __init__(self, head: AnswerHead, options: StreamOptions | None = None, num_prompt_tokens: int = 0) -> None:
        """With `continuous_usage_stats`, each chunk reports the usage so far, which `count` updates.

        Each chunk with choices then reports more tokens than the previous one, if the choice's text allows it: clients
        use the difference as the number of tokens of the chunk.
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
        """The bytes that precede the text in the chunks of each choice that has begun."""

    def count(self, completion_tokens: int) -> None:
        """Add completion tokens to the usage in later chunks."""
        if self.reports_usage:
            self._plain_before = self._plain_end
            self._completion_tokens += completion_tokens
            usage = (self._prompt_tokens, self._completion_tokens, self._prompt_tokens + self._completion_tokens)
            self._close_with(b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % usage)

    def _close_with(self, members: bytes) -> None:
        self._close = members + _END
        self._plain_end = self.plain + self._close

    def closing(self, usage: Usage) -> bytes:
        """Return the end of the stream, preceded by the event with the usage if the request asked for it."""
        if not self._include_usage:
            return DONE
        return b"".join((self._head, b'],"usage":', encode(usage), _END, DONE))


def error_event(body: bytes) -> bytes:
    """Return the last event of a failed stream. `body` is the error object as JSON."""
    return b"data: " + body + b"\n\n"


def ending(logprobs: msgspec.Struct | msgspec.Raw | None, finish_reason: str | None) -> bytes:
    """Return the members that follow the text or delta in a choice, and the choice's end."""
    return b',"logprobs":%b,"finish_reason":%b}' % (encode(logprobs), encode(finish_reason))


Answer = TypeVar("Answer")


def in_slices(answer: Answer) -> Answer:
    """Encode the long lists of a large answer, or of its choices, and return it with their JSON in place of them.

    `encode` holds the interpreter's lock during a call, for 0.1 s for a million log probabilities. Other threads run
    between the slices of a list.
    """
    encoded: Answer = _in_slices(answer, has_choices=True)
    return encoded


def _in_slices(value: Any, *, has_choices: bool) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        return msgspec.structs.replace(
            value, **{name: _in_slices(each, has_choices=has_choices) for name, each in fields}
        )
    if not isinstance(value, list):
        return value
    if has_choices and value and isinstance(value[0], msgspec.Struct):
        return [_in_slices(each, has_choices=False) for each in value]
    if len(value) <= _SLICE:
        return value
    slices = (encode(value[start : start + _SLICE])[1:-1] for start in range(0, len(value), _SLICE))
    return msgspec.Raw(b"[%b]" % b",".join(slices))


class Renderer(Protocol):
    """Renders one request's answer in the form of its endpoint, for `Generation`. Choices have an index."""

    head: AnswerHead
    ping: ServerSentEvent | None = None
    """Event that is sent every few seconds while the stream is open; None: a comment, which clients ignore."""
    repeats_logprobs: ClassVar[bool] = False
    """Whether the last events repeat all log probabilities, so that these stay in memory until then."""

    def opening(self) -> bytes:
        """Return the events before the first token."""

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        """Return the events for more output of choice `index`."""

    def closing(self, usage: Usage) -> bytes:
        """Return the events after the end of the last choice, including the end of the stream."""

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that ends with `error`."""
        return error_event(error.body())

    def whole(self, states: Sequence[RequestState], usage: Usage) -> msgspec.Struct:
        """Return the complete answer, with one choice per state."""


def answer_head(prefix: str, model: str, fingerprint: str) -> AnswerHead:
    """Create the head of an answer. Its id begins with `prefix`."""
    return AnswerHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, fingerprint)
