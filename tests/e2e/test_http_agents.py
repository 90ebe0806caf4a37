"""Turns of coding agents through `/v1/responses`: their requests are read, and their expectations of answers are met.

The model is scripted, and its chat template shows its whole input.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai._streaming import SSEDecoder

from tests.e2e.agent_requests import CODEX_HEADERS, CODEX_TOOLS, HOSTED, as_codex_returns, codex, message
from tests.e2e.kaon_server import MODEL
from tests.e2e.scripted_server import ScriptedServer

PATCH = '*** Begin Patch\n*** Add File: a.txt\n+say "é"\n+C:\\x\n*** End Patch\n'
SUMMARY = "The user wants a patch; a.txt is written."


def call(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


RULES = [
    (r'write a summary that will replace this conversation[^"]*"\}\]', SUMMARY),
    (r"replaced by this summary.*" + SUMMARY, "I go on from the summary."),
    (r'"role": "tool"[^}]*milk', "Buy milk."),
    (r'"role": "tool"[^}]*content of type image', "I see no image."),
    (r'"reasoning_content": "I weigh it\."', "I remember that I weighed it."),
    (r"Read my note", "I read it.\n" + call("mcp__notes__read_note", title="shopping")),
    (r"Patch it", "<think>I weigh it.</think>\n\n" + call("apply_patch", input=PATCH)),
    (r"Run two", call("exec_command", cmd="ls") + "\n" + call("multi_agent_v1__spawn_agent", message="Count.")),
    (r"", "Hello."),
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    running = ScriptedServer(tmp_path_factory.mktemp("scripted") / "log", RULES).ready()
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


@pytest.fixture
def http(scripted: ScriptedServer) -> Iterator[httpx.Client]:
    with scripted.http() as client:
        yield client


def frames(pieces: Iterator[bytes]) -> list[tuple[str | None, Any]]:
    """The events of a stream that arrives in pieces, decoded by the official client."""
    return [(each.event, each.json()) for each in SSEDecoder().iter_bytes(pieces)]


def turn(http: httpx.Client, body: dict[str, Any]) -> tuple[list[Any], httpx.Response]:
    """The events of a turn. The stream does not depend on how its bytes are divided."""
    answer = http.post("/v1/responses", json=body, headers=CODEX_HEADERS)
    assert answer.status_code == 200, answer.text
    whole = frames(iter([answer.content]))
    assert frames(bytes([each]) for each in answer.content) == whole
    assert [name for name, _ in whole] == [event["type"] for _, event in whole]
    assert [event["sequence_number"] for _, event in whole] == list(range(len(whole)))
    return [event for _, event in whole], answer


def completed(events: list[Any]) -> list[Any]:
    """The items of a response, which equal those that its events completed."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    response = events[-1]["response"]
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    assert {"cached_tokens"} <= usage["input_tokens_details"].keys()
    assert {"reasoning_tokens"} <= usage["output_tokens_details"].keys()
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == response["output"]
    return items


def test_codex_gets_an_answer_and_hears_what_was_left_out(http: httpx.Client) -> None:
    events, answer = turn(http, codex(message("user", "Say hello.")))
    (said,) = completed(events)
    assert said["content"][0]["text"] == "Hello."
    assert answer.headers["x-kaon-ignored"] == HOSTED
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"]


def test_a_tool_of_an_mcp_server_is_called_by_its_two_names_and_answered(http: httpx.Client) -> None:
    asked = message("user", "Read my note.")
    said, called = completed(turn(http, codex(asked))[0])
    assert said["content"][0]["text"] == "I read it."
    assert (called["type"], called["namespace"], called["name"]) == ("function_call", "mcp__notes", "read_note")
    assert json.loads(called["arguments"]) == {"title": "shopping"}
    output = {"type": "function_call_output", "call_id": called["call_id"], "output": "milk"}
    history = [asked, as_codex_returns(said), as_codex_returns(called), output]
    assert completed(turn(http, codex(*history))[0])[0]["content"][0]["text"] == "Buy milk."


def test_a_patch_is_streamed_as_text_and_reasoning_comes_back_sealed(http: httpx.Client) -> None:
    asked = message("user", "Patch it.")
    events, _ = turn(http, codex(asked))
    reasoning, called = completed(events)
    assert (called["type"], called["name"], called["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(event["delta"] for event in deltas) == PATCH
    assert len(deltas) > 3
    assert {event["item_id"] for event in deltas} == {called["id"]}
    assert "weigh" not in reasoning["encrypted_content"]
    output = {"type": "custom_tool_call_output", "call_id": called["call_id"], "output": "Done."}
    history = [asked, as_codex_returns(reasoning), as_codex_returns(called), output]
    assert completed(turn(http, codex(*history))[0])[0]["content"][0]["text"] == "I remember that I weighed it."


@pytest.mark.parametrize(("syntax", "definition"), [("lark", "start: nowhere"), ("lark", "\0"), ("regex", "a(")])
def test_a_grammar_that_is_wrong_is_refused_by_its_place(http: httpx.Client, syntax: str, definition: str) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    custom = {"type": "custom", "name": "edit", "format": form}
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "description": "d", "tools": [custom]}]
    answer = http.post("/v1/responses", json=codex(message("user", "Hi"), tools=tools), headers=CODEX_HEADERS)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools[1].tools[0].format.definition")
    assert "is refused: it" in error["message"]


def test_calls_of_two_kinds_stand_in_one_answer(http: httpx.Client) -> None:
    shell, agent = completed(turn(http, codex(message("user", "Run two.")))[0])
    assert (shell["name"], shell.get("namespace")) == ("exec_command", None)
    assert (agent["name"], agent["namespace"]) == ("spawn_agent", "multi_agent_v1")


def test_an_image_in_a_tools_output_is_a_note(http: httpx.Client) -> None:
    called = {"type": "function_call", "call_id": "c1", "name": "view_image", "arguments": '{"path": "x"}'}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "high"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [image]}
    events, answer = turn(http, codex(message("user", "Look."), called, output))
    assert completed(events)[0]["content"][0]["text"] == "I see no image."
    assert "input[5].output[0] (input_image)" in answer.headers["x-kaon-ignored"]


def test_reasoning_that_was_changed_is_refused(http: httpx.Client) -> None:
    asked = message("user", "Patch it.")
    reasoning = as_codex_returns(completed(turn(http, codex(asked))[0])[0])
    blob = reasoning["encrypted_content"]
    reasoning["encrypted_content"] = blob[:40] + ("A" if blob[40] != "A" else "B") + blob[41:]
    answer = http.post("/v1/responses", json=codex(asked, reasoning), headers=CODEX_HEADERS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_encrypted_content")


def test_a_compaction_takes_the_place_of_the_conversation(http: httpx.Client) -> None:
    history = [message("user", "Patch it."), message("assistant", "It is done."), message("user", "Thanks.")]
    events, _ = turn(http, codex(*history, {"type": "compaction_trigger"}))
    (item,) = completed(events)
    assert item["type"] == "compaction"
    rest = codex(message("user", "Thanks."), item, message("user", "And now?"))
    assert completed(turn(http, rest)[0])[0]["content"][0]["text"] == "I go on from the summary."


def test_the_endpoint_for_compaction_keeps_what_the_user_said(scripted: ScriptedServer) -> None:
    history: list[Any] = [message("user", "Patch it."), message("assistant", "Done."), message("user", "Thanks.")]
    with scripted.client() as client:
        compacted = client.responses.compact(model=MODEL, input=history, instructions="You are an agent.")
        assert compacted.object == "response.compaction"
        assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
        kept = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
        answer = client.responses.create(model=MODEL, input=[*kept, {"role": "user", "content": "And now?"}])
        assert answer.output_text == "I go on from the summary."
        assert compacted.usage.output_tokens > 0
        first = client.responses.create(model=MODEL, input="Patch it.")
        again = client.responses.compact(model=MODEL, previous_response_id=first.id)
        assert [item.type for item in again.output] == ["message", "compaction"]
        for wrong in ({}, {"input": "Hi", "extra_body": {"stream": True}}):
            with pytest.raises(openai.BadRequestError):
                client.responses.compact(model=MODEL, **wrong)


def test_a_compaction_of_another_server_is_refused(http: httpx.Client) -> None:
    body = codex({"type": "compaction", "encrypted_content": "gAAAA"}, message("user", "And now?"))
    answer = http.post("/v1/responses", json=body, headers=CODEX_HEADERS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_encrypted_content")


def test_a_websocket_is_refused_such_that_codex_goes_over_to_http(http: httpx.Client) -> None:
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    answer = http.get("/v1/responses", headers=headers)
    assert answer.status_code == 426
    assert "does not speak WebSocket; send a POST" in answer.json()["error"]["message"]
    assert http.get("/v1/responses").status_code == 405


def test_the_catalog_names_what_codex_needs(http: httpx.Client) -> None:
    listed = http.get("/v1/models", params={"client_version": "0.169.0"}).json()
    (model,) = listed["models"]
    assert model["slug"] == listed["data"][0]["id"] == MODEL
    assert model["context_window"] == 131072
    assert [level["effort"] for level in model["supported_reasoning_levels"]] == ["none", "low", "medium", "high"]
    assert model["apply_patch_tool_type"] == "freeform"
    assert model["base_instructions"]


def test_a_stored_conversation_goes_on_behind_a_custom_call(scripted: ScriptedServer) -> None:
    with scripted.client() as client:
        first = client.responses.create(model=MODEL, input="Patch it.", tools=CODEX_TOOLS)  # type: ignore[arg-type]
        called = first.output[-1]
        assert called.type == "custom_tool_call"
        output: Any = {"type": "custom_tool_call_output", "call_id": called.call_id, "output": "Done."}
        second = client.responses.create(model=MODEL, input=[output], previous_response_id=first.id)
        assert second.output_text == "I remember that I weighed it."
        listed = client.responses.input_items.list(second.id, order="asc")
        assert [item.type for item in listed] == [
            "message",
            "reasoning",
            "custom_tool_call",
            "custom_tool_call_output",
        ]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server for two keys, each of which may have one request at a time."""
    folder = tmp_path_factory.mktemp("keyed")
    log, keys = folder / "log", folder / "keys"
    keys.write_text("sk-one\nsk-two\n")
    face = {"api_key_file": str(keys), "max_requests_per_key": 1}
    running = ScriptedServer(log, [("Hold on", "word " * 40_000), *RULES], server_config=face).ready()
    yield running
    assert running.stop() == 0


def headers_of(key: str) -> dict[str, str]:
    return {**CODEX_HEADERS, "authorization": f"Bearer {key}"}


def test_reasoning_that_another_keys_client_got_is_refused(keyed: ScriptedServer) -> None:
    asked = message("user", "Patch it.")
    with keyed.http() as http:
        own, other = headers_of("sk-one"), headers_of("sk-two")
        first = http.post("/v1/responses", json=codex(asked, stream=False), headers=own).json()
        body = codex(asked, as_codex_returns(first["output"][0]), stream=False)
        assert http.post("/v1/responses", json=body, headers=own).status_code == 200
        refused = http.post("/v1/responses", json=body, headers=other)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_encrypted_content")
        assert "weigh" not in refused.text


def test_codex_reads_in_the_stream_when_to_try_again(keyed: ScriptedServer) -> None:
    with keyed.http() as http:
        long = codex(message("user", "Hold on."))
        with http.stream("POST", "/v1/responses", json=long, headers=headers_of("sk-one")) as held:
            assert next(held.iter_lines()) == "event: response.created"
            body = codex(message("user", "Say hello."))
            failed = http.post("/v1/responses", json=body, headers=headers_of("sk-one"))
            *_, (_, last) = frames(iter([failed.content]))
            assert last["type"] == "response.failed"
            error = last["response"]["error"]
            assert error["code"] == "rate_limit_exceeded"
            assert re.search(r"try again in \d+(\.\d+)?s", error["message"])
            others = {name: value for name, value in headers_of("sk-one").items() if name != "originator"}
            assert http.post("/v1/responses", json=body, headers=others).status_code == 429


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server whose context is too short for any turn of an agent."""
    log = tmp_path_factory.mktemp("narrow") / "log"
    running = ScriptedServer(log, RULES, context=512).ready()
    yield running
    assert running.stop() == 0


def test_codex_reads_in_the_stream_that_its_prompt_is_too_long(narrow: ScriptedServer) -> None:
    with narrow.http() as http:
        events, _ = turn(http, codex(message("user", "Say hello. " * 200)))
        assert [event["type"] for event in events] == ["response.created", "response.failed"]
        assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
        for headers, stream in ((CODEX_HEADERS, False), ({}, True)):
            body = codex(message("user", "Say hello. " * 200), stream=stream)
            refused = http.post("/v1/responses", json=body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_conversation_beyond_the_context_is_compacted_from_its_end(narrow: ScriptedServer) -> None:
    with narrow.client() as client:
        long: list[Any] = [*itertools.repeat({"role": "user", "content": "Say hello. " * 10}, 40)]
        compacted = client.responses.compact(model=MODEL, input=long)
        assert compacted.output[-1].type == "compaction"
        assert 1 < len(compacted.output) < 10
        assert compacted.usage.input_tokens <= 512 - 512 // 4
        with pytest.raises(openai.BadRequestError, match=r"it leaves .* tokens for a summary, which needs 128"):
            client.responses.compact(model=MODEL, input=long, instructions="Say hello. " * 60)


# Requests of agents, reduced to their structure by `tests.agents.record`.

RECORDS = Path(__file__).parents[1] / "agents"
RECORDED = [
    pytest.param(json.loads(line), id=f"{file.stem}-{number}")
    for file in sorted(RECORDS.glob("*.jsonl"))
    if file.stem != "claude-code"
    for number, line in enumerate(file.read_text().splitlines())
]
ACCEPTED = re.compile(r"tools\[\d+\] \(\w+\)|reasoning \(encrypted_content of another server\)")
"""The parts of a recorded request that may be omitted."""


def said(answer: httpx.Response, path: str) -> str:
    """The text of an answer. A stream's events do not depend on how its bytes are divided."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        body = answer.json()
        if path == "/v1/chat/completions":
            return str(body["choices"][0]["message"]["content"])
        return "".join(part["text"] for item in body["output"] for part in item.get("content", ()))
    whole = frames(iter([answer.content.replace(b"data: [DONE]", b"data: null")]))
    if path == "/v1/chat/completions":
        choices = [choice for _, chunk in whole if chunk for choice in chunk["choices"]]
        assert [choice["finish_reason"] for choice in choices][-1] == "stop"
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    return "".join(
        part["text"] for item in completed([event for _, event in whole]) for part in item.get("content", ())
    )


@pytest.mark.parametrize("recorded", RECORDED)
def test_what_agents_sent_is_answered(http: httpx.Client, recorded: dict[str, Any]) -> None:
    path, headers = recorded["path"], recorded["headers"]
    body = {**recorded["body"], "model": MODEL}
    items = body.get("input", ())
    if any(item["type"] == "compaction" for item in items):
        # Another server sealed it: a lost summary must be reported.
        refused = http.post(path, json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_encrypted_content")
        return
    answer = http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    ignored = answer.headers.get("x-kaon-ignored", "")
    assert all(ACCEPTED.fullmatch(each) for each in filter(None, ignored.split(", "))), ignored
    if any(item["type"] == "compaction_trigger" for item in items):
        return
    assert said(answer, path) == "Hello."
    whole = {name: value for name, value in body.items() if name != "stream_options"}
    assert said(http.post(path, json={**whole, "stream": False}, headers=headers), path) == "Hello."


def test_every_agent_that_the_page_names_was_recorded() -> None:
    names = {file.stem for file in RECORDS.glob("*.jsonl")}
    assert {"claude-code", "codex", "coding-agents", "aider", "qwen-code", "pi"} <= names
