"""`SlowReader`: a client that hardly reads. Used by the test of slow readers and by the soak."""

import json
import socket
from typing import Any

from tests.e2e.kaon_server import MODEL, START_SECONDS, KaonServer, hold_little

REQUEST: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me a story"}],
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "n": 4,
    "logprobs": True,
    "top_logprobs": 20,
    "stream": True,
    "stream_options": {"include_usage": True},
}
"""About 3 MB of events, of which the connection buffers little."""


class SlowReader:
    """One stream on a connection of its own, which reads a byte on request."""

    def __init__(self, server: KaonServer, **fields: Any) -> None:
        content = json.dumps({**REQUEST, **fields}).encode()
        self._socket = socket.socket()
        self._socket.settimeout(START_SECONDS)
        hold_little(self._socket)
        self._socket.connect(("127.0.0.1", server.port))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        self._socket.sendall((head % len(content)).encode() + content)
        self._received = b""

    def take_byte(self) -> bool:
        """Read one byte; False at the end of the stream."""
        byte = self._socket.recv(1)
        self._received += byte
        return bool(byte)

    def read_all(self) -> str:
        """Read the rest as fast as possible. Returns all events, or the error."""
        parts = [self._received]
        while part := self._socket.recv(2**20):
            parts.append(part)
        self._received = b"".join(parts)
        head, _, body = self._received.partition(b"\r\n\r\n")
        return (_without_chunks(body) if b"chunked" in head.lower() else body).decode()

    @property
    def status(self) -> int | None:
        """The answer's HTTP status; None until it has been read."""
        words = self._received.split(b" ", 2)
        return int(words[1]) if len(words) == 3 else None

    def close(self) -> None:
        self._socket.close()


def _without_chunks(body: bytes) -> bytes:
    """The content of HTTP's chunked coding of `body`, as far as it was received."""
    parts, at = [], 0
    while (end := body.find(b"\r\n", at)) > 0 and (size := int(body[at:end], 16)):
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(parts)
