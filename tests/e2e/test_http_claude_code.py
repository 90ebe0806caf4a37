"""Turns of Claude Code through `/v1/messages`: its requests are read, and its expectations of answers are met.

Its requests were recorded by `tests.agents.record`. The model is scripted, in the embedded model's dialect of calls.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic._streaming import SSEDecoder
from anthropic.types import RawMessageStreamEvent
from pydantic import ConfigDict, TypeAdapter

from tests.e2e.kaon_server import MODEL
from tests.e2e.scripted_server import ScriptedServer

RECORDED = [
    json.loads(line) for line in (Path(__file__).parents[1] / "agents" / "claude-code.jsonl").read_text().splitlines()
]
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent, config=ConfigDict(defer_build=True))
DONE = r"<\|im_start\|>assistant\n$"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


READ, RUN, EDIT = call("Read", file_path="a.txt"), call("Bash", command='echo "é\\n"'), call("Edit", file_path="a.txt")
RULES = [
    (f"was edited.*{DONE}", "<think>\nThat worked.\n</think>\n\nAll is done."),
    (f"a line of text.*{DONE}", f"<think>\nNow I edit.\n</think>\n\nI edit.\n{EDIT}"),
    (f"Change the file.*{DONE}", f"<think>\nFirst I read, “as always”.\n</think>\n\nI read.\n{READ}\n{RUN}"),
    ("", "Hello."),
]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    face = {"chat_template": None, "tool_call_parser": "auto"}
    running = ScriptedServer(tmp_path_factory.mktemp("scripted") / "log", RULES, server_config=face).ready()
    with running.http() as client:
        yield client
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "description": f"What {name} does. " * 40, "input_schema": {"type": "object"}}


class Agent:
    """Sends turns as Claude Code does: the recorded fields around a conversation, with another first line each
    time."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._number = itertools.count()
        self.messages: list[dict[str, Any]] = []
        self.answer: httpx.Response

    def turn(self, *content: dict[str, Any]) -> dict[str, Any]:
        """The message that answers `content`, assembled from the stream as the client does."""
        self.messages.append({"role": "user", "content": list(content)})
        fields = RECORDED[0]["body"]
        line = f"x-anthropic-billing-header: cc_version=2.1.332.{next(self._number):03x}; cc_entrypoint=cli;"
        body = {
            **fields,
            "model": MODEL,
            "system": [{"type": "text", "text": line}, *fields["system"][1:]],
            "tools": [tool("Read"), tool("Bash"), tool("Edit")],
            "messages": self.messages,
        }
        self.answer = self._http.post(RECORDED[0]["path"], json=body, headers=RECORDED[0]["headers"])
        assert self.answer.status_code == 200, self.answer.text
        message = assembled(self.answer.content)
        self.messages.append({"role": "assistant", "content": message["content"]})
        return message


def frames(pieces: Iterator[bytes]) -> list[tuple[str | None, Any]]:
    """The events of a stream that arrives in pieces, decoded by the official client."""
    return [(each.event, each.json()) for each in SSEDecoder().iter_bytes(pieces)]


def assembled(stream: bytes) -> dict[str, Any]:
    """The message of a stream, which does not depend on how its bytes are divided."""
    whole = frames(iter([stream]))
    assert frames(bytes([each]) for each in stream) == whole
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for name, event in whole:
        assert name == event["type"]
        if name == "ping":
            continue
        EVENTS.validate_python(event)
        match event:
            case {"type": "message_start"}:
                message = event["message"]
            case {"type": "content_block_start"}:
                message["content"].append(event["content_block"])
            case {"type": "content_block_delta", "index": index, "delta": {"type": "input_json_delta"} as delta}:
                inputs[index] = inputs.get(index, "") + delta["partial_json"]
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                field = delta["type"].removesuffix("_delta")
                message["content"][index][field] += delta[field]
            case {"type": "message_delta"}:
                message |= event["delta"] | {"usage": event["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def result(call: dict[str, Any], words: str, **fields: Any) -> dict[str, Any]:
    return {"tool_use_id": call["id"], "type": "tool_result", "content": words, **fields}


def test_a_loop_of_three_turns_calls_tools_and_keeps_its_prefix(http: httpx.Client) -> None:
    agent = Agent(http)
    first = agent.turn(text("Change the file."))
    thought, said, read, run = first["content"]
    # Claude Code asks for `display: omitted`: the signature alone carries the thought to the next turn.
    assert (thought["type"], thought["thinking"], bool(thought["signature"])) == ("thinking", "", True)
    assert said == text("I read.")
    assert [(each["name"], each["input"]) for each in (read, run)] == [
        ("Read", {"file_path": "a.txt"}),
        ("Bash", {"command": 'echo "é\\n"'}),
    ]
    assert first["stop_reason"] == "tool_use"
    assert agent.answer.headers["x-kaon-ignored"] == "system[0] (billing line)"
    second = agent.turn(result(read, "a line of text"), result(run, "é", is_error=False))
    assert [block["type"] for block in second["content"]] == ["thinking", "text", "tool_use"]
    last = agent.turn(result(second["content"][-1], "a.txt was edited", cache_control={"type": "ephemeral"}))
    assert [block["type"] for block in last["content"]] == ["thinking", "text"]
    assert (last["content"][1]["text"], last["stop_reason"]) == ("All is done.", "end_turn")
    for before, after in ((first, second), (second, last)):
        prefix = sum(before["usage"][name] for name in before["usage"] if name.endswith("input_tokens"))
        assert after["usage"]["cache_read_input_tokens"] > 0.9 * prefix


def test_a_conversation_whose_first_line_differs_finds_the_tools_of_another_in_the_cache(http: httpx.Client) -> None:
    usages = [Agent(http).turn(text(words))["usage"] for words in ("One.", "Two.")]
    usage = usages[1]
    prompt = sum(usage[name] for name in usage if name.endswith("input_tokens"))
    assert usage["cache_read_input_tokens"] > 0.9 * prompt


def test_thinking_that_was_changed_on_its_way_is_refused(http: httpx.Client) -> None:
    agent = Agent(http)
    first = agent.turn(text("Change the file."))
    first["content"][0]["thinking"] += " Not."
    body = {"model": MODEL, "max_tokens": 5, "messages": [*agent.messages, {"role": "user", "content": [text("Go.")]}]}
    body["messages"][-1]["content"] = [result(each, "x") for each in first["content"] if each["type"] == "tool_use"]
    refused = http.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("messages[1].content[0]: Invalid `signature` in `thinking`")


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_what_claude_code_sent_is_answered(http: httpx.Client, number: int) -> None:
    recorded = RECORDED[number]
    body = {**recorded["body"], "model": MODEL, "stream": True}
    answer = http.post(recorded["path"], json=body, headers=recorded["headers"])
    assert answer.status_code == 200, answer.text
    assert assembled(answer.content)["content"] == [text("Hello.")]
    whole = http.post(recorded["path"], json={**body, "stream": False})
    assert whole.json()["content"] == [text("Hello.")]
    counted = {name: recorded["body"][name] for name in ("messages", "system", "tools", "thinking")}
    count = http.post("/v1/messages/count_tokens?beta=true", json={**counted, "model": MODEL}).json()["input_tokens"]
    usage = whole.json()["usage"]
    assert count == sum(usage[name] for name in usage if name.endswith("input_tokens"))
