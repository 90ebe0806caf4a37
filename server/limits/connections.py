"""`Connections`: bounds the number and the duration of open connections, which `Acceptor` accepts.

A connection is always in one of these phases, and may end in any of them.

    head ──► body ──► answer ──► idle ──► head ...
                          └────► rest ──► idle        (answered before the body's end; the rest is discarded)

A connection is "served" from the last byte of its request to the end of the answer. Fewer connections may be served
than open, so that the head of a probe (a request to `/health` and the like) can always be read. A served connection is
not closed in favour of others while its client reads, unless received bytes take too much memory and it holds most of
them; a request beyond the bound gets an error. All other connections, those of probes and of requests without an
accepted key too, are closed when too many are open: first the oldest one of the address that has the most. Connections
that wait for this server, and not for their client, are spared.
"""

import asyncio
import contextlib
import functools
import ipaddress
import logging
import math
import operator
import os
import resource
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Literal, NamedTuple, Self

from engine.config.server import ServerConfig
from server.errors import ApiError
from server.limits.accounts import Accounts
from server.limits.owners import Owner, address_of
from server.metrics import Metrics

_log = logging.getLogger(__name__)

Phase = Literal["head", "body", "answer", "idle", "rest"]

_RESERVED_DESCRIPTORS = 34
"""File descriptors reserved for the event loop, the engine's supervisor, the checkers of grammars and templates, and
the metrics."""

_FILE_PARTS, _LEAST_FILES = 8, 2
"""1 / 8 of the other file descriptors, but at least 2, are reserved for the files of uploads and downloads."""

_LEAST_CONNECTIONS, _MOST_CONNECTIONS = 4, 8192
"""Range of the default number of connections, which is computed from the limit of open files."""

_RESERVED_PARTS, _MOST_RESERVED = 4, 64
"""1 / 4 of all connections, but at most 64, are reserved for reading heads and are never served."""

_MOST_HELD_BYTES = 32 * 2**20
"""Upper bound of the default of `max_request_bytes`, which is computed from the model."""

_BODY_BUDGET_BODIES, _LEAST_BODY_BUDGET = 64, 64 * 2**20
"""Number of bodies of the largest size that may be in memory while they are received, and the least bytes for them:
with small bodies, too, the event loop reads up to 256 KiB at a time."""

_LEAST_AGE_SECONDS, _MOST_LEAST_AGE_SECONDS = 0.005, 0.05
"""Range of the least age at which a connection is closed for new ones: a flood must not close clients that send at
once."""

_MOST_UNREAD_SECONDS = 0.25
"""Least age at which a connection is closed for new ones if bytes of its first request wait to be read."""

_MOST_NEW_PER_SECOND = 3200
"""Most new connections accepted per second while all connections are open. The least age is proportional to the
number of connections that may be closed, so that this rate holds, and is computed for at least half of all."""

_MAX_SPARED = 16
"""Most connections that are spared in one search because they wait for this server; then one of them is closed."""

_READING_SECONDS = 5.0
"""Time over which the reading rate of a slow client is measured."""

_NUM_KNOWN_ADDRESSES = 1024

_SWEPT_AT_ONCE = 100
"""Most connections that one call of `sweep` checks: a check takes 5 to 30 microseconds."""

_REPORT_SECONDS = 10.0

_FIRST_CHECK_SECONDS, _LONGEST_CHECK_SECONDS = 2.0, 16.0
"""After a client has shut down its sending side: time until the first check whether it still reads, and the longest
interval between two checks."""

TCP_CLOSE, TCP_CLOSE_WAIT = 7, 8
"""Values of the state in the first byte of TCP_INFO (linux/tcp_states.h): the connection was reset; the client has
shut down its sending side."""
_ACKED_BYTES = slice(120, 128)
"""Bytes of TCP_INFO (linux/tcp.h) that count the bytes acknowledged by the client."""


def tcp_state(sock: socket.socket) -> int:
    """Return the state of a connection in the kernel, for example `TCP_CLOSE`."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def has_unread(sock: socket.socket) -> bool:
    """Return whether received bytes wait in the socket."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


class TooManyConnections(ApiError):
    """Too many connections are served: 503."""

    status = 503
    code = "too_many_connections"
    headers = {"Retry-After": "1"}  # noqa: RUF012


class SlowRequest(ApiError):
    """The request did not arrive in time: 408."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class ConnectionLimits(NamedTuple):
    """Bounds on connections; times in seconds."""

    connections: int
    """Most open connections."""
    per_address: int
    """Most open connections of one IPv4 address, or of one /64 network of IPv6."""
    proxies: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    """Networks whose addresses may have any number of connections."""
    head_seconds: float = 10.0
    body_rate: int = 1024
    """Least bytes a second of a body, on average after `head_seconds`; 0 means no least rate.

    Served connections whose clients read their answers more slowly may be closed for others."""
    unread_seconds: float = 300.0
    request_bytes: int = 4 * 2**20
    """Most bytes of one body in memory while it is received; further bytes of an upload are written to disk."""
    body_bytes: int = 256 * 2**20
    """Most bytes of all connections together that were received and wait to be parsed, or are of a body that is being
    received."""
    answer_bytes: int = 2**29
    """Bytes of large answers in memory beyond which those of slow readers end; beyond twice as many, others, too."""
    files: int = 64
    """Most files that uploads and downloads may hold open."""

    @classmethod
    def of(cls, config: ServerConfig, num_free: int, max_request_bytes: int) -> Self:
        """Compute the limits of `config`, for a process that may open `num_free` more files."""
        available = num_free - _RESERVED_DESCRIPTORS
        files = max(available // _FILE_PARTS, _LEAST_FILES)
        available -= files
        connections = config.max_connections or max(min(available, _MOST_CONNECTIONS), _LEAST_CONNECTIONS)
        if connections > available:
            _log.warning(
                "%d connections may be open, but the limit of open files leaves %d; raise it (ulimit -n)",
                connections,
                max(available, 0),
            )
        return cls(
            connections,
            min(config.max_connections_per_address or max(connections // 2, 1), connections),
            tuple(ipaddress.ip_network(network) for network in config.trusted_proxies),
            config.request_head_timeout,
            config.min_body_rate,
            config.send_timeout,
            config.max_request_bytes or _MOST_HELD_BYTES,
            max(_BODY_BUDGET_BODIES * max_request_bytes, _LEAST_BODY_BUDGET),
            files=files,
        )

    @property
    def serving(self) -> int:
        """Most connections that may be served at a time, not counting probes."""
        return self.connections - max(1, min(self.connections // _RESERVED_PARTS, _MOST_RESERVED))

    def is_proxy(self, host: str | None) -> bool:
        """Whether an address may have any number of connections."""
        address = address_of(host or "")
        if address is None:
            return host is None
        return any(address in network for network in self.proxies)


def num_free_descriptors() -> int:
    """Return how many more files this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))


class Connection:
    """One connection, from its acceptance to its end. `Connections.open` makes it."""

    __slots__ = (
        "_abort",
        "_answer_bytes",
        "_body_bytes",
        "_check_at",
        "_check_interval",
        "_has_begun",
        "_is_half_closed",
        "_is_served",
        "_is_uncounted",
        "_phase",
        "_pipelined",
        "_provoke_reset",
        "_reading_since",
        "_refuse",
        "_since",
        "_socket",
        "_table",
        "_taken_before",
        "_transport",
        "_unread",
        "_unread_since",
        "answer_party",
        "body_party",
        "held_bytes",
        "is_exempt",
        "is_open",
        "party",
        "unparsed_bytes",
        "waits_since",
    )

    def __init__(self, table: "Connections", party: str, is_exempt: bool, sock: socket.socket) -> None:
        self.party = party
        self.is_exempt = is_exempt
        """Whether the number of its address' connections is not limited."""
        self.is_open = True
        self._table = table
        self._socket = sock
        self._transport: asyncio.Transport | None = None
        self._refuse: Callable[[ApiError], object] | None = None
        self._abort: Callable[[], object] | None = None
        self._phase: Phase = "head"
        self._since = self.waits_since = table.clock()
        """Time at which its phase began, and time since which it may be closed for others."""
        self._has_begun = False
        """Whether a byte of the head was received."""
        self.unparsed_bytes = 0
        """Bytes in memory because some of them wait to be parsed."""
        self._is_uncounted = False
        """Whether its request is not counted as served, as a probe, or without an accepted key."""
        self._is_served = False
        """Whether it counts as a served connection."""
        self._body_bytes, self.body_party = 0, party
        """Bytes of the body that were received, and the party that `held_bytes` are accounted to."""
        self.held_bytes = 0
        """Bytes in memory, of the body and those that are held unparsed."""
        self._answer_bytes, self.answer_party = 0, party
        """Bytes of a large answer of which a part is yet to be sent, and the party that they are accounted to."""
        self._unread, self._unread_since = 0, 0.0
        """Bytes that wait to be sent, and the time since which this number has not changed."""
        self._reading_since, self._taken_before = 0.0, -1
        """Start of the measurement of the client's reading rate, and the bytes acknowledged at that time; -1: no
        measurement, because nothing waits to be sent."""
        self._pipelined: list[bool] = []
        """Whether each further (pipelined) request behind the one that is being answered is uncounted, in order. While
        there are some, nothing more is read."""
        self._is_half_closed = False
        self._provoke_reset: Callable[[], object] | None = None
        self._check_at = self._check_interval = 0.0

    def established(
        self,
        transport: asyncio.Transport,
        refuse: Callable[[ApiError], object],
        abort: Callable[[], object],
        provoke_reset: Callable[[], object],
    ) -> None:
        """Note that the transport is ready. `refuse` answers an incomplete request with an error, and closes.

        `abort` closes at once, and notifies the request in progress that its client is gone. `provoke_reset` sends
        bytes that a client's system answers with a reset if the client has closed its socket.
        """
        if not self.is_open:  # It was closed for others, or timed out.
            abort()
            return
        self._transport, self._refuse, self._abort = transport, refuse, abort
        self._provoke_reset = provoke_reset

    def received(self) -> None:
        """Note that bytes were received."""
        self._has_begun = True
        if self._phase == "idle":
            self._table.forget(self)
            self._enter("head")

    def begin_request(self, *, is_uncounted: bool, party: str | None = None) -> TooManyConnections | None:
        """Note that the head of a request is complete. Returns the error if the request must be refused.

        `is_uncounted`: whether it does not count as served, unless `serve` is called. `party` is that of its API key;
        by default the address'.
        """
        if not self.is_open:
            return None
        party = party or self.party
        if party != self.body_party:
            # Clients behind one proxy have one address: bodies of one key must not end those of others.
            self._table.account_received(self, party)
        if self._phase != "answer":
            self._is_uncounted = is_uncounted
            refused = None if is_uncounted else self._table.refusal(self)
            if refused is None:
                self._enter("body")
            return refused
        self._pipelined.append(is_uncounted)
        # A pipelined request: `end_answer` of the request before it sets the phase. If that one is a probe, this one
        # must be counted as served now: at `end_answer`, the application has already begun to work on it.
        return None if is_uncounted else self._serve()

    def serve(self) -> TooManyConnections | None:
        """Count an uncounted request as served from now on. Returns the error if it must be refused."""
        return self._serve() if self.is_open else None

    def received_body(self, num_bytes: int) -> None:
        """Note that bytes of a body were received."""
        if self._phase == "body" and self.is_open:
            self._body_bytes += num_bytes
            self._count_held()

    def hold_unparsed(self, num_bytes: int) -> None:
        """Note how many bytes are in memory because some of them wait to be parsed."""
        if self.is_open:
            self.unparsed_bytes = num_bytes
            self._count_held()

    def end_body(self) -> TooManyConnections | None:
        """Note that the request is complete. Returns the error if the request must be refused."""
        if not self.is_open:
            return None
        if self._phase == "body":
            refused = None if self._is_uncounted else self._serve()
            if refused is not None:
                return refused
            self._release_body()
            self._enter("answer")
        elif self._phase == "rest":
            self._enter("idle")
        return None

    def hold_answer(self, num_bytes: int, party: str) -> None:
        """Note how many bytes of a large answer to the party's request are in memory until the last is sent."""
        if self.is_open:
            change, self._answer_bytes, self.answer_party = num_bytes - self._answer_bytes, num_bytes, party
            self._table.held_answer(self, change, is_held=num_bytes > 0)

    def end_answer(self, *, complete: bool) -> None:
        """Note that an answer is complete. `complete`: whether all bytes of the last request were received."""
        begun = bool(self._pipelined)
        if begun:
            self._is_uncounted = self._pipelined.pop(0)
        is_next_complete = begun and (complete or bool(self._pipelined))
        if not is_next_complete or (self._is_uncounted and all(self._pipelined)):
            self._release()
        if is_next_complete:
            self._enter("answer")
        elif begun:
            self._enter("body")
        else:
            self._has_begun = False
            self._enter("idle" if complete else "rest")

    def discard(self) -> None:
        """Note that the last answer was sent: for a while, further bytes are received and discarded."""
        self._release()
        self._enter("rest")

    def half_closed(self) -> None:
        """Note that the client has shut down its sending side: from now on, check whether it still reads."""
        self._is_half_closed = True
        self._check_interval = _FIRST_CHECK_SECONDS
        self._check_at = self._table.clock() + self._check_interval

    def close(self) -> None:
        """Note that the connection has ended, for whatever reason. Idempotent."""
        if self.is_open:
            self.hold_answer(0, self.answer_party)
            self.hold_unparsed(0)
            self.is_open = False
            self._release()
            self._table.closed(self)
            # The protocol refers to this connection: without these references the two are no cycle.
            self._transport = self._refuse = self._provoke_reset = self._abort = None

    def evict(self) -> None:
        """Close it at once, to make room for another connection."""
        self._end_as("evicted")

    @property
    def was_reset(self) -> bool:
        """Whether the connection has ended, for example by a reset. The protocol may not have been notified."""
        return not self.is_open or self._is_socket_closed or tcp_state(self._socket) == TCP_CLOSE

    # -- for `Connections` --------------------------------------------------------------------------------------

    @property
    def body_rate(self) -> float:
        """Bytes a second of the body that is being received; infinite in other phases."""
        if self._phase != "body":
            return math.inf
        return self._body_bytes / max(self._table.clock() - self._since, _LEAST_AGE_SECONDS)

    @property
    def waits_for_client(self) -> bool:
        """Whether this server waits for the client: for bytes of a request that are late, or for it to read its
        answer."""
        if self._phase == "answer":
            return self._transport is not None and self._transport.get_write_buffer_size() > 0
        if self._phase == "body" and self.body_rate >= max(self._table.limits.body_rate, 1):
            return False
        return not self.unparsed_bytes and not has_unread(self._socket)

    @property
    def is_about_to_be_read(self) -> bool:
        """Whether the first bytes of its first request wait in the socket, to be read in one of the loop's next
        rounds."""
        return self._phase == "head" and not self._has_begun and has_unread(self._socket)

    def check(self, now: float) -> None:
        """End the connection if its client has been too slow, or has gone."""
        if self._is_socket_closed:
            return
        limits, elapsed = self._table.limits, now - self._since
        num_unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        self._measure_reading(num_unsent, now)
        if self._reads_nothing(num_unsent, now):
            self._end_as("unread")
        elif self._is_half_closed:
            self._check_half_closed(now)
        elif self._phase == "answer" and tcp_state(self._socket) == TCP_CLOSE:
            self._end_as("gone")  # The loop reports no reset of a connection that it does not read from.
        elif self._pipelined and tcp_state(self._socket) == TCP_CLOSE_WAIT:
            self.half_closed()
        elif self._phase == "head" and elapsed > limits.head_seconds:
            self._time_out("head", f"the request's head was not complete after {limits.head_seconds:g} s")
        elif self._phase == "body" and limits.body_rate:
            self._check_rate(elapsed)
        elif self._phase == "rest" and elapsed > limits.head_seconds:
            self._end_as("body")

    def _check_rate(self, elapsed: float) -> None:
        limits = self._table.limits
        if self._body_bytes < limits.body_rate * (elapsed - limits.head_seconds):
            sentence = f"the request's body arrived at less than {limits.body_rate} bytes a second (min_body_rate)"
            self._time_out("body", sentence)

    def _reads_nothing(self, num_bytes: int, now: float) -> bool:
        """Return whether the client has read nothing for too long while bytes, now `num_bytes`, wait to be sent."""
        if num_bytes != self._unread:
            self._unread, self._unread_since = num_bytes, now
        return bool(num_bytes) and now - self._unread_since > self._table.limits.unread_seconds

    def _measure_reading(self, num_unsent: int, now: float) -> None:
        """Measure whether the client reads waiting bytes at less than the least rate, and report it to the table."""
        if not num_unsent or not self._is_served:
            if self._taken_before >= 0:
                self._taken_before = -1
                self._table.set_slow(self, is_slow=False)
            return
        seconds = now - self._reading_since
        if self._taken_before >= 0 and seconds < _READING_SECONDS:
            return
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_BYTES.stop)
        taken = int.from_bytes(info[_ACKED_BYTES], sys.byteorder)
        if self._taken_before >= 0:
            is_slow = taken - self._taken_before < self._table.limits.body_rate * seconds
            self._table.set_slow(self, is_slow=is_slow)
        self._reading_since, self._taken_before = now, taken

    def _check_half_closed(self, now: float) -> None:
        if tcp_state(self._socket) == TCP_CLOSE:
            self._end_as("gone")
        elif now >= self._check_at and self._provoke_reset is not None:
            self._provoke_reset()
            self._check_interval = min(2 * self._check_interval, _LONGEST_CHECK_SECONDS)
            self._check_at = now + self._check_interval

    def _time_out(self, reason: str, sentence: str) -> None:
        if self._has_begun and self._refuse is not None:
            self._table.note_closed(reason)
            self.discard()
            self._refuse(SlowRequest(f"{sentence}; send it faster"))
        else:
            self._end_as(reason)

    def _end_as(self, reason: str) -> None:
        if self.is_open:
            self._table.note_closed(reason)
            abort = self._abort
            self.close()
            if abort is not None:
                abort()
            else:
                # The code that sets the connection up, such as the TLS handshake, then sees that it has ended.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def _is_socket_closed(self) -> bool:
        """Whether the loop has closed the socket. Under TLS, the protocol is notified in the loop's next round."""
        return self._socket.fileno() < 0

    def _serve(self) -> TooManyConnections | None:
        """Count it as served; return the error instead if it must be refused."""
        if self._is_served:
            return None
        refused = self._table.refusal(self)
        if refused is None:
            self._is_served = True
            self._table.began_request(self)
        return refused

    def _release(self) -> None:
        self._release_body()
        if self._is_served:
            self._is_served = False
            self._table.ended_request(self)

    def _release_body(self) -> None:
        self._body_bytes = 0
        self._count_held()

    def _count_held(self) -> None:
        held_bytes = min(self._body_bytes, self._table.limits.request_bytes) + self.unparsed_bytes
        if held_bytes != self.held_bytes:
            change, self.held_bytes = held_bytes - self.held_bytes, held_bytes
            self._table.held_received(self, change)

    def _enter(self, phase: Phase) -> None:
        if not self.is_open:
            return
        self._phase, self._since = phase, self._table.clock()
        self._table.moved(self, makes_room=not self._is_served)


_HELD_BYTES = operator.attrgetter("held_bytes")


class _Waiting:
    """Connections by party. Finds the oldest one of the party that has the most; every operation takes constant
    time."""

    def __init__(self) -> None:
        self._parties: dict[str, dict[Connection, None]] = {}
        """Connections of each party, oldest first."""
        self._by_number: defaultdict[int, dict[str, None]] = defaultdict(dict)
        """Parties by the number of their connections."""
        self._most = 0
        self.num_connections = 0

    def add(self, connection: Connection) -> None:
        """Add a connection as the newest. No effect if it is present."""
        own = self._parties.setdefault(connection.party, {})
        if connection not in own:
            own[connection] = None
            self.num_connections += 1
            self._count(connection.party, len(own) - 1, len(own))

    def discard(self, connection: Connection) -> None:
        own = self._parties.get(connection.party)
        if own is not None and connection in own:
            del own[connection]
            self.num_connections -= 1
            self._count(connection.party, len(own) + 1, len(own))
            if not own:
                del self._parties[connection.party]

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._parties.get(connection.party, ())

    def oldest(self, party: str | None = None) -> Connection | None:
        """Return the oldest connection of a party; by default, of the party that has the most."""
        if party is None:
            if not self._most:
                return None
            party = next(iter(self._by_number[self._most]))
        return next(iter(self._parties.get(party, ())), None)

    def _count(self, party: str, before: int, after: int) -> None:
        if before:
            del self._by_number[before][party]
            if not self._by_number[before]:
                del self._by_number[before]
        if after:
            self._by_number[after][party] = None
        if after > self._most or (before == self._most and before not in self._by_number):
            self._most = after


class Connections:
    """All connections of one server. Used from the event loop's thread only."""

    def __init__(
        self,
        limits: ConnectionLimits,
        accounts: Accounts,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self._accounts = accounts
        self._metrics = metrics
        self._open: dict[Connection, None] = {}
        self._unchecked: list[Connection] = []
        """Connections that the present pass over all of them has yet to check."""
        self._waiting = _Waiting()
        """Connections that are not served, and may be closed for others."""
        self._slow = _Waiting()
        """Served connections whose clients read too slowly, and which may be closed for other requests."""
        self._answers: dict[Connection, None] = {}
        """Connections with a large answer, of which a part is yet to be sent, in the order of their beginnings."""
        self._num_served = 0
        self._served: defaultdict[str, int] = defaultdict(int)
        """Number of served connections, by party."""
        self._num_reported = 0
        self._num_closed = 0
        self._report_at = 0.0
        self._origin_of = functools.lru_cache(_NUM_KNOWN_ADDRESSES)(
            lambda host: (Owner.of_address(host).party, limits.is_proxy(host))
        )
        """Returns the party of an address, and whether it may have any number of connections."""
        metrics.show_connections(lambda: len(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def open(self, sock: socket.socket, host: str | None) -> Connection | None:
        """Register an accepted connection from `host`. Returns None if there is no room, and none can be made."""
        party, is_exempt = self._origin_of(host)
        # One more than may be served: its head is read, so that it is served as a probe or gets an error.
        if (
            not is_exempt
            and self._accounts.used(party, "connections") > self.limits.per_address
            and not self.make_room(party)
        ):
            self.note_closed("address")
            return None
        if len(self._open) >= self.limits.connections and not self.make_room():
            self.note_closed("connections")
            return None
        connection = Connection(self, party, is_exempt, sock)
        self._open[connection] = None
        self._waiting.add(connection)
        self._accounts.change(party, "connections", 1)
        return connection

    @property
    def open_at(self) -> float:
        """Return the time at which to accept a new connection, so that those it may displace had time to send a
        request."""
        if len(self._open) < self.limits.connections:
            return -math.inf
        victim = self._waiting.oldest(None)
        if victim is None:
            return -math.inf
        num_connections = max(self._waiting.num_connections, self.limits.connections / 2)
        age = max(num_connections / _MOST_NEW_PER_SECOND, _LEAST_AGE_SECONDS)
        open_at = victim.waits_since + min(age, _MOST_LEAST_AGE_SECONDS)
        now = self.clock()
        if open_at <= now < victim.waits_since + _MOST_UNREAD_SECONDS and victim.is_about_to_be_read:
            return now + _LEAST_AGE_SECONDS
        return open_at

    def make_room(self, party: str | None = None) -> bool:
        """Close the oldest connection of `party` that may be closed and whose client is late; by default, of the party
        that has the most. Returns whether one may be closed."""
        spared: list[Connection] = []
        victim = self._waiting.oldest(party)
        while victim is not None and victim not in spared and not victim.waits_for_client:
            spared.append(victim)
            self._waiting.discard(victim)
            self._waiting.add(victim)
            victim = self._waiting.oldest(party) if len(spared) < _MAX_SPARED else None
        if victim is None or victim in spared:
            # No client is late: close the connection with the slowest body, or else the oldest one.
            victim = min(spared, key=lambda each: each.body_rate, default=None)
        if victim is not None:
            victim.evict()
        return victim is not None

    def sweep(self) -> bool:
        """End the connections of clients that are too slow or have gone, among the next few; return whether others of
        this pass over all connections remain."""
        now = self.clock()
        if not self._unchecked:
            self._unchecked = list(self._open)
        for _ in range(min(len(self._unchecked), _SWEPT_AT_ONCE)):
            connection = self._unchecked.pop()
            if connection.is_open:
                connection.check(now)
        if self._unchecked:
            return True
        if self._num_closed > self._num_reported and now >= self._report_at:
            _log.warning(
                "%d connections or requests were refused or closed: for lack of room, because a key holds its share, "
                "or because their clients were too slow (kaon_connections_closed_total counts them by reason); "
                "%d are open",
                self._num_closed - self._num_reported,
                len(self._open),
            )
            self._num_reported, self._report_at = self._num_closed, now + _REPORT_SECONDS
        return False

    def note_closed(self, reason: str) -> None:
        """Count a connection, or a request of one, that was refused or closed. The log omits clients that left."""
        self._num_closed += reason != "gone"
        self._metrics.connection_closed(reason)

    # -- for `Connection` ---------------------------------------------------------------------------------------

    def refusal(self, connection: Connection) -> TooManyConnections | None:
        """Return why a connection cannot be served, or None if it can, if need be after closing a slow one."""
        limits = self.limits
        party = connection.party
        if not connection.is_exempt and self._served[party] >= limits.per_address and not self._end_slow(party):
            self.note_closed("address")
            return TooManyConnections(
                f"{limits.per_address} connections of this address are served (max_connections_per_address); send "
                "the request again later"
            )
        if self._num_served >= limits.serving and not self._end_slow(None):
            self.note_closed("connections")
            return TooManyConnections(
                f"{limits.serving} connections are served, the most that this server serves at a time "
                "(max_connections); send the request again later"
            )
        return None

    def began_request(self, connection: Connection) -> None:
        """Count a connection as served until `ended_request`."""
        self._num_served += 1
        self._served[connection.party] += 1
        self._waiting.discard(connection)

    def held_received(self, connection: Connection, change: int) -> None:
        """Count `change` more received bytes in memory.

        Beyond the bound, connections that hold most, of the key or address that holds most, are closed.
        """
        self._accounts.change(connection.body_party, "body_bytes", change)
        while change > 0 and self._accounts.total("body_bytes") > self.limits.body_bytes:
            party = self._accounts.largest_user("body_bytes")
            max((each for each in self._open if each.body_party == party), key=_HELD_BYTES).evict()

    def account_received(self, connection: Connection, party: str) -> None:
        """Account the received bytes that a connection holds to `party` from now on."""
        self._accounts.change(connection.body_party, "body_bytes", -connection.held_bytes)
        connection.body_party = party
        self._accounts.change(party, "body_bytes", connection.held_bytes)

    def held_answer(self, connection: Connection, change: int, *, is_held: bool) -> None:
        """Count `change` more bytes of large answers in memory.

        Beyond the bound, a slow reader's connection is closed, of the party that holds most; beyond twice the bound,
        the one whose answer began first.
        """
        party, limit = connection.answer_party, self.limits.answer_bytes
        self._accounts.change(party, "answer_bytes", change)
        if is_held:
            self._answers[connection] = None
        else:
            self._answers.pop(connection, None)
        while change > 0 and (total := self._accounts.total("answer_bytes")) > limit:
            holders = [each for each in self._answers if each in self._slow]
            if not holders and total > 2 * limit and len(self._answers) > 1:
                holders = list(self._answers)
            if not holders:
                return
            max(holders, key=lambda each: self._accounts.used(each.answer_party, "answer_bytes")).evict()

    def ended_request(self, connection: Connection) -> None:
        """Note that the request of a served connection was answered, or its client has gone."""
        self._num_served -= 1
        self._served[connection.party] -= 1
        if not self._served[connection.party]:
            del self._served[connection.party]

    def moved(self, connection: Connection, *, makes_room: bool) -> None:
        """Note that a connection has entered another phase."""
        self._slow.discard(connection)
        if not makes_room:
            self._waiting.discard(connection)
        elif connection not in self._waiting:
            connection.waits_since = self.clock()
            self._waiting.add(connection)

    def set_slow(self, connection: Connection, *, is_slow: bool) -> None:
        """Note whether the client of a served connection reads at less than the least rate."""
        (self._slow.add if is_slow else self._slow.discard)(connection)

    def forget(self, connection: Connection) -> None:
        """Remove a connection from those that may be closed for others."""
        self._waiting.discard(connection)
        self._slow.discard(connection)

    def closed(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        self.forget(connection)
        del self._open[connection]
        self._accounts.change(connection.party, "connections", -1)

    def _end_slow(self, party: str | None) -> bool:
        victim = self._slow.oldest(party)
        if victim is not None:
            victim.evict()
        return victim is not None
