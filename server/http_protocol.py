"""`HttpProtocol`: uvicorn's HTTP/1.1 with a bound on heads, and an error object for what is no HTTP.

Used by `server.http`.
"""

from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import ApiError, BadRequest
from server.request_id import HEADER, new_request_id

MAX_HEAD_BYTES = 64 * 2**10
"""Longest run of bytes that may be no body: request line and headers, or the trailers of a chunked body."""


class HeadTooLarge(BadRequest):
    """Request line and headers are over `MAX_HEAD_BYTES`."""

    status = 431
    code = "request_too_large"


class HttpProtocol(HttpToolsProtocol):
    """One connection. The parser collects a head without end, so whoever feeds it must count."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._head_bytes = 0
        """Bytes received since the last that ended a head or were of a body."""

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"the request's headers are too large; send at most {MAX_HEAD_BYTES} bytes"))

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: uvicorn would advise to install what would not help. The request is answered as any other."""

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest("what was sent is not HTTP/1.1; check the client, and that the URL is http://"))

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error`, unless that would break into another answer, and close the connection."""
        if self.cycle is None or self.cycle.response_complete:
            body = error.body()
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\n{HEADER}: {new_request_id()}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
