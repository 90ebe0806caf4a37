"""Real connections to the protocol, with an application of the test's: pipelines, slices, half-closed clients, TLS.

Under uvloop, as the server runs.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import os
import resource
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from server.anthropic.rendering import PING
from server.http import MAX_HEAD_BYTES, HttpProtocol
from server.limits.acceptor import Acceptor
from server.limits.accounts import RESOURCES, Accounts
from server.limits.connections import Connection, ConnectionLimits, Connections
from server.limits.keys import ApiKeys
from server.limits.turns import HeadTurns, RequestTurns
from server.metrics import Metrics
from server.streaming import sse
from server.streaming.sse import EventStream
from tests.unit.server.test_tls import make_certificate

LIMITS = ConnectionLimits(connections=8, per_address=8)
GET = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
PROBE = GET.replace(b"/x", b"/livez")


class Application:
    """Answers with the length of the body; `/held` when it is released, `/stream` in three parts."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.ended: list[str] = []
        """The end of each client of a `/held` request: `answered` or `gone`."""
        self.num_requests = 0
        self.paths: list[str] = []
        self.headers: list[list[bytes]] = []
        """Names of the headers of each request, as they were when it had been answered."""
        self.hosts: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_requests += 1
        self.paths.append(scope["path"])
        self.hosts.append(dict(scope["headers"]).get(b"host", b""))
        if (b"authorization", b"Bearer a.valid.token") in scope["headers"] and scope["state"]["serve"]() is not None:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body"})
            return
        length, more = 0, True
        while more and scope["path"] != "/unread":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            length, more = length + len(message["body"]), message["more_body"]
        if scope["path"] == "/held":
            gone = asyncio.ensure_future(receive())
            release = asyncio.ensure_future(self.release.wait())
            await asyncio.wait([gone, release], return_when=asyncio.FIRST_COMPLETED)
            self.ended.append("gone" if gone.done() else "answered")
            for task in (gone, release):
                task.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(2 if scope["path"] == "/stream" else 0):
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": str(length).encode()})
        self.headers.append([name for name, _ in scope["headers"]])


class Edge(NamedTuple):
    """The listening protocol."""

    port: int
    application: Application
    connections: Connections
    clock: list[float]
    state: ServerState

    async def connect(self, sent: bytes = b"", tls: ssl.SSLContext | None = None) -> "Client":
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        client = Client(reader, writer)
        writer.write(sent)
        return client

    def knows_half_closed(self) -> bool:
        """Whether the server knows that a client has shut down its sending side."""
        return any(each._is_half_closed for each in self.connections._open)

    def num_accepted(self) -> int:
        """Number of connections that were accepted so far."""
        return len(self.connections) + self.connections._num_closed

    async def wait(self, seconds: float) -> None:
        """Move the clock of the limits."""
        self.clock[0] += seconds
        self.connections.sweep()
        await asyncio.sleep(0)


class Client(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def half_close(self) -> None:
        self.writer.write_eof()

    async def all(self) -> bytes:
        """The bytes that the server sends until it closes."""
        return await self.reader.read()

    async def until(self, text: bytes) -> bytes:
        return await self.reader.readuntil(text)


@asynccontextmanager
async def serving(
    limits: ConnectionLimits = LIMITS,
    tls: ssl.SSLContext | None = None,
    turns: RequestTurns | None = None,
    keys: ApiKeys | None = None,
    application: Any = None,
    max_request_bytes: float = math.inf,
) -> AsyncIterator[Edge]:
    application = application or Application()
    settings = uvicorn.Config(application, ws="none", lifespan="off", log_config=None, access_log=False)
    settings.load()
    state = ServerState()
    clock, heads, turns, keys = [0.0], HeadTurns(), turns or RequestTurns(), keys or ApiKeys()
    metrics = Metrics("test")
    connections = Connections(limits, Accounts(), metrics, lambda: time.monotonic() + clock[0])

    def new_protocol(connection: Connection) -> HttpProtocol:
        return HttpProtocol(
            config=settings,
            server_state=state,
            app_state={},
            connection=connection,
            heads=heads,
            turns=turns,
            keys=keys,
            probes=(b"/livez",),
            max_request_bytes=max_request_bytes,
        )

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = Acceptor(listener, connections, new_protocol, None if tls is None else lambda: tls)
        try:
            yield Edge(listener.getsockname()[1], application, connections, clock, state)
        finally:
            acceptor.close()
            acceptor.stop()
            for protocol in list(state.connections):
                protocol.transport.abort()
            await asyncio.sleep(0)


def all_begun(edge: Edge, number: int) -> bool:
    """Whether bytes of `count` requests have arrived."""
    return sum(each._has_begun for each in edge.connections._open) == number


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test under uvloop."""

    def runs() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(test(), 120))

    runs.__name__, runs.__doc__ = test.__name__, test.__doc__
    return runs


# -- clients that have shut down their sending side -------------------------------------------------------------------


@run
async def test_a_client_that_half_closes_gets_its_whole_answer() -> None:
    async with serving() as edge:
        client = await edge.connect(GET.replace(b"/x", b"/held"))
        await until(lambda: edge.application.num_requests == 1)
        client.half_close()
        await until(edge.knows_half_closed)
        edge.application.release.set()
        answer = await client.all()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nconnection: close\r\n" in answer
        assert edge.application.ended == ["answered"]


@run
async def test_one_that_half_closes_with_its_request_gets_its_stream() -> None:
    async with serving() as edge:
        client = await edge.connect(GET.replace(b"/x", b"/stream"))
        client.half_close()
        assert (await client.all()).endswith(b"4\r\npart\r\n4\r\npart\r\n1\r\n0\r\n0\r\n\r\n")


@run
async def test_one_that_half_closes_after_pipelined_requests_gets_all_answers() -> None:
    async with serving() as edge:
        client = await edge.connect(GET * 2000)
        client.half_close()
        assert (await client.all()).count(b"200 OK") == 2000


@run
async def test_one_that_half_closes_within_its_request_is_closed() -> None:
    async with serving() as edge:
        for part in (b"", b"GET /x HT", b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n123"):
            client = await edge.connect(part)
            client.half_close()
            assert await client.all() == b""


@run
async def test_one_that_waits_long_is_sent_interim_responses() -> None:
    async with serving() as edge:
        client = await edge.connect(GET.replace(b"/x", b"/held"))
        client.half_close()
        await until(edge.knows_half_closed)
        for _ in range(2):
            await edge.wait(4)
            assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        edge.application.release.set()
        assert (await client.all()).startswith(b"HTTP/1.1 200 OK\r\n")


@run
async def test_one_of_http_1_0_which_knows_no_interim_responses_is_sent_none() -> None:
    async with serving() as edge:
        client = await edge.connect(b"GET /held HTTP/1.0\r\n\r\n")
        client.half_close()
        await until(edge.knows_half_closed)
        await edge.wait(4)
        edge.application.release.set()
        assert (await client.all()).startswith(b"HTTP/1.1 200 OK\r\n")


@run
async def test_one_that_has_closed_its_socket_is_found_to_have_gone() -> None:
    async with serving() as edge:
        client = await edge.connect(GET.replace(b"/x", b"/held"))
        await until(lambda: edge.application.num_requests == 1)
        client.writer.close()
        await until(edge.knows_half_closed)
        await edge.wait(3)
        while edge.application.ended != ["gone"]:
            await edge.wait(0)
        assert len(edge.connections) == 0


@run
async def test_a_request_whose_client_has_reset_its_connection_is_not_begun() -> None:
    """750 of them a second took most of a core."""
    for is_accepted, path in itertools.product((False, True), (b"/x", b"/livez")):
        async with serving() as edge:
            with mock.patch.object(edge.connections, "open", wraps=edge.connections.open) as opened:
                with socket.create_connection(("127.0.0.1", edge.port)) as client:
                    while is_accepted and not edge.num_accepted():
                        await asyncio.sleep(0.001)
                    # The event loop, which does not run meanwhile, finds the request and the reset.
                    client.sendall(GET.replace(b"/x", path))
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if is_accepted:
                    while edge.connections._open:
                        await asyncio.sleep(0.001)
                else:
                    await (await edge.connect(GET.replace(b"/x", b"/next"))).until(b"\r\n0\r\n\r\n")
                assert opened.call_count == 1
                assert edge.application.paths == ([] if is_accepted else ["/next"])


@run
async def test_nothing_is_left_of_resets_before_requests_begin_while_nothing_is_read() -> None:
    """The event loop reports no reset of a connection that it does not read from, as after a large body. Such
    connections were served for ever."""
    turns = _NoTurns()
    async with serving(turns=turns) as edge:
        edge.connections.sweep = lambda: False  # type: ignore[method-assign]  # It would end them, but later.
        for _ in range(2 * LIMITS.connections):
            turns.end.clear()
            with socket.create_connection(("127.0.0.1", edge.port)) as client:
                client.sendall(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n" + b"x" * 60_000)
                await until(lambda: [each._body_bytes for each in edge.connections._open] == [60_000])
                client.sendall(b"x" * 10_000)
                await until(lambda: edge.connections._num_served == 1)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            (connection,) = edge.connections._open
            assert connection.was_reset
            turns.end.set()
            await until(lambda: not edge.connections._open and not edge.state.tasks)
        assert edge.application.num_requests == edge.connections._num_served == 0
        assert {edge.connections._accounts.total(each) for each in RESOURCES} == {0}
        assert b"kaon_connections_open 0.0\n" in edge.connections._metrics.render()


@run
async def test_one_that_resets_its_connection_is_gone_at_once() -> None:
    async with serving() as edge:
        client = await edge.connect(GET.replace(b"/x", b"/held"))
        await until(lambda: edge.application.num_requests == 1)
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.writer.transport.abort()
        await until(lambda: edge.application.ended == ["gone"])


# -- bytes that are parsed at a time ----------------------------------------------------------------------------------


@run
async def test_pipelined_requests_are_parsed_as_they_are_answered() -> None:
    async with serving() as edge:
        held = GET.replace(b"/x", b"/held")
        client = await edge.connect(held + GET * 20_000)
        await until(lambda: edge.application.num_requests == 1)
        (connection,) = edge.connections._open
        protocol = connection._refuse.__self__  # type: ignore[union-attr]
        await until(lambda: bool(protocol.pipeline) and not protocol._is_reading)
        assert len(protocol.pipeline) <= 2**10 / len(GET) + 1
        assert sum(map(len, protocol._unparsed)) <= 2**20
        edge.application.release.set()
        received = 0
        while received < 20_001:
            received += (await client.reader.read(2**20)).count(b"HTTP/1.1 200")
            assert len(protocol.pipeline) <= 2**10 / len(GET) + 1
            assert sum(map(len, protocol._unparsed)) <= 2**20
        assert edge.application.num_requests == 20_001


@run
async def test_a_connection_that_makes_room_ends_the_request_before_those_pipelined() -> None:
    """uvicorn's protocol notifies the last request that was parsed; the one being answered continued to write, and
    failed."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("uvicorn.error").addHandler(handler)
    async with serving() as edge:
        await edge.connect(GET.replace(b"/x", b"/held") + GET * 3)
        await until(lambda: edge.application.num_requests == 1)
        (connection,) = edge.connections._open
        connection.evict()
        edge.application.release.set()  # Before the transport reports its end.
        await until(lambda: bool(edge.application.ended))
        await asyncio.sleep(0.01)
        assert edge.application.num_requests == 1
    logging.getLogger("uvicorn.error").removeHandler(handler)
    assert edge.application.ended == ["gone"]
    assert not records


@run
async def test_a_client_with_pipelined_requests_that_has_closed_its_socket_is_found_to_have_gone() -> None:
    """Nothing is read after pipelined requests: neither the end of the client's stream nor its reset is visible."""
    for resets in (False, True):
        async with serving() as edge:
            client = await edge.connect(GET.replace(b"/x", b"/held") + GET * 3)
            await until(lambda edge=edge: edge.application.num_requests == 1)  # type: ignore[misc]
            if resets:
                linger = struct.pack("ii", 1, 0)
                client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.writer.close()
            for _ in range(100):
                if edge.application.ended:
                    break
                await edge.wait(2)
                await asyncio.sleep(0.005)
            assert edge.application.ended == ["gone"]
            assert edge.application.num_requests == 1


@run
async def test_one_that_half_closes_behind_pipelined_requests_gets_all_answers_however_late() -> None:
    async with serving() as edge:
        client = await edge.connect(GET.replace(b"/x", b"/held") + GET * 100)
        client.half_close()
        await until(lambda: edge.application.num_requests == 1)
        for _ in range(5):
            await edge.wait(20)
        edge.application.release.set()
        assert (await client.all()).count(b"HTTP/1.1 200") == 101


@pytest.mark.parametrize("is_tls", [False, True])
def test_bytes_behind_requests_that_are_answered_are_bounded_in_all(is_tls: bool, tmp_path: Path) -> None:
    """150 clients with pipelines took 145 KB of memory each, with TLS 600 to 800 KB, and 8192 may be connected."""
    served, trusted = tls_contexts(tmp_path) if is_tls else (None, None)
    limits = LIMITS._replace(connections=64, per_address=64, body_bytes=2**18 + 2**16)

    @run
    async def test() -> None:
        async with serving(limits, tls=served) as edge:
            accounts, clients = edge.connections._accounts, []
            for number in range(24):
                clients.append(await edge.connect(GET.replace(b"/x", b"/held") + GET * 600, trusted))
                await until(lambda begun=number + 1: edge.application.num_requests == begun)
                assert accounts.total("body_bytes") <= limits.body_bytes
            assert edge.connections._num_closed
            for connection in list(edge.connections._open)[:-1]:
                connection.evict()
            edge.application.release.set()
            answers = b""
            while answers.count(b"HTTP/1.1 200") < 601:
                answers += await clients[-1].reader.read(2**20)
            await until(lambda: accounts.total("body_bytes") == 0)

    test()


def test_a_read_ahead_with_tls_counts_after_a_single_pipelined_request_too(tmp_path: Path) -> None:
    served, trusted = tls_contexts(tmp_path)

    @run
    async def test() -> None:
        async with serving(tls=served) as edge:
            client = await edge.connect(GET.replace(b"/x", b"/held"), trusted)
            await until(lambda: edge.application.num_requests == 1)
            client.writer.write(GET)
            await until(lambda: edge.connections._accounts.total("body_bytes") >= 2**18)
            edge.application.release.set()
            await until(lambda: edge.connections._accounts.total("body_bytes") == 0)

    test()


@run
async def test_a_request_that_waited_to_be_parsed_is_not_ended_as_an_idle_connection() -> None:
    """Its answer was cut off when the time ended that began at the answer before it."""
    async with serving() as edge:
        client = await edge.connect()
        await until(lambda: bool(edge.state.connections))
        (protocol,) = edge.state.connections
        padded = GET.removesuffix(b"\r\n") + b"X: " + b"p" * 600 + b"\r\n\r\n"
        client.writer.write(padded * 2 + padded.replace(b"/x", b"/held"))
        await until(lambda: edge.application.num_requests == 3)
        assert protocol.timeout_keep_alive_task is None
        edge.application.release.set()
        await until(lambda: protocol.timeout_keep_alive_task is not None)


@run
async def test_pipelined_requests_after_a_body_wait_in_small_numbers_too() -> None:
    async with serving() as edge:
        held = b"POST /held HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000
        client = await edge.connect(held + GET * 2000)
        await until(lambda: edge.application.num_requests == 1)
        (connection,) = edge.connections._open
        protocol = connection._refuse.__self__  # type: ignore[union-attr]
        await until(lambda: bool(protocol.pipeline) and not protocol._is_reading)
        assert len(protocol.pipeline) <= 4 * 2**10 / len(GET) + 1
        edge.application.release.set()
        received = b""
        while received.count(b"HTTP/1.1 200") < 2001:
            received += await client.reader.read(2**20)


class _NoTurns(RequestTurns):
    """Pretend that very many requests wait."""

    def __init__(self) -> None:
        super().__init__()
        self.end = asyncio.Event()

    async def take(self, party: str) -> None:
        await self.end.wait()


@run
async def test_a_probe_on_a_new_connection_takes_no_turn() -> None:
    turns = _NoTurns()
    async with serving(turns=turns) as edge:
        first = await edge.connect(GET)
        probe = await edge.connect(PROBE)
        assert b"200 OK" in await probe.until(b"\r\n")
        assert edge.application.paths == ["/livez"]
        probe.writer.write(PROBE)  # On the same connection, as in a flood of probes.
        await asyncio.sleep(0.05)
        assert edge.application.paths == ["/livez"]
        turns.end.set()
        assert b"200 OK" in await first.until(b"\r\n")
        await until(lambda: edge.application.paths == ["/livez", "/x", "/livez"])


@run
async def test_while_many_wait_to_be_accepted_clients_that_have_sent_all_they_will_are_refused() -> None:
    """Most of them have closed their sockets, and each would cost as much as a request."""
    async with serving() as edge:
        for _ in range(100):  # The event loop does not run meanwhile, so they wait in the system's queue.
            with socket.create_connection(("127.0.0.1", edge.port)) as gone:
                gone.sendall(GET)
        client = await edge.connect(GET)
        client.half_close()
        assert (await client.all()).startswith(b"HTTP/1.1 200"), "few wait when it is accepted"
        assert 1 < edge.application.num_requests <= 66


@run
async def test_few_of_the_heads_that_end_at_once_are_parsed_in_a_round() -> None:
    """Else a thousand connections without a key would hold up all others for half a second."""
    async with serving(LIMITS._replace(connections=200, per_address=200)) as edge:
        with contextlib.ExitStack() as opened:
            flood = [opened.enter_context(socket.create_connection(("127.0.0.1", edge.port))) for _ in range(100)]
            for client in flood:
                client.sendall(PROBE[:-1])
            await until(lambda: all_begun(edge, len(flood)))
            for client in flood:
                client.sendall(PROBE[-1:])
            numbers, before = list[int](), 0
            while before < len(flood):
                await asyncio.sleep(0)
                numbers.append(edge.application.num_requests - before)
                before += numbers[-1]
            assert max(numbers) <= 64


@run
async def test_a_probe_on_a_new_connection_is_answered_within_two_rounds_of_the_event_loop() -> None:
    """A round may take tens of milliseconds: when many requests or outputs of a step are ready."""
    async with serving() as edge:
        for path, most in ((PROBE, 2), (GET, 4)):
            with socket.create_connection(("127.0.0.1", edge.port)) as client:
                client.sendall(path)
                client.setblocking(False)
                num_rounds, answer = 0, b""
                while not answer:
                    await asyncio.sleep(0)
                    num_rounds += 1
                    with contextlib.suppress(BlockingIOError):
                        answer = client.recv(2**16)
                assert answer.startswith(b"HTTP/1.1 200")
                assert num_rounds <= most, path


@run
async def test_a_body_in_very_many_tiny_chunks_is_refused() -> None:
    async with serving() as edge:
        head = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client = await edge.connect(head + b"1\r\nx\r\n" * 200_000)
        answer = await client.all()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"chunks of less than 16 bytes on average" in answer
        client = await edge.connect(head + b"14\r\n01234567890123456789\r\n" * 20_000 + b"0\r\n\r\n")
        assert (await client.until(b"0\r\n\r\n")).endswith(b"6\r\n400000\r\n0\r\n\r\n")


async def refused(edge: Edge) -> tuple[Client, HttpProtocol]:
    """Send what is no HTTP, and wait for the last answer. Return the client and the server's side."""
    client = await edge.connect(b"no HTTP\r\n\r\n")
    await client.until(b"}")
    (protocol,) = edge.state.connections
    assert isinstance(protocol, HttpProtocol)
    return client, protocol


@run
async def test_a_large_body_after_the_last_answer_is_read_without_pauses() -> None:
    async with serving() as edge:
        _, protocol = await refused(edge)
        protocol.data_received(b"x" * 2**16)
        assert protocol._is_reading
        protocol.data_received(b"x")
        assert not protocol._is_reading


@run
async def test_what_follows_the_last_answer_is_read_with_pauses() -> None:
    async with serving() as edge:
        client, protocol = await refused(edge)
        for _ in range(2):
            client.writer.write(b"x" * 1000)
            await until(lambda: not protocol._is_reading)
            await until(lambda: protocol._is_reading)


@run
async def test_a_body_in_some_tiny_chunks_is_read_whole() -> None:
    """Codings are named in any case, and spaces after one are no part of it (RFC 9110, section 5.5)."""
    async with serving() as edge:
        chunks = b"1\r\nx\r\n" * 4000
        client = await edge.connect(
            b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked \r\n\r\n" + chunks + b"0\r\n\r\n"
        )
        assert (await client.until(b"0\r\n\r\n")).endswith(b"4\r\n4000\r\n0\r\n\r\n")
        client.writer.write(GET)
        assert (await client.until(b"0\r\n\r\n")).endswith(b"1\r\n0\r\n0\r\n\r\n")


@run
async def test_heads_that_are_too_large_or_have_too_many_headers_are_refused() -> None:
    async with serving() as edge:
        for headers in (b"a: b\r\n" * 257, b"a: " + b"b" * 2 * MAX_HEAD_BYTES + b"\r\n"):
            client = await edge.connect(b"GET /x HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
            answer = await client.all()
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert b'"code":"request_too_large"' in answer
        client = await edge.connect(b"GET /x HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 255 + b"\r\n")
        assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")
        assert edge.application.num_requests == 1


@run
async def test_too_many_headers_are_refused_before_the_end_of_the_head() -> None:
    async with serving() as edge:
        client = await edge.connect(GET[:-2] + b"a: b\r\n" * 256 + b"a")
        assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 431 ")


@run
async def test_what_takes_milliseconds_to_decode_in_a_head_is_refused() -> None:
    """64 KiB of escapes, of parameters or of trusted addresses would each hold up the event loop for 12 to 90 ms."""
    hops = [b"127.0.0.1"] * 64
    async with serving() as edge:
        for target, header, status in (
            (b"/" + b"a" * (2**13 - 1), b"", b"200"),
            (b"/" + b"a" * 2**13, b"", b"414"),
            (b"/?" + b"a&" * 255, b"", b"200"),
            (b"/?" + b"a&" * 256, b"", b"414"),
            (b"/", b"X-Forwarded-For: " + b",".join(hops) + b"\r\n", b"200"),
            (b"/", b"X-Forwarded-For: ::1\r\nX-Forwarded-For: " + b",".join([*hops, b"::1"]) + b"\r\n", b"431"),
        ):
            client = await edge.connect(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
            assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 " + status)


@run
async def test_the_tokens_of_the_header_connection_are_not_read_for_an_upgrade() -> None:
    """Upgrades are ignored, and a header may have 64 KiB of commas."""
    upgrade = GET[:-2] + b"Upgrade: x\r\nConnection: upgrade" + b"," * 60_000 + b"\r\n\r\n"
    with mock.patch.object(HttpToolsProtocol, "_get_upgrade", side_effect=AssertionError):
        async with serving() as edge:
            client = await edge.connect(upgrade)
            assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")


@run
async def test_trailers_are_no_headers() -> None:
    """A proxy passes trailers on unchanged: they must not name a client's address, key or expectation."""
    head = GET.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    trailers = b"X-Forwarded-For: 1.2.3.4\r\nAuthorization: Bearer key\r\nExpect: 100-continue\r\n"
    async with serving() as edge:
        client = await edge.connect(head + b"1\r\nx\r\n0\r\n" + trailers + b"\r\n" + GET)
        client.half_close()
        assert (await client.all()).count(b"HTTP/1.1 ") == 2
        assert edge.application.headers == [[b"host", b"transfer-encoding"], [b"host"]]


@run
async def test_trailers_that_are_too_large_are_refused_in_words() -> None:
    head = GET.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    async with serving() as edge:
        client = await edge.connect(head + b"1\r\nx\r\n0\r\nA: " + b"x" * (MAX_HEAD_BYTES + 1024))
        client.half_close()
        assert b"431 Request Header Fields Too Large" in await client.all()
    assert edge.application.num_requests == 0


@run
async def test_a_transfer_coding_that_the_server_does_not_decode_is_refused() -> None:
    """Taken as chunked alone, the bytes of a coding would be taken for the body."""
    for coding in (b"gzip, chunked", b"chunked, chunked", b"identity"):
        head = GET.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: " + coding + b"\r\n\r\n")
        async with serving() as edge:
            client = await edge.connect(head + b"1\r\nx\r\n0\r\n\r\n" + GET)
            assert (await client.all()).count(b"HTTP/1.1 400") == 1
        assert edge.application.num_requests == 0


@run
async def test_a_body_whose_end_has_two_readings_is_refused_with_what_follows() -> None:
    """Another server in front may read the other one, so that what follows would be a request only here."""
    chunks = b"3\r\nabc\r\n0\r\n\r\n"
    heads = [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3",
        b"Content-Length: 3\r\nContent-Length: 3",
        b"Content-Length: 3\r\nContent-Length: 9",
        *(b"Content-Length: " + length for length in (b"3, 3", b"+3", b"-3", b"0x3", b"3 3", b"", b"9" * 30)),
        *(
            b"Transfer-Encoding: " + coding
            for coding in (b"chunked, identity", b"xchunked", b'"chunked"', b"\x0bchunked")
        ),
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding : chunked",
        b"Content-Length : 3",
        b"Content-Length:\r\n 3",
        b"X: y\r\n Transfer-Encoding: chunked",
        b"X: y\nTransfer-Encoding: chunked",
        b"X: y\rTransfer-Encoding: chunked",
        b"X\0: y",
    ]
    bodies = [
        b"3;x\ny\r\nabc\r\n0\r\n\r\n",
        b"3\nabc\n0\n\n",
        b"-3\r\nabc",
        b"0x3\r\nabc",
        b"3\r\nabc0\r\n\r\n",
        b"F" * 17,
    ]
    sent = [b"POST /x HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n" + chunks for head in heads]
    sent += [b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body for body in bodies]
    async with serving() as edge:
        for each in sent:
            client = await edge.connect(each + GET)
            assert (await client.all()).count(b"HTTP/1.1 ") == 1, each
        assert edge.application.num_requests <= len(bodies)  # It may begin before its body turns out to be broken.
        assert edge.application.headers == []


@run
async def test_a_request_without_one_valid_host_is_refused_with_what_follows() -> None:
    """A proxy in front may have checked another host than this server would, or none (RFC 9112, section 3.2)."""
    requests = {
        b"GET /x HTTP/1.1\r\n\r\n": b"no Host header",
        b"GET http://x/x HTTP/1.1\r\n\r\n": b"no Host header",
        GET.replace(b"Host: x", b"Host: x\r\nhost: x"): b"several Host headers",
        **{
            GET.replace(b"Host: x", b"Host: " + host): b"no name or address"
            for host in (
                b"a b",
                b"a, b",
                b"a/b",
                b"u@a",
                b"a:b",
                b"[::1",
                b"a:1:2",
                b"a?",
                b"a\xe9",
                b"<a>",
                b"a\\b",
                b"[zz]",
            )
        },
        GET.replace(b"/x", b"http://u@a/x"): b"no name or address",
        GET.replace(b"/x", b"ftp://a/x"): b"no path",
        GET.replace(b"/x", b"*"): b"no path",
        GET.replace(b"/x", b"/x#y"): b"no path",
        GET.replace(b"/x", b"http://x/#y"): b"no path",
        GET.replace(b"1.1", b"2.0"): b"is HTTP/2.0",
        GET.replace(b"1.1", b"0.9"): b"is HTTP/0.9",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n": b"no path",
    }
    async with serving() as edge:
        for request, reason in requests.items():
            answer = await (await edge.connect(request + GET)).all()
            assert answer.startswith(b"HTTP/1.1 400 "), request
            assert (answer.count(b"HTTP/1.1 400 "), reason in answer) == (1, True), (request, answer)
        assert edge.application.num_requests == 0


@run
async def test_the_host_and_path_of_an_absolute_target_replace_those_of_the_request() -> None:
    hosts = [b"", b"x", b"a_b.example:8000", b"127.0.0.1:1", b"[::1]:80", b"[fe80::1%25eth0]", b"x "]
    targets = [b"http://x/y?z", b"HTTPS://x:80", b"http://x?z", b"http://[::1]:8000/y"]
    async with serving() as edge:
        for sent in (
            *(GET.replace(b"Host: x", b"Host: " + host) for host in hosts),
            *(GET.replace(b"/x", target).replace(b"Host: x", b"Host: other") for target in targets),
            b"GET /x HTTP/1.0\r\n\r\n",
            b"GET http://x/y HTTP/1.0\r\n\r\n",
        ):
            client = await edge.connect(sent)
            client.half_close()
            assert (await client.all()).startswith(b"HTTP/1.1 200 "), sent
        assert edge.application.paths == ["/x"] * len(hosts) + ["/y", "/", "/", "/y", "/x", "/y"]
        sent_hosts = edge.application.hosts[len(hosts) :]
        assert sent_hosts == [b"x", b"x:80", b"x", b"[::1]:8000", b"", b"x"]


@run
async def test_a_request_for_an_upgrade_keeps_its_body_and_what_follows() -> None:
    # As Java's client asks for HTTP/2. If its body were taken for a request, it would get the next one's answer.
    head = b"POST /body HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n%s\r\n\r\n"
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(GET), GET)
    bodies = [
        (b"Content-Length: %d" % len(GET), GET, len(GET)),
        (b"Transfer-Encoding: chunked", chunks, len(GET)),
        (b"Content-Length: 0", b"", 0),
        (b"X: y", b"", 0),
    ]
    for framing, body, length in bodies:
        async with serving() as edge:
            client = await edge.connect(head % framing)
            await asyncio.sleep(0.01)
            client.writer.write(body + (head % framing) + body + GET)
            client.half_close()
            answers = await client.all()
            assert edge.application.paths == ["/body", "/body", "/x"]
            assert answers.count(b"\r\n%d\r\n0\r\n\r\n" % length) == 2 + (not length)


@run
async def test_http_1_0_has_no_chunks_in_either_direction() -> None:
    """A proxy of HTTP/1.0 would take the bytes of a chunked body for the next request, or answer."""
    chunked = b"POST /x HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
    async with serving() as edge:
        client = await edge.connect(chunked + GET)
        assert (await client.all()).count(b"HTTP/1.1 400") == 1
        assert edge.application.num_requests == 0
        client = await edge.connect(b"GET /stream HTTP/1.0\r\n\r\n")
        head, _, body = (await client.all()).partition(b"\r\n\r\n")
        assert body == b"partpart0"
        assert b"chunked" not in head
        assert b"connection: close" in head


@run
async def test_an_answer_before_the_body_leaves_the_connection_usable() -> None:
    async with serving() as edge:
        client = await edge.connect(
            b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 99_999
        )
        await client.until(b"0\r\n\r\n")
        await edge.wait(5)
        client.writer.write(b"x" + GET)
        assert (await client.until(b"0\r\n\r\n")).endswith(b"1\r\n0\r\n0\r\n\r\n")


@run
async def test_a_last_answer_before_the_body_arrives_although_the_client_sends_the_rest() -> None:
    """If the server closed the connection, the rest would reset it."""
    for version in (b"1.1\r\nConnection: close", b"1.0"):
        async with serving() as edge:
            head = b"POST /unread HTTP/" + version + b"\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"
            client = await edge.connect(head + b"x" * 8_999_999)
            answer = await client.all()
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.count(b"connection: close") == 1
            assert not edge.connections._num_served
            await edge.wait(11)
            assert len(edge.connections) == 0


@run
async def test_an_expected_continue_comes_before_the_body() -> None:
    async with serving() as edge:
        client = await edge.connect(
            b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        )
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"abc")
        assert (await client.until(b"0\r\n\r\n")).endswith(b"1\r\n3\r\n0\r\n\r\n")


@run
async def test_a_body_that_is_announced_as_too_long_is_not_waited_for() -> None:
    """It is an upload, which is written as it arrives, or refused."""
    async with serving(max_request_bytes=10) as edge:
        client = await edge.connect(b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n")
        assert (await client.until(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        client = await edge.connect(b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n123")
        await until(lambda: all_begun(edge, 1))
        later = await edge.connect(GET)
        assert (await later.until(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert edge.application.num_requests == 2
        client.writer.write(b"4567890")
        assert (await client.until(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@run
async def test_a_connection_ends_with_an_answer_in_place_of_100_continue() -> None:
    """The client may not send the body: the head of its next request would be taken for it."""
    async with serving(max_request_bytes=10) as edge:
        head = b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\nExpect: 100-continue\r\n\r\n"
        client = await edge.connect(head)
        answer = await client.all()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"connection: close") == 1
        client = await edge.connect(head.replace(b"/unread", b"/x"))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"x" * 4000 + GET)
        answer = await client.until(b"1\r\n0\r\n0\r\n\r\n")
        assert b"connection: close" not in answer, "the body was sent"


@run
async def test_the_application_begins_when_a_body_has_arrived_or_as_much_as_is_held() -> None:
    async with serving() as edge:
        small = await edge.connect(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nabc")
        gone = await edge.connect(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nabc")
        large = await edge.connect(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 70_000)
        await until(lambda: edge.application.num_requests == 1 and all_begun(edge, 3))
        gone.writer.close()
        await until(lambda: len(edge.connections) == 2)
        small.writer.write(b"d")
        assert (await small.until(b"0\r\n\r\n")).endswith(b"1\r\n4\r\n0\r\n\r\n")
        large.writer.write(b"x" * 30_000)
        assert (await large.until(b"0\r\n\r\n")).endswith(b"6\r\n100000\r\n0\r\n\r\n")
        assert edge.application.num_requests == 2


def test_pings_break_no_stream_whose_http_1_0_client_reads_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the answer waits for the client; a ping that comes meanwhile must not change the part's length."""
    num_dropped = 0

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        flow = receive.__self__.flow

        async def events() -> AsyncGenerator[bytes, None]:
            while not flow.write_paused:
                yield b"x" * 2**16
            yield b"x" * 1000 + b"the end"

        async def counted(message: Any) -> None:
            nonlocal num_dropped
            num_dropped += flow.write_paused and message["body"] == PING.encode()
            await send(message)

        scope["state"]["send_body"] = counted
        await EventStream(events(), ping=PING)(scope, receive, send)

    @run
    async def test() -> None:
        async with serving(application=slow) as edge:
            with socket.create_connection(("127.0.0.1", edge.port)) as client:
                client.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
                await until(lambda: num_dropped > 1)
                client.setblocking(False)
                answer = b""
                while part := await asyncio.get_running_loop().sock_recv(client, 2**20):
                    answer += part
        assert b"the end" in answer[-100:]

    monkeypatch.setattr(sse, "_PING_SECONDS", 0.005)
    test()


# -- limits -----------------------------------------------------------------------------------------------------------


@run
async def test_parts_of_requests_are_answered_when_their_time_is_over() -> None:
    async with serving() as edge:
        head = await edge.connect(b"GET /x HTTP/1.1\r\nHost:")
        body = await edge.connect(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n\r\n123")
        silent = await edge.connect()
        await until(lambda: all_begun(edge, 2))
        await edge.wait(11)
        for client, says in ((head, b"head was not complete"), (body, b"less than 1024 bytes a second")):
            answer = await client.all()
            assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert says in answer
            client.writer.close()
        assert await silent.all() == b""
        await until(lambda: len(edge.connections) == 0)


@run
async def test_requests_beyond_those_served_get_503_and_probes_are_answered() -> None:
    async with serving() as edge:
        held = [await edge.connect(GET.replace(b"/x", b"/held")) for _ in range(6)]
        await until(lambda: edge.application.num_requests == 6)
        silent = [await edge.connect() for _ in range(20)]
        refused = await (await edge.connect(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n123")).all()
        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b'"code":"too_many_connections"' in refused
        for _ in range(20):
            probe = await edge.connect(GET.replace(b"/x", b"/livez?verbose"))
            assert (await probe.until(b"\r\n")).startswith(b"HTTP/1.1 200")
        edge.application.release.set()
        for client in held:
            assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")
        assert edge.application.num_requests == 26
        for client in silent:
            client.writer.close()


def test_a_check_that_fails_does_not_end_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    num_checks, failures = 0, []

    def check(connection: Connection, now: float) -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 1:
            raise OSError

    @run
    async def fails_once() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
        async with serving() as edge:
            client = await edge.connect()
            await until(lambda: num_checks > 2)
            client.writer.close()

    monkeypatch.setattr("server.limits.acceptor._SWEEP_SECONDS", 0.001)
    monkeypatch.setattr(Connection, "check", check)
    fails_once()
    assert [type(each) for each in failures] == [OSError]


def held_by(key: str) -> bytes:
    return f"GET /held HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode()


@run
async def test_requests_without_an_accepted_key_take_no_slot_of_those_with_one() -> None:
    """Also while they wait, for a turn or for the keys of a token's issuer; a token counts once it is verified."""
    async with serving(LIMITS._replace(connections=16, per_address=16), keys=ApiKeys(["key"])) as edge:
        unknown = [await edge.connect(held_by(each)) for each in ("unknown", "a.stalled.token")]
        pipelined = await edge.connect(GET + b"POST /held HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")
        await pipelined.until(b"0\r\n\r\n")
        pipelined.writer.write(b"x")
        unknown.append(pipelined)
        await until(lambda: edge.application.num_requests == 4)
        assert edge.connections._num_served == 0
        accepted = [await edge.connect(held_by(each)) for each in ["key"] * 10 + ["a.valid.token"] * 2]
        await until(lambda: edge.application.num_requests == 16)
        assert edge.connections._num_served == 12
        for key in ("key", "a.valid.token"):
            refused = await edge.connect(held_by(key))
            assert (await refused.until(b"\r\n")).startswith(b"HTTP/1.1 503")
        edge.application.release.set()
        for client in (*unknown, *accepted):
            assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")
        await until(lambda: edge.connections._num_served == 0)


@run
async def test_keys_take_turns_where_their_connections_have_one_address() -> None:
    async with serving(LIMITS._replace(connections=200, per_address=200), keys=ApiKeys(["many", "one"])) as edge:
        bodies = [held_by("many")] * 50 + [held_by("one").replace(b"/held", b"/x")]
        clients = [socket.create_connection(("127.0.0.1", edge.port)) for _ in bodies]
        await until(lambda: edge.num_accepted() == len(bodies))
        for client, body in zip(clients, bodies, strict=True):
            client.sendall(body)
        await until(lambda: edge.application.num_requests == len(bodies))
        assert edge.application.paths.index("/x") < 30
        edge.application.release.set()
        for client in clients:
            client.close()


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end", ["answered", "half a body", "no head", "left", "reset", "pipelined", "pipelined and left"]
)
def test_a_connection_leaves_nothing_to_garbage_collections(end: str) -> None:
    """With waiting requests, full collections take too long, so that they do not happen: nothing may need them."""
    sent = {"half a body": b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n123", "no head": b"GET"}.get(
        end, GET
    )
    if end in ("left", "reset", "pipelined and left"):
        sent = GET.replace(b"/x", b"/held")

    @run
    async def ends() -> None:
        async with serving() as edge:
            for number in range(3):
                edge.application.release.clear()
                with socket.create_connection(("127.0.0.1", edge.port)) as client:
                    client.sendall(sent * 3 if end.startswith("pipelined") else sent)
                    client.setblocking(False)
                    if sent is GET:
                        await asyncio.get_running_loop().sock_recv(client, 1000)
                    else:
                        await until(lambda: all_begun(edge, 1))
                    if end in ("left", "reset", "pipelined and left"):
                        await until(lambda begun=number + 1: edge.application.num_requests == begun)
                    if end in ("reset", "pipelined and left"):
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if end == "left":
                    await until(edge.knows_half_closed)
                    edge.application.release.set()
                await until(lambda: not edge.state.connections and not edge.state.tasks)
            await asyncio.sleep(0)
            assert num_left() == dict.fromkeys(KINDS, 0)

    without_collections(ends)


KINDS = ("HttpProtocol", "RequestResponseCycle", "Connection")


def num_left() -> dict[str, int]:
    """Number of objects of each of `KINDS` that exist."""
    kinds = Counter(type(each).__qualname__ for each in gc.get_objects())  # A tracer has a local `Connection`.
    return {kind: kinds[kind] for kind in KINDS}


def without_collections(test: Callable[[], None]) -> None:
    gc.collect()
    gc.disable()
    try:
        test()
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["answered", "no TLS", "left", "timed out", "closed as it ends"])
def test_tls_and_failed_handshakes_leave_nothing_to_garbage_collections(end: str, tmp_path: Path) -> None:
    served, trusted = tls_contexts(tmp_path)

    @run
    async def ends() -> None:
        async with serving(tls=served) as edge:
            for _ in range(3):
                client = await edge.connect(GET if end == "no TLS" else b"", trusted if end == "answered" else None)
                if end == "answered":
                    client.writer.write(GET)
                    await client.until(b"0\r\n\r\n")
                await until(lambda: len(edge.connections) == 1)
                if end == "timed out":
                    await edge.wait(11)
                elif end == "closed as it ends":
                    next(iter(edge.connections._open)).close()
                    await client.writer.start_tls(trusted)
                if end in ("no TLS", "closed as it ends"):
                    with contextlib.suppress(ConnectionError):
                        await client.all()
                client.writer.transport.abort()
                await until(lambda: not edge.state.connections and not len(edge.connections))
            del client
            for _ in range(5):
                await asyncio.sleep(0.001)
            assert num_left() == dict.fromkeys(KINDS, 0)

    without_collections(ends)


@run
async def test_without_a_free_descriptor_whoever_waits_makes_room_and_then_the_spare_one_refuses() -> None:
    async with serving(LIMITS._replace(connections=1000, per_address=1000)) as edge:
        loop = asyncio.get_running_loop()
        held = GET.replace(b"/x", b"/held")
        first = await edge.connect(held)
        waiting = await edge.connect(b"GET /x")
        await until(lambda: edge.application.num_requests == 1 and len(edge.connections) == 2)
        with no_descriptor_but(3) as (late, use_up):
            connect(late[0], edge)
            with contextlib.suppress(ConnectionResetError):
                assert await waiting.all() == b""
            await loop.sock_sendall(late[0], GET.replace(b"/x", b"/livez"))
            assert (await loop.sock_recv(late[0], 100)).startswith(b"HTTP/1.1 200")
            await loop.sock_sendall(late[0], held)
            await until(lambda: edge.application.num_requests == 3)
            use_up()  # The descriptors of the closed connection.
            for each in late[1:]:  # Nothing waits any more.
                connect(each, edge)
                assert (await loop.sock_recv(each, 100)).startswith(b"HTTP/1.1 503")
        edge.application.release.set()
        assert (await first.until(b"\r\n")).startswith(b"HTTP/1.1 200")


def connect(sock: socket.socket, edge: Edge) -> None:
    """Begin to connect. asyncio's own function opens files."""
    with contextlib.suppress(BlockingIOError):
        sock.connect(("127.0.0.1", edge.port))


@contextmanager
def no_descriptor_but(number: int) -> Iterator[tuple[list[socket.socket], Callable[[], None]]]:
    """Open `count` sockets until no descriptor is free; the returned function takes those that have become free
    since."""
    sockets = [socket.socket() for _ in range(number)]
    files: list[int] = []

    def use_up() -> None:
        with contextlib.suppress(OSError):
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
        use_up()
        for each in sockets:
            each.setblocking(False)
        yield sockets, use_up
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in files:
            os.close(file)
        for each in sockets:
            each.close()


@run
async def test_nothing_is_left_of_connections_that_made_room_at_once() -> None:
    async with serving() as edge:
        clients = [socket.create_connection(("127.0.0.1", edge.port)) for _ in range(100)]
        await until(lambda: edge.num_accepted() == 100)
        for each in clients:
            each.close()
        # A connection is counted before it has a protocol, so both may be empty one after the other.
        await until(lambda: not edge.state.connections and not len(edge.connections))


# -- TLS --------------------------------------------------------------------------------------------------------------


def tls_contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server, and of a client that trusts it."""
    certificate, key = make_certificate(directory)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate, key)
    trusted = ssl.create_default_context(cafile=certificate)
    trusted.check_hostname = False
    return served, trusted


def test_connections_that_end_may_be_checked_in_any_round_of_the_event_loop(tmp_path: Path) -> None:
    served, trusted = tls_contexts(tmp_path)

    @run
    async def test() -> None:
        async with serving(tls=served) as edge:
            client = await edge.connect(GET.replace(b"/x", b"/held") * 2, trusted)
            await until(lambda: edge.application.num_requests == 1)
            client.writer.transport.abort()
            while len(edge.connections):
                edge.connections.sweep()
                # A request may begin in any round, too.
                for each in edge.connections._open:
                    each.was_reset  # noqa: B018
                await asyncio.sleep(0)

    test()


def test_handshakes_that_are_not_completed_make_room_and_end(tmp_path: Path) -> None:
    served, trusted = tls_contexts(tmp_path)

    async def test() -> None:
        async with serving(tls=served) as edge:
            silent = [await edge.connect() for _ in range(30)]
            client = await edge.connect(GET, trusted)
            assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")
            assert len(edge.connections) == LIMITS.connections
            await edge.wait(11)
            for each in silent:
                assert await each.all() == b""
            await until(lambda: len(edge.connections) == 1)

    run(test)()
