"""docs/api.md and `/docs` describe each field as the request models do."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server import openapi as api_page
from server.openapi import Description, fields_of, request_models, request_schemas, type_of
from server.schemas.tolerated import TOLERATED
from tests.e2e.processes import END_SECONDS
from tools import api_docs


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert api_docs.main(["--check"]) == 0, capsys.readouterr().err


def test_every_field_of_every_request_is_on_the_page() -> None:
    page = api_docs.PAGE.read_text()
    for request in request_models():
        assert [name for name in request.model_fields if f"`{name}`" not in page] == []


def test_fields_that_do_nothing_and_fields_that_are_refused_are_distinguished() -> None:
    chat = api_docs.tables(request_schemas()["ChatCompletionRequest"])
    accepted = next(line for line in chat.splitlines() if line.startswith("Accepted, and change nothing"))
    refused = next(line for line in chat.splitlines() if line.startswith("Refused with a 400"))
    assert "`store`" in accepted
    assert "`user`" in accepted
    assert "`audio`" in refused
    assert "| `store`" not in chat


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, "integer, at least 1"),
        ({"anyOf": [{"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"}]}, "number, 0 to 2"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 10}, "number, above 0 to 10"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "string or list of string"),
        ({"enum": ["a", "b"]}, '"a" or "b"'),
        ({"const": "function"}, '"function"'),
        ({"type": "array", "items": {"$ref": "#/components/schemas/Message"}}, "list of Message"),
        ({"type": "null"}, "null"),
        ({}, "any"),
    ],
)
def test_a_type_is_reported_in_a_few_words(schema: dict[str, object], words: str) -> None:
    assert type_of(schema) == words


def test_a_default_is_reported_as_json_and_a_required_field_as_such() -> None:
    schema = {
        "required": ["a"],
        "properties": {"a": {}, "b": {"default": True}, "c": {"default": None, "anyOf": [{"description": "Some."}]}},
    }
    assert [(field.default, field.meaning) for field in fields_of(schema)] == [
        ("required", ""),
        ("true", ""),
        ("", "Some."),
    ]


def test_a_stale_page_fails_the_check_and_a_page_without_markers_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "api.md"
    page.write_text(api_docs.PAGE.read_text().replace("| `model` |", "| `modell` |"))
    monkeypatch.setattr(api_docs, "PAGE", page)
    assert api_docs.main(["--check"]) == 1
    assert "api.md" in capsys.readouterr().err
    assert api_docs.main([]) == 0
    assert api_docs.main(["--check"]) == 0
    page.write_text("nothing")
    with pytest.raises(ValueError, match="needs the lines"):
        api_docs.main([])


def test_what_stands_between_backticks_is_code_on_the_page_for_people() -> None:
    schema = {"properties": {"model": {"type": "string", "description": "As `/v1/<models>` lists it, or `none`."}}}
    document = {"info": {"title": "Kaon", "version": "1"}, "paths": {}, "components": {"schemas": {"Some": schema}}}
    assert "As <code>/v1/&lt;models&gt;</code> lists it, or <code>none</code>." in api_page.page(document)


def test_every_tolerated_field_is_on_the_page() -> None:
    page = api_docs.PAGE.read_text()
    assert [field.name for field in TOLERATED if f"`{field.object_path}{field.name}`" not in page] == []


async def test_clients_that_wait_for_the_description_occupy_one_thread() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    release, created = threading.Event(), list[bool]()

    def describe() -> dict[str, Any]:
        created.append(release.wait(END_SECONDS))
        return {"info": {"title": "x", "version": "1"}, "paths": {}, "components": {"schemas": {}}}

    description = Description(describe, "")
    waiting = [asyncio.create_task(description.forms()) for _ in range(5)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "other work"), END_SECONDS)
    release.set()
    assert len(set(await asyncio.gather(*waiting))) == 1
    assert created == [True]


def test_no_schema_has_the_name_of_a_module() -> None:
    schemas = api_page.request_schemas()
    assert {"ChatCustomTool", "ResponsesCustomTool"} <= set(schemas)
    assert "server__" not in json.dumps(schemas)
