"""`/livez`, `/readyz`, `/health`, `/ping`, `/metrics` and `/version`: for orchestrators, scrapers and people."""

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from server.endpoints import ENDPOINTS, EndpointFamily
from server.models import Models
from server.schemas.models import Version
from server.streaming.sse import as_json

endpoints = ENDPOINTS.register("health")(EndpointFamily())


@endpoints.get("/livez", "text/plain", is_probe=True, scope=None)
async def live() -> Response:
    """Answer 200 while the process is alive."""
    return PlainTextResponse("ok\n")


@endpoints.get("/ping", "text/plain", is_probe=True, scope=None)
@endpoints.get("/health", "text/plain", is_probe=True, scope=None)
@endpoints.get("/readyz", "text/plain", is_probe=True, scope=None)
async def ready(http: Request) -> Response:
    """Answer 200 while requests are served, else 503 with the reason: the engine starts or restarts, or the server
    ends."""
    Models.of(http.app).check_ready()
    return PlainTextResponse("ok\n")


@endpoints.get("/metrics", "text/plain", is_probe=True, scope="metrics")
async def metrics(http: Request) -> Response:
    """Prometheus metrics."""
    return Response(await Models.of(http.app).shared.metrics.page(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@endpoints.get("/version", Version, scope=None)
async def version(http: Request) -> Response:
    """The server's version."""
    return as_json(Version(Models.of(http.app).shared.version))
