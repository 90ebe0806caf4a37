"""Runs the application under uvicorn until a signal, or until the engine is gone. Called by `server.serve`."""

import asyncio
import socket
import ssl
from collections.abc import Callable

import uvicorn
from sse_starlette.sse import AppStatus

from engine.config import Config
from engine.core_manager import CoreManager
from server.app import create_app
from server.auth import KeyRing
from server.frontend import Frontend
from server.http_protocol import HttpProtocol

_KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of common load balancers, so that it is they who close."""

_SHUTDOWN_SECONDS = 5
"""How long requests may take to arrive, and answers to leave, for slow clients once the server ends."""


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
    _Server(settings, frontend).run(sockets=[listener])
    return frontend.why_ended


class _Server(uvicorn.Server):
    """Also ends when the engine is gone, and ends the live requests before it waits for their connections."""

    def __init__(self, settings: uvicorn.Config, frontend: Frontend) -> None:
        super().__init__(settings)
        self._frontend = frontend

    async def on_tick(self, counter: int) -> bool:
        return self._frontend.why_ended is not None or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._frontend.close()
        asyncio.get_running_loop().call_later(_SHUTDOWN_SECONDS, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        """Cut off who neither reads nor sends on: their requests end as those of any client that is gone."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
