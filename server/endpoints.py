"""`ENDPOINTS`: the registry of endpoint families, and the declaration of each endpoint.

A family is one module in `server.routes` and one line here. `server.app` serves what the registry holds;
`server.openapi`, `tools.api_docs` and the access log read the declarations.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from models.registry import Registry
from server.errors import BadRequest, ErrorBody
from server.limits.owners import Scope
from server.schemas.body import RequestModel

SCHEMA_REF = "#/components/schemas/{name}"

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])

Answer: TypeAlias = type[msgspec.Struct] | str
"""The form of an answer: a struct that is sent as JSON, or the media type of a text."""

_EVENT = {
    "title": "Server-sent event",
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "The event's type, where events have types."},
        "data": {"type": "string", "description": "JSON text of a chunk or event, or [DONE] after the last chunk."},
    },
    "required": ["data"],
}
"""Schema of one event of a stream: before OpenAPI 3.2, the schema of `text/event-stream` describes each event."""


class Endpoint(NamedTuple):
    """The declaration of one endpoint: its request, answer and access rights."""

    path: str
    answer: Answer
    request: type[RequestModel] | None = None
    example: Mapping[str, Any] | None = None
    """A valid body, except for the name of the model."""
    is_probe: bool = False
    """Whether probes or scrapers request it every few seconds."""
    scope: Scope | None = "inference"
    """Scope that a key needs to request it; None means that any key suffices."""


class EndpointFamily:
    """The endpoints of one module. `get`, `post` and `delete` decorate their handlers."""

    def __init__(self, error: type[msgspec.Struct] = ErrorBody) -> None:
        """`error` is the body of error answers."""
        self._error = error
        self.router = APIRouter()
        self.endpoints: list[Endpoint] = []

    def get(
        self,
        path: str,
        answer: Answer,
        *,
        parameters: Sequence[Mapping[str, Any]] = (),
        is_probe: bool = False,
        in_schema: bool = True,
        scope: Scope | None = "inference",
    ) -> Callable[[Handler], Handler]:
        """Declare an endpoint for GET and HEAD. `parameters` describes the query parameters in OpenAPI's form."""
        self.endpoints.append(Endpoint(path, answer, is_probe=is_probe, scope=scope))
        keywords = _keywords(answer, self._error)
        if parameters:
            keywords["openapi_extra"] = {"parameters": list(parameters)}

        def add(handler: Handler) -> Handler:
            self.router.add_api_route(path, handler, methods=["GET"], include_in_schema=in_schema, **keywords)
            self.router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, response_model=None)
            return handler

        return add

    def post(
        self,
        path: str,
        answer: Answer,
        *,
        request: type[RequestModel] | None = None,
        example: Mapping[str, Any] | None = None,
        streams: bool = False,
        parameters: Sequence[Mapping[str, Any]] = (),
        scope: Scope | None = "inference",
    ) -> Callable[[Handler], Handler]:
        """Declare an endpoint with the body `request`. `streams`: whether it may answer with server-sent events."""
        self.endpoints.append(Endpoint(path, answer, request, example, scope=scope))
        keywords = _keywords(answer, self._error)
        if streams:
            keywords["responses"][200]["content"]["text/event-stream"] = {"schema": _EVENT}
        if request is not None:
            keywords["openapi_extra"] = {"requestBody": {"required": True, "content": _json(request)}}
        if parameters:
            keywords["openapi_extra"] = {"parameters": list(parameters)}
        return self._add("POST", path, keywords)

    def delete(self, path: str, answer: Answer) -> Callable[[Handler], Handler]:
        """Declare an endpoint for DELETE."""
        self.endpoints.append(Endpoint(path, answer))
        return self._add("DELETE", path, _keywords(answer, self._error))

    def _add(self, method: str, path: str, keywords: Mapping[str, Any]) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            self.router.add_api_route(path, handler, methods=[method], **keywords)
            return handler

        return add


def query_parameter(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """Describe a query parameter in OpenAPI's form, for `EndpointFamily.get`."""
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


ORDER = query_parameter("order", "Oldest first, or newest first.", type="string", enum=["asc", "desc"], default="desc")
"""Query parameter of lists, which `is_newest_first` parses."""


def is_newest_first(http: Request) -> bool:
    """Parse the query parameter `order`. Raises `BadRequest`."""
    order = http.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order is {order[:60]!r}; it must be 'asc' or 'desc'", param="order")
    return order == "desc"


def query_integer(http: Request, name: str, default: int, *, low: int, high: int) -> int:
    """Parse an integer of the query. Raises `BadRequest`."""
    text = http.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and low <= int(text) <= high):
        raise BadRequest(f"{name} is {text[:60]!r}; it must be an integer between {low} and {high}", param=name)
    return int(text)


ENDPOINTS: Registry[EndpointFamily] = Registry(
    "endpoint",
    {
        "completions": "server.routes.completions",
        "chat": "server.routes.chat",
        "responses": "server.routes.responses",
        "pooling": "server.routes.pooling",
        "messages": "server.routes.messages",
        "message_batches": "server.routes.message_batches",
        "batches": "server.routes.batches",
        "models": "server.routes.models",
        "tokenize": "server.routes.tokenize",
        "operations": "server.routes.operations",
        "health": "server.routes.health",
        "docs": "server.routes.docs",
    },
)
"""Endpoint families by name."""


def all_endpoints() -> list[Endpoint]:
    """Return the endpoints of every family."""
    return [endpoint for name in ENDPOINTS for endpoint in ENDPOINTS[name].endpoints]


def _keywords(answer: Answer, error: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the arguments of FastAPI's decorators that describe the answer `answer` and the error body `error`."""
    content = {answer: {"schema": {"type": "string"}}} if isinstance(answer, str) else _json(answer)
    return {
        "response_model": None,
        "responses": {
            200: {"description": "Success.", "content": content},
            "4XX": {"description": "The request is at fault.", "content": _json(error)},
            "5XX": {"description": "The server is at fault, or not ready.", "content": _json(error)},
        },
    }


def _json(model: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": SCHEMA_REF.format(name=model.__name__)}}}
