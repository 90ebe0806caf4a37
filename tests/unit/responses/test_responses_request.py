"""`ResponsesRequest`: the fields that it reads, and the sentences of its refusals."""

from typing import Any

import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem

from server.errors import BadRequest
from tests.unit.responses_support import request_of


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"input": 5}, "input is 5; it must be a string or a list of items", "input"),
        ({"input": []}, "input is an empty list; it must have at least 1 item", "input"),
        ({"input": [3]}, "input[0] is 3; it must be an object", "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content is missing", "input[0].content"),
        ({"input": [{"role": "robot", "content": ""}]}, 'input[0].role is "robot"', "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content is 5", "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0] is of type input_image",
            "input[0].content[0]",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0] is of type input_file",
            "input[0].content[0]",
        ),
        ({"input": [{"type": "telepathy_call"}]}, "input[0] is of type telepathy_call", "input[0]"),
        ({"input": [{"type": 7}]}, "input[0] has a type that is not a string", "input[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id is missing", "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0] has no call_id", "input[0]"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0] is of type telepathy, which is not known", "tools[0]"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
            'tools[0].tools[0].type is "mcp"; it must be',
            "tools[0].tools[0].type",
        ),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name is", "tools[0].name"),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "ebnf"}}]},
            'tools[0].format.syntax is "ebnf"',
            "tools[0].format.syntax",
        ),
        ({"tool_choice": "maybe"}, 'tool_choice is "maybe"', "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice is of type mcp", "tool_choice"),
        ({"tool_choice": {"name": "f"}}, "tool_choice.type is missing", "tool_choice.type"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema is missing", None),
        ({"reasoning": {"effort": "huge"}}, 'reasoning.effort is "huge"', "reasoning.effort"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt is not supported by this release", "prompt"),
        ({"conversation": "conv_1"}, "conversation is not supported by this release", "conversation"),
        ({"context_management": []}, "context_management is not supported by this release", None),
        ({"n": 2}, "n is 2; it must be 1", "n"),
        ({"n": True}, "n is true; it must be 1", "n"),
        ({"return_token_ids": 0}, "return_token_ids is 0; it must be false", "return_token_ids"),
        ({"background": True, "store": False}, "background is true; it needs store", None),
        ({"include": ["everything"]}, 'include[0] is "everything"', "include[0]"),
        ({"metadata": {"k" * 65: ""}}, "its keys may have at most 64 characters, and kkk", "metadata"),
        ({"metadata": {"k": "x" * 513}}, "its values may have at most 512 characters, and that of k has", "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "at most 16 keys, and has 17", "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0", "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs is 21", "top_logprobs"),
        ({"messages": []}, "messages is not a known field", "messages"),
        # The forms of chat completions.
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name is missing", "tools[0].name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].name is missing", "tools[0].name"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.name is missing", None),
        (
            {"text": {"format": {"type": "json_schema", "json_schema": {"name": "n"}}}},
            "text.format.name is missing",
            "text.format.name",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], said: str, param: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        request_of(**fields)
    assert said in str(refused.value)
    assert refused.value.param == (param or refused.value.param)


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "phase": None,
            "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "{}", "parsed": {"a": 1}}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "5", "created_by": "u"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "encrypted_function_args": ["a"]},
        {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "hm"}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "5"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
        {"type": "item_reference", "id": "msg_1"},
        {"type": None, "id": "msg_1"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "data:x"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "compaction_summary", "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "a"}]},
        ResponseFunctionToolCall(type="function_call", call_id="c", name="f", arguments="{}").model_dump(),
        ResponseReasoningItem(type="reasoning", id="rs_1", summary=[]).model_dump(),
    ],
)  # fmt: skip
def test_the_items_that_clients_send_are_read(item: dict[str, Any]) -> None:
    assert len(request_of(input=[item]).input) == 1


def test_a_schema_too_deep_to_be_repeated_is_refused() -> None:
    def nested(depth: int) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": nested(depth - 1)} if depth else {}}

    request_of(tools=[{"type": "function", "name": "f", "parameters": nested(199)}])
    for fields in (
        {"tools": [{"type": "function", "name": "f", "parameters": nested(200)}]},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": nested(450)}}},
    ):
        with pytest.raises(BadRequest, match="nested too deeply; it may have at most 400 levels"):
            request_of(**fields)


def test_the_tools_that_agents_send_are_read() -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": "f", "strict": False, "parameters": {"type": "object"}, "defer_loading": True},
        {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}},
        {"type": "namespace", "name": "mcp__notes", "description": "d", "tools": [{"type": "function", "name": "f"}]},
        {"type": "web_search", "external_web_access": False},
        {"type": "mcp", "server_label": "x", "server_url": "https://example.com"},
        *({"type": kind} for kind in ("file_search", "code_interpreter", "image_generation", "computer_use_preview")),
        *({"type": kind} for kind in ("local_shell", "tool_search", "web_search_preview", "computer_use")),
    ]
    assert len(request_of(tools=tools).tools) == len(tools)


@pytest.mark.parametrize(
    "fields",
    [
        *({"reasoning": {"effort": each}} for each in ("none", "minimal", "low", "medium", "high", "xhigh", "max")),
        *({"text": {"verbosity": each}} for each in ("low", "medium", "high")),
        *({"service_tier": each} for each in ("auto", "default", "flex", "priority", "fast")),
        {"client_metadata": {"session_id": "x"}},
        {"background_options": {"completion_window": "2h"}},
        {"include": ["reasoning.encrypted_content"], "store": False},
        {"prompt_cache_key": "x", "prompt_cache_retention": "24h", "safety_identifier": "x", "max_tool_calls": 3},
        {"stream": True, "stream_options": {"include_obfuscation": False}, "truncation": "auto"},
    ],
)
def test_the_fields_that_agents_send_are_read(fields: dict[str, Any]) -> None:
    request_of(**fields)
