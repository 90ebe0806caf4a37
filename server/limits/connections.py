"""`Connections`: which connections the server keeps, and for how long. `Acceptor`: accepts them.

A connection is in one of these phases; from any of them it may end.

    head ──► body ──► answer ──► idle ──► head ...
                          └────► rest ──► idle        (answered before the body's end; the rest is discarded)

A connection serves a request from the request's last byte to the end of its answer. There are fewer of them than
connections may be open, so that there is always room for the head of a probe. They are not closed for others as long
as their clients read; a new request beyond them is refused in words. All other connections, those of probes too, make
room when there are too many: the oldest of the address that has the most, but for those that do not wait for their
clients.
"""

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import math
import os
import resource
import socket
import ssl
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Literal, NamedTuple, Self

from engine.config.config import ServerConfig
from server.errors import ApiError, as_raw_response
from server.limits.accounts import Accounts
from server.limits.owners import Owner
from server.metrics import Metrics

_log = logging.getLogger(__name__)

Phase = Literal["head", "body", "answer", "idle", "rest"]

_ENGINE_DESCRIPTORS = 24
"""Descriptors left to the engine's supervisor, the checkers of grammars and templates, and the metrics."""

_LEAST_CONNECTIONS, _MOST_CONNECTIONS = 4, 8192
"""Range of the number that follows from the limit of open files."""

_RESERVED_PARTS, _MOST_RESERVED = 4, 64
"""Of all connections, a part of 1 / this, up to so many, never serves requests: there, heads are read."""

_MOST_HELD_BYTES = 32 * 2**20
"""Largest default of `max_request_bytes`, which follows from the model."""

_BODY_BUDGET_BODIES = 64
"""Bodies of the largest size that may be held while they arrive."""

_LEAST_AGE_SECONDS, _MOST_LEAST_AGE_SECONDS = 0.005, 0.05
"""A connection makes no room for new ones before this age, so that a flood does not close those that send at once."""

_MOST_UNREAD_SECONDS = 0.25
"""Nor before this age, if bytes of its first request have arrived that this process has not read yet."""

_MOST_NEW_PER_SECOND = 3200
"""New connections that are accepted in a second at most. With more connections that make room, the least age rises so
that this rate holds; it is at least half of the age that holds when all connections that may be open make room."""

_MAX_SPARED = 16
"""Most connections that make no room because they do not wait for their clients, before one of them does."""

_READING_SECONDS = 5.0
"""Time over which it is measured how fast a client reads that does not keep up."""

_NUM_KNOWN_ADDRESSES = 1024

_SWEEP_SECONDS = 0.5
_REPORT_SECONDS = 10.0

_FIRST_QUESTION_SECONDS, _LAST_QUESTION_SECONDS = 2.0, 16.0
"""After a client has shut down its sending side, when it is asked whether it still reads, and the longest interval."""

_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8
"""States in the first byte of TCP_INFO (linux/tcp_states.h): of a connection that was reset, and of one whose client
sends no more."""
_ACKED_BYTES = slice(120, 128)
"""Where TCP_INFO (linux/tcp.h) counts the bytes that the other side has taken."""

_MAX_ADMITTED_AT_ONCE, _MAX_ACCEPTED_AT_ONCE = 8, 64
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_SECONDS = 0.05


class TooManyConnections(ApiError):
    """Too many connections serve requests: 503."""

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
    """Most that are open."""
    per_address: int
    """Most of one address, or of one /64 network of IPv6."""
    proxies: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    """Addresses that may have any number."""
    head_seconds: float = 10.0
    body_rate: int = 1024
    """Least bytes a second of a body, on average after `head_seconds`; 0: no least rate.

    Clients that take what waits for them more slowly keep no place from others."""
    idle_seconds: float = 75.0
    unread_seconds: float = 300.0
    request_bytes: int = 4 * 2**20
    """Most bytes of a body that are held in memory while it arrives; more of it, of an upload, go to the disk."""
    body_bytes: int = 256 * 2**20
    """Most bytes of all bodies that are held in memory while they arrive."""

    @classmethod
    def of(cls, config: ServerConfig, num_free: int, max_request_bytes: int) -> Self:
        """Those of `config`, for a process that may open `num_free` more files."""
        available = num_free - _ENGINE_DESCRIPTORS
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
            config.keep_alive_timeout,
            config.send_timeout,
            config.max_request_bytes or _MOST_HELD_BYTES,
            _BODY_BUDGET_BODIES * max_request_bytes,
        )

    @property
    def serving(self) -> int:
        """Most connections that serve requests other than probes."""
        return self.connections - max(1, min(self.connections // _RESERVED_PARTS, _MOST_RESERVED))

    def is_proxy(self, host: str | None) -> bool:
        """Whether an address may have any number of connections."""
        try:
            address = ipaddress.ip_address((host or "").partition("%")[0])
        except ValueError:
            return host is None
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self.proxies)


def num_free_descriptors() -> int:
    """How many more files this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))


class Connection:
    """One connection, from its acceptance to its end. `Connections.open` makes it."""

    __slots__ = (
        "_abort",
        "_ask",
        "_ask_at",
        "_ask_interval",
        "_body_bytes",
        "_has_begun",
        "_has_pipelined",
        "_is_half_closed",
        "_is_probe",
        "_is_served",
        "_phase",
        "_reading_since",
        "_refuse",
        "_since",
        "_socket",
        "_table",
        "_taken_before",
        "_transport",
        "_unread",
        "_unread_since",
        "is_exempt",
        "is_open",
        "party",
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
        """When its phase began, and when it began to make room for others, if it does."""
        self._has_begun = False
        """Whether a byte of the head has arrived."""
        self._is_probe = False
        """Whether its request needs no place among those that are served."""
        self._is_served = False
        """Whether it counts among the connections that serve requests."""
        self._body_bytes = 0
        """Bytes of the body that have arrived."""
        self._unread, self._unread_since = 0, 0.0
        """Bytes that wait to be sent, and since when this number has not changed."""
        self._reading_since, self._taken_before = 0.0, -1
        """Since when it is measured how fast the client reads, and the bytes that it had taken; -1: it keeps up."""
        self._has_pipelined = False
        """Whether further requests have arrived after the one that is served: nothing more is read then."""
        self._is_half_closed = False
        self._ask: Callable[[], object] | None = None
        self._ask_at = self._ask_interval = 0.0

    def established(
        self,
        transport: asyncio.Transport,
        refuse: Callable[[ApiError], object],
        abort: Callable[[], object],
        ask: Callable[[], object],
    ) -> None:
        """Bytes may arrive; `refuse` answers a request that is not complete with an error, and closes.

        `abort` closes at once, and notifies the request in progress that its client is gone. `ask` sends bytes that
        the system of a client that is gone answers with a reset.
        """
        self._transport, self._refuse, self._abort, self._ask = transport, refuse, abort, ask
        if not self.is_open:
            abort()

    def received(self) -> None:
        """Bytes have arrived."""
        self._has_begun = True
        if self._phase == "idle":
            self._table.forget(self)
            self._enter("head")

    def begin_request(self, *, is_probe: bool) -> TooManyConnections | None:
        """The head of a request is complete; the error, if it must be refused."""
        if not self.is_open:
            return None
        if self._phase != "answer":
            self._is_probe = is_probe
            refused = None if is_probe else self._table.refusal(self)
            if refused is None:
                self._enter("body")
            return refused
        self._has_pipelined = True
        # A pipelined request. The phase is set when the one before it has been answered. Behind a probe, it needs its
        # place now: afterwards, the application works on it already.
        return None if is_probe else self._serve()

    def received_body(self, num_bytes: int) -> None:
        """Bytes of a body have arrived."""
        if self._phase == "body" and self.is_open:
            before = self._held_bytes
            self._body_bytes += num_bytes
            self._table.received_body(self, self._held_bytes - before)

    def end_body(self) -> TooManyConnections | None:
        """The request is complete; the error, if it must be refused."""
        if not self.is_open:
            return None
        if self._phase == "body":
            refused = None if self._is_probe else self._serve()
            if refused is not None:
                return refused
            self._release_body()
            self._enter("answer")
        elif self._phase == "rest":
            self._enter("idle")
        return None

    def end_answer(self, *, begun: bool, complete: bool) -> None:
        """An answer is complete. `begun`: the next request is served; `complete`: it, or else this one, arrived."""
        self._has_pipelined = begun
        if begun and complete:
            self._enter("answer")
            return
        self._release()
        if begun:
            self._is_probe = False
            self._enter("body")
            return
        self._has_begun = False
        self._enter("idle" if complete else "rest")

    def discard(self) -> None:
        """The last answer has been sent; what still arrives is discarded for a while."""
        self._release()
        self._enter("rest")

    def half_closed(self) -> None:
        """The client sends no more, and may have gone: it is asked from now on."""
        self._is_half_closed = True
        self._ask_interval = _FIRST_QUESTION_SECONDS
        self._ask_at = self._table.clock() + self._ask_interval

    def close(self) -> None:
        """The connection has ended, for whatever reason. No effect on one that has ended."""
        if self.is_open:
            self.is_open = False
            self._release()
            self._table.closed(self)

    def evict(self) -> None:
        """Close it at once: others need its place."""
        self._end_as("evicted")

    # -- for `Connections` --------------------------------------------------------------------------------------

    @property
    def is_receiving_body(self) -> bool:
        return self._phase == "body"

    @property
    def body_rate(self) -> float:
        """Bytes a second of a body that is arriving; infinite in other phases."""
        if self._phase != "body":
            return math.inf
        return self._body_bytes / max(self._table.clock() - self._since, _LEAST_AGE_SECONDS)

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing has arrived that is to be read, and the rest is late, or an answer is not taken."""
        if self._phase == "answer":
            return self._transport is not None and self._transport.get_write_buffer_size() > 0
        if self._phase == "body" and self.body_rate >= max(self._table.limits.body_rate, 1):
            return False
        return not self._has_unread

    @property
    def is_about_to_be_read(self) -> bool:
        """Whether the first bytes of its first request have arrived, and are read in one of the next rounds."""
        return self._phase == "head" and not self._has_begun and self._has_unread

    @property
    def held_bytes(self) -> int:
        """Bytes of a body that are held in memory."""
        return self._held_bytes

    def check(self, now: float) -> None:
        """End the connection if its client has been too slow, or has gone."""
        limits, elapsed = self._table.limits, now - self._since
        num_unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        self._measure_reading(num_unsent, now)
        if self._is_unread(num_unsent, now):
            self._end_as("unread")
        elif self._is_half_closed:
            self._check_half_closed(now)
        elif self._has_pipelined and self._tcp_state in (_TCP_CLOSE, _TCP_CLOSE_WAIT):
            self.half_closed()
            self._check_half_closed(now)
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

    def _is_unread(self, num_bytes: int, now: float) -> bool:
        """Whether the client has read nothing for too long, with `num_bytes` waiting to be sent now."""
        if num_bytes != self._unread:
            self._unread, self._unread_since = num_bytes, now
        return bool(num_bytes) and now - self._unread_since > self._table.limits.unread_seconds

    def _measure_reading(self, num_unsent: int, now: float) -> None:
        """Note whether the client takes what waits for it at less than the least rate."""
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
        if self._tcp_state == _TCP_CLOSE:
            self._end_as("gone")
        elif now >= self._ask_at and self._ask is not None:
            self._ask()
            self._ask_interval = min(2 * self._ask_interval, _LAST_QUESTION_SECONDS)
            self._ask_at = now + self._ask_interval

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
            self.close()
            if self._abort is not None:
                self._abort()
            else:
                # Whoever sets the connection up, TLS for instance, sees that it has ended.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def _tcp_state(self) -> int:
        return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]

    @property
    def _has_unread(self) -> bool:
        """Whether bytes have arrived that this process has not come to read."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    @property
    def _held_bytes(self) -> int:
        return min(self._body_bytes, self._table.limits.request_bytes)

    def _serve(self) -> TooManyConnections | None:
        """Count it among the connections that serve requests, or why not."""
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
        self._table.released_body(self, self._held_bytes)
        self._body_bytes = 0

    def _enter(self, phase: Phase) -> None:
        if not self.is_open:
            return
        self._phase, self._since = phase, self._table.clock()
        self._table.moved(self, makes_room=not self._is_served)


class _Waiting:
    """Connections by party; finds the oldest of the party that has the most, each in constant time."""

    def __init__(self) -> None:
        self._parties: dict[str, dict[Connection, None]] = {}
        """Its connections, the oldest first."""
        self._by_number: defaultdict[int, dict[str, None]] = defaultdict(dict)
        """Parties by the number of their connections."""
        self._most = 0
        self.num_connections = 0

    def add(self, connection: Connection) -> None:
        """As the newest. No effect on one that is there."""
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
        """The oldest of a party; None: of the one that has the most."""
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
        self._waiting = _Waiting()
        """Those that serve no request, and make room for others."""
        self._slow = _Waiting()
        """Those that serve a request whose client hardly reads the answer, and make room for other requests."""
        self._num_served = 0
        self._served: defaultdict[str, int] = defaultdict(int)
        """Connections that serve requests, by party."""
        self._num_reported = 0
        self._num_closed = 0
        self._report_at = 0.0
        self._origin_of = functools.lru_cache(_NUM_KNOWN_ADDRESSES)(
            lambda host: (Owner.of_address(host).party, limits.is_proxy(host))
        )
        """The party of an address, and whether it may have any number of connections."""
        metrics.show_connections(lambda: len(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def open(self, sock: socket.socket, host: str | None) -> Connection | None:
        """A connection from `host` was accepted; None if there is no room for it, even if others make room."""
        party, is_exempt = self._origin_of(host)
        # One more than serve requests, so that its head is read, and it is refused in words or is a probe.
        if (
            not is_exempt
            and self._accounts.used(party, "connections") > self.limits.per_address
            and not self._make_room(party)
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
        """When a new connection is taken: those that make room for it shall have had a moment to send a request."""
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

    def make_room(self) -> bool:
        """Close the oldest connection that makes room, of the address that has most; whether there was one."""
        return self._make_room(None)

    def sweep(self) -> None:
        """End the connections of clients that are too slow or have gone. Call it every half second."""
        now = self.clock()
        for connection in list(self._open):
            if connection.is_open:
                connection.check(now)
        if self._num_closed > self._num_reported and now >= self._report_at:
            _log.warning(
                "%d connections were refused or closed for lack of room, or because their clients were too slow "
                "(kaon_connections_closed_total counts them by reason); %d are open",
                self._num_closed - self._num_reported,
                len(self._open),
            )
            self._num_reported, self._report_at = self._num_closed, now + _REPORT_SECONDS

    def note_closed(self, reason: str) -> None:
        """Count a connection, or a request of one, that was refused or closed."""
        self._num_closed += 1
        self._metrics.connection_closed(reason)

    # -- for `Connection` ---------------------------------------------------------------------------------------

    def refusal(self, connection: Connection) -> TooManyConnections | None:
        """Why a connection cannot be one of those that serve requests; None if it can, perhaps in place of another."""
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
        """A connection is one of those that serve requests from now on, until `ended_request`."""
        self._num_served += 1
        self._served[connection.party] += 1
        self._waiting.discard(connection)

    def received_body(self, connection: Connection, num_bytes: int) -> None:
        """Hold so many more bytes. Beyond what may be held, the largest body of the address that holds most ends."""
        self._accounts.change(connection.party, "body_bytes", num_bytes)
        if self._accounts.total("body_bytes") <= self.limits.body_bytes:
            return
        arriving = [each for each in self._open if each.is_receiving_body]
        largest = max(arriving, key=lambda each: (self._accounts.used(each.party, "body_bytes"), each.held_bytes))
        largest.evict()

    def released_body(self, connection: Connection, num_bytes: int) -> None:
        """A body has arrived, or will not."""
        self._accounts.change(connection.party, "body_bytes", -num_bytes)

    def ended_request(self, connection: Connection) -> None:
        """A request that was served has been answered, or its client has gone."""
        self._num_served -= 1
        self._served[connection.party] -= 1
        if not self._served[connection.party]:
            del self._served[connection.party]

    def moved(self, connection: Connection, *, makes_room: bool) -> None:
        """A connection has entered another phase."""
        self._slow.discard(connection)
        if not makes_room:
            self._waiting.discard(connection)
        elif connection not in self._waiting:
            connection.waits_since = self.clock()
            self._waiting.add(connection)

    def set_slow(self, connection: Connection, *, is_slow: bool) -> None:
        """The client of a connection that serves a request reads at less than the least rate, or no longer."""
        (self._slow.add if is_slow else self._slow.discard)(connection)

    def forget(self, connection: Connection) -> None:
        """A connection is no longer among those that make room."""
        self._waiting.discard(connection)
        self._slow.discard(connection)

    def closed(self, connection: Connection) -> None:
        """A connection has ended."""
        self.forget(connection)
        del self._open[connection]
        self._accounts.change(connection.party, "connections", -1)

    def _make_room(self, party: str | None) -> bool:
        spared: list[Connection] = []
        victim = self._waiting.oldest(party)
        while victim is not None and victim not in spared and not victim.waits_for_client:
            spared.append(victim)
            self._waiting.discard(victim)
            self._waiting.add(victim)
            victim = self._waiting.oldest(party) if len(spared) < _MAX_SPARED else None
        if victim is None or victim in spared:
            # None is late. The slowest body ends, or else the oldest connection.
            victim = min(spared, key=lambda each: each.body_rate, default=None)
        if victim is not None:
            victim.evict()
        return victim is not None

    def _end_slow(self, party: str | None) -> bool:
        victim = self._slow.oldest(party)
        if victim is not None:
            victim.evict()
        return victim is not None


class Acceptor:
    """Accepts the connections of a listening socket, as far as `Connections` has room for them."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        new_protocol: Callable[[Connection], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        """`tls` returns what the next connection uses; None: plain HTTP.

        Accept from now on, in the running event loop, until `close`. The caller owns `listener`."""
        self._listener = listener
        self._connections = connections
        self._new_protocol = new_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[None]] = set()
        self._spare: int | None = None
        """A descriptor that is given up to accept a connection when there is no other."""
        self._sweep_timer = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        self._retry: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        _set_options(listener)
        self._take_spare()
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more. Connections go on, and are still checked."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        self._give_up_spare()

    def stop(self) -> None:
        """Check connections no more."""
        self._sweep_timer.cancel()

    def _sweep(self) -> None:
        self._sweep_timer = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        self._connections.sweep()

    def _accept(self) -> None:
        num_admitted = 0
        for _ in range(_MAX_ACCEPTED_AT_ONCE):
            delay = self._connections.open_at - self._connections.clock()
            if delay > 0:
                self._pause(delay)  # Meanwhile the system holds the new ones.
                return
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    self._accept_without_descriptor()
                    return
                continue  # The client has gone again.
            if _has_ended(sock):
                sock.close()
                continue
            self._admit(sock, address[0] if address else None)
            num_admitted += 1
            if num_admitted == _MAX_ADMITTED_AT_ONCE:
                return

    def _accept_without_descriptor(self) -> None:
        """This process, or the system, can open no file: have a connection make room, or refuse the new ones."""
        self._connections.note_closed("descriptors")
        if not self._connections.make_room() and self._spare is not None:
            self._give_up_spare()
            with contextlib.suppress(OSError):
                sock, _ = self._listener.accept()
                _refuse(sock)
        # What is closed is free in the loop's next round; until then the listener would be reported again and again.
        self._pause(_RETRY_SECONDS)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(seconds, self._accept_again)

    def _accept_again(self) -> None:
        self._take_spare()
        self._loop.add_reader(self._listener, self._accept)

    def _take_spare(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_up_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _admit(self, sock: socket.socket, host: str | None) -> None:
        connection = self._connections.open(sock, host)
        if connection is None:
            if self._tls is None:
                _refuse(sock)
            else:
                sock.close()
            return
        sock.setblocking(False)
        task = self._loop.create_task(self._start(sock, connection))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, sock: socket.socket, connection: Connection) -> None:
        """Hand the connection to a protocol of its own, after the TLS handshake where there is one."""
        timeout = None if self._tls is None else self._connections.limits.head_seconds
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._new_protocol(connection),
                sock,
                ssl=None if self._tls is None else self._tls(),
                ssl_handshake_timeout=timeout,
            )
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever it is, nobody else is concerned
            is_usual = isinstance(error, (OSError, asyncio.CancelledError))
            _log.log(logging.DEBUG if is_usual else logging.ERROR, "a connection was not set up: %r", error)
            connection.close()
            sock.close()


_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""A client that is silent is asked by the system after so many seconds, so often, and so many times."""


def _set_options(listener: socket.socket) -> None:
    """Options that accepted sockets inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEP_ALIVE:
        listener.setsockopt(socket.IPPROTO_TCP, option, value)


def _has_ended(sock: socket.socket) -> bool:
    """Whether the client has sent nothing, and sends no more."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _refuse(sock: socket.socket) -> None:
    """Send an error, as far as that is possible without waiting, and close."""
    with sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.send(as_raw_response(TooManyConnections("too many connections are open; try again later")))
