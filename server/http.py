"""`serve`: runs the application under uvicorn until a signal, or until the engine has failed.

`HttpProtocol` is uvicorn's HTTP/1.1 with a bound on the size of headers, and with an error object as the answer to
bytes that are not HTTP. `_Server` drains: after a signal, live requests may end before the server does.
"""

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
from server.limits.keys import ApiKeys

_log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 2**10
"""Most bytes outside of a body: of a request line with its headers, or of the trailers of a chunked body."""

_KEEP_ALIVE_SECONDS = 75
"""Longer than the idle timeout of common load balancers, so that these close the connections."""

_SHUTDOWN_SECONDS = 5
"""How long slow clients may take to send requests and to read answers when the server ends."""

_HURRIED_SECONDS = 0.5
"""The same after a second signal."""


class HeadTooLarge(BadRequest):
    """Request line and headers are over `MAX_HEAD_BYTES`."""

    status = 431
    code = "request_too_large"


class HttpProtocol(HttpToolsProtocol):
    """One connection. Counts the bytes of a head, because the parser collects them without a bound."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._head_bytes = 0
        """Bytes received since the last end of a head, or since the last byte of a body."""

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
        """No warning: uvicorn's advice does not apply here. The request is answered like any other."""

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest("the request is not HTTP/1.1; check the client, and that the URL is http://"))

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error`, unless another answer is being sent, and close the connection."""
        if self.cycle is None or self.cycle.response_complete:
            body = error.body()
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\n{HEADER}: {new_request_id()}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


def serve(
    config: Config,
    core: CoreManager,
    listener: socket.socket,
    on_ready: Callable[[tuple[str, ...]], object],
    keys: ApiKeys,
    tls: ssl.SSLContext | None,
) -> str | None:
    """Serve on `listener`; why that ended, as a sentence, or None after a signal. May raise `KeyboardInterrupt`."""
    app = create_app(config, core, on_ready, keys)
    frontend: Frontend = app.state.frontend
    # The front end ends streams with an event that gives the reason; sse-starlette would cancel them.
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
    """Ends when the engine has failed; after a signal, with the last live request; after a second one, at once."""

    def __init__(self, settings: uvicorn.Config, frontend: Frontend, drain_timeout: float) -> None:
        super().__init__(settings)
        self._frontend = frontend
        self._drain_timeout = drain_timeout
        self._drain_until = math.inf
        self._is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Record a signal. The listening socket stays open while requests end, so that new ones get a 503."""
        self._captured_signals.append(sig)
        self._is_hurried = len(self._captured_signals) > 1

    async def on_tick(self, counter: int) -> bool:
        if self._captured_signals and self._drain_until == math.inf:
            self._drain_until = time.monotonic() + self._drain_timeout
            self._frontend.drain()
            if live := self._frontend.hub.num_live:
                _log.warning(
                    "new requests are refused; the server ends after the %d live ones, in %g s at the latest, or at "
                    "another signal",
                    live,
                    self._drain_timeout,
                )
        if self._frontend.why_ended is not None or self._is_hurried or time.monotonic() >= self._drain_until:
            return True
        if self._captured_signals and not self._frontend.hub.num_live:
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._frontend.close()
        patience = float(_HURRIED_SECONDS if self._is_hurried else _SHUTDOWN_SECONDS)
        if not self._is_hurried and self._drain_until < math.inf:
            # Generated text may still be on its way to the clients.
            patience = max(patience, self._drain_until - time.monotonic())
        self.config.timeout_graceful_shutdown = math.ceil(patience) + _SHUTDOWN_SECONDS
        asyncio.get_running_loop().call_later(patience, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        """Abort the connections of clients that neither read nor send. Their requests end as after a disconnect."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
