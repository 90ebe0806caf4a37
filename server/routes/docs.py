"""`GET /` and `/docs`: where to begin, for people. The framework itself answers `/openapi.json`, for programs."""

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from server.endpoints import ENDPOINTS, EndpointFamily
from server.frontend import Frontend
from server.openapi import page
from server.schemas.body import as_json
from server.schemas.models import Welcome

endpoints = ENDPOINTS.register("docs")(EndpointFamily())


@endpoints.get("/", Welcome)
async def welcome(http: Request) -> Response:
    """What this server is, and where its API is described."""
    root = http.scope.get("root_path", "")
    version = Frontend.of(http.app).version
    return as_json(Welcome("Kaon", version, f"{root}/v1/models", f"{root}/docs", f"{root}/openapi.json"))


@endpoints.get("/docs", "text/html", in_schema=False)
async def docs(http: Request) -> HTMLResponse:
    """The API's description as a page."""
    app: FastAPI = http.app
    return HTMLResponse(page(app.openapi(), http.scope.get("root_path", "")))
