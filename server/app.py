"""`create_app`: the ASGI application over a running `CoreManager`. Called by `server.http`, tests and benchmarks."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from engine.config import Config
from engine.core_manager import CoreManager
from server import errors, openapi
from server.frontend import Frontend
from server.routes import chat, completions, health, models


def create_app(
    config: Config, core: CoreManager, on_ready: Callable[[tuple[str, ...]], object] = lambda names: None
) -> FastAPI:
    """The application. It answers at once, with 503 until the core is ready; then `on_ready` hears the names.

    The caller owns `core` and ends it.
    """
    frontend = Frontend(config, core)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(frontend.start(on_ready))
        yield
        starting.cancel()
        frontend.close()

    app = FastAPI(
        title="Kaon",
        version=frontend.version,
        description="An OpenAI-compatible LLM inference server.",
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.frontend = frontend
    app.openapi = functools.partial(openapi.describe, app)  # type: ignore[method-assign]
    errors.install(app)
    for routes in (completions, chat, models, health):
        app.include_router(routes.router)
    return app
