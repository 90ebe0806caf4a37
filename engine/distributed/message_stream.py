"""`MessageWriter` and `MessageReader`: send messages over connected stream sockets on one host, without threads.

A core sends its outputs in this way to a front end on the same host. ZeroMQ's sockets have an I/O thread at each end:
each message would first wake both threads, on CPUs that compute the next step, and then the reader.

On the stream, a message is its length as 8 bytes, little-endian, followed by its bytes.
"""

import select
import socket
import threading
from collections import deque

_LENGTH_BYTES = 8
_PIECE = 2**16


class MessageWriter:
    """The sending end. Never blocks: a thread sends the bytes that the socket does not accept at once."""

    def __init__(self, stream: socket.socket) -> None:
        """Takes over `stream`. It stays open until the process ends, so that the reader detects both ends together."""
        stream.setblocking(False)
        self._stream = stream
        self._unsent: deque[memoryview] = deque()
        """Bytes that a thread is sending; empty if none runs."""
        self._changed = threading.Condition()

    def send(self, message: bytes) -> None:
        """Send a message after all earlier ones. Without a reader it is lost."""
        frame = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        with self._changed:
            if not self._unsent:
                sent = self._send(frame)
                if sent == len(frame):
                    return
                threading.Thread(target=self._send_rest, name="outputs", daemon=True).start()
                self._unsent.append(memoryview(frame)[sent:])
            else:
                self._unsent.append(memoryview(frame))

    def flush(self, seconds: float) -> None:
        """Wait until all messages are sent, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unsent, seconds)

    def _send(self, frame: bytes | memoryview) -> int:
        try:
            return self._stream.send(frame)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(frame)

    def _send_rest(self) -> None:
        room = select.poll()
        room.register(self._stream, select.POLLOUT)
        while True:
            room.poll()
            with self._changed:
                rest = self._unsent[0][self._send(self._unsent[0]) :]
                if rest:
                    self._unsent[0] = rest
                    continue
                self._unsent.popleft()
                if not self._unsent:
                    self._changed.notify_all()
                    return


class MessageReader:
    """The receiving end. Its descriptor is readable when there may be a message, and when the writer has ended."""

    def __init__(self, stream: socket.socket) -> None:
        """Takes over `stream`."""
        stream.setblocking(False)
        self._stream = stream
        self._readable = select.poll()
        self._readable.register(stream, select.POLLIN)
        self._held = bytearray()
        """Received bytes that follow the last returned message."""
        self._is_drained = False
        """Whether the last read took all available bytes."""
        self._has_ended = False

    def fileno(self) -> int:
        """The descriptor."""
        return self._stream.fileno()

    def receive(self) -> bytes | None:
        """Return the next received message; None if there is none.

        A message that arrives meanwhile may not be returned; then the descriptor is still readable.
        """
        while True:
            if self._held and (message := self._take()) is not None:
                return message
            if self._is_drained:
                self._is_drained = False
                return None
            try:
                piece = self._stream.recv(_PIECE)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                piece = b""
            if not piece:
                self._has_ended = True
                return None
            self._is_drained = len(piece) < _PIECE
            self._held += piece

    def poll(self, milliseconds: int) -> bool:
        """Wait until there may be a message. Returns False after the time, or if the writer has ended."""
        return not self._has_ended and bool(self._readable.poll(milliseconds))

    def close(self) -> None:
        """Stop receiving."""
        self._stream.close()

    def _take(self) -> bytes | None:
        """Take the first complete message; None if there is none."""
        held = self._held
        if len(held) < _LENGTH_BYTES:
            return None
        end = _LENGTH_BYTES + int.from_bytes(held[:_LENGTH_BYTES], "little")
        if len(held) < end:
            return None
        message = bytes(held[_LENGTH_BYTES:end])
        del held[:end]
        return message
