"""Structured output over HTTP: answers follow their format, invalid formats are refused, and others are not
affected."""

import contextlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI

from tests.e2e.kaon_server import MODEL, KaonServer, eventually
from tests.e2e.processes import wait_gone

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def complete(client: OpenAI, **extra: Any) -> Any:
    fields = {"model": MODEL, "prompt": "Tell me", "max_tokens": 80, "temperature": 1.0, "seed": 3}
    own = {name: extra.pop(name) for name in list(extra) if name in ("n", "stop", "stream", "logprobs", "max_tokens")}
    return client.completions.create(**{**fields, **own}, extra_body=extra)


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def is_person(text: str) -> bool:
    person = json.loads(text)
    return list(person) == ["name", "age"] and len(person["name"]) <= 12 and 0 <= person["age"] <= 99


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"response_format": json_schema(PERSON)}, is_person),
        ({"structured_outputs": {"json": PERSON}}, is_person),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, is_person),
        ({"guided_json": PERSON}, is_person),
        ({"structured_outputs": {"regex": "[a-c]{2}-[0-9]{3}"}}, re.compile("[a-c]{2}-[0-9]{3}").fullmatch),
        ({"guided_regex": "^(yes|no)$"}, re.compile("yes|no").fullmatch),
        ({"structured_outputs": {"choice": ["left", "right"]}}, {"left", "right"}.__contains__),
        ({"guided_choice": ["left"]}, {"left"}.__contains__),
        ({"structured_outputs": {"grammar": 'root ::= x "!"\nx ::= "a" | "b"'}}, {"a!", "b!"}.__contains__),
        ({"guided_grammar": 'start: x "!"\nx: "a" | "b"'}, {"a!", "b!"}.__contains__),
    ],
)
def test_an_answer_has_the_form_asked_for(client: OpenAI, fields: dict[str, Any], holds: Any) -> None:
    answer = complete(client, n=2, ignore_eos=True, **fields)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert holds(choice.text)


def test_any_object_is_an_object_as_far_as_it_came(client: OpenAI) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        (choice,) = complete(client, **fields).choices
        assert choice.text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)


def test_a_stream_is_the_whole_answer_in_parts(client: OpenAI) -> None:
    whole = complete(client, logprobs=2, structured_outputs={"json": PERSON}).choices[0]
    chunks = list(complete(client, stream=True, logprobs=2, structured_outputs={"json": PERSON}))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    assert len(whole.logprobs.token_logprobs) == sum(len(chunk.choices[0].logprobs.tokens) for chunk in chunks)


def test_a_stop_string_ends_an_answer_within_its_form(client: OpenAI) -> None:
    (choice,) = complete(client, stop='"age"', structured_outputs={"json": PERSON}).choices
    assert choice.finish_reason == "stop"
    assert choice.text.startswith('{"name"') or choice.text.startswith("{")
    assert "age" not in choice.text


HOSTILE = {
    "nested 10000 deep": {"json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
    "a chain of references": {
        "json": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1000)}
            | {"d1000": {}},
        }
    },
    "endless reference": {"json": {"$ref": "#"}},
    "reference to a URL": {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "reference to a file": {"json": {"$ref": "file:///etc/passwd"}},
    "unknown type": {"json": {"type": "strin"}},
    "unsupported keyword": {"json": {"type": "object", "not": {}}},
    "nothing to choose": {"json": {"enum": []}},
    "products of alternatives": {
        "json": {
            "allOf": [
                {"properties": {f"p{i}": {"type": "string", "pattern": "a" * i}, "z": {"pattern": f"x{i}"}}}
                for i in range(200)
            ]
        }
    },
    "enum of 30000": {"json": {"enum": [f"{i * 7919:x}" for i in range(30_000)]}},
    "no regex": {"regex": "(a"},
    "look-ahead": {"regex": "(?=a)b"},
    "grammar without a rule": {"grammar": 'start: "a" nope'},
    "deep grammar": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "long chain of rules": {
        "grammar": "start: a0\n" + "\n".join(f'a{i}: a{i + 1} | "x{i}"' for i in range(4000)) + '\na4000: "z"'
    },
    "empty choice": {"choice": []},
    "3 MB": {"regex": "a" * 3_000_000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_cannot_be_followed_is_a_400_that_names_its_field(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, structured_outputs=HOSTILE[name])
    (field,) = HOSTILE[name]
    assert error.value.param == f"structured_outputs.{field}"
    assert len(error.value.body["message"]) < 600


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|a)*{1000}{1000}",
        "(.*a){30}",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("(a+)+$", "(x+x+)+y", "a{1,9999}")),
    ],
)
def test_a_catastrophic_regex_is_enforced_or_refused_and_delays_no_other(client: OpenAI, pattern: str) -> None:
    outcome = "followed"
    try:
        complete(client, structured_outputs={"regex": pattern})
    except openai.BadRequestError as error:
        outcome = error.body["message"]
    assert outcome == "followed" or "costly" in outcome


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json"),
        ({"response_format": json_schema({}), "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": json_schema({"type": 7})}, "response_format.json_schema.schema"),
    ],
)
def test_fields_that_make_no_sense_are_named(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, **fields)
    assert error.value.param == param


def test_a_conflict_that_leaves_no_token_is_a_400_that_names_both_sides(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="grammar and allowed_token_ids") as error:
        complete(client, structured_outputs={"choice": ["yes"]}, allowed_token_ids=[300])
    assert "forbid every" in str(error.value)


def test_hostile_grammars_leave_the_streams_of_others_and_the_engine_alone(server: KaonServer, client: OpenAI) -> None:
    def stream() -> list[str]:
        chunks = client.completions.create(
            model=MODEL,
            prompt="Hello",
            max_tokens=100,
            temperature=1.0,
            seed=4,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return [chunk.choices[0].text for chunk in chunks]

    expected, core = "".join(stream()), server.core.pid
    hostile = ["products of alternatives", "long chain of rules"]
    with ThreadPoolExecutor() as pool:
        neighbour = pool.submit(stream)
        for number, name in enumerate(hostile):
            # Not one of those whose result is cached.
            asked = json.loads(json.dumps(HOSTILE[name]).replace("x", f"x{number}"))
            with pytest.raises(openai.BadRequestError):
                complete(client, structured_outputs=asked)
        assert "".join(neighbour.result()) == expected
    assert server.core.pid == core
    eventually(lambda: len(server.process.children()) <= 2 and not any(map(is_zombie, server.process.children())))


def is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.slow  # With all other processes: tests/chaos/test_shutdown.py.
def test_the_checking_process_ends_with_the_server(start_server: Any) -> None:
    server = start_server().ready()
    with server.client() as client:
        complete(client, max_tokens=5, structured_outputs={"choice": ["a", "b"]})
    checkers = [child for child in server.process.children() if child.pid != server.core.pid]
    assert len(checkers) == 1
    server.process.kill()
    wait_gone(checker.pid for checker in checkers)
