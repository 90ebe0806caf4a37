"""`HostSocket`: where other hosts call, and who of them is gone. Made by `HostRouter`, whose thread makes all calls.

Hosts go by the names of their connections, another one each time that they call.
"""

import logging
import math
import time
from collections.abc import Collection

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.cluster_key import CurvePair
from engine.worker.curve import listen
from engine.worker.host_messages import Farewell, ToHost

_log = logging.getLogger(__name__)

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_ASK_SECONDS = (0.0, 0.02, 1.0)
"""After the end of some connection: the socket does not say whose, and knows it a moment later itself."""
_LINGER_MS = 2000
"""For a last message to leave."""
_FAREWELL_SECONDS = 2.0
"""For a farewell to be heard."""
_ASK_AGAIN_SECONDS = 0.02
ALIVE = b""
"""Whether a host is there, and its answer."""

_encoder = msgspec.msgpack.Encoder()


class HostSocket:
    """A ROUTER, and what its monitor tells."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: CurvePair) -> None:
        """Listen at `tcp://` an address. Raises `OSError`, a sentence, when it cannot be had."""
        self._socket = listen(context, zmq.ROUTER, address, keys)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _FAILED)
        self._asks: list[float] = []
        """When to ask who is still there, on the monotonic clock, the last first."""
        self._has_warned = False

    def register(self, poller: zmq.Poller) -> None:
        """Have `poller` wake when something has happened."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    @property
    def next_ask(self) -> float:
        """When `is_time_to_ask` next, though nothing happens, on the monotonic clock; infinite: not before."""
        return self._asks[-1] if self._asks else math.inf

    def is_time_to_ask(self) -> bool:
        """Whether a connection has ended, so that all hosts are to be asked whether they are there."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                now = time.monotonic()
                self._asks = sorted((now + seconds for seconds in _ASK_SECONDS), reverse=True)
            elif not self._has_warned:
                self._has_warned = True
                _log.warning("somebody who does not know this server's cluster key was turned away")
        if time.monotonic() < self.next_ask:
            return False
        self._asks.pop()
        return True

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The frames of the next message, and whose it is; None where none has come."""
        try:
            name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return name, frames

    def send(self, name: bytes, message: ToHost) -> bool:
        """Tell a host something; False where it is gone."""
        return self._send(name, _encoder.encode(message))

    def ask(self, name: bytes) -> bool:
        """Ask a host whether it is there; False where its connection has ended. One that is there answers `ALIVE`."""
        return self._send(name, ALIVE)

    def part(self, farewell: Farewell, names: Collection[bytes]) -> None:
        """Tell these hosts, wait until they have heard it, which ends their connections, and close."""
        left = [name for name in names if self.send(name, farewell)]
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while left and time.monotonic() < deadline:
            time.sleep(_ASK_AGAIN_SECONDS)
            left = [name for name in left if self.ask(name)]
        self._close(linger=0)

    def close(self) -> None:
        """End all connections, once what was said has left."""
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
