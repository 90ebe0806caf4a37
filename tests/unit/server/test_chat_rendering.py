"""Chat answers that a parser splits into parts: their chunks add up to the whole answer, in OpenAI's format."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.messages import TokenLogprobs
from engine.text.request_state import RequestDelta, RequestState
from engine.text.tokenizer import Tokenizer
from server.parsing.dialects.hermes import HermesParser
from server.parsing.parser import AnswerParser, ArgumentsPart, Part, ReasoningPart, TextPart, ToolCallPart
from server.routes.chat import ChatRenderer
from server.schemas.body import validate
from server.schemas.chat import ChatCompletionRequest
from server.schemas.chat_tools import ToolUse
from server.schemas.generation import PromptTokensDetails, Usage
from server.streaming.sse import DONE

USAGE = Usage(3, 5, 8, PromptTokensDetails(0))
TOOL = {"type": "function", "function": {"name": "add"}}


class Scripted:
    """Returns the parts that the script has for the pushed text."""

    def __init__(self, script: dict[str, list[Part]]) -> None:
        self._script = script

    def push(self, text: str) -> list[Part]:
        return self._script.get(text, [])

    def finish(self, *, cut_off: bool = False) -> list[Part]:
        return self._script.get("finish", [])


SCRIPT: dict[str, list[Part]] = {
    "<think>": [],
    "so": [ReasoningPart("so")],
    "</think>Hi": [TextPart("Hi")],
    "<call>": [ToolCallPart(0, "call_1", "add")],
    "{}</call>": [ArgumentsPart(0, "{"), ArgumentsPart(0, "}")],
    "finish": [ToolCallPart(1, "call_2", "add"), ArgumentsPart(1, "[")],
}
STEPS = ["<think>", "so", "</think>Hi", "<call>", "{}</call>"]


def renderer(
    script: dict[str, list[Part]] | None = SCRIPT, parser: AnswerParser | None = None, **fields: Any
) -> ChatRenderer:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL], **fields}
    request = validate(body, ChatCompletionRequest, allow_unknown=False)
    tokenizer = cast(Tokenizer, SimpleNamespace(token_bytes=lambda token_id: b"a", token_text=lambda token_id: "a"))
    return ChatRenderer(request, tokenizer, "f", lambda: Scripted(script) if script is not None else parser)


def chunks(of: ChatRenderer, steps: Sequence[str] = STEPS, reason: str = "stop", **last: Any) -> list[Any]:
    events = [of.opening()]
    for place, text in enumerate(steps):
        finished = place == len(steps) - 1
        delta = RequestDelta(text, [1], None, finished, reason if finished else None, **last if finished else {})
        events.append(of.chunk(0, delta))
    stream = b"".join((*events, of.closing(USAGE)))
    assert stream.endswith(DONE)
    lines = stream.removesuffix(DONE).decode().split("\n\n")[:-1]
    return [ChatCompletionChunk.model_validate(json.loads(line.removeprefix("data: "))) for line in lines]


def whole(of: ChatRenderer, steps: Sequence[str] = STEPS, reason: str = "stop") -> dict[str, Any]:
    state = SimpleNamespace(
        steps=[(text, 1) for text in steps], text="".join(steps), logprobs=None, finish_reason=reason, stop_reason=None
    )
    answer = of.whole([cast(RequestState, state)], USAGE)
    return cast(dict[str, Any], msgspec.to_builtins(answer))


def test_a_whole_answer_holds_reasoning_content_and_calls() -> None:
    answer = whole(renderer())
    ChatCompletion.model_validate(answer)
    message = answer["choices"][0]["message"]
    assert message["content"] == "Hi"
    assert message["reasoning_content"] == message["reasoning"] == "so"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": "{}"},
        {"name": "add", "arguments": "["},
    ]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


@pytest.mark.parametrize(("reason", "content"), [("length", "Hi"), ("stop", 'Hi\n<tool_call>{"na')])
def test_a_call_that_max_tokens_cuts_off_in_its_name_is_no_content(reason: str, content: str) -> None:
    steps = ["Hi\n", '<tool_call>{"na']
    answer = whole(renderer(None, HermesParser(ToolUse.of([], "auto"))), steps, reason)
    assert answer["choices"][0]["message"]["content"] == content
    streamed = chunks(renderer(None, HermesParser(ToolUse.of([], "auto")), stream=True), steps, reason)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == content


def test_the_chunks_of_a_stream_add_up_to_the_whole_answer() -> None:
    of = renderer(stream=True, stream_options={"include_usage": True})
    *streamed, usage = chunks(of)
    deltas = [chunk.choices[0].delta for chunk in streamed]
    assert (deltas[0].role, deltas[0].content) == ("assistant", None)
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == "Hi"
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "so"
    calls: dict[int, list[Any]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or ()):
        calls.setdefault(call.index, []).append(call)
    assert [(first.id, first.type, first.function.name) for first, *_ in calls.values()] == [
        ("call_1", "function", "add"),
        ("call_2", "function", "add"),
    ]
    assert ["".join(each.function.arguments for each in of_call) for of_call in calls.values()] == ["{}", "["]
    assert [chunk.choices[0].finish_reason for chunk in streamed][-1] == "tool_calls"
    assert usage.usage is not None
    assert usage.usage.completion_tokens_details is not None
    assert usage.usage.completion_tokens_details.reasoning_tokens == 1


def test_each_chunk_of_a_text_reports_more_tokens_where_it_reports_the_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *streamed, last = chunks(renderer(None, stream=True, stream_options=options), ["a", "b", "c"], "length")
    reported = [chunk.usage and chunk.usage.completion_tokens for chunk in streamed]
    assert reported == [0, 1, 2, 3]
    assert [chunk.choices[0].delta.content for chunk in streamed] == ["", "a", "b", "c"]
    assert [chunk.choices[0].finish_reason for chunk in streamed] == [None, None, None, "length"]
    assert last.choices == []


def test_tokens_can_be_spelled_by_their_ids() -> None:
    of = renderer(None, logprobs=True, return_tokens_as_token_ids=True, stream=True)
    raw = of.chunk(0, RequestDelta("a", [9], [TokenLogprobs(9, -0.5, (7,), (-1.5,), 1)]))
    (token,) = json.loads(raw.decode().split("\n\n")[1].removeprefix("data: "))["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("token_id:9", [97])
    assert [top["token"] for top in token["top_logprobs"]] == ["token_id:7"]


def test_a_request_with_functions_gets_a_function_call() -> None:
    script = {name: SCRIPT[name] for name in ("<call>", "{}</call>")}
    fields = {"tools": [], "functions": [{"name": "add"}]}
    choice = ChatCompletion.model_validate(whole(renderer(script, **fields), ["<call>", "{}</call>"])).choices[0]
    assert choice.message.function_call is not None
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("add", "{}")
    assert (choice.message.tool_calls, choice.model_dump()["finish_reason"]) == (None, "function_call")
    streamed = chunks(renderer(script, stream=True, **fields), ["<call>", "{}</call>"])
    calls = [call for chunk in streamed if (call := chunk.choices[0].delta.function_call) is not None]
    assert [call.name for call in calls] == ["add", None, None]
    assert "".join(call.arguments or "" for call in calls) == "{}"
    assert streamed[-1].choices[0].finish_reason == "function_call"


def test_an_answer_of_calls_alone_has_no_content() -> None:
    message = whole(renderer(), ["<call>", "{}</call>"])["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning_content" not in message


def test_an_answer_that_is_not_parsed_has_no_reasoning_tokens() -> None:
    assert whole(renderer(None), ["Hi"])["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_an_empty_answer_has_empty_content_and_no_calls() -> None:
    script: dict[str, list[Part]] = {}
    message = whole(renderer(script), [""])["choices"][0]["message"]
    assert message["content"] == ""
    assert "tool_calls" not in message
    first, last = chunks(renderer(script), [""])
    assert first.choices[0].delta.content == ""
    assert last.choices[0].finish_reason == "stop"


ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
}


@pytest.mark.parametrize(
    ("reason", "choice", "reported"),
    [
        ("stop", "auto", "tool_calls"),
        ("stop", "required", "tool_calls"),
        ("stop", {"type": "function", "function": {"name": "add"}}, "stop"),
        ("stop", ALLOWED, "tool_calls"),
        ("length", "auto", "length"),
    ],
)
def test_the_finish_reason_of_calls_is_openais(reason: str, choice: Any, reported: str) -> None:
    assert whole(renderer(tool_choice=choice), reason=reason)["choices"][0]["finish_reason"] == reported
    assert chunks(renderer(tool_choice=choice), reason=reason)[-1].choices[0].finish_reason == reported


def test_log_probabilities_come_with_the_text_or_without_it() -> None:
    of = renderer(logprobs=True)
    stream = b"".join(
        of.chunk(0, RequestDelta(text, [1], [TokenLogprobs(1, -0.5)])) for text in ("<think>", "<call>", "so")
    )
    lines = [json.loads(line.removeprefix("data: ")) for line in stream.decode().split("\n\n")[:-1]]
    reported = [choice["logprobs"] for line in lines for choice in line["choices"] if choice["logprobs"]]
    assert [len(each["content"]) for each in reported] == [1, 1, 1]


def test_an_echo_begins_each_choice_and_the_whole() -> None:
    last = {"role": "assistant", "content": "One, two"}
    fields: dict[str, Any] = {"messages": [last], "continue_final_message": True, "echo": True, "n": 2}
    of = renderer(None, **fields)
    assert of.opening().count(b'"content":"One, two"') == 2
    state = SimpleNamespace(text=", three", logprobs=None, finish_reason="stop", stop_reason=None)
    answer = renderer(None, **fields).whole([cast(RequestState, state)], USAGE)
    assert answer.choices[0].message.content == "One, two, three"


HELD: dict[str, list[Part]] = {
    "so": [ReasoningPart("so")],
    " then": [ReasoningPart("<| then")],
    "Hi": [TextPart("<|Hi")],
}


def test_tokens_of_text_that_is_held_back_count_as_what_it_turns_out_to_be() -> None:
    steps = ["<think>", "so", "<|", " then", "</think>", "<|", "Hi", "<|"]
    assert whole(renderer(HELD), steps)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    held_to_the_end = whole(renderer({**HELD, "finish": [TextPart("<|")]}), ["so", "</think>", "<|"])
    assert held_to_the_end["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


def test_a_slow_client_gets_the_same_count() -> None:
    steps = [("<think>", 1), ("so", 1), ("<|", 1), (" then", 1), ("</think>", 1), ("Hi", 1)]
    delta = RequestDelta("".join(text for text, _ in steps), [1] * 6, None, True, "stop", merged=steps)
    of = renderer(HELD, stream=True, stream_options={"include_usage": True})
    stream = of.opening() + of.chunk(0, delta) + of.closing(USAGE)
    usage = json.loads(stream.removesuffix(DONE).decode().split("\n\n")[-2].removeprefix("data: "))["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}


PATCH = {"type": "custom", "custom": {"name": "patch"}}
CUSTOM_SCRIPT: dict[str, list[Part]] = {
    "<call>": [ToolCallPart(0, "call_1", "patch"), ArgumentsPart(0, '{"inp')],
    "text": [ArgumentsPart(0, 'ut": "a\\nb\\'), ArgumentsPart(0, 'u00e9"}')],
    "<next>": [ToolCallPart(1, "call_2", "add"), ArgumentsPart(1, "{}")],
    "finish": [ToolCallPart(2, "call_3", "patch"), ArgumentsPart(2, "bare text")],
}
CUSTOM_STEPS = ["<call>", "text", "<next>"]


def test_a_call_of_a_custom_tool_holds_its_input_as_text() -> None:
    answer = whole(renderer(CUSTOM_SCRIPT, tools=[TOOL, PATCH]), CUSTOM_STEPS)
    ChatCompletion.model_validate(answer)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["choices"][0]["message"]["tool_calls"] == [
        {"type": "custom", "id": "call_1", "custom": {"name": "patch", "input": "a\nb\u00e9"}},
        {"type": "function", "id": "call_2", "function": {"name": "add", "arguments": "{}"}},
        {"type": "custom", "id": "call_3", "custom": {"name": "patch", "input": "bare text"}},
    ]


def test_a_streamed_call_of_a_custom_tool_adds_up_to_the_whole_one() -> None:
    of = renderer(CUSTOM_SCRIPT, tools=[TOOL, PATCH], stream=True)
    events = [of.chunk(0, RequestDelta(text, [1], None, False, None)) for text in CUSTOM_STEPS]
    events.append(of.chunk(0, RequestDelta("", [1], None, True, "stop")))
    lines = b"".join(events).decode().split("\n\n")[:-1]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call for call in calls if "id" in call] == [
        {"index": 0, "id": "call_1", "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 1, "id": "call_2", "type": "function", "function": {"name": "add", "arguments": ""}},
        {"index": 2, "id": "call_3", "type": "custom", "custom": {"name": "patch", "input": ""}},
    ]
    inputs = ["".join(call.get("custom", {}).get("input", "") for call in calls if call["index"] == i) for i in (0, 2)]
    assert inputs == ["a\nb\u00e9", "bare text"]
