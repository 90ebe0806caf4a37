"""`GET /` and `/docs`: where to begin, for people. `/openapi.json`, for programs, is the framework's route."""

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from server import frontend as frontends
from server.openapi import answers, page
from server.schemas.body import as_json
from server.schemas.models import Welcome

router = APIRouter()


@router.head("/", include_in_schema=False)
@router.get("/", **answers(Welcome))
async def welcome(http: Request) -> Response:
    """What this server is, and where its API is described."""
    root = http.scope.get("root_path", "")
    version = frontends.of(http).version
    return as_json(Welcome("Kaon", version, f"{root}/v1/models", f"{root}/docs", f"{root}/openapi.json"))


@router.head("/docs", include_in_schema=False)
@router.get("/docs", include_in_schema=False)
async def docs(http: Request) -> HTMLResponse:
    """The API's description as a page."""
    app: FastAPI = http.app
    return HTMLResponse(page(app.openapi(), http.scope.get("root_path", "")))
