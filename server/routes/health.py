"""`/livez`, `/readyz`, `/health`, `/metrics` and `/version`: for orchestrators, scrapers and people."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from server import frontend as frontends

router = APIRouter()


@router.head("/livez", include_in_schema=False)
@router.get("/livez", response_class=PlainTextResponse)
async def live() -> Response:
    """200 while the process answers."""
    return PlainTextResponse("ok\n")


@router.head("/health", include_in_schema=False)
@router.head("/readyz", include_in_schema=False)
@router.get("/health", response_class=PlainTextResponse)
@router.get("/readyz", response_class=PlainTextResponse)
async def ready(http: Request) -> Response:
    """200 while requests are served; 503 with the reason while the model loads, and when the engine is gone."""
    _ = frontends.of(http).processor
    return PlainTextResponse("ok\n")


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    """Prometheus metrics."""
    return Response(frontends.of(http).metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version(http: Request) -> dict[str, str]:
    """The server's version."""
    return {"version": frontends.of(http).version}
