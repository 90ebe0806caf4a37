"""`HostRouter`: the thread that other hosts connect to, and that exchanges messages with their ranks or cores.

`RankNetwork` creates it in an engine core whose ranks other hosts run, and `CoreHosts` in a front end whose cores
other hosts run. A `RemoteMember` is one rank or core (`RemoteRank`, `RemoteCore`). `HostSocket` is the listening
socket. It detects hosts that are gone: at once if their system closes the connection, else by missing heartbeats.
`PendingHosts` have sent a hello and cannot join yet.
"""

import logging
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.config.release import release
from engine.distributed.cluster import CurvePair, HostAgreement
from engine.distributed.curve import bind_curve
from engine.distributed.host_messages import (
    CoreEnded,
    CoreStarted,
    FromHost,
    Hello,
    RankGone,
    RankReport,
    Refused,
    ShutdownMessage,
    ToHost,
)


class RemoteMember(Protocol):
    """A rank or core on another host. The router's thread calls its methods."""

    @property
    def number(self) -> int:
        """Number that identifies it in messages of its host."""

    @property
    def node(self) -> int:
        """Number of its host."""

    @property
    def join_by(self) -> float:
        """Time by which its host must have joined, on the monotonic clock."""

    @property
    def far_descriptor(self) -> int:
        """Descriptor that is readable when there is a message to forward, or its owner has closed it; -1 when it is
        lost."""

    def on_joined(self, host: str) -> None:
        """Called when its host, with the name `host`, has joined."""

    def next_message(self) -> ToHost | None:
        """Return the next message to forward to its host; None when its owner has closed it."""

    def on_message(self, message: FromHost) -> None:
        """Handle a message of its host about it."""

    def on_mismatch(self, host: str, difference: str) -> None:
        """Called when its host, with the name `host`, cannot join. `difference` ends a sentence about the host."""

    def on_timeout(self, timeout: float) -> None:
        """Called when its host has not joined within `timeout` seconds."""

    def on_lost(self, how: str, killed: bool) -> None:
        """Called when it has ended. `how` ends a sentence; `killed`: whether another process ended it."""


class PendingHosts:
    """The hellos of hosts that cannot join yet, by the names of their connections. A host may be gone already."""

    def __init__(self) -> None:
        self._for_agreement: dict[bytes, Hello] = {}
        self._for_node: dict[bytes, Hello] = {}

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the names of all connections."""
        return iter([*self._for_agreement, *self._for_node])

    def wait_for_agreement(self, name: bytes, hello: Hello) -> None:
        """Store a host until the agreement that it is compared with is known."""
        self._for_agreement[name] = hello

    def wait_for_node(self, name: bytes, hello: Hello) -> None:
        """Store a host until it is known whether the host that joined with its number is still alive."""
        self._for_node[name] = hello

    def take_for_agreement(self) -> Mapping[bytes, Hello]:
        """Remove and return the hosts that wait for the agreement."""
        taken, self._for_agreement = self._for_agreement, {}
        return taken

    def take_for_node(self, node: int | None) -> Mapping[bytes, Hello]:
        """Remove and return the hosts that wait for the number `node`."""
        taken = {name: hello for name, hello in self._for_node.items() if hello.node == node}
        for name in taken:
            del self._for_node[name]
        return taken


_log = logging.getLogger(__name__)

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_ASK_SECONDS = (0.0, 0.02, 1.0)
"""Delays of the checks after a connection has ended: the monitor does not report which one, and the socket knows it
only a moment later."""
_LINGER_MS = 2000
"""Milliseconds for sending the last messages."""
_SHUTDOWN_MESSAGE_SECONDS = 2.0
"""Seconds that hosts have to receive a shutdown message."""
_ASK_AGAIN_SECONDS = 0.02
ALIVE = b""
"""The message that checks whether a host is alive, and its answer."""

_encoder = msgspec.msgpack.Encoder()


class HostSocket:
    """A ROUTER socket and its monitor. All calls come from the router's thread.

    A host is identified by the name of its connection, which is new each time that it connects.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: CurvePair) -> None:
        """Listen at the `tcp://` address. Raises `OSError` with a sentence if that is impossible."""
        self._socket = bind_curve(context, zmq.ROUTER, address, keys)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _FAILED)
        self._asks: list[float] = []
        """Times at which to check whether the hosts are alive, on the monotonic clock, in descending order."""
        self._has_warned = False

    def register(self, poller: zmq.Poller) -> None:
        """Register with `poller`, which wakes for messages and for events of the monitor."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    @property
    def next_ask(self) -> float:
        """Time of the next check without an event, on the monotonic clock; infinite without one."""
        return self._asks[-1] if self._asks else math.inf

    def is_time_to_ask(self) -> bool:
        """Return whether a connection has ended, so that all hosts must be checked."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                now = time.monotonic()
                self._asks = sorted((now + seconds for seconds in _ASK_SECONDS), reverse=True)
            elif not self._has_warned:
                self._has_warned = True
                _log.warning("a connection without this server's cluster key was refused")
        if time.monotonic() < self.next_ask:
            return False
        self._asks.pop()
        return True

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """Return the sender and the frames of the next message; None if there is none."""
        try:
            name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return name, frames

    def send(self, name: bytes, message: ToHost) -> bool:
        """Send a message to a host. Returns False if it is gone."""
        return self._send(name, _encoder.encode(message))

    def ask(self, name: bytes) -> bool:
        """Check whether a host is alive, which it answers by `ALIVE`. Returns False if its connection has ended."""
        return self._send(name, ALIVE)

    def announce_shutdown(self, shutdown: ShutdownMessage, names: Collection[bytes]) -> None:
        """Send these hosts the message, wait until they have received it and disconnect, and close."""
        left = [name for name in names if self.send(name, shutdown)]
        deadline = time.monotonic() + _SHUTDOWN_MESSAGE_SECONDS
        while left and time.monotonic() < deadline:
            time.sleep(_ASK_AGAIN_SECONDS)
            left = [name for name in left if self.ask(name)]
        self._close(linger=0)

    def close(self) -> None:
        """End all connections when the last messages have been sent."""
        self._close(_LINGER_MS)

    def _close(self, linger: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger)

    def _send(self, name: bytes, frame: bytes) -> bool:
        try:
            self._socket.send_multipart([name, frame])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


_decoder = msgspec.msgpack.Decoder(FromHost)


class _TurnedAway(NamedTuple):
    node: int
    why: str


class HostRouter:
    """Exchanges messages with the hosts of `nodes`, which are numbered from 1, until `close`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        keys: CurvePair,
        *,
        agreement: HostAgreement | None,
        nodes: Mapping[int, Sequence[RemoteMember]],
        timeout: float,
    ) -> None:
        """Listen at the `tcp://` address. Raises `OSError` with a sentence if that is impossible.

        Without an `agreement`, hosts wait for `compare_with`. `timeout` is the number of seconds until
        `RemoteMember.join_by`; they start again with `compare_with`.
        """
        self._socket = HostSocket(context, address, keys)
        self._agreement = agreement
        self._timeout = timeout
        self._compares_since = math.inf if agreement is None else -math.inf
        """Time at which the agreement became known, on the monotonic clock: before it, no host is late."""
        self._nodes = {node: list(members) for node, members in nodes.items()}
        self._waiting = PendingHosts()
        self._new: SimpleQueue[RemoteMember | HostAgreement | _TurnedAway] = SimpleQueue()
        self._joined: dict[bytes, int] = {}
        """Numbers of the joined hosts, by the names of their connections."""
        self._hosts: dict[int, str] = {}
        """Names of the joined hosts, by number."""
        self._shutdown: ShutdownMessage | None = None
        self._closing, self._wake = os.pipe()
        self._wake_lock = Lock()
        self._is_closed = False
        self._thread = Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def add(self, member: RemoteMember) -> None:
        """Serve another member from now on. Thread-safe."""
        self._post(member)

    def compare_with(self, agreement: HostAgreement) -> None:
        """Set the agreement that hosts are compared with. Thread-safe."""
        self._post(agreement)

    def announce_shutdown(self, why: str) -> None:
        """Notify the hosts that no other core will follow, and `close`. `why` as in `ShutdownMessage`."""
        self._shutdown = ShutdownMessage(why)
        self.close()

    def close(self) -> None:
        """End all connections. Idempotent and thread-safe."""
        with self._wake_lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._wake)
        self._thread.join()

    def turn_away(self, node: int, why: str) -> None:
        """Note that a host cannot join, for the reason `why`. No effect if it has joined. Thread-safe."""
        self._post(_TurnedAway(node, why))

    def _post(self, news: "RemoteMember | HostAgreement | _TurnedAway") -> None:
        with self._wake_lock:
            if not self._is_closed:
                self._new.put(news)
                os.write(self._wake, b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        self._socket.register(poller)
        poller.register(self._closing, zmq.POLLIN)
        while True:
            reachable = {link.far_descriptor: link for link in self._reachable()}
            for descriptor in reachable:
                poller.register(descriptor, zmq.POLLIN)
            due = min([self._socket.next_ask, *map(self._late_at, self._awaited())])
            timeout = None if due == math.inf else math.ceil(1e3 * max(0.0, due - time.monotonic()))
            readable = dict(poller.poll(timeout))
            for descriptor in reachable:
                poller.unregister(descriptor)
            if self._closing in readable:
                if not os.read(self._closing, 1):
                    return self._end()
                self._handle_news(self._new.get())
            for member in self._awaited():
                if time.monotonic() >= self._late_at(member):
                    member.on_timeout(self._timeout)
            if self._socket.is_time_to_ask():
                self._ask(list(self._joined))
            if (received := self._socket.receive()) is not None:
                self._receive(*received)
            for descriptor, link in reachable.items():
                # A member that was lost in this round has closed its descriptor.
                if descriptor in readable and link.far_descriptor == descriptor:
                    self._forward(link)

    def _reachable(self) -> list[RemoteMember]:
        """Return the members whose hosts have joined."""
        joined = (link for node in self._joined.values() for link in self._nodes[node])
        return [link for link in joined if link.far_descriptor >= 0]

    def _receive(self, name: bytes, frames: list[bytes]) -> None:
        """Handle a message of a peer that has the key, but may run another version of Kaon."""
        if frames == [ALIVE]:
            self._refuse_doubles(name)
            return
        try:
            message = _decoder.decode(b"".join(frames))
        except msgspec.DecodeError as error:
            _log.error("a host sent a message that this version of Kaon cannot read: %s", error)
            why = f"the first host runs Kaon {release()} and cannot read this host's message; install the same version"
            self._send(name, Refused(why))
            self._lose(name, "is gone: its host sent a message that this version of Kaon cannot read", False)
        else:
            self._dispatch(name, message)

    def _awaited(self) -> Iterator[RemoteMember]:
        """Iterate over the members whose hosts have not joined."""
        absent = (link for node in self._nodes.keys() - self._joined.values() for link in self._nodes[node])
        return (link for link in absent if link.far_descriptor >= 0)

    def _late_at(self, member: RemoteMember) -> float:
        return max(member.join_by, self._compares_since + self._timeout)

    def _handle_news(self, news: "RemoteMember | HostAgreement | _TurnedAway") -> None:
        if isinstance(news, HostAgreement):
            self._agreement, self._compares_since = news, time.monotonic()
            self._welcome_again(self._waiting.take_for_agreement())
        elif isinstance(news, _TurnedAway):
            for member in list(self._awaited()):
                if member.node == news.node:
                    member.on_mismatch("", f"cannot join: {news.why}")
        else:
            self._admit(news)

    def _admit(self, member: RemoteMember) -> None:
        there = self._nodes[member.node]
        # Members that were lost are removed.
        there[:] = [other for other in there if other.far_descriptor >= 0]
        there.append(member)
        if member.node in self._joined.values():
            member.on_joined(self._hosts[member.node])
        elif member.join_by == math.inf:
            _log.warning("the ranks and replicas of node %d start again once it has joined again", member.node)

    def _dispatch(self, name: bytes, message: FromHost) -> None:
        match message:
            case Hello():
                self._welcome(name, message)
            case RankReport() | RankGone():
                self._deliver(name, message.rank, message)
            case CoreStarted() | CoreEnded():
                self._deliver(name, message.core, message)

    def _deliver(self, name: bytes, number: int, message: FromHost) -> None:
        """Deliver a message to its member. The member or its host may be lost already."""
        for member in self._nodes.get(self._joined.get(name, -1), ()):
            if member.number == number and member.far_descriptor >= 0:
                member.on_message(message)

    def _welcome(self, name: bytes, hello: Hello) -> None:
        if self._agreement is None:
            self._waiting.wait_for_agreement(name, hello)
        elif hello.node not in self._nodes:
            self._send(name, Refused(f"node_rank is {hello.node}, but the other hosts are 1 to {len(self._nodes)}"))
        elif hello.node in self._joined.values():
            # The joined host may have vanished without a message, or be this host: check it first. If it does not
            # answer, it counts as gone after a while, and this host joins instead.
            self._waiting.wait_for_node(name, hello)
            self._ask([each for each, node in self._joined.items() if node == hello.node])
        elif (difference := self._agreement.difference(hello.agreement)) is not None:
            _log.warning("node %d (%s) was refused: it %s", hello.node, hello.host, difference)
            self._send(name, Refused(f"this host {difference}"))
            for link in self._nodes[hello.node]:
                link.on_mismatch(hello.host, difference)
        else:
            self._joined[name], self._hosts[hello.node] = hello.node, hello.host
            _log.info("node %d has joined: %s", hello.node, hello.host)
            for link in self._nodes[hello.node]:
                link.on_joined(hello.host)

    def _welcome_again(self, hellos: Mapping[bytes, Hello]) -> None:
        """Handle the hellos of hosts that had to wait, and may be gone."""
        for name, hello in hellos.items():
            if self._socket.ask(name):
                self._welcome(name, hello)

    def _refuse_doubles(self, name: bytes) -> None:
        """Refuse other hosts with the number of a joined host that is alive."""
        node = self._joined.get(name)
        for double in self._waiting.take_for_node(node):
            self._send(double, Refused(f"node_rank is {node}, but another host has already joined with this number"))

    def _forward(self, link: RemoteMember) -> None:
        message = link.next_message()
        if message is None:
            link.on_lost("was closed", False)
            return
        self._send(next(name for name, node in self._joined.items() if node == link.node), message)

    def _ask(self, names: Iterable[bytes]) -> None:
        """Check whether joined hosts are alive."""
        for name in names:
            if not self._socket.ask(name):
                self._lose_connection(name)

    def _send(self, name: bytes, message: ToHost) -> None:
        if not self._socket.send(name, message):
            self._lose_connection(name)

    def _lose_connection(self, name: bytes) -> None:
        self._lose(name, "is gone: the connection to its host has ended", True)

    def _lose(self, name: bytes, how: str, killed: bool) -> None:
        """Treat a host, which may have joined, as gone. Another host may be waiting for its number."""
        node = self._joined.pop(name, None)
        if node is not None:
            for link in self._nodes[node]:
                link.on_lost(how, killed)
            self._welcome_again(self._waiting.take_for_node(node))

    def _end(self) -> None:
        os.close(self._closing)
        if self._shutdown is None:
            self._socket.close()
        else:
            self._socket.announce_shutdown(self._shutdown, [*self._joined, *self._waiting])
