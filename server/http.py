"""Runs the application under uvicorn until a signal, or until the engine is gone. Called by `server.serve`."""

import asyncio
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from sse_starlette.sse import AppStatus

from engine.config import Config
from engine.core_manager import CoreManager
from server.app import create_app
from server.auth import KeyRing
from server.frontend import Frontend
from server.http_protocol import HttpProtocol

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
