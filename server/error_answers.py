"""The exception handler of the application: it answers every failure with an error object of `server.errors`.

The object has OpenAI's form, or Anthropic's if the request uses Anthropic's API. `install` adds the handler.
"""

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Scope

from engine.config.spelling import nearest
from engine.text.io_processor import DoesNotFit, InvalidRequest
from server.access_log import CLIENT_GONE, facts_of, route_path
from server.errors import ApiError, BadRequest, ContextLengthExceeded, RouteError

_log = logging.getLogger(__name__)

_ANTHROPIC_STATUS = {503: 529}
"""Status in Anthropic's API by our status, where they differ."""

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")

_UNSUPPORTED_PARTS = {
    "audio": "speech",
    "images": "images",
    "videos": "videos",
    "moderations": "moderation",
    "uploads": "files",
    "fine_tuning": "fine-tuning",
    "assistants": "assistants",
    "threads": "assistants",
    "vector_stores": "vector stores",
    "realtime": "real-time sessions",
    "conversations": "stored conversations",
}
"""First segments of OpenAI's paths that this server does not have, with the subject of each API."""

_MIN_PATH_LIKENESS = 0.75
"""Least similarity of a path to a route for a hint: low enough for a missing /v1, a missing plural s or a slash at the
end."""


def install(app: FastAPI) -> None:
    """Make `app` answer every exception through `answer`."""
    for kind in (ApiError, InvalidRequest, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


async def answer(request: Request, error: Exception) -> Response:
    """Return the response to a request that ended with `error`."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    reported = _as_api_error(request, error)
    facts_of(request.scope).error = str(reported)
    return as_response(reported, request.scope)


def as_response(error: ApiError, scope: Scope) -> Response:
    """Return the response that reports `error`, in the form of the API of the request with `scope`."""
    if speaks_anthropic(scope):
        body = error.anthropic_body(scope.get("state", {}).get("request_id"))
        status = _ANTHROPIC_STATUS.get(error.status, error.status)
        return Response(body, status, error.headers, media_type="application/json")
    return Response(error.body(), error.status, error.headers, media_type="application/json")


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a request uses Anthropic's API: by its path, or by the header that Anthropic's clients always
    send."""
    path = route_path(scope)
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return True
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def refusal(error: InvalidRequest, message: str | None = None, param: str | None = None) -> BadRequest:
    """Convert `error` to the error of an answer, optionally with the endpoint's own message and parameter."""
    kind = ContextLengthExceeded if isinstance(error, DoesNotFit) else BadRequest
    return kind(message or str(error), param=param or error.param)


def _as_api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return refusal(error)
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        if error.status_code == 405 and request.headers.get("upgrade", "").lower() == "websocket":
            # After a 426, Codex switches to HTTP at once; otherwise only after several attempts.
            return RouteError(
                426,
                f"{request.url.path} does not speak WebSocket; send a POST, with stream true for a stream of events",
                {"Upgrade": "HTTP/1.1", "Connection": "Upgrade"},
            )
        if error.status_code == 405:
            headers["Allow"] = _allowed_methods(request)
        return RouteError(error.status_code, _route_sentence(request, error, headers), headers)
    _log.error("%s %r failed", request.method, request.url.path, exc_info=error)
    return ApiError("the server failed on this request; its log has the reason")


def _allowed_methods(request: Request) -> str:
    """Return all methods of the path. The framework lists those of one route, but a path may have several routes."""
    app: FastAPI = request.app
    routes = _routes(app)
    path = next((route.path for route in routes if route.matches(request.scope)[0] is not Match.NONE), None)
    methods = {method for route in routes if route.path == path for method in route.methods or ()}
    return ", ".join(sorted(methods, key=_METHODS.index))


def _routes(app: FastAPI) -> list[Route]:
    return [route for route in (*getattr(app.state, "routes", ()), *app.router.routes) if isinstance(route, Route)]


def _route_sentence(request: Request, error: HTTPException, headers: Mapping[str, str]) -> str:
    path = request.url.path
    if error.status_code == 404:
        part = path.removeprefix("/v1/").partition("/")[0]
        if path.startswith("/v1/") and part in _UNSUPPORTED_PARTS:
            return (
                f"{path} is of OpenAI's API for {_UNSUPPORTED_PARTS[part]}, which this server does not have; see /docs"
            )
        hint = nearest(path, (route.path for route in _routes(request.app)), likeness=_MIN_PATH_LIKENESS)
        return f"{path} is not a path of this server{hint or '; /docs lists them'}"
    if error.status_code == 405:
        return f"{path} does not take {request.method}; use {headers['Allow']}"
    return str(error.detail)
