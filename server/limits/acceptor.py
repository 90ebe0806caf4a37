"""`Acceptor`: accepts the connections of a listening socket while `Connections` has room.

It also works while the process has no free descriptor, ends the connections of slow clients by regular sweeps, and
leaves new connections to the system's queue until those that they may displace have had time to send a request. While
this queue is long, clients that have shut down their sending side are refused: most of them have gone.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable

from server.errors import as_raw_response
from server.limits.connections import (
    TCP_CLOSE,
    TCP_CLOSE_WAIT,
    Connection,
    Connections,
    TooManyConnections,
    has_unread,
    tcp_state,
)
from server.limits.turns import begin_at_once

_log = logging.getLogger(__name__)

_SWEEP_SECONDS, _SWEEP_PAUSE_SECONDS = 0.5, 0.01
"""Time between two passes over all connections, and the pause between two parts of a pass."""

_MAX_ADMITTED_AT_ONCE, _MAX_ACCEPTED_AT_ONCE = 8, 64
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_SECONDS = 0.05

_LONG_QUEUE = 64
"""Connections in the system's queue beyond which half-closed clients are refused. A refusal takes a tenth of the time
of the smallest request."""

_REFUSAL = as_raw_response(TooManyConnections("too many connections are open; try again later"))

_QUEUED = slice(24, 28)
"""Bytes of a listening socket's TCP_INFO (linux/tcp.h) that count the connections in the system's queue."""


class Acceptor:
    """Accepts the connections of a listening socket while `Connections` has room."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        new_protocol: Callable[[Connection], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        """Start to accept connections in the running event loop, until `close`. The caller owns `listener`.

        `tls` returns the TLS context of the next connection; None means plain HTTP.
        """
        self._listener = listener
        self._connections = connections
        self._new_protocol = new_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[None]] = set()
        self._spare: int | None = None
        """A descriptor that is closed in order to accept a connection when no other descriptor is free."""
        self._sweep_timer = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        self._retry: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        _set_options(listener)
        self._take_spare()
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop accepting. Open connections continue and are still checked."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        self._give_up_spare()

    def stop(self) -> None:
        """Stop checking connections."""
        self._sweep_timer.cancel()

    def _sweep(self) -> None:
        pause = _SWEEP_SECONDS
        try:
            if self._connections.sweep():
                pause = _SWEEP_PAUSE_SECONDS
        finally:  # A failed check must not end the checks of all connections.
            self._sweep_timer = self._loop.call_later(pause, self._sweep)

    def _accept(self) -> None:
        num_admitted = 0
        for _ in range(_MAX_ACCEPTED_AT_ONCE):
            delay = self._connections.open_at - self._connections.clock()
            if delay > 0:
                self._pause(delay)  # Meanwhile the system queues new connections.
                return
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    if not num_admitted:  # Else perhaps no client waits: the system looks for a descriptor first.
                        self._accept_without_descriptor()
                    return
                continue  # The client has gone again.
            state = tcp_state(sock)
            if state == TCP_CLOSE_WAIT and self._queue_length > _LONG_QUEUE:
                self._connections.note_closed("connections")
                self._turn_away(sock)
                continue
            # What came before a reset can still be read, and would be handled as a request.
            if state == TCP_CLOSE or (state == TCP_CLOSE_WAIT and not has_unread(sock)):
                sock.close()
                continue
            self._admit(sock, address[0] if address else None)
            num_admitted += 1
            if num_admitted == _MAX_ADMITTED_AT_ONCE:
                return

    def _accept_without_descriptor(self) -> None:
        """Handle that no file can be opened: close a connection to make room, or refuse the new ones."""
        self._connections.note_closed("descriptors")
        if not self._connections.make_room() and self._spare is not None:
            self._give_up_spare()
            with contextlib.suppress(OSError):
                sock, _ = self._listener.accept()
                _refuse(sock)
        # A closed descriptor is free in the loop's next round. Until then, the loop would report the listener
        # repeatedly.
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
            self._turn_away(sock)
            return
        sock.setblocking(False)
        task = begin_at_once(self._start(sock, connection))
        if task is not None:
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    @property
    def _queue_length(self) -> int:
        info = self._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUED.stop)
        return int.from_bytes(info[_QUEUED], sys.byteorder)

    def _turn_away(self, sock: socket.socket) -> None:
        if self._tls is None:
            _refuse(sock)
        else:
            sock.close()

    async def _start(self, sock: socket.socket, connection: Connection) -> None:
        """Attach a new protocol to the connection, after the TLS handshake if there is one."""
        timeout = None if self._tls is None else self._connections.limits.head_seconds
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._new_protocol(connection),
                sock,
                ssl=None if self._tls is None else self._tls(),
                ssl_handshake_timeout=timeout,
            )
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - no other connection is affected
            is_usual = isinstance(error, (OSError, asyncio.CancelledError))
            _log.log(logging.DEBUG if is_usual else logging.ERROR, "a connection was not set up: %r", error)
            connection.close()
            sock.close()


_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""TCP keep-alive: idle seconds before the first probe, seconds between probes, and number of unanswered probes."""


def _set_options(listener: socket.socket) -> None:
    """Set the options that accepted sockets inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEP_ALIVE:
        listener.setsockopt(socket.IPPROTO_TCP, option, value)


def _refuse(sock: socket.socket) -> None:
    """Send an error as far as possible without blocking, and close."""
    with sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.send(_REFUSAL)
