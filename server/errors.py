"""The errors that clients receive, and their one handler: every failure is answered with an error object.

It is OpenAI's, or Anthropic's where the request is of their API. Errors are raised anywhere in `server`, and
`server.responses.store` adds its own; `install` adds the handler.
"""

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Scope

from engine.config.spelling import nearest
from engine.text.io_processor import DoesNotFit, InvalidRequest
from server.access_log import CLIENT_GONE, facts_of, route_path

_log = logging.getLogger(__name__)


class ErrorDetail(msgspec.Struct):
    """An error in OpenAI's form."""

    message: str
    type: str
    param: str | None = None
    """The request field at fault, as a path such as `messages[0].content`."""
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """Body of every answer that is not a success."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """Body of every answer that is not a success, in Anthropic's form; also the data of an event `error`."""

    error: AnthropicErrorDetail
    request_id: str | None


class ApiError(Exception):
    """A failure that is reported to the client: a sentence for people, and OpenAI's fields for programs."""

    status = 500
    type = "server_error"
    code: str | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 - replaced as a whole, never changed

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> bytes:
        """The error object as JSON."""
        return msgspec.json.encode(ErrorBody(ErrorDetail(str(self), self.type, self.param, self.code)))

    def anthropic_body(self, request_id: str | None) -> bytes:
        """Anthropic's error object as JSON."""
        default = "invalid_request_error" if self.status < 500 else "api_error"
        detail = AnthropicErrorDetail(_ANTHROPIC_TYPES.get(self.status, default), str(self))
        return msgspec.json.encode(AnthropicError(detail, request_id))


class BadRequest(ApiError):
    """The request is at fault: 400."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """Prompt and completion are longer than the model's context, or than the cache holds."""

    code = "context_length_exceeded"


class InvalidApiKey(BadRequest):
    """The request has no key that this server accepts: 401."""

    status = 401
    code = "invalid_api_key"
    headers = {"WWW-Authenticate": "Bearer"}  # noqa: RUF012


class Forbidden(BadRequest):
    """The request's key does not open this path: 403."""

    status = 403
    code = "insufficient_scope"


class UnsupportedMediaType(BadRequest):
    """The body's media type is not JSON, or it is compressed: 415."""

    status = 415


class ModelNotFound(BadRequest):
    """This server serves no model of that name."""

    status = 404
    code = "model_not_found"


class AdapterNotLoaded(BadRequest):
    """There is no LoRA adapter of that name, or in that directory."""

    status = 404
    code = "adapter_not_found"


class PathNotAllowed(BadRequest):
    """The server reads nothing there at a client's request: 403."""

    status = 403
    code = "path_not_allowed"


class WrongTask(BadRequest):
    """The served model does not do what the endpoint is for: 404, as OpenAI answers for a model of another kind."""

    status = 404
    code = "model_not_supported"


class BodyTooLarge(BadRequest):
    """The body is over `max_request_bytes`."""

    status = 413
    code = "request_too_large"


class RouteError(BadRequest):
    """The path does not exist, or does not take the method."""

    def __init__(self, status: int, message: str, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class NotReady(ApiError):
    """The model is still loading, or the server is shutting down: 503."""

    status = 503
    code = "not_ready"
    headers = {"Retry-After": "1"}  # noqa: RUF012


class ShuttingDown(NotReady):
    """The server is shutting down."""


class Overloaded(ApiError):
    """Too much is waiting or running: 429, with the time after which to try again."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, type: str, seconds: float) -> None:
        """`type` is what exceeds its bound, `requests` or `tokens`; `seconds` until the client may try again."""
        milliseconds = math.ceil(seconds * 1000)
        super().__init__(f"{message}; please try again in {milliseconds / 1000:g}s")
        self.type = type
        self.headers = {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(milliseconds)}


class RequestTimeout(ApiError):
    """The request was not done within its `timeout`, or the server's: 408, which clients must not retry."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"
    headers = {"x-should-retry": "false"}  # noqa: RUF012


class SlowReader(BadRequest):
    """The client read its stream too slowly: more than `stream_buffer_bytes` of it are waiting."""

    code = "slow_reader"


class EngineError(ApiError):
    """The engine could not finish the request."""

    code = "engine_error"


class PoisonousRequest(EngineError):
    """Computing the request broke the engine. The header keeps clients from retrying it, as they do after a 500."""

    headers = {"x-should-retry": "false"}  # noqa: RUF012


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by status, where they are neither `invalid_request_error` nor `api_error`."""

_ANTHROPIC_STATUS = {503: 529}
"""Anthropic's statuses for ours, where they differ."""

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
"""First parts of OpenAI's paths that this server does not have, with the subject of each API."""

_MIN_PATH_LIKENESS = 0.75
"""Likeness that a path needs for a hint: enough for a missing /v1, a missing plural or a slash at the end."""


def install(app: FastAPI) -> None:
    """Make `app` answer every exception through `answer`."""
    for kind in (ApiError, InvalidRequest, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


async def answer(request: Request, error: Exception) -> Response:
    """The response to a request that ended in `error`."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    reported = _as_api_error(request, error)
    facts_of(request.scope).error = str(reported)
    return as_response(reported, request.scope)


def as_response(error: ApiError, scope: Scope) -> Response:
    """The response that reports `error` to the request of `scope`, in the form of its API."""
    if speaks_anthropic(scope):
        body = error.anthropic_body(scope.get("state", {}).get("request_id"))
        status = _ANTHROPIC_STATUS.get(error.status, error.status)
        return Response(body, status, error.headers, media_type="application/json")
    return Response(error.body(), error.status, error.headers, media_type="application/json")


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is of Anthropic's API: by its path, or by the header that Anthropic's clients send always."""
    path = route_path(scope)
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return True
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def as_raw_response(error: ApiError, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """The bytes of a response that reports `error` and closes the connection, where no application answers."""
    body = error.body()
    fields = {
        "Content-Type": "application/json",
        "Content-Length": len(body),
        **error.headers,
        **headers,
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def refusal(error: InvalidRequest, message: str | None = None, param: str | None = None) -> BadRequest:
    """The error of a request that cannot run: `error` itself, or with the endpoint's own message and parameter."""
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
            # Codex goes over to HTTP at once after a 426, and only after several attempts otherwise.
            return RouteError(
                426,
                f"{request.url.path} does not speak WebSocket; send a POST, with stream true for a stream of events",
                {"Upgrade": "HTTP/1.1", "Connection": "Upgrade"},
            )
        if error.status_code == 405:
            headers["Allow"] = _allowed_methods(request)
        return RouteError(error.status_code, _route_sentence(request, error, headers), headers)
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError("the server failed on this request; its log has the reason")


def _allowed_methods(request: Request) -> str:
    """All methods that the path takes: the framework names those of one route, and a path may have several."""
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
