"""The API's description at `/openapi.json` and `/docs`, from what reads requests and what answers.

Routes give their keywords with `answers`, `reads` and `generates`; `server.app` has `describe` write the document.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.errors import ErrorBody
from server.schemas.body import RequestModel
from server.schemas.chat import ChatCompletion, ChatCompletionRequest
from server.schemas.completions import Completion, CompletionRequest
from server.schemas.models import Model, ModelList, Version, Welcome
from server.schemas.responses import (
    DeletedResponse,
    InputTokens,
    InputTokensRequest,
    ItemList,
    ResponseObject,
    ResponsesRequest,
)
from server.schemas.tokenize import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

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


# [schema_words] JSON schemas of requests in words: each field's type, default and meaning. For `/docs` and
# docs/api.md.

_SCHEMA_WORDS_REF = "#/components/schemas/"
_MOST_CHOICES = 8


class Field(NamedTuple):
    """One field of an object that a request holds."""

    name: str
    type: str
    default: str
    """As JSON spells it; `required` where there is none, empty where leaving it out is what it means."""
    meaning: str


def fields_of(schema: Mapping[str, Any]) -> Iterator[Field]:
    """The fields of an object's schema, in the order of their declaration."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        default = field.get("default")
        shown = "required" if name in required else "" if default is None else json.dumps(default)
        yield Field(name, type_of(field), shown, " ".join(_description(field).split()))


def _description(field: Mapping[str, Any]) -> str:
    """Of the field, or of the type that it may have."""
    kinds = [field, *field.get("anyOf", ())]
    return next((str(kind["description"]) for kind in kinds if "description" in kind), "")


def type_of(schema: Mapping[str, Any]) -> str:
    """The type in a few words: `integer 0 to 20`, `string or list of strings`."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_SCHEMA_WORDS_REF)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = dict.fromkeys(type_of(kind) for kind in schema[key] if kind.get("type") != "null")
            return " or ".join(kinds) or "null"
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema and len(schema["enum"]) <= _MOST_CHOICES:
        return " or ".join(map(json.dumps, schema["enum"]))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    if kind in ("integer", "number"):
        return kind + _range(schema)
    return kind


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is None or abs(low) >= 2**31 - 1:
        return ""
    above = "above " if "exclusiveMinimum" in schema else ""
    return f", {above}{low:g} to {high:g}" if high is not None and high < 2**31 - 1 else f", at least {low:g}"


# [api_page] `page`: the API's description as one HTML page that needs nothing else: no script, no other server. For
# `/docs`.

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
color-scheme: light dark }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem } code, pre { font-family: ui-monospace, monospace; font-size: .9em }
pre { padding: .7rem; overflow-x: auto; border: 1px solid #8885; border-radius: .4rem }
table { border-collapse: collapse; width: 100% } td, th { border-top: 1px solid #8885; padding: .25rem .6rem;
text-align: left; vertical-align: top } summary { cursor: pointer } b { display: inline-block; min-width: 4.5rem }
"""


def page(document: Mapping[str, Any], root_path: str = "") -> str:
    """`document`, an OpenAPI description, for people. `root_path` is what a proxy puts before each path."""
    title = f"{document['info']['title']} {document['info']['version']}"
    return "".join(
        (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>',
            f"<h1>{escape(title)}</h1><p>{_prose(document['info'].get('description', ''))} ",
            f'For programs: <a href="{escape(root_path)}/openapi.json">openapi.json</a>.',
            " Requests need an API key: <code>Authorization: Bearer KEY</code>." if "security" in document else "",
            "</p>",
            *_operations(document),
            "<h2>Objects in requests</h2>",
            *_objects(document["components"]["schemas"]),
            "</html>\n",
        )
    )


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f'<h2 id="{escape(method + path)}"><b>{method.upper()}</b> <code>{escape(path)}</code></h2>'
            yield f"<p>{_prose(operation.get('description', ''))}"
            yield " Needs no key.</p>" if operation.get("security") == [] else "</p>"
            yield from _table(operation.get("parameters", ()))
            if "requestBody" in operation:
                yield from _body(operation["requestBody"], document["components"]["schemas"])


def _table(parameters: Any) -> Iterator[str]:
    for parameter in parameters:
        yield f"<p><code>{escape(parameter['name'])}</code> ({escape(parameter['in'])}) "
        yield f"{_prose(parameter.get('description', ''))}</p>"


def _body(body: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    for example in schemas[name].get("examples", ()):
        yield f"<pre>{escape(json.dumps(example, indent=2))}</pre>"
    yield "<details><summary>Fields</summary>"
    yield from _fields(schemas[name])
    yield "</details>"


def _objects(schemas: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in schemas.items():
        if "properties" in schema:
            yield f'<details id="{escape(name)}"><summary>{escape(name)}</summary>'
            yield from _fields(schema)
            yield "</details>"


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    yield "<table><tr><th>Field<th>Type<th>Default<th>Meaning</tr>"
    for field in fields_of(schema):
        name, default = (f"<code>{escape(text)}</code>" for text in (field.name, field.default))
        yield f"<tr><td>{name}<td>{escape(field.type)}<td>{default}<td>{_prose(field.meaning)}</tr>"
    yield "</table>"


def _prose(text: str) -> str:
    """`text` with what stands between backticks set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
