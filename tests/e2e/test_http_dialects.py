"""Calls, reasoning and structured answers in the dialects of known models, over HTTP.

The models' weights are random: their texts are forced, or biased towards a marker.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import ConfigDict, TypeAdapter

from tests.e2e.dialect_models import STYLES, make_model
from tests.e2e.kaon_server import KaonServer, free_port

ROLL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "roll",
        "parameters": {
            "type": "object",
            "properties": {"sides": {"type": "integer", "minimum": 2, "maximum": 20}, "mode": {"enum": ['é{"}', "b"]}},
            "required": ["sides", "mode"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "roll"}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent, config=ConfigDict(defer_build=True))
OPENING = {"deepseek": "</think>", "harmony": "<|channel|>", "mistral": "[TOOL_CALLS]"}
"""A bias of an answer towards a marker, so that it ends its reasoning."""


class Dialect(NamedTuple):
    """A served model of one style."""

    name: str
    client: openai.OpenAI
    server: KaonServer
    ids: dict[str, int]

    def body(self, **fields: Any) -> dict[str, Any]:
        pulls = {str(self.ids[token]): 6 for token in (OPENING[self.name], "<|end|>") if token in self.ids}
        message = {"role": "user", "content": "Hi"}
        body = {"messages": [message], "temperature": 1, "seed": 3, "max_tokens": 400, "logit_bias": pulls}
        return {"model": "m", **body, **fields}

    def ask(self, **fields: Any) -> ChatCompletion:
        """The answer, which is the same if it is streamed."""
        answer: ChatCompletion = self.client.chat.completions.create(**self.body(**fields))
        streamed: dict[int, dict[str, Any]] = {}
        usage = None
        body = self.body(**fields, stream=True, stream_options={"include_usage": True})
        for chunk in self.client.chat.completions.create(**body):
            usage = chunk.usage
            for choice in chunk.choices:
                found = streamed.setdefault(choice.index, {"content": "", "reasoning": "", "calls": {}, "tokens": []})
                found["content"] += choice.delta.content or ""
                found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or ():
                    name, arguments = found["calls"].get(call.index, ("", ""))
                    name += call.function.name or ""
                    found["calls"][call.index] = (name, arguments + (call.function.arguments or ""))
                found["tokens"] += [each.token for each in choice.logprobs.content] if choice.logprobs else []
                found["reason"] = choice.finish_reason
        for choice in answer.choices:
            assert streamed[choice.index] == {
                "content": choice.message.content or "",
                "reasoning": reasoning(choice),
                "calls": dict(enumerate(calls(choice))),
                "tokens": [each.token for each in choice.logprobs.content or ()] if choice.logprobs else [],
                "reason": choice.finish_reason,
            }
        assert usage.completion_tokens == answer.usage.completion_tokens  # type: ignore[union-attr]
        assert usage.completion_tokens_details == answer.usage.completion_tokens_details  # type: ignore[union-attr]
        return answer


def calls(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def reasoning(choice: Any) -> str:
    text = getattr(choice.message, "reasoning_content", "")
    assert getattr(choice.message, "reasoning", "") == text
    return text or ""


@pytest.fixture(scope="module", params=STYLES)
def dialect(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dialect]:
    directory = tmp_path_factory.mktemp(request.param)
    ids = make_model(directory, request.param)
    names = {"served_model_name": ["m"]}
    server = KaonServer(directory / "log", free_port(), model=str(directory), server_config=names).ready()
    with server.client() as client:
        yield Dialect(request.param, client, server, ids)
    assert server.stop() == 0
    assert "Traceback" not in server.stderr


def check_roll(choice: Any) -> None:
    for name, text in calls(choice):
        arguments = json.loads(text)
        assert name == "roll"
        assert set(arguments) == {"sides", "mode"}
        assert 2 <= arguments["sides"] <= 20
    assert calls(choice)
    assert choice.message.content is None


def test_forced_calls_are_calls_and_show_no_marker(dialect: Dialect) -> None:
    fields: dict[str, Any] = {"tools": [ROLL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = dialect.ask(**fields, n=2, logprobs=True, top_logprobs=1)
    for choice in answer.choices:
        check_roll(choice)
        assert choice.finish_reason == "tool_calls"
    assert sum(len(choice.logprobs.content) for choice in answer.choices) == answer.usage.completion_tokens  # type: ignore
    named = dialect.ask(tools=[ROLL], tool_choice=NAMED, response_format=FORMAT)
    check_roll(named.choices[0])
    assert named.choices[0].finish_reason == "stop"


def test_stop_strings_are_not_found_in_markers(dialect: Dialect) -> None:
    stop = ["<|", "<｜", "TOOL_", "|>"]  # noqa: RUF001
    check_roll(dialect.ask(tools=[ROLL], tool_choice=NAMED, stop=stop).choices[0])


def test_a_call_that_is_cut_off_is_reported_alike_streamed_and_whole(dialect: Dialect) -> None:
    for limit in (3, 12, 20, 30):
        (choice,) = dialect.ask(tools=[ROLL], tool_choice=NAMED, max_tokens=limit).choices
        assert choice.finish_reason == "length"


def test_an_answer_in_a_form_may_be_preceded_by_reasoning(dialect: Dialect) -> None:
    answer = dialect.ask(response_format=FORMAT, n=2)
    for choice in answer.choices:
        assert isinstance(json.loads(choice.message.content or "")["ok"], bool)
        assert choice.finish_reason == "stop"
    choice = dialect.ask(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}).choices[0]
    assert choice.message.content in ("yes", "no")


@pytest.mark.parametrize("dialect", ["deepseek", "mistral"], indirect=True)  # harmony's calls are like its messages
def test_without_tools_the_markers_of_calls_are_not_shown(dialect: Dialect) -> None:
    pulls = {str(id): 8 for token, id in dialect.ids.items() if "tool" in token.lower() or token == "</think>"}
    choice = dialect.ask(logit_bias=pulls, max_tokens=40).choices[0]
    written = (choice.message.content or "") + reasoning(choice)
    assert not any(token in written for token in STYLES[dialect.name].special)


def test_responses_report_reasoning_calls_and_text_as_items(dialect: Dialect) -> None:
    function = {"type": "function", "strict": False, **ROLL["function"]}
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    # Otherwise this model's reasoning takes all tokens, and no call or text follows.
    budget = {"reasoning": {"max_tokens": 20}} if dialect.name == "deepseek" else None
    for fields in ({"tools": [function], "tool_choice": "required", "parallel_tool_calls": False}, {"text": text}):
        final = dialect.client.responses.create(
            model="m", input="Hi", max_output_tokens=900, temperature=0.1, extra_body=budget, **fields
        )  # type: ignore[call-overload]
        assert final.output_text == "" or json.loads(final.output_text)
        events = list(
            dialect.client.responses.create(  # type: ignore[call-overload]
                model="m",
                input="Hi",
                max_output_tokens=900,
                temperature=0.1,
                stream=True,
                extra_body=budget,
                **fields,
            )
        )
        for event in events:
            EVENT.validate_python(event.model_dump(by_alias=True))
        Response.model_validate(final.model_dump(by_alias=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.type for item in done] == [item.type for item in events[-1].response.output]
        assert {item.type for item in done} <= {"reasoning", "message", "function_call"}
        assert done[-1].type == ("message" if "text" in fields else "function_call")


@pytest.mark.parametrize("dialect", ["deepseek"], indirect=True)
def test_a_budget_closes_the_reasoning_where_it_is_spent(dialect: Dialect) -> None:
    """Streamed or not, alone or before a call or a structured answer; the tokens up to the end of reasoning do not
    change."""
    forms: list[dict[str, Any]] = [
        {"max_tokens": 60},
        {"tools": [ROLL], "tool_choice": NAMED},
        {"response_format": FORMAT},
    ]
    for form in forms:
        fields: dict[str, Any] = {**form, "logit_bias": {}, "logprobs": True}
        free = dialect.ask(**{**fields, "max_tokens": 40}).choices[0]
        tokens = [each.token for each in free.logprobs.content]
        assert "</think>" not in tokens
        names = ("thinking_budget", "max_thinking_tokens", "thinking_token_budget")
        for name in names if "max_tokens" in form else names[:1]:
            answer = dialect.ask(**fields, extra_body={name: 25})
            (choice,) = answer.choices
            said = [each.token for each in choice.logprobs.content]
            closed = said.index("</think>")
            # The grammar allows the marker only after a whole character.
            assert 25 <= closed <= 28 if "max_tokens" not in fields else closed == 25
            assert said[:25] == tokens[:25]
            assert "</think>" not in said[closed + 1 :]
            assert answer.usage.completion_tokens_details.reasoning_tokens >= 24  # type: ignore[union-attr]
            if "tools" in fields:
                check_roll(choice)
            elif "response_format" in fields:
                assert set(json.loads(choice.message.content or "")) == {"ok"}
    body = {"model": "m", "input": "Hi", "reasoning": {"max_tokens": 25}, "max_output_tokens": 40, "temperature": 0}
    response = dialect.client.responses.create(**body)  # type: ignore[call-overload]
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage.output_tokens_details.reasoning_tokens <= 27


@pytest.mark.parametrize("dialect", ["harmony"], indirect=True)
def test_a_budget_that_cannot_be_enforced_is_named_as_ignored(dialect: Dialect) -> None:
    raw = dialect.client.chat.completions.with_raw_response.create(**dialect.body(extra_body={"thinking_budget": 5}))
    assert "thinking budget" in raw.headers["x-kaon-ignored"]


def test_calls_of_custom_tools_follow_their_grammar(dialect: Dialect) -> None:
    lark = 'start: line{1,2}\nline: "say \\"" /[a-c]{1,3}/ "\\"" LF\n%import common.LF'
    form = {"type": "grammar", "syntax": "lark", "definition": lark}
    raw = dialect.client.responses.with_raw_response.create(
        model="m",
        input="Hi",
        max_output_tokens=900,
        temperature=0.1,
        tools=[{"type": "custom", "name": "speak", "format": form}],  # type: ignore[list-item]
        tool_choice={"type": "custom", "name": "speak"},
        extra_body={"reasoning": {"max_tokens": 20}} if dialect.name == "deepseek" else None,
    )
    assert "x-kaon-ignored" not in raw.headers
    (called,) = (item for item in raw.parse().output if item.type == "custom_tool_call")
    assert re.fullmatch(r'(say "[a-c]{1,3}"\n){1,2}', called.input)
