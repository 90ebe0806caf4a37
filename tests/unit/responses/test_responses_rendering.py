"""The events and the answer of a response, checked against the official client's types."""

import json
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
from openai.types.responses import Response

from engine.messages import TokenLogprobs
from engine.text.request_state import RequestDelta, RequestState
from server.errors import ApiError, BadRequest, ContextLengthExceeded, EngineError, Overloaded
from server.ignored import collect
from server.limits.owners import ANYONE
from server.parsing.dialects.hermes import HermesParser
from server.parsing.parser import AnswerParser, ArgumentsPart, Part, ReasoningPart, TextPart, ToolCallPart
from server.responses.rendering import LogprobList, encode_in_parts, joined_items
from server.responses.store import Turn
from server.schemas.chat_tools import ToolUse
from server.schemas.response_objects import MessageItem, OutputText, ResponseObject
from tests.unit.responses_support import SEALED, USAGE, ScriptedParser, events_of, renderer_of, types_of

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
THINKS_AND_CALLS = [
    [ReasoningPart("Let me ")],
    [ReasoningPart("see.")],
    [TextPart("I look.")],
    [ToolCallPart(0, "call_1", "f"), ArgumentsPart(0, '{"a"')],
    [ArgumentsPart(0, ":1}")],
    [ToolCallPart(1, "call_2", "f"), ArgumentsPart(1, "{}")],
]


AGENT_TOOLS: list[dict[str, Any]] = [
    {"type": "namespace", "name": "crm", "description": "d", "tools": [{"type": "function", "name": "f"}]},
    {"type": "custom", "name": "patch"},
    {"type": "web_search"},
]
MEMBER_AND_PATCH = [
    [ToolCallPart(0, "call_1", "crm__f"), ArgumentsPart(0, '{"a":1}')],
    [ToolCallPart(1, "call_2", "patch"), ArgumentsPart(1, '{"input": "*** Be')],
    [ArgumentsPart(1, 'gin\\n\\u00e9"}')],
]


class State:
    """A sequence that has ended."""

    def __init__(self, steps: list[tuple[str, int]], finish_reason: str = "stop") -> None:
        self.finish_reason = finish_reason
        self.logprobs: list[TokenLogprobs] | None = None
        self._steps = steps

    @property
    def steps(self) -> Iterator[tuple[str, int]]:
        return iter(self._steps)


def stream(parser: AnswerParser | None, texts: list[str], finish_reason: str = "stop", **fields: Any) -> bytes:
    """The whole stream of an answer, with one token per text."""
    renderer = renderer_of(parser, **fields)
    events = renderer.opening()
    for text in texts[:-1]:
        events += renderer.chunk(0, RequestDelta(text, [1]))
    events += renderer.chunk(0, RequestDelta(texts[-1], [1], None, True, finish_reason))
    return events + renderer.closing(USAGE)


def whole(parser: AnswerParser | None, texts: list[str], finish_reason: str = "stop", **fields: Any) -> Response:
    state = cast(RequestState, State([(text, 1) for text in texts], finish_reason))
    answer = renderer_of(parser, **fields).whole([state], USAGE)
    return Response.model_validate_json(msgspec.json.encode(answer))


def without_ids(response: Response) -> Any:
    dumped = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in dumped["output"]:
        del item["id"]
    return dumped


def test_text_goes_through_openais_events_in_openais_order() -> None:
    events = stream(None, ["Hel", "lo"])
    assert types_of(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    *_, done, part, item, completed = events_of(events)
    assert (done.text, part.part.text, item.item.status) == ("Hello", "Hello", "completed")
    assert completed.response.output_text == "Hello"
    assert completed.response.output == [item.item]
    assert completed.response.completed_at >= completed.response.created_at


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    events = events_of(stream(ScriptedParser(THINKS_AND_CALLS), ["t"] * 6, tools=[TOOL]))
    assert [event.type.removeprefix("response.") for event in events[2:-1]] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    response = events[-1].response
    reasoning, message, first, second = response.output
    assert reasoning.content[0].text == "Let me see."
    assert message.content[0].text == "I look."
    assert (first.call_id, first.name, first.arguments, first.status) == ("call_1", "f", '{"a":1}', "completed")
    assert (second.call_id, second.arguments) == ("call_2", "{}")
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens) == (7, 4)
    ids = {event.item.id: event.output_index for event in events if event.type == "response.output_item.added"}
    assert list(ids.values()) == [0, 1, 2, 3]
    assert all(ids[event.item_id] == event.output_index for event in events if hasattr(event, "item_id"))


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_an_answer_is_the_same_whole_as_streamed(finish_reason: str) -> None:
    streamed = events_of(stream(ScriptedParser(THINKS_AND_CALLS), ["t"] * 6, finish_reason))[-1].response
    assert without_ids(streamed) == without_ids(whole(ScriptedParser(THINKS_AND_CALLS), ["t"] * 6, finish_reason))


@pytest.mark.parametrize(("finish_reason", "text"), [("length", "Hi"), ("stop", 'Hi\n<tool_call>{"na')])
def test_a_call_that_the_token_limit_cuts_off_in_its_name_is_no_text(finish_reason: str, text: str) -> None:
    parser, texts = (lambda: HermesParser(ToolUse.of([], "auto"))), ["Hi\n", '<tool_call>{"na']
    assert whole(parser(), texts, finish_reason).output_text == text
    assert events_of(stream(parser(), texts, finish_reason))[-1].response.output_text == text


def test_the_token_limit_leaves_the_response_and_its_last_item_incomplete() -> None:
    events = events_of(stream(ScriptedParser(THINKS_AND_CALLS[:4]), ["t"] * 4, "length"))
    response = events[-1].response
    assert (events[-1].type, response.status) == ("response.incomplete", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["completed", "completed", "incomplete"]
    assert response.completed_at is None


def test_what_the_parser_held_back_comes_before_the_end() -> None:
    events = events_of(stream(ScriptedParser([[], []], rest=[TextPart("<to")]), ["<", "to"]))
    assert events[-1].response.output_text == "<to"


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    assert types_of(stream(None, [""]))[2:] == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    (message,) = whole(None, [""]).output
    assert message.type == "message"
    assert whole(None, [""]).output_text == ""


def test_log_probabilities_go_with_the_text_that_their_tokens_wrote() -> None:
    script: list[Any] = [[ReasoningPart("hm")], [], [TextPart("a b")]]
    renderer = renderer_of(ScriptedParser(script), include=["message.output_text.logprobs"], top_logprobs=1)
    events = renderer.opening()
    for token in (5, 6, 7):
        logprobs = [TokenLogprobs(token, -0.5, (9,), (-0.25,))]
        events += renderer.chunk(0, RequestDelta("x", [token], logprobs, token == 7, "stop" if token == 7 else None))
    reported = events_of(events + renderer.closing(USAGE))
    (delta,) = [event for event in reported if event.type == "response.output_text.delta"]
    (done,) = [event for event in reported if event.type == "response.output_text.done"]
    content = reported[-1].response.output[-1].content[0]
    for logprobs in (delta.logprobs, done.logprobs, content.logprobs):
        assert [each.logprob for each in logprobs] == [-0.5, -0.5]
        assert [each.top_logprobs[0].logprob for each in logprobs] == [-0.25, -0.25]


def test_log_probabilities_are_encoded_once_for_all_last_events() -> None:
    """The last events have them five times: encoding 3900 of 20 alternatives each time took 127 ms."""
    ended: list[ResponseObject] = []
    renderer = renderer_of(None, include=["message.output_text.logprobs"], top_logprobs=1, ended=ended)
    events = renderer.opening()
    for token in range(8):
        events += renderer.chunk(0, RequestDelta("x", [token], [TokenLogprobs(token, -token, (9,), (-0.25,))]))
        assert len(json.loads(b"".join(renderer.snapshot()))["output"][0]["content"][0]["logprobs"]) == token + 1
    events += renderer.chunk(0, RequestDelta("", [], None, True, "stop"))
    reported = events_of(events + renderer.closing(USAGE))
    (done,) = [event for event in reported if event.type == "response.output_text.done"]
    assert [each.logprob for each in done.logprobs] == [-token for token in range(8)]
    (message,) = ended[0].output
    assert isinstance(message, MessageItem)
    assert isinstance(message.content[0], OutputText)
    assert isinstance(message.content[0].logprobs, LogprobList)
    (kept,) = joined_items([message])
    assert isinstance(kept, MessageItem)
    assert [each["logprob"] for each in json.loads(msgspec.json.encode(kept))["content"][0]["logprobs"]] == [
        -token for token in range(8)
    ]
    assert b"".join(encode_in_parts(message)) == msgspec.json.encode(kept)
    assert Turn(None, ()).answered([kept]).size == len(msgspec.json.encode(kept)) + 512


def test_a_list_of_log_probabilities_may_be_read_at_any_time() -> None:
    probs, expected = LogprobList(), list[Any]()
    for number in range(40):
        entries = [[number] * 500, "x" * number]
        probs.append(msgspec.json.encode(entries))
        expected += entries
        assert json.loads(b"".join(probs.parts())) == expected
        if number % 3 == 2:
            assert probs.joined() == msgspec.json.encode(expected)
            assert probs.parts() == [probs.joined()]
    assert LogprobList().joined() == b"[]"


def test_log_probabilities_that_a_thread_appends_while_others_are_joined_are_kept() -> None:
    class Appended(LogprobList):
        def parts(self) -> list[bytes]:
            parts = super().parts()
            if len(parts) == 3:
                self.append(b"[2]")
            return parts

    probs = Appended()
    probs.append(b"[1]")
    assert probs.joined() == b"[1]"
    assert probs.joined() == b"[1,2]"


def test_a_client_that_polls_gets_log_probabilities_that_were_encoded_before() -> None:
    """Each poll encoded 3900 of 20 alternatives on the event loop: 128 ms."""
    script: list[list[Part]] = [
        [TextPart("a")],
        [TextPart("b")],
        [ToolCallPart(0, "call_1", "f")],
        [ArgumentsPart(0, "{}")],
    ]
    renderer = renderer_of(ScriptedParser(script), include=["message.output_text.logprobs"])
    renderer.opening()
    many = [TokenLogprobs(5, -0.5, (9,) * 20, (-0.25,) * 20)] * 500
    polled = []
    for logprobs in (many, many[:1], many[:1], many[:1]):
        renderer.chunk(0, RequestDelta("x" * len(logprobs), [5] * len(logprobs), logprobs))
        polled.append(renderer.snapshot())
    for before, after in ((polled[0], polled[1]), (polled[2], polled[3])):  # While the message is open, and later.
        known = {id(part) for part in before}
        new = [part for part in after if id(part) not in known]
        assert sum(map(len, new)) < 5_000 < 400_000 < sum(map(len, after))
    for parts, kinds in zip(polled[1:3], (["message"], ["message", "function_call"]), strict=True):
        answer = json.loads(b"".join(parts))
        assert [item["type"] for item in answer["output"]] == kinds
        assert len(answer["output"][0]["content"][0]["logprobs"]) == 501


def test_tokens_can_be_spelled_by_their_ids() -> None:
    include = ["message.output_text.logprobs"]
    renderer = renderer_of(None, include=include, top_logprobs=1, return_tokens_as_token_ids=True)
    delta = RequestDelta("x", [5], [TokenLogprobs(5, -0.5, (9,), (-0.25,))], True, "stop")
    reported = events_of(renderer.opening() + renderer.chunk(0, delta) + renderer.closing(USAGE))
    (token,) = reported[-1].response.output[-1].content[0].logprobs
    assert (token.token, token.top_logprobs[0].token) == ("token_id:5", "token_id:9")


@pytest.mark.parametrize("begun", [True, False])
def test_a_failure_ends_the_stream_with_an_event_that_says_why(begun: bool) -> None:
    ended: list[ResponseObject] = []
    renderer = renderer_of(ended=ended)
    events = renderer.opening() + renderer.chunk(0, RequestDelta("Hel", [1])) if begun else b""
    reported = events_of(events + renderer.failure(EngineError("the engine is gone")))
    assert reported[0].type == "response.created"
    response = reported[-1].response
    assert (reported[-1].type, response.status, response.error.code) == ("response.failed", "failed", "server_error")
    assert response.error.message == "the engine is gone"
    assert response.output_text == ("Hel" if begun else "")
    assert [each.status for each in ended] == ["failed"]


def test_a_background_response_is_queued_until_its_first_token() -> None:
    renderer = renderer_of(background=True)
    events = renderer.opening()
    assert types_of(events) == ["created", "queued"]
    assert Response.model_validate_json(b"".join(renderer.snapshot())).status == "queued"
    events += renderer.chunk(0, RequestDelta("Hel", [1]))
    assert types_of(events)[2] == "in_progress"
    running = Response.model_validate_json(b"".join(renderer.snapshot()))
    assert (running.status, running.output_text) == ("in_progress", "Hel")
    last = events_of(events + renderer.cancel())[-1]
    assert (last.type, last.response.status, last.response.output_text) == ("response.incomplete", "cancelled", "Hel")


def test_the_end_is_known_to_the_store_before_the_client_hears_of_it() -> None:
    ended: list[ResponseObject] = []
    renderer = renderer_of(ended=ended)
    renderer.opening()
    renderer.chunk(0, RequestDelta("Hi", [1], None, True, "stop"))
    assert not ended
    renderer.closing(USAGE)
    assert [each.status for each in ended] == ["completed"]


def test_an_answer_repeats_what_was_asked_for() -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.25,
        "truncation": "auto",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        "reasoning": {"effort": "low"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "previous_response_id": "resp_1",
        "max_tool_calls": 3,
    }
    answer = whole(None, ["Hi"], **fields).model_dump(by_alias=True)
    for name, value in fields.items():
        kept = answer[name]
        if isinstance(value, dict):
            kept = {key: kept[key] for key in value}
            if name == "text":
                kept["format"].pop("description", None)
        elif name == "tools":
            kept = [{key: tool[key] for key in TOOL} for tool in kept]
        assert kept == value


def test_defaults_that_the_checkpoint_set_are_reported() -> None:
    assert whole(None, ["Hi"]).temperature == 0.75


def test_a_members_call_bears_name_and_namespace() -> None:
    with collect():
        events = events_of(stream(ScriptedParser(MEMBER_AND_PATCH), ["t"] * 3, tools=AGENT_TOOLS))
    call = events[-1].response.output[0]
    assert (call.type, call.name, call.namespace, call.arguments) == ("function_call", "f", "crm", '{"a":1}')
    added = next(event for event in events if event.type == "response.output_item.added")
    assert (added.item.name, added.item.namespace) == ("f", "crm")
    assert [tool.type for tool in events[-1].response.tools] == ["namespace", "custom"]
    (plain,) = whole(ScriptedParser([THINKS_AND_CALLS[5]]), ["t"], tools=[TOOL]).output
    assert "namespace" not in plain.model_dump(exclude_unset=True)


def test_a_custom_call_streams_its_text() -> None:
    with collect():
        events = events_of(stream(ScriptedParser(MEMBER_AND_PATCH), ["t"] * 3, tools=AGENT_TOOLS))
    second = [event for event in events if getattr(event, "output_index", 0) == 1]
    assert [event.type.removeprefix("response.") for event in second] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.delta",
        "custom_tool_call_input.done", "output_item.done",
    ]  # fmt: skip
    assert [event.delta for event in second[1:3]] == ["*** Be", "gin\n\xe9"]
    assert second[3].input == second[4].item.input == "*** Begin\n\xe9"
    assert (second[4].item.type, second[4].item.name, second[4].item.call_id) == (
        "custom_tool_call",
        "patch",
        "call_2",
    )


def test_reasoning_is_sealed_where_the_request_asks_for_it() -> None:
    script = [[ReasoningPart("hm")], [TextPart("5")]]
    asked: dict[str, Any] = {"include": ["reasoning.encrypted_content"]}
    events = events_of(stream(ScriptedParser(script), ["t"] * 2, **asked))
    done = next(event.item for event in events if event.type == "response.output_item.done")
    assert SEALED.opener(ANYONE.key)("reasoning", done.encrypted_content) == "hm"
    assert events[-1].response.output[0] == done
    assert whole(ScriptedParser(script), ["t"] * 2).output[0].model_dump()["encrypted_content"] is None


COMPACT: dict[str, Any] = {"input": [{"role": "user", "content": "Hi"}, {"type": "compaction_trigger"}]}


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_compaction_is_one_sealed_item(finish_reason: str) -> None:
    script = [[ReasoningPart("hm")], [TextPart(" We ag")], [TextPart("reed.")]]
    events = stream(ScriptedParser(script), ["t"] * 3, finish_reason, **COMPACT)
    assert types_of(events) == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    (item,) = events_of(events)[-1].response.output
    assert item.type == "compaction"
    assert SEALED.opener(ANYONE.key)("compaction", item.encrypted_content) == "We agreed."
    plain = whole(None, ["We ", "agreed."], **COMPACT).output[0].model_dump()
    assert SEALED.opener(ANYONE.key)("compaction", plain["encrypted_content"]) == "We agreed."


def test_a_compaction_has_no_beginning_of_a_call_that_the_token_limit_cuts_off() -> None:
    parser = HermesParser(ToolUse.of([], "auto"))
    item = whole(parser, ["We agreed.", '<tool_call>{"na'], "length", **COMPACT).output[0].model_dump()
    assert SEALED.opener(ANYONE.key)("compaction", item["encrypted_content"]) == "We agreed."


def test_a_compaction_without_a_summary_fails() -> None:
    with pytest.raises(EngineError, match="wrote no summary"):
        whole(ScriptedParser([[ReasoningPart("hm")]]), ["t"], **COMPACT)
    with pytest.raises(
        BadRequest, match="no summary of the conversation within max_output_tokens, stop; leave"
    ) as bad:
        whole(None, [" "], **COMPACT, stop=["a"], max_output_tokens=1)
    assert bad.value.param == "max_output_tokens"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("it broke"), "server_error"),
        (Overloaded("full", "requests", 1.5), "rate_limit_exceeded"),
        (ContextLengthExceeded("too long"), "context_length_exceeded"),
    ],
)
def test_a_failed_response_says_why(error: ApiError, code: str) -> None:
    last = json.loads(renderer_of().failure(error).split(b"data: ")[-1])
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"message": str(error), "code": code}
