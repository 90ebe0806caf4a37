"""`RemoteCore`: an engine core on another host as `CoreLink` sees it. Made by `CoreHosts`, served by `HostRouter`.

A pair of sockets: the one end is the front end's, the other the thread's that talks to hosts.
"""

import contextlib
import math
import select
import signal
import socket
from typing import NamedTuple

import msgspec
import zmq

from engine.core_process import LOST_FRONT_END
from engine.core_wires import RemoteWire
from engine.messages import Failed
from engine.worker.host_messages import (
    CoreEnded,
    CoreServes,
    CoreStarted,
    DumpStacks,
    FromHost,
    KillCore,
    LaunchCore,
    StopCore,
    TellCore,
    ToHost,
)

_MAX_BYTES = 1 << 20
"""Of what it is told, each one packet of a socket."""
_KILLED = -signal.SIGKILL

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TellCore)


class CorePlace(NamedTuple):
    """Where the cores of a replica run, one after the other."""

    node: int
    joining: str
    """Where its host is to come."""
    calling: str
    """Where the core is to call."""
    socket: "zmq.Socket[bytes]"
    """Which listens there."""


class RemoteCore:
    """See `CoreHandle` and `Member`."""

    def __init__(self, launch: LaunchCore, place: CorePlace, name: str, join_by: float) -> None:
        """`name` is what sentences call it. `join_by`: until when its host must have joined, on the monotonic clock;
        infinite for a core that takes another's place.
        """
        self.number = launch.core
        self.node = place.node
        self.join_by = join_by
        self.pid = -1
        self._launch, self._place, self._name = launch, place, name
        self._wire = RemoteWire(place.socket, launch.front_end.name)
        self._host: str | None = None
        self._end: CoreEnded | None = None
        self._failure: Failed | None = None
        self.lifeline, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lifeline_poll = select.poll()
        self._lifeline_poll.register(self.lifeline, select.POLLIN)

    @property
    def title(self) -> str:
        """As sentences call it."""
        where = f"node {self.node}" if self._host is None else f"node {self.node} ({self._host})"
        return f"{self._name} on {where}"

    # -- for the front end --------------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """See `CoreHandle`."""
        return self._host is None

    @property
    def is_gone(self) -> bool:
        """See `CoreHandle`."""
        return bool(self._lifeline_poll.poll(0))

    def open_wire(self, context: "zmq.Context[zmq.Socket[bytes]]") -> RemoteWire:
        """See `CoreHandle`."""
        return self._wire

    def start(self) -> None:
        """See `CoreHandle`; it waits until its host has joined."""
        self._tell(self._launch)

    def connected(self) -> None:
        """See `CoreHandle`."""
        self._tell(CoreServes(self.number))

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
        if self._wire.has_called:
            return Failed(f"{self.title} lost its connection to this server", killed=True)
        where = self._place.calling.removeprefix("tcp://")
        return Failed(f"{self.title} does not reach {where}; open that port to the hosts", usage=True)

    def running_step(self) -> list[int] | None:
        """See `CoreHandle`: what ended with a connection is nobody's fault."""
        if self._end is None or self._end.exit_code == LOST_FRONT_END:
            return None
        return self._end.in_step

    def stopped_process(self) -> int | None:
        """See `CoreHandle`: what stands still on another host is known by its silence."""
        return None

    def dump_stacks(self) -> None:
        """See `CoreHandle`; they go to its host's log."""
        self._tell(DumpStacks(self.number))

    def kill(self) -> None:
        """See `CoreHandle`."""
        self._tell(KillCore(self.number))

    def stop(self, timeout: float, why: str = "") -> None:
        """See `CoreHandle`: its host ends it, in its own time, and hears `why` when there will be no other."""
        self.lifeline.close()

    def _tell(self, message: TellCore) -> None:
        # One that is gone is told of by the lifeline; who was about to kill it may have stopped it since.
        if self.lifeline.fileno() >= 0:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.lifeline.send(_encoder.encode(message))

    # -- for the thread that talks to hosts ---------------------------------------------------------------------

    @property
    def far_descriptor(self) -> int:
        """See `Member`."""
        return self._far_end.fileno()

    def joined(self, host: str) -> None:
        """See `Member`."""
        self._host = host
        self.join_by = math.inf

    def take(self) -> ToHost | None:
        """See `Member`."""
        packet = self._far_end.recv(_MAX_BYTES)
        if packet:
            message: TellCore = _decoder.decode(packet)
            return message
        self._far_end.close()
        return StopCore(self.number)

    def hear(self, message: FromHost) -> None:
        """See `Member`."""
        if isinstance(message, CoreStarted):
            self.pid = message.pid
        elif isinstance(message, CoreEnded):
            self._end = message
            self._far_end.close()

    def differ(self, host: str, difference: str) -> None:
        """See `Member`; one that takes another's place goes on waiting for the right host."""
        if self.join_by < math.inf:
            self._host = host or None
            self._fail(Failed(f"{self.title}: its host {difference}", usage=True))

    def be_late(self, timeout: float) -> None:
        """See `Member`."""
        sentence = f"did not join at {self._place.joining} within rank_start_timeout {timeout:g} s"
        self._fail(Failed(f"{self.title} {sentence}", usage=True))

    def lose(self, how: str, killed: bool) -> None:
        """See `Member`."""
        self._fail(Failed(f"{self.title} {how}", killed=killed))

    def _fail(self, failure: Failed) -> None:
        if self._far_end.fileno() >= 0:
            self._failure = failure
            self._far_end.close()
