"""The API's description at `/openapi.json` and `/docs`, from what reads requests and what answers."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.errors import ErrorBody
from server.protocol.chat import ChatCompletion, ChatCompletionRequest
from server.protocol.completions import Completion, CompletionRequest
from server.protocol.models import Model, ModelList
from server.protocol.rules import RequestModel

_REF = "#/components/schemas/{name}"
_REQUESTS: tuple[type[RequestModel], ...] = (CompletionRequest, ChatCompletionRequest)
_ANSWERS: tuple[type[msgspec.Struct], ...] = (Completion, ChatCompletion, Model, ModelList, ErrorBody)


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


def generates(request: type[RequestModel], answer: type[msgspec.Struct]) -> dict[str, Any]:
    """Keywords of a route that reads `request` and answers with `answer`, or with a stream of its chunks."""
    keywords = answers(answer)
    keywords["responses"][200]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    keywords["openapi_extra"] = {"requestBody": {"required": True, "content": _json(request)}}
    return keywords


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document; stands in for `FastAPI.openapi`, which cannot see models that routes read by hand."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, requests = models_json_schema(
            [(model, "validation") for model in _REQUESTS], ref_template=_REF.replace("name", "model")
        )
        _, responses = msgspec.json.schema_components(_ANSWERS, ref_template=_REF)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(requests["$defs"], **responses)
        app.openapi_schema = document
    return app.openapi_schema


def _json(model: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=model.__name__)}}}
