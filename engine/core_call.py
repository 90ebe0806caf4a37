"""`CoreCall`: an engine core's connections to a front end on another host, and the thread that watches them.

A connection that breaks is not made again: what was on its way would be lost, and nobody would know. The core ends,
and another goes on with its requests.
"""

import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.cluster_key import CurvePair
from engine.core_wires import connection_names
from engine.worker.curve import dial
from engine.worker.host_messages import CoreAddress

_NEVER_AGAIN_MS = -1
_TRY_SECONDS = 3.0
"""For one attempt to be answered."""
_BETWEEN_SECONDS = 0.25
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class CoreCall:
    """Two connections: one that the core hears by, one that it speaks by."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", to: CoreAddress, timeout: float) -> None:
        """Call the front end. Raises `ConnectionError`, a sentence, where it is not reached in so many seconds."""
        self._context, self._to = context, to
        self._is_closing = threading.Event()
        deadline = time.monotonic() + timeout
        calls = [self._call(name, timeout, deadline) for name in connection_names(to.name)]
        (self.input, _), (self.output, _) = calls
        self._monitors = [monitor for _, monitor in calls]

    def watch(self, on_lost: Callable[[str], object]) -> None:
        """From now on, have a thread call `on_lost` with a sentence when one of the two has ended."""
        threading.Thread(target=self._watch, args=(on_lost,), name="front-end", daemon=True).start()

    def close(self) -> None:
        """From now on, the end of a connection is no news."""
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
        """A connection, and the socket that tells of its end."""
        pair = CurvePair(self._to.public, self._to.secret)
        while True:
            socket = dial(self._context, pair, self._to.front_end_public, name.encode())
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
