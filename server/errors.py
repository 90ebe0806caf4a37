"""The error tree of the HTTP face and its one handler: every failure leaves as OpenAI's error object.

Raised anywhere in `server/`; `install` hooks the handler into the application.
"""

import logging

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engine.io_processor import InvalidRequest

_log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""Status, in logs only, of a request whose client left before the answer."""


class ErrorDetail(msgspec.Struct):
    """What went wrong, in OpenAI's form."""

    message: str
    type: str
    param: str | None = None
    """The request field at fault, as a path such as `messages[0].content`."""
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """Body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A failure that the client is told of: a sentence for a person, and OpenAI's fields for a program."""

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


class BadRequest(ApiError):
    """The request is at fault: 400."""

    status = 400
    type = "invalid_request_error"


class ModelNotFound(BadRequest):
    """This server serves no model of that name."""

    status = 404
    code = "model_not_found"


class BodyTooLarge(BadRequest):
    """The body is over `max_request_bytes`."""

    status = 413
    code = "request_too_large"


class RouteError(BadRequest):
    """No such path, or not with this method."""

    def __init__(self, status: int, message: str, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class NotReady(ApiError):
    """The model is still loading, or the server is on its way out."""

    status = 503
    code = "not_ready"
    headers = {"Retry-After": "1"}  # noqa: RUF012


class EngineError(ApiError):
    """The engine could not finish the request."""

    code = "engine_error"


def install(app: FastAPI) -> None:
    """Make `app` answer every exception through `answer`."""
    for kind in (ApiError, InvalidRequest, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


async def answer(request: Request, error: Exception) -> Response:
    """The response to a request that ended in `error`."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    told = _as_api_error(request, error)
    return Response(told.body(), told.status, told.headers, media_type="application/json")


def _as_api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return BadRequest(str(error), param=error.param)
    if isinstance(error, HTTPException):
        return RouteError(error.status_code, _route_sentence(request, error), dict(error.headers or {}))
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError("the server failed on this request; its log says why")


def _route_sentence(request: Request, error: HTTPException) -> str:
    path = request.url.path
    if error.status_code == 404:
        return f"{path} is not a path of this server; /docs lists them"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{path} does not take {request.method}; use {allowed}"
    return str(error.detail)
