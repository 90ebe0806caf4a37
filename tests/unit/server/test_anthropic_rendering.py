"""Answers of `/v1/messages`: content blocks, events as the official client's types take them, stops, usage."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from anthropic._streaming import SSEDecoder
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict, TypeAdapter

from engine.text.request_state import RequestDelta
from server.anthropic.conversion import digest
from server.anthropic.rendering import MessagesRenderer
from server.errors import EngineError, NotReady
from server.parsing.dialects.hermes import HermesParser
from server.parsing.parser import (
    AnswerParser,
    ArgumentsPart,
    ChainedParsers,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
)
from server.parsing.reasoning import TaggedReasoning
from server.parsing.registry import REASONING_DIALECTS
from server.schemas.body import validate
from server.schemas.chat_tools import FunctionTool, ToolUse
from server.schemas.generation import PromptTokensDetails, Usage
from server.schemas.messages import MessagesRequest
from server.sealing import Kind
from tests.unit.responses_support import ScriptedParser

USAGE = Usage(40, 5, 45, PromptTokensDetails(16))
THINKS = {"thinking": {"type": "adaptive"}}
_EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent, config=ConfigDict(defer_build=True))


def seal(kind: Kind, words: str) -> str:
    """A seal with the same result each time."""
    return f"{kind}:{words}"


def signature_of(words: str) -> str:
    return seal("signature", digest(words))


def renderer_of(parser: AnswerParser | None = None, **fields: Any) -> MessagesRenderer:
    keywords = {name: fields.pop(name) for name in ("is_clipped", "cache_block_size") if name in fields}
    body = {"model": "m", "max_tokens": 2000, "messages": [{"role": "user", "content": "Hi"}], **fields}
    request = validate(body, MessagesRequest, allow_unknown=False)
    return MessagesRenderer(request, 40, "f", parser, seal, request_id="req_1", **keywords)


def delta(text: str, count: int = 1, **fields: Any) -> RequestDelta:
    return RequestDelta(text, [5] * count, **fields)


def last(text: str = "", reason: str = "stop", stop: int | str | None = None) -> RequestDelta:
    return delta(text, finished=True, finish_reason=reason, stop_reason=stop)


def stream_of(renderer: MessagesRenderer, deltas: Sequence[RequestDelta], usage: Usage = USAGE) -> bytes:
    events = [renderer.opening(), *(renderer.chunk(0, each) for each in deltas)]
    return b"".join([*events, renderer.closing(usage)])


def events_of(stream: bytes) -> list[Any]:
    """The events without pings, as the official client's types; the two names of each agree."""
    events = []
    for frame in stream.split(b"\n\n")[:-1]:
        name, data = frame.split(b"\n")
        parsed = json.loads(data.removeprefix(b"data: "))
        assert name == f"event: {parsed['type']}".encode()
        if parsed["type"] != "ping":
            events.append(_EVENTS.validate_python(parsed))
    return events


def assembled(stream: bytes) -> dict[str, Any]:
    """The message that a client assembles from a stream; fails if events are out of order."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    open_index: int | None = None
    for event in events_of(stream):
        match event.type:
            case "message_start":
                assert not message
                message = event.message.to_dict()
            case "content_block_start":
                assert open_index is None
                assert event.index == len(message["content"])
                open_index = event.index
                message["content"].append(event.content_block.to_dict())
            case "content_block_delta":
                assert event.index == open_index
                block, change = message["content"][event.index], event.delta
                if change.type == "input_json_delta":
                    inputs[event.index] = inputs.get(event.index, "") + change.partial_json
                else:
                    name = change.type.removesuffix("_delta")
                    block[name] += getattr(change, name)
            case "content_block_stop":
                assert event.index == open_index
                open_index = None
            case "message_delta":
                message |= event.delta.to_dict()
                message["usage"] = event.usage.to_dict()
            case "message_stop":
                assert open_index is None
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def test_text_is_one_block_between_start_and_stop() -> None:
    stream = stream_of(renderer_of(), [delta("Hel"), delta("lo"), last(".")])
    assert [event.type for event in events_of(stream)] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message = assembled(stream)
    assert message["content"] == [{"type": "text", "text": "Hello."}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert stream.count(b"event: ping\n") == 1


CALLS: list[list[Part]] = [
    [ReasoningPart("Let me ")],
    [ReasoningPart("see."), TextPart("\n")],
    [TextPart("I look"), TextPart(" it up.")],
    [ToolCallPart(0, "call_ab", "find"), ArgumentsPart(0, '{"a": ')],
    [ArgumentsPart(0, "1}"), ToolCallPart(1, "X9aB3dE5f", "ask"), ArgumentsPart(1, "{}")],
]


def test_reasoning_text_and_calls_are_blocks_in_their_order() -> None:
    message = assembled(stream_of(renderer_of(ScriptedParser(CALLS), **THINKS), [delta("x")] * 4 + [last("x")]))
    assert message["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": signature_of("Let me see.")},
        {"type": "text", "text": "\nI look it up."},
        {"type": "tool_use", "id": "toolu_ab", "name": "find", "input": {"a": 1}},
        {"type": "tool_use", "id": "X9aB3dE5f", "name": "ask", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


@pytest.mark.parametrize("thinking", [{}, {"thinking": {"type": "disabled"}}])
def test_reasoning_that_was_not_asked_for_is_left_out(thinking: dict[str, Any]) -> None:
    message = assembled(stream_of(renderer_of(ScriptedParser(CALLS), **thinking), [delta("x")] * 4 + [last("x")]))
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use"]


def test_omitted_thinking_is_in_the_signature() -> None:
    parser = ScriptedParser([[ReasoningPart("Hm.")], [ReasoningPart(" So.")], [TextPart("Yes.")]])
    renderer = renderer_of(parser, thinking={"type": "adaptive", "display": "omitted"})
    stream = stream_of(renderer, [delta("x"), delta("x"), last("x")])
    block = assembled(stream)["content"][0]
    assert (block["type"], block["thinking"]) == ("thinking", "")
    assert block["signature"] == seal("reasoning", "Hm. So.")
    assert b"thinking_delta" not in stream


def test_an_answer_that_only_caches_the_prompt_has_no_content() -> None:
    streamed = assembled(stream_of(renderer_of(max_tokens=0), [delta("The"), last(reason="length")]))
    state: Any = _State([("The", 1)], "length")
    whole = msgspec.to_builtins(renderer_of(max_tokens=0).whole([state], USAGE))
    for message in (streamed, whole):
        assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
        assert message["usage"]["output_tokens"] == 0


def test_white_space_alone_is_no_block() -> None:
    parser = ScriptedParser(
        [[TextPart("\n")], [TextPart("\n"), ToolCallPart(0, "call_a", "f"), ArgumentsPart(0, "{}")]]
    )
    message = assembled(stream_of(renderer_of(parser), [delta("x"), last("x")]))
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert assembled(stream_of(renderer_of(), [delta(" "), last(" ")]))["content"] == []


@pytest.mark.parametrize(
    ("end", "fields", "stop_reason", "stop_sequence"),
    [
        (last(), {}, "end_turn", None),
        (last(stop=151643), {}, "end_turn", None),
        (last(stop="END"), {}, "stop_sequence", "END"),
        (last(reason="length"), {}, "max_tokens", None),
        (last(reason="length"), {"is_clipped": True}, "model_context_window_exceeded", None),
    ],
)
def test_why_the_answer_ended(
    end: RequestDelta, fields: dict[str, Any], stop_reason: str, stop_sequence: str | None
) -> None:
    message = assembled(stream_of(renderer_of(**fields), [delta("a"), end]))
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)


@pytest.mark.parametrize(
    ("prompt", "cached", "block_size", "counts"),
    [
        (40, 16, None, (24, 0, 16)),
        (40, 16, 16, (8, 16, 16)),
        (40, 16, 32, (8, 16, 16)),
        (40, 16, 64, (24, 0, 16)),
        (48, 16, 16, (16, 16, 16)),
        (48, 48, None, (1, 0, 47)),
        (48, 48, 16, (1, 0, 47)),
    ],
)
def test_the_prompt_is_split_into_new_cached_and_newly_cached_and_never_without_new(
    prompt: int, cached: int, block_size: int | None, counts: tuple[int, int, int]
) -> None:
    usage = Usage(prompt, 5, prompt + 5, PromptTokensDetails(cached))
    renderer = renderer_of(cache_block_size=block_size)
    reported = assembled(stream_of(renderer, [last("a")], usage))["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert tuple(reported[name] for name in names) == counts
    assert sum(counts) == prompt
    assert reported["output_tokens"] == 5


def test_a_request_with_context_management_hears_that_nothing_was_cleared() -> None:
    assert b'"context_management":{"applied_edits":[]}' in stream_of(renderer_of(context_management={}), [last("a")])
    assert b"context_management" not in stream_of(renderer_of(), [last("a")])


def test_a_failure_in_a_stream_is_an_event_with_anthropics_error() -> None:
    for error, kind in ((EngineError("gone"), "api_error"), (NotReady("later"), "overloaded_error")):
        name, data = renderer_of().failure(error).removesuffix(b"\n\n").split(b"\n")
        assert name == b"event: error"
        parsed = json.loads(data.removeprefix(b"data: "))
        assert parsed == {
            "type": "error",
            "error": {"type": kind, "message": str(error)},
            "request_id": "req_1",
        }


ANSWER = "<think>\nI must “ask”.\n</think>\n\nLook: é\n"
ANSWER += '<tool_call>\n{"name": "find", "arguments": {"a": "ü\\n"}}\n</tool_call>'


def real_parser() -> AnswerParser:
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    use = ToolUse.of([validate(tool, FunctionTool, allow_unknown=False)], "auto")
    return ChainedParsers(TaggedReasoning(REASONING_DIALECTS["think"]), HermesParser(use))


def cut_at(cuts: Sequence[int]) -> dict[str, Any]:
    edges = [0, *sorted(cut % len(ANSWER) for cut in cuts), len(ANSWER)]
    pieces = [ANSWER[begin:end] for begin, end in pairwise(edges)]
    deltas = [*(delta(piece) for piece in pieces[:-1]), last(pieces[-1])]
    return without_ids(assembled(stream_of(renderer_of(real_parser(), **THINKS), deltas)))


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    for block in message["content"]:
        block.pop("id", None)
    return {"content": message["content"], "stop_reason": message["stop_reason"]}


WHOLE: dict[str, Any] = {
    "content": [
        {"type": "thinking", "thinking": "I must “ask”.", "signature": signature_of("I must “ask”.")},
        {"type": "text", "text": "Look: é"},
        {"type": "tool_use", "name": "find", "input": {"a": "ü\n"}},
    ],
    "stop_reason": "tool_use",
}


def test_an_answer_cut_at_every_character_is_the_same_message() -> None:
    for cut in range(1, len(ANSWER)):
        assert cut_at([cut]) == WHOLE
    assert cut_at(range(1, len(ANSWER))) == WHOLE


@given(st.lists(st.integers(0, len(ANSWER)), max_size=12))
def test_an_answer_cut_anywhere_is_the_same_message(cuts: list[int]) -> None:
    assert cut_at(cuts) == WHOLE


def test_a_stream_split_at_every_byte_is_the_same_events_to_the_official_decoder() -> None:
    stream = stream_of(renderer_of(real_parser(), **THINKS), [delta(ANSWER[:40]), last(ANSWER[40:])])

    def decoded(*pieces: bytes) -> list[tuple[str | None, str]]:
        return [(each.event, each.data) for each in SSEDecoder().iter_bytes(iter(pieces))]

    whole = decoded(stream)
    assert [kind for kind, _ in whole] == [json.loads(data)["type"] for _, data in whole]
    assert all(decoded(stream[:cut], stream[cut:]) == whole for cut in range(1, len(stream)))


class _State:
    """The part of a finished sequence that a renderer reads."""

    def __init__(self, steps: list[tuple[str, int]], reason: str) -> None:
        self.steps, self.finish_reason, self.stop_reason = steps, reason, None


def test_the_whole_answer_is_what_the_stream_adds_up_to() -> None:
    state: Any = _State([(ANSWER[:50], 3), (ANSWER[50:], 9)], "stop")
    answer = renderer_of(real_parser(), **THINKS).whole([state], USAGE)
    message = Message.model_validate_json(msgspec.json.encode(answer)).to_dict()
    assert without_ids(message) == WHOLE  # type: ignore[arg-type]


def test_a_call_that_is_cut_off_has_the_whole_values_of_its_input() -> None:
    text = ANSWER.replace('"ü\\n"', '"ü", "b": "cut off"')
    state: Any = _State([(text[: text.index("cut") + 3], 3)], "length")
    answer = renderer_of(real_parser(), **THINKS).whole([state], USAGE)
    assert answer.content[-1].input == {"a": "ü"}  # type: ignore[union-attr]
    assert answer.stop_reason == "max_tokens"


@pytest.mark.parametrize(("reason", "text"), [("length", "Hi"), ("stop", 'Hi\n<tool_call>{"na')])
def test_a_call_that_is_cut_off_in_its_name_is_no_text(reason: str, text: str) -> None:
    steps = [("Hi\n", 1), ('<tool_call>{"na', 1)]
    state: Any = _State(steps, reason)
    answer = renderer_of(HermesParser(ToolUse.of([], "auto"))).whole([state], USAGE)
    assert [block.text for block in answer.content] == [text]  # type: ignore[union-attr]
    deltas = [delta(steps[0][0]), last(steps[1][0], reason)]
    streamed = assembled(stream_of(renderer_of(HermesParser(ToolUse.of([], "auto"))), deltas))
    assert [block["text"] for block in streamed["content"]] == [text]
