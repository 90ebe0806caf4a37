"""A responses request becomes a chat request."""

import gc
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.errors import BadRequest
from server.frontend import Frontend
from server.ignored import collect
from server.limits.accounts import Accounts
from server.limits.jobs import Jobs
from server.limits.owners import ANYONE
from server.responses import conversion
from server.responses.conversion import SUMMARY_INTRODUCTION, _starts, prepare, to_chat
from server.responses.store import Turn, stored_items
from server.responses.tools import ToolTable
from server.schemas.chat_tools import AllowedToolsChoice, NamedFunction
from server.schemas.response_objects import Item
from server.sealing import Changed, Kind, Seal
from tests.unit.responses_support import request_of

CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "5"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": True} for name in ("add", "sub")
]


def items_of(*given: dict[str, Any]) -> list[Item]:
    return stored_items(request_of(input=list(given)).input, lambda id: None)


NO_TOOLS = ToolTable(request_of())
SEAL = Seal()


def chat_of(**fields: Any) -> Any:
    request = request_of(**fields)
    return to_chat(request, [{"role": "user", "content": "Hi"}], ToolTable(request), request.max_output_tokens)


def to_messages(items: list[Item], tools: ToolTable = NO_TOOLS, owner: str | None = None) -> list[conversion.Message]:
    return conversion.to_messages(items, tools, lambda kind, sealed: SEAL.open(kind, sealed, owner))


def with_responses_field_names(error: BadRequest, tools: ToolTable = NO_TOOLS) -> BadRequest:
    return conversion.with_responses_field_names(error, tools)


def test_messages_keep_their_roles_and_their_text() -> None:
    items = items_of(
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "What is "}, {"type": "input_text", "text": "2?"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "2."}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No more."}]},
    )
    assert to_messages(items) == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "What is 2?"},
        {"role": "assistant", "content": "2."},
        {"role": "assistant", "content": "No more."},
    ]


def test_reasoning_text_and_calls_of_a_turn_are_one_message() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "I add."}
    second = {**CALL, "call_id": "c2"}
    items = items_of(reasoning, said, CALL, second, OUTPUT, {**OUTPUT, "call_id": "c2", "output": "6"}, reasoning)
    turn, *results, last = to_messages(items)
    assert (turn["reasoning_content"], turn["content"]) == ("hm", "I add.")
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert results == [
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "5"},
        {"role": "tool", "tool_call_id": "c2", "name": "add", "content": "6"},
    ]
    assert last == {"role": "assistant", "content": "", "reasoning_content": "hm"}


def test_text_behind_a_call_begins_a_message() -> None:
    first, second = to_messages(items_of(CALL, {"role": "assistant", "content": "Done."}))
    assert "tool_calls" in first
    assert second == {"role": "assistant", "content": "Done."}


def test_the_summary_stands_in_for_reasoning_that_is_not_there() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}
    assert to_messages(items_of(reasoning))[0]["reasoning_content"] == "in short"


def test_the_output_of_an_unknown_call_is_refused() -> None:
    with pytest.raises(BadRequest, match="output of the function call 'c1'"):
        to_messages(items_of(OUTPUT, CALL))


@pytest.mark.parametrize(
    ("fields", "name"), [({}, "watch"), ({"namespace": "mcp__ci"}, "mcp__ci__watch"), ({"call_id": None}, "watch")]
)
def test_what_a_tool_reports_without_a_call_is_a_message(fields: dict[str, Any], name: str) -> None:
    output = {"type": "function_call_output", "name": "watch", "output": "The build failed.", **fields}
    said = f"The tool {name} reports:\nThe build failed."
    assert to_messages(items_of(CALL, OUTPUT, output))[-1] == {"role": "user", "content": said}


def test_a_task_for_an_agent_is_shown_though_codex_takes_it_for_encrypted() -> None:
    task = {"type": "encrypted_content", "encrypted_content": "Count the files."}
    message = {"type": "agent_message", "author": "/agent", "recipient": "/agent/count"}
    opening = {"type": "input_text", "text": "Payload:\n"}
    (shown,) = to_messages(items_of({**message, "content": [opening, task]}))
    assert shown == {"role": "user", "content": "Payload:\nCount the files."}
    (shown,) = to_messages(items_of({**message, "content": [opening, {**task, "encrypted_content": "gAAAAABq" * 20}]}))
    assert shown == {"role": "user", "content": "Payload:\n"}


def test_a_reference_is_the_stored_item() -> None:
    (call,) = items_of({**CALL, "id": "fc_1"})
    given = request_of(input=[{"type": "item_reference", "id": "fc_1"}, OUTPUT]).input
    assert stored_items(given, {"fc_1": call}.get)[0] is call
    with pytest.raises(BadRequest, match="no stored response has an item") as refused:
        stored_items(given, lambda id: None)
    assert refused.value.param == "input[0].id"


def test_references_count_as_if_the_items_had_been_sent() -> None:
    (item,) = items_of({"role": "user", "content": "x" * 1000, "id": "msg_1"})
    given = request_of(input=[{"type": "item_reference", "id": "msg_1"}] * 100).input
    assert len(stored_items(given, lambda id: item, 200_000)) == 100
    with pytest.raises(BadRequest, match=r"^input\[0\] to input\[\d+\] refer to items of \d+ bytes"):
        stored_items(given, lambda id: item, 50_000)


async def test_a_long_conversation_is_read_in_a_thread() -> None:
    frontend = cast(Frontend, SimpleNamespace(jobs=Jobs(Accounts())))
    on_main_thread: list[bool] = []

    def open(kind: Kind, sealed: str) -> str:
        on_main_thread.append(threading.current_thread() is threading.main_thread())
        raise Changed

    for size in (1000, 2**20):
        turn = Turn(
            None, items_of({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x" * size})
        )
        with pytest.raises(BadRequest):
            await prepare(request_of(), turn, NO_TOOLS, open, frontend, ANYONE)
    assert on_main_thread == [True, False]


async def test_many_tools_are_converted_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """2048 tools took the event loop 106 ms."""
    frontend = cast(Frontend, SimpleNamespace(jobs=Jobs(Accounts()), loaded=SimpleNamespace(max_model_len=100)))
    on_main_thread: list[bool] = []

    def to_chat(*_: object) -> None:
        on_main_thread.append(threading.current_thread() is threading.main_thread())
        raise BadRequest("enough")

    monkeypatch.setattr(conversion, "to_chat", to_chat)
    for number in (64, 65):
        request = request_of(tools=[{"type": "function", "name": f"f{each}"} for each in range(number)])
        with pytest.raises(BadRequest, match="enough"):
            await prepare(request, Turn(None, []), ToolTable(request), lambda *_: "", frontend, ANYONE)
    assert on_main_thread == [True, False]


def test_items_get_ids_unless_they_have_one() -> None:
    first, second, third = items_of({"role": "user", "content": "Hi"}, {**CALL, "id": "mine"}, OUTPUT)
    assert first.id.startswith("msg_")
    assert second.id == "mine"
    assert third.id.startswith("fco_")


def test_a_tool_choice_means_the_same_to_a_chat() -> None:
    def choice(value: Any) -> Any:
        return chat_of(tools=TOOLS, tool_choice=value).tool_choice

    assert choice("required") == "required"
    named = choice({"type": "function", "name": "sub"})
    assert isinstance(named, NamedFunction)
    assert named.function.name == "sub"
    tools = [{"type": "function", "name": "sub"}]
    allowed = choice({"type": "allowed_tools", "mode": "required", "tools": tools})
    assert isinstance(allowed, AllowedToolsChoice)
    assert allowed.allowed_tools.mode == "required"
    assert allowed.allowed_tools.tools[0].function.name == "sub"


def test_fields_reach_the_chat_by_their_names_there() -> None:
    chat = chat_of(
        tools=TOOLS,
        max_output_tokens=9,
        reasoning={"effort": "low"},
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        parallel_tool_calls=False,
        temperature=0.5,
        stop=["x"],
        seed=7,
        top_k=5,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert (chat.token_limit, chat.reasoning_effort, chat.alternatives) == (9, "low", 3)
    assert (chat.temperature, chat.stop, chat.seed, chat.top_k) == (0.5, ["x"], 7, 5)
    assert not chat.parallel_tool_calls
    assert chat.template_variables["enable_thinking"] is False
    assert [(tool.function.name, tool.function.strict) for tool in chat.tools] == [("add", True), ("sub", True)]
    assert chat_of(top_logprobs=0).alternatives is None
    assert chat_of(include=["message.output_text.logprobs"]).alternatives == 0


def test_a_text_format_means_the_same_to_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    chat = chat_of(text={"format": form}).model_dump(by_alias=True, exclude_none=True)
    assert chat["response_format"]["type"] == "json_schema"
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": schema, "strict": True}
    assert chat_of(text={"format": {"type": "text"}}).response_format is None


def test_errors_of_the_chat_speak_of_the_fields_that_were_sent() -> None:
    error = BadRequest("messages are not accepted: their prompt has 9 tokens", param="messages")
    renamed = with_responses_field_names(error)
    assert (str(renamed), renamed.param) == ("input is not accepted: its prompt has 9 tokens", "input")
    error = BadRequest("max_completion_tokens is 9, but …", param="max_completion_tokens")
    assert with_responses_field_names(error).param == "max_output_tokens"
    assert str(with_responses_field_names(error)).startswith("max_output_tokens is 9")
    assert (
        with_responses_field_names(BadRequest("x", param="response_format.json_schema.schema")).param
        == "text.format.schema"
    )
    error = BadRequest("min_tokens is 9; it must be at most max_tokens, 4", param="min_tokens")
    assert str(with_responses_field_names(error)).endswith("at most max_output_tokens, 4")
    fields = {"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}
    with pytest.raises(BadRequest) as refused:
        chat_of(**fields)
    renamed = with_responses_field_names(refused.value, ToolTable(request_of(**fields)))
    assert renamed.param == "tools[0].parameters"
    assert str(renamed).startswith("tools[0].parameters is not the schema of an object")


def test_a_truncated_chat_begins_at_no_calls_output_and_where_the_rest_may_fit() -> None:
    messages = to_messages(
        items_of({"role": "user", "content": "x" * 100}, {"role": "user", "content": "Add."}, CALL, OUTPUT)
    )
    assert _starts(messages, 1000) == [1, 2]
    assert _starts(messages, 2) == [2]
    messages.append({"role": "user", "content": "x" * 100})
    assert _starts(messages, 50) == [4]
    assert _starts(messages[:1], 50) == []


def test_custom_calls_are_calls_of_a_function_with_one_argument() -> None:
    call = {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": 'a "b"\n\N{BULLET}'}
    output = {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"}
    turn, result = to_messages(items_of(call, output))
    assert turn["tool_calls"][0]["function"] == {
        "name": "patch",
        "arguments": '{"input": "a \\"b\\"\\n\N{BULLET}"}',
    }
    assert result == {"role": "tool", "tool_call_id": "c3", "name": "patch", "content": "done"}


def test_calls_of_members_have_the_name_that_the_model_sees() -> None:
    tools = ToolTable(
        request_of(
            tools=[{"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "add"}]}, TOOLS[0]]
        )
    )
    turn, result, _ = to_messages(items_of({**CALL, "namespace": "crm"}, OUTPUT, {**CALL, "call_id": "c2"}), tools)
    assert turn["tool_calls"][0]["function"]["name"] == result["name"] == "crm__add"
    (gone,) = to_messages(items_of({**CALL, "namespace": "old"}))
    assert gone["tool_calls"][0]["function"]["name"] == "old__add"


def test_what_a_tool_showed_is_a_note_and_reported() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
    output = {**OUTPUT, "output": [{"type": "input_text", "text": "See:"}, image]}
    with collect() as ignored:
        _, result = to_messages(items_of(CALL, output))
    assert result["content"].startswith("See:[The output holds content of type image here")
    assert ignored == ["input[1].output[1] (input_image)"]


def test_calls_that_another_server_ran_read_as_functions() -> None:
    shell = {
        "type": "local_shell_call",
        "id": "ls",
        "call_id": "s1",
        "status": "completed",
        "action": {"type": "exec"},
    }
    done = {"type": "local_shell_call_output", "id": "lo", "call_id": "s1", "output": "README"}
    remote = {"type": "mcp_call", "id": "m", "server_label": "x", "name": "look", "arguments": "{}", "output": "seen"}
    searched = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}}
    with collect() as ignored:
        messages = to_messages(items_of(shell, done, searched, remote))
    assert [(message["role"], message.get("name")) for message in messages] == [
        ("assistant", None), ("tool", "local_shell"), ("assistant", None), ("tool", "look"),
    ]  # fmt: skip
    assert [message["content"] for message in messages[1::2]] == ["README", "seen"]
    assert ignored == ["input[2] (web_search_call)"]


def test_sealed_reasoning_is_shown_to_the_template() -> None:
    sealed = SEAL.seal("reasoning", "hm", "me")
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    assert to_messages(items_of(item), owner="me")[0]["reasoning_content"] == "hm"
    for owner, blob in (("you", sealed), ("me", sealed[:-6] + "AAAA" + sealed[-2:])):
        with pytest.raises(BadRequest, match="it was changed, or was made for another API key") as refused:
            to_messages(items_of({**item, "encrypted_content": blob}), owner=owner)
        assert refused.value.code == "invalid_encrypted_content"


@pytest.mark.parametrize(
    "blob",
    ["gAAAAABopaque", "", "kaon", Seal().seal("reasoning", "hm", None)],
    ids=["of OpenAI", "empty", "short", "with another key"],
)
def test_reasoning_that_another_server_sealed_is_left_out_and_reported(blob: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": blob}
    with collect() as ignored:
        assert to_messages(items_of(item))[0]["reasoning_content"] == ""
    assert ignored == ["reasoning (encrypted_content of another server)"]


def test_a_compaction_makes_no_call_and_has_no_form() -> None:
    items = [{"role": "user", "content": "Hi"}, {"type": "compaction_trigger"}]
    with collect() as ignored:
        assert chat_of(text={"format": {"type": "json_object"}}, input=items).response_format is None
    assert ignored == ["text.format (of a compaction)"]
    for choice, expected in (("required", "auto"), ({"type": "function", "name": "add"}, "auto"), ("none", "none")):
        assert chat_of(tools=TOOLS, tool_choice=choice, input=items).tool_choice == expected


def test_a_compaction_is_its_summary_or_refused() -> None:
    item = {"type": "compaction", "encrypted_content": SEAL.seal("compaction", "We agreed.", None)}
    assert to_messages(items_of(item)) == [{"role": "user", "content": SUMMARY_INTRODUCTION + "We agreed."}]
    for blob in (Seal().seal("compaction", "x", None), SEAL.seal("reasoning", "x", None), "x"):
        with pytest.raises(BadRequest) as refused:
            to_messages(items_of({**item, "encrypted_content": blob}))
        assert refused.value.code == "invalid_encrypted_content"


def test_the_collector_does_not_visit_stored_items() -> None:
    """Each full collection would visit them, and hold the interpreter's lock meanwhile."""
    given: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    found = items_of(*given)
    gc.collect()  # It excludes tuples whose members it does not visit.
    assert not any(map(gc.is_tracked, found))
    contents = [field for item in found for field in (getattr(item, "content", ()), *getattr(item, "content", ()))]
    assert contents
    assert not any(map(gc.is_tracked, contents))
