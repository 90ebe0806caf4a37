"""Runs the application under uvicorn until a signal, or until the engine is gone. Called by `server.process`."""

import asyncio
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from sse_starlette.sse import AppStatus
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.client.core_manager import CoreManager
from engine.config.config import Config
from server.access_log import HEADER, new_request_id
from server.app import create_app
from server.errors import ApiError, BadRequest
from server.frontend import Frontend
from server.limits.keys import KeyRing

# [http_protocol] `HttpProtocol`: uvicorn's HTTP/1.1 with a bound on heads, and an error object for what is no HTTP.
#
# Used by `server.http`.

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


_log = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of common load balancers, so that it is they who close."""

_SHUTDOWN_SECONDS = 5
"""How long requests may take to arrive, and answers to leave, for slow clients once the server ends."""

_HURRIED_SECONDS = 0.5
"""The same for a server that was told twice."""


def serve(
    config: Config,
    core: CoreManager,
    listener: socket.socket,
    on_ready: Callable[[tuple[str, ...]], object],
    keys: KeyRing,
    tls: ssl.SSLContext | None,
) -> str | None:
    """Serve on `listener`; why that ended, as a sentence, or None if a signal did. Then raises `KeyboardInterrupt`."""
    app = create_app(config, core, on_ready, keys)
    frontend: Frontend = app.state.frontend
    # Streams end through the front end, with an event that says why, and not by sse-starlette's cancellation.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    settings = uvicorn.Config(
        app,
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2 * _SHUTDOWN_SECONDS,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
    )
    _Server(settings, frontend, config.server_config.drain_timeout).run(sockets=[listener])
    return frontend.why_ended


class _Server(uvicorn.Server):
    """Ends when the engine is gone; at a signal once the live requests have ended, at a second one now."""

    def __init__(self, settings: uvicorn.Config, frontend: Frontend, drain_timeout: float) -> None:
        super().__init__(settings)
        self._frontend = frontend
        self._drain_timeout = drain_timeout
        self._drain_until = math.inf
        self._hurries = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal. The listening socket stays open while requests end, so that new ones are told why not."""
        self._captured_signals.append(sig)
        self._hurries = len(self._captured_signals) > 1

    async def on_tick(self, counter: int) -> bool:
        if self._captured_signals and self._drain_until == math.inf:
            self._drain_until = time.monotonic() + self._drain_timeout
            self._frontend.drain()
            if live := self._frontend.hub.num_live:
                _log.warning(
                    "no more requests are taken; the server ends when %d have ended, in %g s at the latest, "
                    "or at another signal",
                    live,
                    self._drain_timeout,
                )
        if self._frontend.why_ended is not None or self._hurries or time.monotonic() >= self._drain_until:
            return True
        if self._captured_signals and not self._frontend.hub.num_live:
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._frontend.close()
        patience = float(_HURRIED_SECONDS if self._hurries else _SHUTDOWN_SECONDS)
        if not self._hurries and self._drain_until < math.inf:
            # What has been generated may yet be on its way to who reads it.
            patience = max(patience, self._drain_until - time.monotonic())
        self.config.timeout_graceful_shutdown = math.ceil(patience) + _SHUTDOWN_SECONDS
        asyncio.get_running_loop().call_later(patience, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        """Cut off who neither reads nor sends on: their requests end as those of any client that is gone."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
