"""Random changes of the requests of agents to `/v1/responses` give an answer or an error object, and do not affect
others."""

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from tests.e2e.agent_requests import codex, message
from tests.e2e.kaon_server import KaonServer
from tests.fuzz.hostile import Hostile
from tests.fuzz.test_hostile_requests import Attack

PATHS = ("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens")

LEAVES: list[Any] = [
    None, True, False, 0, -1, 0.5, 2**31, 2**63, 10**30, "", "\x00", "x" * 70, "\u202e{}", "\\ud800",
    [], {}, [[]], [{}], {"type": "function"}, {"": ""}, {"$ref": "#"}, "c1", "function", "custom", "reasoning",
    "compaction", "namespace", "message", "a2FvbjE=", "start: (", "(a*)*b", "%ignore /x/",
]  # fmt: skip


def body() -> dict[str, Any]:
    """A turn with every kind of item and tool, in which many values can be wrong."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "gAAA"},
        {"type": "function_call", "call_id": "c1", "name": "f", "namespace": "n", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": [image, {"type": "input_text", "text": "t"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "y"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c3", "output": "z"},
        {"type": "mcp_call", "id": "m", "server_label": "s", "name": "g", "arguments": "{}", "output": "o"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "more"}]},
        {"type": "agent_message", "content": [{"type": "input_text", "text": "hi"}]},
        message("assistant", "Hm."),
        message("user", "Hi"),
    ]
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": "f", "parameters": schema, "strict": True},
        {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "regex", "definition": "a{1,3}"}},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "f"}]},
        {"type": "mcp", "server_label": "x", "server_url": "https://example.com"},
        {"type": "web_search"},
    ]
    return codex(*items, tools=tools, stream=False, max_output_tokens=2)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The positions in a JSON value at which it can be changed."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(given: dict[str, Any], rng: Random) -> dict[str, Any]:
    """A copy with one to three changes: a value replaced, removed, doubled, or moved to another position."""
    made = copy.deepcopy(given)
    for _ in range(rng.randint(1, 3)):
        everywhere = [place for place in places(made) if place[0] not in ("model", "max_output_tokens")]
        *path, last = rng.choice(everywhere)
        holder: Any = made
        for key in path:
            holder = holder[key]
        match rng.randrange(5):
            case 0:
                del holder[last]
            case 1 if isinstance(holder, list):
                holder.insert(rng.randint(0, len(holder)), copy.deepcopy(holder[last]))
            case 1 | 2 if isinstance(holder, dict):
                holder[rng.choice(["name", "type", "id", "namespace", "output", "tools", "unheard_of"])] = holder[last]
            case _:
                holder[last] = copy.deepcopy(rng.choice(LEAVES))
    return made


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", PATHS)
async def test_any_change_of_an_agents_request_is_answered_or_refused(
    server: KaonServer, path: str, count: int, record_property: Any
) -> None:
    rng = Random(path)
    right = body()
    bodies = [right, *(changed(right, rng) for _ in range(count))]
    requests = [Hostile(str(number), path, json.dumps(each).encode()) for number, each in enumerate(bodies)]
    attack = Attack(may_be_answered=True)
    await attack.run(server, requests)
    record_property("measured", attack.measured)
