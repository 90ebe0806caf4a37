"""`page`: the API's description as one HTML page that needs nothing else: no script, no other server. For `/docs`."""

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from server.schema_words import fields_of

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
