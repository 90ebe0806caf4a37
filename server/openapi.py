"""The description of the API: the OpenAPI document at `/openapi.json`, tables of fields, and the page at `/docs`.

`describe` creates the document from the schemas of requests and answers that `server.endpoints` lists. `fields_of` and
`type_of` describe schemas in text, for the page and for docs/api.md. `page` creates one HTML page without scripts.
"""

import asyncio
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.endpoints import SCHEMA_REF, all_endpoints
from server.errors import AnthropicError, ErrorBody
from server.schemas.body import RequestModel

_MAX_LISTED_VALUES = 8


def describe(
    app: FastAPI, model_names: Sequence[str], keyless_paths: Collection[str] | None, *, names_may_change: bool = False
) -> dict[str, Any]:
    """Create the OpenAPI document. `FastAPI.openapi` cannot, because routes parse their bodies themselves.

    `keyless_paths` are the paths that need no API key; None if no path needs one. With `names_may_change`, the model's
    name is only an example in the document, which is created once.
    """
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components["schemas"] = request_schemas()
    answers = {each.answer for each in all_endpoints() if not isinstance(each.answer, str)}
    _, answered = msgspec.json.schema_components(
        [*sorted(answers, key=lambda answer: answer.__name__), ErrorBody, AnthropicError], ref_template=SCHEMA_REF
    )
    schemas.update(answered)
    for request, example in _examples().items():
        schema = schemas[request.__name__]
        schema["examples"] = [dict(example)]
        if "model" in schema["properties"]:
            if not names_may_change:
                schema["properties"]["model"]["enum"] = list(model_names)
            schema["examples"][0]["model"] = model_names[0]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # This is the framework's error for parameters that it parses. It parses none: all are declared as text.
            operation["responses"].pop("422", None)
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model" and not names_may_change:
                    parameter["schema"]["enum"] = list(model_names)
            if keyless_paths is not None and path in keyless_paths:
                operation["security"] = []
    if keyless_paths is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def request_models() -> list[type[RequestModel]]:
    """Return the body types of all endpoints."""
    return list(dict.fromkeys(each.request for each in all_endpoints() if each.request is not None))


def _examples() -> dict[type[RequestModel], Mapping[str, Any]]:
    return {each.request: each.example for each in all_endpoints() if each.request and each.example}


def request_schemas() -> dict[str, Any]:
    """Return the JSON schemas of bodies and of the objects in them, by name."""
    models = request_models()
    _, generated = models_json_schema(
        [(model, "validation") for model in models], ref_template=SCHEMA_REF.replace("name", "model")
    )
    # Pydantic names equally named classes of several modules by their modules. These names become shorter:
    # `server__schemas__chat_tools__CustomTool` is ChatCustomTool.
    short = re.sub(
        r"server__schemas__([a-z]+)\w*?__(\w+)", lambda name: name[1].title() + name[2], json.dumps(generated["$defs"])
    )
    schemas: dict[str, Any] = json.loads(short)
    for model in models:
        schema = schemas[model.__name__]
        for name, field in schema["properties"].items():
            if name not in schema.get("required", ()):
                schema["properties"][name] = _or_null(field)
    return schemas


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """Allow null in a top-level field of a body, where it has the meaning of an absent field."""
    kinds = field.get("anyOf", [field])
    if any(kind.get("type") == "null" for kind in kinds):
        return field
    about: dict[str, Any] = {key: field[key] for key in ("default", "description", "title") if key in field}
    bare = [{key: value for key, value in kind.items() if key not in about} for kind in kinds]
    return {"anyOf": [*bare, {"type": "null"}], **about}


class Field(NamedTuple):
    """The description of one field of an object in a request."""

    name: str
    type: str
    default: str
    """The default as JSON; `required` for a required field; empty if there is no default value."""
    meaning: str


def fields_of(schema: Mapping[str, Any]) -> Iterator[Field]:
    """Yield the fields of an object's schema, in the order of their declaration."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        default = field.get("default")
        shown = "required" if name in required else "" if default is None else json.dumps(default)
        yield Field(name, type_of(field), shown, " ".join(_description(field).split()))


def _description(field: Mapping[str, Any]) -> str:
    """Return the description of the field, or else of its type."""
    kinds = [field, *field.get("anyOf", ())]
    return next((str(kind["description"]) for kind in kinds if "description" in kind), "")


def type_of(schema: Mapping[str, Any]) -> str:
    """Describe a type in a few words: `integer 0 to 20`, `string or list of strings`."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(SCHEMA_REF.format(name=""))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = dict.fromkeys(type_of(kind) for kind in schema[key] if kind.get("type") != "null")
            return " or ".join(kinds) or "null"
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema and len(schema["enum"]) <= _MAX_LISTED_VALUES:
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


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
color-scheme: light dark }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem } code, pre { font-family: ui-monospace, monospace; font-size: .9em }
pre { padding: .7rem; overflow-x: auto; border: 1px solid #8885; border-radius: .4rem }
table { border-collapse: collapse; width: 100% } td, th { border-top: 1px solid #8885; padding: .25rem .6rem;
text-align: left; vertical-align: top } summary { cursor: pointer } b { display: inline-block; min-width: 4.5rem }
"""


class Description:
    """A document as JSON and as HTML. Both are created once, in a thread, which holds the interpreter's lock for
    0.17 s in all.

    `begin` is called while the engine loads, because later all clients would wait for that lock.
    """

    def __init__(self, describe: Callable[[], Mapping[str, Any]], root_path: str) -> None:
        self._describe = describe
        self._root_path = root_path
        self._forms: asyncio.Future[tuple[bytes, bytes]] | None = None

    def begin(self) -> asyncio.Future[tuple[bytes, bytes]]:
        """Begin to create both forms, unless this was done before. Returns the future result."""
        if self._forms is None:
            # One thread for all requests: those of many clients would occupy every thread of the default executor.
            self._forms = asyncio.ensure_future(asyncio.to_thread(self._create))
        return self._forms

    async def forms(self) -> tuple[bytes, bytes]:
        """Return the document as JSON and as an HTML page."""
        try:
            return await asyncio.shield(self.begin())
        except Exception:
            self._forms = None  # The next request tries again.
            raise

    def _create(self) -> tuple[bytes, bytes]:
        document = self._describe()
        return msgspec.json.encode(document), page(document, self._root_path).encode()


def page(document: Mapping[str, Any], root_path: str = "") -> str:
    """Format an OpenAPI document as HTML. `root_path` is the prefix that a proxy adds to each path."""
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
    """Convert `text` to HTML, with words between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
