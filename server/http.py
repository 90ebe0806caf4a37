"""`serve`: runs the application under uvicorn until a signal, or until the engine has failed.

`HttpProtocol` is uvicorn's HTTP/1.1 with bounds on what a connection may hold and on how long it may take, with an
error object as the answer to bytes that are not HTTP, and with answers to clients that have shut down their sending
side.
`_Server` drains: after a signal, live requests may end before the server does.
"""

import asyncio
import logging
import math
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from sse_starlette.sse import AppStatus
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine.client.core_manager import CoreManager
from engine.config.config import Config
from engine.config.server import ServerConfig
from engine.config.settings import ModelList
from engine.full_collections import FullCollections
from server.access_log import HEADER, new_request_id
from server.app import create_app
from server.batches.runner import BatchRunner
from server.endpoints import all_endpoints
from server.errors import ApiError, BadRequest, as_raw_response
from server.limits.acceptor import Acceptor
from server.limits.connections import Connection, Connections
from server.limits.keys import ApiKeys
from server.limits.owners import address_of
from server.limits.turns import HeadTurns, RequestTurns, begin_at_once
from server.models import Models
from server.service_manager import ServiceManager
from server.signals import Signals
from server.tls import Tls
from server.tracing import Tracing

_log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 2**10
"""Most bytes outside of a body: of a request line with its headers, or of the trailers of a chunked body."""

_MAX_HEADERS = 256

_MAX_TARGET_BYTES, _MAX_PARAMETERS = 8 * 2**10, 256
"""Most bytes of a request's target, and most parameters in its query. Decoding 64 KiB of either takes 12 to 90 ms at
a time, on the event loop."""

_MAX_HOPS = 64
"""Most addresses in `X-Forwarded-For`, of which each that is a trusted proxy's takes a microsecond."""

_SLICE = 16 * 2**10
"""Most bytes of one connection that are parsed before other connections get a turn."""

_HEAD_SLICE, _BODY_SLICE = 512, 4 * 2**10
"""Most bytes of a head, and of a body, that are parsed at a time. Parsing stops when a request waits for the answer to
an earlier one: 16 KiB hold hundreds of requests, each with dozens of objects."""

_TLS_READ_BYTES = 2**18
"""Most bytes that the event loop reads at a time from a connection with TLS. After a pause, it may read once more."""

_DISCARD_SECONDS, _SMALL_BYTES = 0.05, 2**14
"""Pause after a read of fewer bytes of what a client sends after its last answer: without it, a flood of tiny chunks
takes 0.67 of a core. Large bodies are read without pauses, so that their clients get to the answer."""

_MAX_TINY_PIECES, _TINY_BYTES = 4096, 16
"""A body in more pieces than this must have this many bytes per piece on average: each piece costs a microsecond."""

_HOST = re.compile(rb"(?:\[([0-9A-Za-z:.%_~-]{1,128})\]|[\w.~!$&'()*+;=%-]*)(?::[0-9]*)?", re.ASCII)
"""A host and port (RFC 3986, section 3.2), with an IPv6 address as the group. Commas, which it allows in names, come
from several headers that were joined."""

_ABSOLUTE = re.compile(rb"https?://([^/?#]+)(.*)", re.IGNORECASE)
"""The absolute form of a request's target, with its host and path."""

_TINY = f"the request's body comes in chunks of less than {_TINY_BYTES} bytes on average; send larger ones"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_HTTP = "the request is not HTTP/1.1; check the client, and that the URL is http://"

_SHUTDOWN_SECONDS = 5
"""Time that slow clients have, at the end of the server, to send requests and to read answers."""

_HURRIED_SECONDS = 0.5
"""That time after a second signal."""


class HeadTooLarge(BadRequest):
    """The request line and headers exceed `MAX_HEAD_BYTES`, or there are more than `_MAX_HEADERS` headers."""

    status = 431
    code = "request_too_large"


class TargetTooLong(HeadTooLarge):
    """The request's target exceeds `_MAX_TARGET_BYTES`, or its query has more than `_MAX_PARAMETERS` parameters."""

    status = 414


class _Flow(FlowControl):
    """uvicorn's flow control of one connection, except that `HttpProtocol` decides when to read."""

    def __init__(self, transport: asyncio.Transport, on_change: Callable[[], object]) -> None:
        super().__init__(transport)
        self._on_change = on_change

    def pause_reading(self) -> None:
        self.read_paused = True
        self._on_change()

    def resume_reading(self) -> None:
        self.read_paused = False
        self._on_change()

    def detach(self) -> None:
        """Drop the reference to the protocol, which no longer reads."""
        self._on_change = lambda: None


class HttpProtocol(HttpToolsProtocol):
    """One connection. Reports its phases to its `Connection`, and sets the bounds that uvicorn's protocol lacks.

    The parser itself collects the bytes of a head without a bound. It is given at most `_SLICE` bytes at a time: 250
    KB of tiny requests, headers or chunks, parsed at once, would block the event loop for 0.1 s. While pipelined
    requests of the connection wait for the answer to an earlier one, nothing more is parsed or read.
    """

    def __init__(
        self,
        *args: Any,
        connection: Connection,
        heads: HeadTurns,
        turns: RequestTurns,
        keys: ApiKeys,
        probes: Collection[bytes] = (),
        max_request_bytes: float = math.inf,
        **keywords: Any,
    ) -> None:
        """`probes` are the paths of probes and admin calls, which are served in addition to `max_connections`.
        A request with a longer body than `max_request_bytes` begins before it arrives: it is an upload, or is refused.

        Requests without an accepted key are served in addition, too; those with a token count once it is verified. A
        probe that is a connection's first request needs no turn, since few connections are accepted at once.
        """
        super().__init__(*args, **keywords)
        # Reference cycles begin in `connection_made`: after a failed TLS handshake, `connection_lost` is not called.
        self.parser = None  # type: ignore[assignment]
        self._probes = probes
        self._max_request_bytes = max_request_bytes
        self._keys = keys
        self._heads = heads
        self._turns = turns
        self._has_begun = False
        """Whether a request of the connection has begun."""
        self._probe: tuple[RequestResponseCycle, Any] | None = None
        """A probe that is the connection's first request, until the bytes with its head are parsed."""
        self._is_in_body = False
        self._answered: RequestResponseCycle | None = None
        """The request in progress, else the last one. Requests that are pipelined after it have not begun."""
        self._connection = connection
        self._application = self.app
        self._head_bytes = 0
        """Bytes received since the last end of a head, or since the last byte of a body."""
        self._body_bytes = 0
        """Bytes of a body in the bytes that are being parsed."""
        self._num_pieces = self._piece_bytes = 0
        """Number of pieces of the body received so far, and their bytes."""
        self._unparsed: deque[memoryview] = deque()
        self._num_read = 0
        """Bytes of the last read, which are in memory as long as any of them is unparsed."""
        self._is_parsing_later = False
        self._is_reading = True
        self._has_ended = False
        """Whether the client has shut down its sending side."""
        self._is_discarding = False
        """Whether the last answer has been sent, so that further bytes are discarded."""
        self._is_last = False
        """Whether the connection ends after the present answer, although its request is incomplete."""
        self._refusal: ApiError | None = None
        """The error because of which the parser was stopped."""
        self._framing: bytes | None = None
        """The header that says where the body ends, of a request with a body that the parser will not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app = self._answer_when_arrived
        self.parser = self._new_parser()
        self.flow = _Flow(transport, self._choose_reading)
        if self.scheme == "https":
            transport.set_read_buffer_limits(_SLICE)  # type: ignore[attr-defined]  # Of what is not decrypted.
        self._connection.established(transport, self._refuse_incomplete, self.abort, self._provoke_reset)

    def _new_parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn's.
        return parser

    def abort(self) -> None:
        """Close the connection at once."""
        self._lose_client()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose_client()
        self._connection.close()
        self._unparsed.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves the timer of a connection that was reset.
        # Without reference cycles, the connection and its requests need no full garbage collection.
        assert isinstance(self.flow, _Flow)
        self.flow.detach()
        self.pipeline.clear()
        self.app = self._application
        self.cycle = None  # type: ignore[assignment]

    def _lose_client(self) -> None:
        """Notify the request in progress that its client is gone. uvicorn's protocol would notify the last pipelined
        one."""
        cycle = self._answered
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    # -- receiving ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            if len(data) < _SMALL_BYTES:
                self._set_reading(False)
                self.loop.call_later(_DISCARD_SECONDS, self._choose_reading)
            return
        self._unset_keepalive_if_required()
        self._connection.received()
        may_parse = not self._unparsed and not self.flow.read_paused and (self._is_in_body or self._heads.may_parse())
        if len(data) <= _SLICE and may_parse:
            if len(data) <= _HEAD_SLICE:
                self._parse(data)
                if self.pipeline:
                    self._choose_reading()
                return
            self._num_read = len(data)
            self._parse_slice(memoryview(data))
            if self._unparsed:
                self._choose_reading()
            return
        self._num_read = len(data)
        view = memoryview(data)
        self._unparsed.extend(view[start : start + _SLICE] for start in range(0, len(data), _SLICE))
        self._choose_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection while completely received requests wait for their answers; else close it.

        A client that closed its socket cannot be distinguished from one that shut down its sending side.
        `_provoke_reset` finds out: a closed socket answers further bytes with a reset.
        """
        self._has_ended = True
        if self._is_discarding or self.scheme == "https":  # TLS ends both directions.
            return False
        return bool(self._unparsed) or self._answer_without_more()

    def _answer_without_more(self) -> bool:
        """Handle the end of the client's bytes, all parsed. Returns whether a complete request waits for its
        answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        self._connection.half_closed()
        return True

    def _provoke_reset(self) -> None:
        """Send an interim response, which clients must ignore, unless a response has begun or the client is HTTP/1.0.

        A closed socket answers it with a reset. If a response has begun, its next bytes have the same effect.
        """
        cycle = self._answered
        if cycle is not None and not cycle.response_started and cycle.scope["http_version"] != "1.0":
            self.transport.write(_CONTINUE)

    def _choose_reading(self) -> None:
        """Parse received bytes and read more, unless the application must first read, or an earlier answer be sent."""
        must_wait = (self.flow.read_paused or bool(self.pipeline)) and not self._is_discarding
        if self._unparsed and not must_wait and not self._is_parsing_later:
            self._is_parsing_later = True
            (self.loop.call_soon if self._is_in_body else self._heads.parse_later)(self._parse_later)
        held_bytes = self._num_read if self._unparsed else 0
        if self.pipeline and self.scheme == "https":
            held_bytes += _TLS_READ_BYTES
        if held_bytes != self._connection.unparsed_bytes:
            self._connection.hold_unparsed(held_bytes)
        self._set_reading(not must_wait and not self._unparsed and not self._has_ended)

    def _set_reading(self, reads: bool) -> None:
        if reads != self._is_reading and not self.transport.is_closing():
            self._is_reading = reads
            (self.transport.resume_reading if reads else self.transport.pause_reading)()

    def _parse_later(self) -> None:
        self._is_parsing_later = False
        if self.transport.is_closing() or not self._unparsed or self.flow.read_paused or self.pipeline:
            return
        self._parse_slice(self._unparsed.popleft())
        if self._unparsed or not self._has_ended:
            self._choose_reading()
        elif not self._answer_without_more():
            self.transport.close()

    def _parse_slice(self, data: memoryview) -> None:
        """Parse bytes until a request waits for the answer to an earlier one."""
        start = 0
        while start < len(data) and not self.transport.is_closing() and not self._is_discarding:
            if self.pipeline:
                self._unparsed.appendleft(data[start:])
                return
            end = start + (_BODY_SLICE if self._is_in_body else _HEAD_SLICE)
            self._parse(data[start:end])
            start = end

    def _parse(self, data: bytes | memoryview) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        try:
            self._feed(data)
        except HttpParserError:
            self._refuse_incomplete(self._refusal or BadRequest(_NO_HTTP))
            return
        finally:
            self._begin_probe()
        if self._body_bytes:
            self._connection.received_body(self._body_bytes)
            self._piece_bytes += self._body_bytes
            self._body_bytes = 0
            if self._num_pieces > _MAX_TINY_PIECES and self._piece_bytes < _TINY_BYTES * self._num_pieces:
                self._refuse_incomplete(BadRequest(_TINY))
                return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_incomplete(
                HeadTooLarge(f"the request's headers are too large; send at most {MAX_HEAD_BYTES} bytes")
            )

    def _feed(self, data: bytes | memoryview) -> None:
        """Parse bytes. Upgrades are ignored: a request that asks for one is answered like any other.

        The parser ends such a request at its head. What follows would be lost, or a body be taken for requests.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            if self._framing is not None:
                framing, self._framing = self._framing, None
                self.parser = self._new_parser()
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")

    def _should_upgrade(self) -> bool:
        return False  # uvicorn's would split the header Connection, which may have 64 KiB of commas, several times.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        is_first_probe = not self._has_begun and cycle.scope["raw_path"] in self._probes
        if is_first_probe and cycle.scope["method"] == "GET":
            self._probe = (cycle, app)
        else:
            super()._start_asgi_task(cycle, app)

    def _begin_probe(self) -> None:
        """Answer a probe in the callback in which it has arrived: a task would wait for all callbacks that are
        ready."""
        if self._probe is None:
            return
        (cycle, app), self._probe = self._probe, None
        if cycle.more_body:
            super()._start_asgi_task(cycle, app)
        elif (task := begin_at_once(cycle.run_asgi(app))) is not None:
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)

    async def _answer_when_arrived(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application once the request has arrived, or as much of it as is buffered unread.

        Until then a request costs only the memory of its bytes: heads without bodies must not occupy the application.
        """
        cycle = self._answered = receive.__self__  # type: ignore[attr-defined]
        lengths = (int(value) for name, value in scope["headers"] if name == b"content-length")
        waits = next(lengths, 0) <= self._max_request_bytes
        while waits and cycle.more_body and not cycle.disconnected and len(cycle.body) <= HIGH_WATER_LIMIT:
            if cycle.waiting_for_100_continue:
                cycle.waiting_for_100_continue = False
                self.transport.write(_CONTINUE)
            cycle.message_event.clear()
            await cycle.message_event.wait()
        if not (cycle.more_body and cycle.disconnected):
            if self._has_begun or scope["raw_path"] not in self._probes:
                await self._turns.take(scope["state"]["party"])
            if cycle.disconnected:
                return
            # Of a flood of requests whose clients reset their connections, most end here or at their acceptance.
            if self._connection.was_reset:
                self.abort()  # While a large body pauses reading, the loop does not report the reset.
                return
            self._has_begun = True
            cycle.message_event.set()
            if cycle.more_body and (cycle.waiting_for_100_continue or not cycle.keep_alive):
                send = self._lingering(cycle, send)
            await self._application(
                scope, receive, _unchunked(cycle, send) if scope["http_version"] == "1.0" else send
            )

    def _lingering(self, cycle: RequestResponseCycle, send: Send) -> Send:
        """Wrap `send` of `cycle`, whose body is incomplete: a connection's last request, or one with `Expect`.

        After an answer in place of 100 Continue, the client may send the body or another request, which cannot be
        distinguished (RFC 9110, section 10.1.1), so the connection ends. uvicorn would close a connection at the
        answer's end, and the rest of the body would reset it.
        """

        async def send_lingering(message: Message) -> None:
            if message["type"] == "http.response.start":
                if cycle.waiting_for_100_continue and cycle.more_body:
                    cycle.keep_alive = False
            elif cycle.more_body and not (cycle.keep_alive or message.get("more_body", False)):
                self._is_last = cycle.keep_alive = True
            await send(message)

        return send_lingering

    # -- what the parser reports --------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are no headers: a proxy in front passes them on, and neither sets nor removes fields of them.
        if self._is_in_body:
            return
        if len(self.headers) == _MAX_HEADERS:
            self._stop(HeadTooLarge(f"the request has too many headers; send at most {_MAX_HEADERS}"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_in_body:
            return  # Of the head in `_feed`.
        self._head_bytes = self._num_pieces = self._piece_bytes = 0
        self._is_in_body = True
        self._unset_keepalive_if_required()  # It was received before the last answer, and waited for its turn.
        try:
            self.url = _checked_target(self.parser.get_http_version(), self.url, self.headers)
        except BadRequest as error:
            self._stop(error)
        owner = self._keys.known_owner(self.headers)
        is_uncounted = self.url.partition(b"?")[0] in self._probes
        if owner is None and self._keys and not is_uncounted:
            is_uncounted = True
            self.scope["state"]["serve"] = self._connection.serve
        self.scope["state"]["hold_answer"] = self._connection.hold_answer
        self.scope["state"]["party"] = self._connection.party if owner is None else owner.party
        refused = self._connection.begin_request(is_uncounted=is_uncounted, party=self.scope["state"]["party"])
        if refused is not None:
            self._stop(refused)
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self._framing = _framing_of(self.headers)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._body_bytes += len(body)
        self._num_pieces += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._framing is not None:
            return
        self._head_bytes = 0
        self._is_in_body = False
        refused = self._connection.end_body()
        if refused is not None:
            self._stop(refused)
        super().on_message_complete()
        self.cycle.more_body = False  # uvicorn does not reset it if the request was answered before its end.

    def _stop(self, error: ApiError) -> NoReturn:
        """Make the parser fail, so that it calls back no more."""
        self._refusal = error
        raise error

    # -- answers ------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_last and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._discard_rest()
        elif not self.transport.is_closing():
            self._connection.end_answer(complete=not self.cycle.more_body)
            self._choose_reading()

    def _refuse_incomplete(self, error: ApiError) -> None:
        """Answer an incomplete request with `error`, unless its answer has begun, and close."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline:
            # To the application, the request appears as one whose client has disconnected.
            cycle.disconnected = True
            cycle.message_event.set()
            self._send_last(error)
        else:
            self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error`, unless another answer is being sent, and close the connection."""
        if self.cycle is None or self.cycle.response_complete:
            self._send_last(error)
        else:
            self._unparsed.clear()
            self.transport.close()

    def _send_last(self, error: ApiError) -> None:
        """Answer with `error`, and end the connection."""
        self.transport.write(as_raw_response(error, {HEADER: new_request_id()}))
        self._discard_rest()

    def _discard_rest(self) -> None:
        """Close after the client has closed. If this side closed first, further bytes of the client would reset the
        connection, and the last answer could be lost."""
        self._unparsed.clear()
        if self._has_ended or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._is_discarding = True
        self._connection.discard()
        self._choose_reading()


def _checked_target(version: str, target: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Check the head of a request (RFC 9112, sections 3.2 and 6.1), and return the target's path and query.

    The host of an absolute target replaces the header `Host`. Raises `BadRequest`.
    """
    if len(target) > _MAX_TARGET_BYTES:
        raise TargetTooLong(f"the request's target has {len(target)} bytes; send at most {_MAX_TARGET_BYTES}")
    if target.count(b"&") >= _MAX_PARAMETERS:
        raise TargetTooLong(f"the request's query has more than {_MAX_PARAMETERS} parameters; send fewer")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if any(coding != b"chunked" for coding in codings):
        raise BadRequest("the request has a Transfer-Encoding other than chunked; send chunked alone")
    if version not in ("1.0", "1.1"):
        raise BadRequest(f"the request is HTTP/{version}; send it as HTTP/1.1")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        # A proxy may have checked another one than this server would.
        raise BadRequest("the request has several Host headers; send one")
    if not hosts and version == "1.1":
        raise BadRequest("the request has no Host header; send one")
    host = hosts[0].strip() if hosts else b""
    if (absolute := _ABSOLUTE.fullmatch(target)) is not None:
        host, path = absolute.groups()
        target = path if path.startswith(b"/") else b"/" + path
        headers[:] = [header for header in headers if header[0] != b"host"]
        headers.append((b"host", host))
    if sum(value.count(b",") for name, value in headers if name == b"x-forwarded-for") >= _MAX_HOPS:
        raise HeadTooLarge(f"the request's X-Forwarded-For has more than {_MAX_HOPS} addresses; send fewer")
    if not target.startswith(b"/") or b"#" in target:
        raise BadRequest("the request's target is no path; send one that begins with /, without a fragment")
    match = _HOST.fullmatch(host)
    if match is None or (match[1] is not None and address_of(match[1].decode()) is None):
        raise BadRequest("the request's host is no name or address with an optional port; check Host")
    if codings and version == "1.0":
        # A proxy of HTTP/1.0 would not know where the body ends.
        raise BadRequest("the request is HTTP/1.0 with a Transfer-Encoding; send it as HTTP/1.1")
    return target


def _framing_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the header that says where the body ends, of which the parser accepts only one; None without a body."""
    for name, value in headers:
        if name == b"transfer-encoding":
            return b"Transfer-Encoding: chunked"
        if name == b"content-length" and int(value):
            return b"Content-Length: " + value
    return None


def _unchunked(cycle: RequestResponseCycle, send: Send) -> Send:
    """Wrap `send` of `cycle` for a client of HTTP/1.0, which knows no chunks: its answer ends with the connection."""
    has_length = True

    async def send_unchunked(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = cycle.keep_alive = False
                cycle.expected_content_length = sys.maxsize
        elif not (has_length or message.get("more_body", False)):
            # Not for each part: uvicorn may wait for the client before it compares, and a ping may come meanwhile.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked


def serve(
    config: Config,
    cores: Sequence[CoreManager],
    models: ModelList,
    listener: socket.socket,
    on_ready: Callable[[tuple[str, ...]], object],
    keys: ApiKeys,
    tls: Tls | None,
    manager: ServiceManager,
    signals: Signals,
    tracing: Tracing | None = None,
    read_config: Callable[[], Config] | None = None,
) -> str | None:
    """Serve on `listener`. Returns a sentence that says why serving ended, or None after a signal.

    `models` describes the models of `cores`. `manager` is notified of the first signal, and regularly while the event
    loop runs. Recorded `signals` end the server or ask for a reload. `read_config` as in `server.process.run`.
    """
    try:
        app = create_app(config, cores, on_ready, keys, tracing, read_config, models)
    except OSError as error:  # Of `data_dir`.
        return str(error)
    served = Models.of(app)
    # The front end ends streams with an event that gives the reason; sse-starlette would cancel them.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    settings = uvicorn_settings(app, config.server_config)
    state = app.state
    _Server(settings, served, state.batches, state.connections, listener, keys, tls, manager, signals).run()
    return served.why_ended


def uvicorn_settings(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's settings. None of them is left to an environment variable."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        workers=1,
        timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]  # a float will do
        timeout_graceful_shutdown=2 * _SHUTDOWN_SECONDS,
        # uvicorn's default is the environment's FORWARDED_ALLOW_IPS, which may be *.
        forwarded_allow_ips=list(config.trusted_proxies),
    )


class _Server(uvicorn.Server):
    """Ends when the engine has failed. A first signal ends it after the last live request, a second one at once."""

    def __init__(
        self,
        settings: uvicorn.Config,
        models: Models,
        batches: BatchRunner,
        connections: Connections,
        listener: socket.socket,
        keys: ApiKeys,
        tls: Tls | None,
        manager: ServiceManager,
        signals: Signals,
    ) -> None:
        super().__init__(settings)
        self._keys = keys
        self._manager = manager
        self._signals = signals
        self._models = models
        self._batches = batches
        self._connections = connections
        self._listener = listener
        self._tls = tls
        self._acceptor: Acceptor | None = None
        self._collections = FullCollections()
        self._drain_timeout = models.config.server_config.drain_timeout
        self._drain_until = math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Record a signal. The listening socket stays open while live requests end, so that new requests get a 503."""
        self._signals.endings.append(sig)

    @property
    def _is_hurried(self) -> bool:
        return len(self._signals.endings) > 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        root_path = self._models.config.server_config.root_path
        reserved = [each for each in all_endpoints() if each.is_probe or each.scope in ("admin", "metrics")]
        probes = {f"{prefix}{each.path}".encode() for each in reserved for prefix in ("", root_path)}

        def new_protocol(connection: Connection) -> HttpProtocol:
            return HttpProtocol(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                connection=connection,
                heads=heads,
                turns=turns,
                keys=self._keys,
                probes=probes,
                max_request_bytes=self._models.max_request_bytes,
            )

        heads, turns = HeadTurns(), RequestTurns()
        tls = self._tls
        context = None if tls is None else lambda: tls.context
        self._acceptor = Acceptor(self._listener, self._connections, new_protocol, context)

    async def on_tick(self, counter: int) -> bool:
        self._manager.beat()
        self._collections.collect_if_due()
        if self._tls is not None:
            self._tls.reload_if_changed()
        if self._signals.asks_reload:
            self._signals.asks_reload = False
            self._models.shared.reloader.reload_and_log()
        if self._signals.endings and self._drain_until == math.inf:
            self._drain_until = time.monotonic() + self._drain_timeout
            self._manager.stopping()
            self._models.drain()
            # Lines of batches do not count as live requests: the next server continues with them.
            await self._batches.stop()
            if live := self._models.num_live:
                _log.warning(
                    "new requests are refused; the server ends after its live requests (%d), in %g s at the latest; "
                    "a second Ctrl-C or SIGTERM ends it now",
                    live,
                    self._drain_timeout,
                )
        if self._models.why_ended is not None or self._is_hurried or time.monotonic() >= self._drain_until:
            return True
        if self._signals.endings and not self._models.num_live:
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._models.close()
        patience = float(_HURRIED_SECONDS if self._is_hurried else _SHUTDOWN_SECONDS)
        if not self._is_hurried and self._drain_until < math.inf:
            # Generated text may still be on its way to the clients.
            patience = max(patience, self._drain_until - time.monotonic())
        self.config.timeout_graceful_shutdown = math.ceil(patience) + _SHUTDOWN_SECONDS
        asyncio.get_running_loop().call_later(patience, self._hang_up)
        if self._acceptor is not None:
            self._acceptor.close()
        self._listener.close()
        await super().shutdown()
        if self._acceptor is not None:
            self._acceptor.stop()

    def _hang_up(self) -> None:
        """Abort the remaining connections. Their requests end as after a disconnect of the client."""
        for connection in list(self.server_state.connections):
            assert isinstance(connection, HttpProtocol)
            connection.abort()
