"""The errors that clients receive, each with an error object in OpenAI's form and one in Anthropic's.

Errors are raised anywhere in `server`, and `server.responses.store` adds its own; `server.error_answers` answers with
them. Imports no web framework: the process that starts the core loads this module before it loads FastAPI.
"""

import math
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Literal, Self

import msgspec


class ErrorDetail(msgspec.Struct):
    """An error in OpenAI's form."""

    message: str
    type: str
    param: str | None = None
    """The request field that caused the error, as a path such as `messages[0].content`."""
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """Body of every error answer."""

    error: ErrorDetail


class ThreadDetails(msgspec.Struct):
    """Why a conversation cannot be stored: after this error, Anthropic's clients send it whole with each request."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: list[str] = msgspec.field(default_factory=lambda: ["thread"])


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str
    details: ThreadDetails | msgspec.UnsetType = msgspec.UNSET


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """Body of every error answer in Anthropic's form; also the data of the event `error`."""

    error: AnthropicErrorDetail
    request_id: str | None


class ApiError(Exception):
    """A failure that is reported to the client: a sentence for people, and fields of OpenAI's form for programs."""

    status = 500
    type = "server_error"
    code: str | None = None
    anthropic_details: ThreadDetails | msgspec.UnsetType = msgspec.UNSET
    headers: dict[str, str] = {}  # noqa: RUF012 - replaced as a whole, never changed

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> bytes:
        """Return the error object in OpenAI's form as JSON."""
        return msgspec.json.encode(ErrorBody(ErrorDetail(str(self), self.type, self.param, self.code)))

    def anthropic_body(self, request_id: str | None) -> bytes:
        """Return the error object in Anthropic's form as JSON."""
        default = "invalid_request_error" if self.status < 500 else "api_error"
        detail = AnthropicErrorDetail(_ANTHROPIC_TYPES.get(self.status, default), str(self), self.anthropic_details)
        return msgspec.json.encode(AnthropicError(detail, request_id))


class BadRequest(ApiError):
    """The request is invalid: 400."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """Prompt and completion are longer than the model's context, or than the cache holds."""

    code = "context_length_exceeded"


class ThreadUnsupported(BadRequest):
    """The request asks the server to store its conversation as one of Anthropic's message threads."""

    anthropic_details = ThreadDetails()


class InvalidApiKey(BadRequest):
    """The request has no key that this server accepts: 401."""

    status = 401
    code = "invalid_api_key"
    headers = {"WWW-Authenticate": "Bearer"}  # noqa: RUF012


class Forbidden(BadRequest):
    """The request's key does not open this path: 403."""

    status = 403
    code = "insufficient_scope"


class ForeignPage(Forbidden):
    """A web page of another site sent the request to a server without API keys: 403."""

    code = "origin_not_allowed"


class UnsupportedMediaType(BadRequest):
    """The body's media type is not JSON, or it is compressed: 415."""

    status = 415


class ModelNotFound(BadRequest):
    """This server serves no model of that name."""

    status = 404
    code = "model_not_found"


class AdapterNotLoaded(BadRequest):
    """No LoRA adapter has that name, or the directory has none."""

    status = 404
    code = "adapter_not_found"


class PathNotAllowed(BadRequest):
    """Clients may not make the server read that path: 403."""

    status = 403
    code = "path_not_allowed"


class WrongTask(BadRequest):
    """The served model cannot do the endpoint's task: 404, as OpenAI answers for a model of another kind."""

    status = 404
    code = "model_not_supported"


class BodyTooLarge(BadRequest):
    """The body is larger than `max_request_bytes`."""

    status = 413
    code = "request_too_large"


class RangeNotSatisfiable(BadRequest):
    """The range is not within the content: 416."""

    status = 416

    def __init__(self, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.headers = {"Content-Range": headers["content-range"]}


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

    def __init__(self, message: str, *, retry_seconds: float = 1) -> None:
        """`retry_seconds` is the time after which the client may retry."""
        super().__init__(message)
        self.headers = {"Retry-After": str(math.ceil(retry_seconds))}


class ShuttingDown(NotReady):
    """The server is shutting down."""


class Overloaded(ApiError):
    """Too many requests or tokens are waiting or running: 429, with the time after which to try again."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, type: str, seconds: float) -> None:
        """`type` is what exceeds its bound, `requests` or `tokens`; `seconds` is the time until the client may
        retry."""
        milliseconds = math.ceil(seconds * 1000)
        super().__init__(f"{message}; please try again in {milliseconds / 1000:g}s")
        self.type = type
        self.headers = {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(milliseconds)}


class RequestTimeout(ApiError):
    """The request was not completed within its `timeout` or the server's: 408, which clients must not retry."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"
    headers = {"x-should-retry": "false"}  # noqa: RUF012

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Return the error of a request that was not completed within `seconds`."""
        return cls(f"the request was not done within {seconds:g} s, its timeout; ask for less, or for more time")


class SlowReader(BadRequest):
    """The client read its stream too slowly: more than `stream_buffer_bytes` of it are waiting."""

    code = "slow_reader"


class EngineError(ApiError):
    """The engine failed to compute the request."""

    code = "engine_error"


class PoisonousRequest(EngineError):
    """Computing the request crashed the engine. The header asks clients not to retry it, as they do after a 500."""

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
"""Anthropic's error type by status, for types other than `invalid_request_error` and `api_error`."""


def as_raw_response(error: ApiError, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Return the bytes of an HTTP response that reports `error` and closes the connection, for use without an
    application."""
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
