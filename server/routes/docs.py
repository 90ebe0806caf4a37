"""`GET /` and `/docs` for people, and `/openapi.json` for programs: where to begin with the API."""

from html import escape

from fastapi import Request, Response
from fastapi.responses import HTMLResponse

from server.endpoints import ENDPOINTS, EndpointFamily
from server.models import Models
from server.openapi import Description
from server.schemas.models import Welcome
from server.streaming.sse import as_json

endpoints = ENDPOINTS.register("docs")(EndpointFamily())


_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#0b7285"/>'
    '<path d="M10 7v18M22 7 11 16l11 9" fill="none" stroke="#fff" stroke-width="3.4" stroke-linecap="round"/></svg>'
)

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Kaon</title>
<link rel="icon" href="{root}/favicon.ico" type="image/svg+xml">
<style>
body {{ font: 16px/1.6 system-ui, sans-serif; max-width: 40rem; margin: 4rem auto; padding: 0 1rem; }}
:root {{ color-scheme: light dark; }}
h1 svg {{ width: 1em; vertical-align: -0.12em; margin-right: 0.3em; }}
dt {{ margin-top: 0.6rem; }}
dd {{ margin: 0; opacity: 0.75; }}
</style>
<h1>{icon}Kaon {version}</h1>
<p>This is an OpenAI-compatible LLM inference server. Clients use this address with <code>/v1</code> after it as their
base URL.</p>
<dl>
<dt><a href="{root}/docs">/docs</a><dd>every request, with an example and its fields
<dt><a href="{root}/v1/models">/v1/models</a><dd>the models that are served
<dt><a href="{root}/readyz">/readyz</a><dd>whether requests are served now
<dt><a href="{root}/metrics">/metrics</a><dd>Prometheus metrics
<dt><a href="{root}/openapi.json">/openapi.json</a><dd>the API, for programs
</dl>
</html>
"""


@endpoints.get("/", Welcome)
async def welcome(http: Request) -> Response:
    """Name the server and the address of its API description: a page for browsers, JSON for programs."""
    root = http.scope.get("root_path", "")
    version = Models.of(http.app).shared.version
    if "text/html" in http.headers.get("accept", ""):
        page = _PAGE.format(root=escape(root), version=escape(version), icon=_ICON)
        return HTMLResponse(page, headers={"Vary": "Accept"})
    return as_json(Welcome("Kaon", version, f"{root}/v1/models", f"{root}/docs", f"{root}/openapi.json"))


@endpoints.get("/favicon.ico", "image/svg+xml", in_schema=False)
async def favicon() -> Response:
    """The icon that browsers ask for."""
    return Response(_ICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})


@endpoints.get("/docs", "text/html", in_schema=False)
async def docs(http: Request) -> HTMLResponse:
    """The API's description as a page."""
    return HTMLResponse((await _description(http).forms())[1])


@endpoints.get("/openapi.json", "application/json", in_schema=False)
async def openapi(http: Request) -> Response:
    """The API's description for programs."""
    return Response((await _description(http).forms())[0], media_type="application/json")


def _description(http: Request) -> Description:
    description: Description = http.app.state.description
    return description
