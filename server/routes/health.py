"""`/livez`, `/readyz`, `/health`, `/ping`, `/metrics` and `/version`: for orchestrators, scrapers and people."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from server import frontend as frontends
from server.openapi import answers, answers_text
from server.schemas.body import as_json
from server.schemas.models import Version

router = APIRouter()


@router.head("/livez", include_in_schema=False)
@router.get("/livez", **answers_text())
async def live() -> Response:
    """200 while the process answers."""
    return PlainTextResponse("ok\n")


@router.head("/ping", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.head("/readyz", include_in_schema=False)
@router.get("/ping", **answers_text())
@router.get("/health", **answers_text())
@router.get("/readyz", **answers_text())
async def ready(http: Request) -> Response:
    """200 while requests are served; 503 with the reason while the engine starts, or starts again, and at the end."""
    frontends.of(http).check_ready()
    return PlainTextResponse("ok\n")


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", **answers_text())
async def metrics(http: Request) -> Response:
    """Prometheus metrics."""
    return Response(frontends.of(http).metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.head("/version", include_in_schema=False)
@router.get("/version", **answers(Version))
async def version(http: Request) -> Response:
    """The server's version."""
    return as_json(Version(frontends.of(http).version))
