"""The API's description at `/openapi.json` and `/docs`, from what reads requests and what answers.

Routes give their keywords with `answers`, `reads` and `generates`; `server.app` has `describe` write the document.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.errors import ErrorBody
from server.protocol.chat import ChatCompletion, ChatCompletionRequest
from server.protocol.completions import Completion, CompletionRequest
from server.protocol.models import Model, ModelList, Version, Welcome
from server.protocol.responses import InputTokensRequest, ResponsesRequest
from server.protocol.responses_answer import DeletedResponse, InputTokens, ResponseObject
from server.protocol.responses_items import ItemList
from server.protocol.rules import RequestModel
from server.protocol.tokenize import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

_REF = "#/components/schemas/{name}"

_EVENT = {
    "title": "Server-sent event",
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "The event's type, where events have types."},
        "data": {"type": "string", "description": "JSON text of a chunk or event, or [DONE] behind the last chunk."},
    },
    "required": ["data"],
}
"""What a stream is made of: before OpenAPI 3.2, the schema of `text/event-stream` describes each event."""

REQUESTS: tuple[type[RequestModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    InputTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
"""Every body that is read."""

_ANSWERS: tuple[type[msgspec.Struct], ...] = (
    Completion,
    ChatCompletion,
    ResponseObject,
    InputTokens,
    DeletedResponse,
    ItemList,
    Model,
    ModelList,
    Version,
    Welcome,
    TokenizeAnswer,
    DetokenizeAnswer,
    ErrorBody,
)

_EXAMPLES: dict[type[RequestModel], dict[str, Any]] = {
    ChatCompletionRequest: {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_completion_tokens": 32,
    },
    CompletionRequest: {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8},
    ResponsesRequest: {"input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 32},
    InputTokensRequest: {"input": "What is the capital of France?"},
    TokenizeRequest: {"prompt": "Hello, world!", "return_token_strs": True},
    DetokenizeRequest: {"tokens": [1, 2, 3]},
}
"""A request that works, but for the name of the model."""


def answers(answer: type[msgspec.Struct]) -> dict[str, Any]:
    """Keywords of a route that answers with `answer`."""
    return {
        "response_model": None,
        "responses": {
            200: {"description": "Success.", "content": _json(answer)},
            "4XX": {"description": "The request is at fault.", "content": _json(ErrorBody)},
            "5XX": {"description": "The server is at fault, or not ready.", "content": _json(ErrorBody)},
        },
    }


def answers_text(media_type: str = "text/plain") -> dict[str, Any]:
    """Keywords of a route that answers with text, or with an error object."""
    keywords = answers(ErrorBody)
    keywords["responses"][200]["content"] = {media_type: {"schema": {"type": "string"}}}
    return keywords


def reads(request: type[RequestModel]) -> dict[str, Any]:
    """Keywords of a route that reads `request`."""
    return {"openapi_extra": {"requestBody": {"required": True, "content": _json(request)}}}


def generates(request: type[RequestModel], answer: type[msgspec.Struct]) -> dict[str, Any]:
    """Keywords of a route that reads `request` and answers with `answer`, or with a stream of its chunks."""
    keywords = answers(answer)
    keywords["responses"][200]["content"]["text/event-stream"] = {"schema": _EVENT}
    return {**keywords, **reads(request)}


def describe(app: FastAPI, model_names: Sequence[str], keyless_paths: Collection[str] | None) -> dict[str, Any]:
    """The OpenAPI document; stands in for `FastAPI.openapi`, which cannot see models that routes read by hand.

    `keyless_paths` are those that need no API key, where others do; None where none does.
    """
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components["schemas"] = request_schemas()
    _, answered = msgspec.json.schema_components(_ANSWERS, ref_template=_REF)
    schemas.update(answered)
    for request in REQUESTS:
        schema = schemas[request.__name__]
        schema["examples"] = [dict(_EXAMPLES[request])]
        if "model" in schema["properties"]:
            schema["properties"]["model"]["enum"] = list(model_names)
            schema["examples"][0]["model"] = model_names[0]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # The framework's own errors of parameters, which do not occur: all of them are plain text.
            operation["responses"].pop("422", None)
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"]["enum"] = list(model_names)
            if keyless_paths is not None and path in keyless_paths:
                operation["security"] = []
    if keyless_paths is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def request_schemas() -> dict[str, Any]:
    """JSON schemas of what requests hold, by name."""
    _, generated = models_json_schema(
        [(model, "validation") for model in REQUESTS], ref_template=_REF.replace("name", "model")
    )
    schemas: dict[str, Any] = generated["$defs"]
    for model in REQUESTS:
        schema = schemas[model.__name__]
        for name, field in schema["properties"].items():
            if name not in schema.get("required", ()):
                schema["properties"][name] = _or_null(field)
    return schemas


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """Null counts as absent in a body's own fields."""
    kinds = field.get("anyOf", [field])
    if any(kind.get("type") == "null" for kind in kinds):
        return field
    about: dict[str, Any] = {key: field[key] for key in ("default", "description", "title") if key in field}
    bare = [{key: value for key, value in kind.items() if key not in about} for kind in kinds]
    return {"anyOf": [*bare, {"type": "null"}], **about}


def _json(model: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=model.__name__)}}}
