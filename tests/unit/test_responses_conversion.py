"""From a responses request to the chat that it is."""

from typing import Any

import pytest

from server.errors import BadRequest
from server.responses.conversion import _starts, to_chat, to_messages, with_responses_field_names
from server.responses.store import stored_items
from server.schemas.chat import AllowedToolsChoice, NamedTool
from server.schemas.responses import Item
from tests.unit.responses_support import request_of

CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "5"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": True} for name in ("add", "sub")
]


def items_of(*given: dict[str, Any]) -> list[Item]:
    return stored_items(request_of(input=list(given)).input, lambda id: None)


def chat_of(**fields: Any) -> Any:
    return to_chat(request_of(**fields), [{"role": "user", "content": "Hi"}])


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


def test_the_output_of_a_call_that_nobody_made_is_refused() -> None:
    with pytest.raises(BadRequest, match="output of the function call 'c1'"):
        to_messages(items_of(OUTPUT, CALL))


def test_a_reference_is_the_stored_item() -> None:
    (call,) = items_of({**CALL, "id": "fc_1"})
    given = request_of(input=[{"type": "item_reference", "id": "fc_1"}, OUTPUT]).input
    assert stored_items(given, {"fc_1": call}.get)[0] is call
    with pytest.raises(BadRequest, match="no stored response has an item") as refused:
        stored_items(given, lambda id: None)
    assert refused.value.param == "input[0].id"


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
    assert isinstance(named, NamedTool)
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
    with pytest.raises(BadRequest) as refused:
        chat_of(tools=[{"type": "function", "name": "f", "parameters": {"type": "string"}}])
    renamed = with_responses_field_names(refused.value)
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
