"""`LocalWire` and `RemoteWire`: the front end's sockets to an engine core, here or on another host. See `CoreWire`."""

from collections import deque
from collections.abc import Sequence
from typing import cast

import zmq


class LocalWire:
    """Two sockets of this core's own, with a name each in a private directory."""

    is_one_socket = False

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", input_address: str, output_address: str) -> None:
        self._identity = b""
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._input = self._bind(context, zmq.ROUTER, input_address)
            self._output = self._bind(context, zmq.PULL, output_address)
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """See `CoreWire`."""
        return self._output.fileno()

    def register(self, poller: zmq.Poller) -> None:
        """See `CoreWire`."""
        poller.register(self._output, zmq.POLLIN)

    def poll(self, milliseconds: int) -> bool:
        """See `CoreWire`."""
        return bool(self._output.poll(milliseconds))

    def receive(self) -> bytes | None:
        """See `CoreWire`."""
        # Not `poll`, which makes a poller at each call.
        if not cast(int, self._output.get(zmq.EVENTS)) & zmq.POLLIN:
            return None
        return self._output.recv(zmq.NOBLOCK)

    def connected(self) -> None:
        """See `CoreWire`."""
        self._identity = self._input.recv_multipart()[0]

    def send(self, frames: Sequence[bytes]) -> None:
        """See `CoreWire`."""
        self._input.send_multipart([self._identity, *frames])

    def close(self) -> None:
        """See `CoreWire`."""
        for socket in self._sockets:
            socket.close(linger=0)

    def _bind(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str) -> "zmq.Socket[bytes]":
        """A socket without high-water mark: it never blocks the front end and never drops."""
        socket = context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(0)
        socket.bind(address)
        return socket


class RemoteWire:
    """One socket for all cores of a replica, one after the other: a port cannot be had again at once.

    A core calls by two connections, since it hears by one thread and speaks by others. Their names, of this core
    alone, part what it says from what its predecessor left.
    """

    is_one_socket = True

    def __init__(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        """`socket` is a ROUTER; `name` is what the core was given for its connections."""
        self._socket = socket
        self._input, self._output = (own.encode() for own in connection_names(name))
        self._is_heard = False
        """Whether it has called by the connection that it hears by."""
        self._frames: deque[bytes] = deque()
        """That came before that."""

    @property
    def has_called(self) -> bool:
        """Whether anything has come from it."""
        return self._is_heard or bool(self._frames)

    @property
    def descriptor(self) -> int:
        """See `CoreWire`."""
        return self._socket.fileno()

    def register(self, poller: zmq.Poller) -> None:
        """See `CoreWire`."""
        poller.register(self._socket, zmq.POLLIN)

    def poll(self, milliseconds: int) -> bool:
        """See `CoreWire`."""
        return bool(self._socket.poll(milliseconds))

    def receive(self) -> bytes | None:
        """See `CoreWire`."""
        while cast(int, self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if sender == self._input:
                self._is_heard = True
            elif sender == self._output:
                self._frames += frames
            if self._is_heard and self._frames:
                return self._frames.popleft()
        return self._frames.popleft() if self._is_heard and self._frames else None

    def connected(self) -> None:
        """See `CoreWire`: nothing was received before."""

    def send(self, frames: Sequence[bytes]) -> None:
        """See `CoreWire`."""
        self._socket.send_multipart([self._input, *frames])

    def close(self) -> None:
        """See `CoreWire`; the socket is the next core's."""


def connection_names(name: str) -> tuple[str, str]:
    """Of the connections by which a core of that name hears, and speaks."""
    return f"{name}.in", f"{name}.out"
