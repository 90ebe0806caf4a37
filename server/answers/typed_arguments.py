"""Arguments that a dialect (GLM, Qwen3-Coder) writes as bare text, typed by the tool's schema."""

from collections.abc import Mapping
from typing import Any

from server.answers.json_mender import mend

_ANY = frozenset({"string", "number", "boolean", "null", "array", "object"})
_KINDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
_PYTHON_KINDS = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
_DEPTH = 8
"""References and unions followed inside one another; a schema may refer to itself."""


def argument_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """JSON types that argument `key` may have under the tool's `schema`; integers count as numbers."""
    properties = schema.get("properties")
    return _types(properties.get(key) if isinstance(properties, dict) else None, schema, _DEPTH)


def typed_argument(text: str, types: frozenset[str]) -> str | None:
    """The JSON that `text` is under `types`; None where it can only be a string.

    Text that is JSON of another of the types is taken as that: in a union, `null` is null.
    """
    if types == {"string"}:
        return None
    value = mend(text)
    if value is None:
        return None
    kind = _KINDS.get(value[0], "number")
    if kind == "string":
        return value if types == _ANY or "string" not in types else None
    return value if kind in types or "string" not in types else None


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth == 0:
        return _ANY
    if isinstance(schema.get("$ref"), str):
        return _types(resolved(schema["$ref"], root), root, depth - 1)
    kind = schema.get("type")
    if isinstance(kind, str | list):
        names = [kind] if isinstance(kind, str) else kind
        return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_PYTHON_KINDS.get(type(value), "null") for value in values)
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list) and schema[union]:
            return frozenset().union(*(_types(member, root, depth - 1) for member in schema[union]))
    if isinstance(schema.get("allOf"), list) and schema["allOf"]:
        return _types(schema["allOf"][0], root, depth - 1)
    return _ANY


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of schema `root` that `reference`, `#/…`, names; None if there is none."""
    value: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        value = value.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value
