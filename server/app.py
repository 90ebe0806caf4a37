"""`create_app`: the ASGI application over running engine cores: routes, error handler and middleware."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from sse_starlette import EventSourceResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.client.core_manager import CoreManager
from engine.config.config import Config
from engine.config.server import ServerConfig
from engine.config.settings import ModelEntry, ModelList
from server import error_answers, openapi
from server.access_log import ANTHROPIC_HEADER, AccessLog
from server.access_log import HEADER as REQUEST_ID_HEADER
from server.batches.runner import BatchRunner
from server.batches.store import open_store
from server.endpoints import ENDPOINTS, all_endpoints
from server.limits.admission import KeyShares, OpenFiles
from server.limits.connections import ConnectionLimits, Connections, num_free_descriptors
from server.limits.keys import ApiKeys
from server.limits.pages import PageGuard
from server.limits.quotas import RATE_LIMIT_HEADERS
from server.limits.turns import RequestTurns
from server.middleware import OwnerMiddleware, RequestIdMiddleware
from server.models import Models
from server.responses.service import ResponsesService
from server.tracing import Tracing


def create_app(
    config: Config,
    core: CoreManager | Sequence[CoreManager],
    on_ready: Callable[[tuple[str, ...]], object] = lambda names: None,
    keys: ApiKeys | None = None,
    tracing: Tracing | None = None,
    read_config: Callable[[], Config] | None = None,
    model_list: ModelList | None = None,
) -> FastAPI:
    """Create the application. It answers 503 until it is ready, and then calls `on_ready` with the served names.

    The caller owns `core` and ends it. `keys` defaults to the keys that `config` names. `tracing` is closed with the
    application. `model_list` has the models of the cores, in order; None means that `config` is the only one.
    """
    cores = core if isinstance(core, Sequence) else [core]
    model_list = ModelList([ModelEntry(config)]) if model_list is None else model_list
    models = Models(config, model_list, cores, read_config)
    shared, settings = models.shared, config.server_config
    service = ResponsesService(settings, shared.accounts)
    keys = ApiKeys.of(settings) if keys is None else keys
    shared.reloader.also_reload(keys.reload)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def start() -> None:
            await models.start(on_ready)
            if models.why_ended is None:
                batches.start()

        starting = asyncio.create_task(start())
        app.state.description.begin()
        # The first response of this kind imports modules, for which other clients would wait 17 ms later.
        EventSourceResponse(iter(()))
        watching = asyncio.create_task(keys.watch())
        yield
        starting.cancel()
        watching.cancel()
        await batches.close()
        models.close()
        await shared.streams.close()
        await service.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    limits = ConnectionLimits.of(settings, num_free_descriptors(), models.max_request_bytes)
    connections = Connections(limits, shared.accounts, shared.metrics)
    app = _Application(
        settings,
        keys,
        connections,
        tracing,
        title="Kaon",
        version=shared.version,
        description="An OpenAI-compatible LLM inference server.",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.models = models
    app.state.connections = connections
    app.state.open_files = OpenFiles(limits.files, shared.accounts)
    app.state.upload_turns = RequestTurns()
    app.state.description = openapi.Description(app.openapi, settings.root_path)
    app.state.responses = service
    lines = settings.batch_concurrency or min(32, max(1, config.max_num_seqs // 2))
    app.state.batches = batches = BatchRunner(
        open_store(settings),
        app.answer,
        lambda: models.num_live,
        lines,
        shared.jobs,
        keys.holder,
        lambda: models.max_request_bytes_once_loaded,
    )
    error_answers.install(app)
    routers = [ENDPOINTS[name].router for name in ENDPOINTS]
    for router in routers:
        app.include_router(router)
    app.state.routes = [route for router in routers for route in router.routes]
    return app


class _Application(FastAPI):
    """FastAPI with our middleware outside of its error handler, so that error answers pass the middleware too."""

    def __init__(
        self,
        settings: ServerConfig,
        keys: ApiKeys,
        connections: Connections,
        tracing: Tracing | None,
        **keywords: Any,
    ) -> None:
        super().__init__(**keywords)
        self._connections = connections
        self._tracing = tracing
        self._settings = settings
        self._keys = keys
        self._routes_alone: ASGIApp | None = None

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an internal request, whose owner is set already: no check of keys, and no line in the log."""
        if self._routes_alone is None:
            self._routes_alone = super().build_middleware_stack()
        await self._routes_alone({**scope, "app": self}, receive, send)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["root_path"] = self._settings.root_path
        await super().__call__(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        settings, shared = self._settings, Models.of(self).shared
        app: ASGIApp = super().build_middleware_stack()
        scopes = {endpoint.path: endpoint.scope for endpoint in all_endpoints()}
        pages = PageGuard(settings)
        shares = KeyShares(self._connections.limits.serving, shared.accounts, self._connections.note_closed)
        app = OwnerMiddleware(app, self._keys, settings.keyless_paths, scopes, shared.quotas, shares, pages)
        if settings.allowed_origins:
            app = CORSMiddleware(
                app,
                allow_origins=settings.allowed_origins,
                allow_methods=settings.allowed_methods,
                allow_headers=settings.allowed_headers,
                allow_credentials=settings.allow_credentials,
                expose_headers=(
                    REQUEST_ID_HEADER,
                    ANTHROPIC_HEADER,
                    "Retry-After",
                    "retry-after-ms",
                    *RATE_LIMIT_HEADERS,
                ),
            )
        probe_paths = [endpoint.path for endpoint in all_endpoints() if endpoint.is_probe]
        log = None
        if settings.access_log != "none":
            log = AccessLog(json=settings.access_log == "json", probe_paths=probe_paths)
        return RequestIdMiddleware(app, log, shared.metrics, self._tracing, probe_paths)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document of `/openapi.json`."""
        if self.openapi_schema is None:
            settings = self._settings
            keyless = settings.keyless_paths if self._keys else None
            document = openapi.describe(
                self,
                self.state.models.names,
                keyless,
                names_may_change=self.state.models.names_may_change,
            )
            if settings.root_path:
                document["servers"] = [{"url": settings.root_path}]
            self.openapi_schema = document
        return self.openapi_schema
