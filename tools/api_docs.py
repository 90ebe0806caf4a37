"""Writes the field tables of docs/api.md from server/schemas: `python -m tools.api_docs [--check]`.

Each table is between two marker lines; the rest of the page is written by hand. `make lint` checks the tables.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from server.openapi import Field, fields_of, request_models, request_schemas
from server.schemas.body import NO_CHANGE
from server.schemas.tolerated import TOLERATED
from tools.written import write_or_compare

PAGE = Path(__file__).parent.parent / "docs" / "api.md"

_NOT_SUPPORTED = "Not supported"
_BAR = "\\|"


def main(arguments: Sequence[str]) -> int:
    """Write or check the page. Returns the exit code."""
    return write_or_compare({PAGE: with_tables(PAGE.read_text("utf-8"))}, arguments, "make docs")


def with_tables(page: str) -> str:
    """Return `page` with each request's tables between its markers. Raises `ValueError` if markers are missing."""
    schemas = request_schemas()
    requests = [request.__name__ for request in request_models()]
    for name in requests:
        page = _between_markers(page, name, tables(schemas[name]))
    objects = sorted(name for name, schema in schemas.items() if "properties" in schema and name not in requests)
    page = _between_markers(page, "tolerated", "\n".join(_tolerated()) + "\n")
    return _between_markers(page, "objects", "\n".join(f"### {name}\n\n{tables(schemas[name])}" for name in objects))


def _between_markers(page: str, name: str, text: str) -> str:
    opening, closing = f"<!-- fields of {name}: written by `make docs` -->\n", f"<!-- end of {name} -->"
    before, opened, rest = page.partition(opening)
    _, closed, after = rest.partition(closing)
    if not opened or not closed:
        raise ValueError(f"docs/{PAGE.name} needs the lines {opening.strip()} and {closing}")
    return f"{before}{opening}\n{text}\n{closing}{after}"


def tables(schema: Mapping[str, Any]) -> str:
    """A table of the fields that have an effect, and lists of the ignored and of the refused ones."""
    fields = list(fields_of(schema))
    ignored = [field for field in fields if field.meaning == NO_CHANGE]
    refused = [field for field in fields if field.type == "null" or field.meaning.startswith(_NOT_SUPPORTED)]
    effective = [field for field in fields if field not in ignored and field not in refused]
    parts = ["\n".join(_table(effective))]
    if ignored:
        parts.append(f"Accepted, and change nothing: {_listed(ignored)}.")
    if refused:
        parts.append(f"Refused with a 400 that names the field: {_listed(refused)}.")
    return "\n\n".join(parts) + "\n"


def _table(fields: Sequence[Field]) -> Iterator[str]:
    yield "| Field | Type | Default | Meaning |"
    yield "| --- | --- | --- | --- |"
    for field in fields:
        default = field.default if field.default in ("", "required") else f"`{field.default}`"
        cells = (f"`{field.name}`", field.type, default, field.meaning)
        yield f"| {' | '.join(cell.replace('|', _BAR) for cell in cells)} |"


def _tolerated() -> Iterator[str]:
    yield "| Field | Accepted values | Sent by |"
    yield "| --- | --- | --- |"
    for field in TOLERATED:
        values = " or ".join(f"`{json.dumps(value)}`" for value in field.values) or "any"
        yield f"| `{field.object_path}{field.name}` | {values} | {field.sent_by} |"


def _listed(fields: Sequence[Field]) -> str:
    return ", ".join(f"`{field.name}`" for field in fields)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
