"""An engine core on another host: `RemoteCore` is the front end's side, `FrontEndConnection` the core's side.

Commands (start, stop) are sent by `HostRouter` to the core's host. Requests and outputs use two separate connections
of the core. A broken connection is not restored, because messages in transit could be lost: the core ends, and another
one continues its requests.
"""

import contextlib
import math
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.distributed.cluster import CurvePair
from engine.distributed.core_process import LOST_FRONT_END, RemoteTransport, connection_names
from engine.distributed.curve import curve_client
from engine.distributed.host_messages import (
    CoreAddress,
    CoreCommand,
    CoreEnded,
    CoreServes,
    CoreStarted,
    DumpStacks,
    FromHost,
    KillCore,
    LaunchCore,
    StopCore,
    ToHost,
)
from engine.messages import Failed

_MAX_BYTES = 1 << 20
"""Largest size of a command, which is one packet of a socket."""
_KILLED = -signal.SIGKILL

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CoreCommand)


class ReplicaEndpoint(NamedTuple):
    """The host and the addresses of a replica's successive cores."""

    node: int
    joining: str
    """Address at which its host joins."""
    calling: str
    """Address that the core connects to."""
    socket: "zmq.Socket[bytes]"
    """The socket that listens at `calling`."""


class RemoteCore:
    """See `CoreHandle` and `RemoteMember`. Made by `CoreHosts`.

    It is a pair of sockets: one end for the front end, the other for the thread of `HostRouter`.
    """

    def __init__(self, launch: LaunchCore, endpoint: ReplicaEndpoint, name: str, join_by: float) -> None:
        """`name` is its name in error messages. `join_by` is the time by which its host must have joined, on the
        monotonic clock; infinite for a restarted core.
        """
        self.number = launch.core
        self.node = endpoint.node
        self.join_by = join_by
        self.pid = -1
        self._launch, self._endpoint, self._name = launch, endpoint, name
        self._transport = RemoteTransport(endpoint.socket, launch.front_end.name)
        self._host: str | None = None
        self._end: CoreEnded | None = None
        self._failure: Failed | None = None
        self.lifeline, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lifeline_poll = select.poll()
        self._lifeline_poll.register(self.lifeline, select.POLLIN)

    @property
    def title(self) -> str:
        """Its name in error messages."""
        where = f"node {self.node}" if self._host is None else f"node {self.node} ({self._host})"
        return f"{self._name} on {where}"

    # -- for the front end --------------------------------------------------------------------------------------

    @property
    def waits_for_host(self) -> bool:
        """See `CoreHandle`."""
        return self._host is None

    @property
    def is_gone(self) -> bool:
        """See `CoreHandle`."""
        return bool(self._lifeline_poll.poll(0))

    def open_transport(self, context: "zmq.Context[zmq.Socket[bytes]]") -> RemoteTransport:
        """See `CoreHandle`."""
        return self._transport

    def start(self) -> None:
        """See `CoreHandle`. The core starts when its host has joined."""
        self._send(self._launch)

    def connected(self) -> None:
        """See `CoreHandle`."""
        self._send(CoreServes(self.number))

    def wait(self) -> int:
        """See `CoreHandle`."""
        return _KILLED if self._end is None else self._end.exit_code

    def why_gone(self) -> Failed | None:
        """See `CoreHandle`."""
        if self._failure is not None or self._end is None:
            return self._failure
        if self._end.error:
            return Failed(f"{self.title}: {self._end.error}", usage=True)
        if self._end.exit_code != LOST_FRONT_END:
            return None
        if self._transport.has_called:
            return Failed(f"{self.title} lost its connection to this server", killed=True)
        where = self._endpoint.calling.removeprefix("tcp://")
        return Failed(f"{self.title} does not reach {where}; open that port to the hosts", usage=True)

    def running_step(self) -> list[int] | None:
        """See `CoreHandle`. If the connection ended, no request is the cause."""
        if self._end is None or self._end.exit_code == LOST_FRONT_END:
            return None
        return self._end.in_step

    def stopped_process(self) -> int | None:
        """See `CoreHandle`. Returns None: a stopped process on another host is detected by missing steps."""
        return None

    def dump_stacks(self) -> None:
        """See `CoreHandle`. The stacks are in the log of its host."""
        self._send(DumpStacks(self.number))

    def kill(self) -> None:
        """See `CoreHandle`."""
        self._send(KillCore(self.number))

    def stop(self, timeout: float, why: str = "") -> None:
        """See `CoreHandle`. Its host ends it; the shutdown message to all hosts has `why`."""
        self.lifeline.close()

    def _send(self, message: CoreCommand) -> None:
        # The lifeline shows that the core is gone. Another thread may have stopped it meanwhile.
        if self.lifeline.fileno() >= 0:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.lifeline.send(_encoder.encode(message))

    # -- for the thread that talks to hosts ---------------------------------------------------------------------

    @property
    def far_descriptor(self) -> int:
        """See `RemoteMember`."""
        return self._far_end.fileno()

    def on_joined(self, host: str) -> None:
        """See `RemoteMember`."""
        self._host = host
        self.join_by = math.inf

    def next_message(self) -> ToHost | None:
        """See `RemoteMember`."""
        packet = self._far_end.recv(_MAX_BYTES)
        if packet:
            message: CoreCommand = _decoder.decode(packet)
            return message
        self._far_end.close()
        return StopCore(self.number)

    def on_message(self, message: FromHost) -> None:
        """See `RemoteMember`."""
        if isinstance(message, CoreStarted):
            self.pid = message.pid
        elif isinstance(message, CoreEnded):
            self._end = message
            self._far_end.close()

    def on_mismatch(self, host: str, difference: str) -> None:
        """See `RemoteMember`. A restarted core continues to wait for the right host."""
        if self.join_by < math.inf:
            self._host = host or None
            self._fail(Failed(f"{self.title}: its host {difference}", usage=True))

    def on_timeout(self, timeout: float) -> None:
        """See `RemoteMember`."""
        sentence = f"did not join at {self._endpoint.joining} within rank_start_timeout {timeout:g} s"
        self._fail(Failed(f"{self.title} {sentence}", usage=True))

    def on_lost(self, how: str, killed: bool) -> None:
        """See `RemoteMember`."""
        self._fail(Failed(f"{self.title} {how}", killed=killed))

    def _fail(self, failure: Failed) -> None:
        if self._far_end.fileno() >= 0:
            self._failure = failure
            self._far_end.close()


_NEVER_AGAIN_MS = -1
_TRY_SECONDS = 3.0
"""Seconds for one attempt to connect."""
_BETWEEN_SECONDS = 0.25
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class FrontEndConnection:
    """A core's two connections to a front end on another host: one for receiving, the other for sending."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", to: CoreAddress, timeout: float) -> None:
        """Connect. Raises `ConnectionError` with a sentence if the front end is not reached in `timeout` seconds."""
        self._context, self._to = context, to
        self._is_closing = threading.Event()
        deadline = time.monotonic() + timeout
        calls = [self._call(name, timeout, deadline) for name in connection_names(to.name)]
        (self.input, _), (self.output, _) = calls
        self._monitors = [monitor for _, monitor in calls]

    def watch(self, on_lost: Callable[[str], object]) -> None:
        """Start a thread that calls `on_lost` with a sentence when either connection has ended."""
        threading.Thread(target=self._watch, args=(on_lost,), name="front-end", daemon=True).start()

    def close(self) -> None:
        """Stop reporting the end of a connection."""
        self._is_closing.set()

    def _watch(self, on_lost: Callable[[str], object]) -> None:
        poller = zmq.Poller()
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        try:
            while not any(_event(monitor) == zmq.EVENT_DISCONNECTED for monitor, _ in poller.poll()):
                pass
        except zmq.ContextTerminated:
            self.close()
        finally:
            # The context ends when all its sockets are closed.
            for monitor in self._monitors:
                monitor.close(linger=0)
        if not self._is_closing.is_set():
            on_lost(f"the connection to the front end at {self._to.address} has ended")

    def _call(self, name: str, timeout: float, deadline: float) -> tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]:
        """Open a connection. Returns it and the monitor that reports its end."""
        pair = CurvePair(self._to.public, self._to.secret)
        while True:
            socket = curve_client(self._context, pair, self._to.front_end_public, name.encode())
            socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_AGAIN_MS)
            monitor = socket.get_monitor_socket(_EVENTS)
            socket.connect(self._to.address)
            if monitor.poll(round(1e3 * _TRY_SECONDS)) and _event(monitor) == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return socket, monitor
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
            if time.monotonic() >= deadline:
                raise ConnectionError(f"the front end at {self._to.address} was not reached within {timeout:g} s")
            time.sleep(_BETWEEN_SECONDS)


def _event(monitor: "zmq.Socket[bytes]") -> int:
    event: int = recv_monitor_message(monitor)["event"]
    return event
