"""JSON schemas of requests in words: each field's type, default and meaning. For `/docs` and docs/api.md."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_REF = "#/components/schemas/"
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
        return str(schema["$ref"]).removeprefix(_REF)
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
