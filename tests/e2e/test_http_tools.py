"""Tool calls through the official client: chosen by the embedded model, forced, streamed, and answered."""

import json
import re
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.e2e.kaon_server import MODEL

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ROLL: Any = {
    "type": "function",
    "function": {
        "name": "roll",
        "parameters": {
            "type": "object",
            "properties": {"sides": {"type": "integer", "minimum": 2, "maximum": 20}, "loud": {"type": "boolean"}},
            "required": ["sides", "loud"],
            "additionalProperties": False,
        },
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]


def ask(client: openai.OpenAI, messages: list[Any] = QUESTION, **fields: Any) -> ChatCompletion:
    defaults = {"model": MODEL, "messages": messages, "tools": [WEATHER], "temperature": 0, "max_tokens": 200}
    answer: ChatCompletion = client.chat.completions.create(**{**defaults, **fields})
    return answer


def calls(answer: ChatCompletion) -> list[tuple[str, Any]]:
    made: list[Any] = answer.choices[0].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in made]


def test_a_call_that_the_model_chooses_comes_as_a_call_and_not_as_text(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert calls(answer) == [("get_weather", {"city": "Paris"})]
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_streamed_call_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    chosen: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "temperature": 0}
    with client.chat.completions.stream(**chosen) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert calls(final) == [("get_weather", {"city": "Paris"})]
    assert final.choices[0].finish_reason == "tool_calls"
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 2


def test_the_result_of_a_call_can_be_answered(client: openai.OpenAI) -> None:
    message = ask(client).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"sky": "sunny"}'}  # type: ignore[index]
    answer = ask(client, [*QUESTION, message.model_dump(), result])
    assert answer.choices[0].finish_reason == "stop"
    assert "sunny" in (answer.choices[0].message.content or "")


def test_without_a_call_the_answer_is_content(client: openai.OpenAI) -> None:
    answer = ask(client, HELLO)
    assert calls(answer) == []
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_required_forces_calls_whose_arguments_follow_their_schema(client: openai.OpenAI, seed: int) -> None:
    answer = ask(client, HELLO, tools=[ROLL], tool_choice="required", temperature=1.5, seed=seed)
    made = calls(answer)
    assert made
    for name, arguments in made:
        assert name == "roll"
        assert 2 <= arguments["sides"] <= 20
        assert isinstance(arguments["loud"], bool)
        assert set(arguments) == {"sides", "loud"}


def test_a_named_function_is_called_once_and_openai_says_stop(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "roll"}}
    answer = ask(client, HELLO, tools=[WEATHER, ROLL], tool_choice=named)
    assert [name for name, _ in calls(answer)] == ["roll"]
    assert answer.choices[0].finish_reason == "stop"


def test_one_call_at_a_time_where_parallel_calls_are_off(client: openai.OpenAI) -> None:
    answer = ask(
        client, HELLO, tools=[ROLL], tool_choice="required", parallel_tool_calls=False, temperature=1.5, seed=5
    )
    assert len(calls(answer)) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_each_choice_has_calls_of_its_own(client: openai.OpenAI, n: int) -> None:
    answer = ask(client, HELLO, tools=[ROLL], tool_choice="required", temperature=1.5, seed=5, n=n)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len(answer.choices) == n
    assert len(set(ids)) == len(ids) >= n


def test_a_call_cut_off_by_the_limit_says_length_and_invents_nothing(client: openai.OpenAI) -> None:
    whole = ask(client).choices[0].message.tool_calls[0].function.arguments  # type: ignore[index,union-attr]
    answer = ask(client, max_tokens=19)
    assert answer.choices[0].finish_reason == "length"
    (call,) = answer.choices[0].message.tool_calls or ()
    cut = call.function.arguments  # type: ignore[union-attr]
    assert whole.startswith(cut)
    assert 0 < len(cut) < len(whole)


def test_a_form_for_the_content_leaves_the_model_free_to_call(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "said", "schema": {"type": "object"}, "strict": True}}
    assert calls(ask(client, response_format=form)) == [("get_weather", {"city": "Paris"})]
    said = ask(client, [{"role": "user", "content": "Answer in JSON: what is 2 + 3?"}], response_format=form)
    assert isinstance(json.loads(said.choices[0].message.content or ""), dict)


def test_an_unknown_parser_ends_the_start_with_a_sentence(start_server: Any) -> None:
    server = start_server(server_config={"tool_call_parser": "hermess"})
    assert server.wait() == 1
    assert "tool_call_parser is hermess; it must be auto, none or one of" in server.stderr


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "asks for a call, and there are no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "names the function 'f'; among the tools",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools", "holds two functions named get_weather"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$ref": 3}}}
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
            "tools[0].function.parameters cannot be followed",
        ),
    ],
)
def test_tools_that_make_no_sense_are_refused_in_words(
    client: openai.OpenAI, fields: dict[str, Any], param: str, sentence: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert sentence in caught.value.message
    assert caught.value.param == param


def test_custom_tools_are_called_with_text_that_follows_their_grammar(client: openai.OpenAI) -> None:
    for grammar, wanted in (
        ({"syntax": "regex", "definition": "[a-c]{3}"}, r"[a-c]{3}"),
        ({"syntax": "lark", "definition": 'start: "up" | "down"'}, "up|down"),
    ):
        tool = {"type": "custom", "custom": {"name": "go", "format": {"type": "grammar", "grammar": grammar}}}
        choice = {"type": "custom", "custom": {"name": "go"}}
        answer = ask(client, HELLO, tools=[WEATHER, tool], tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "custom"
        assert re.fullmatch(wanted, call.custom.input)
        again = [*HELLO, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Gone."}]
        assert ask(client, again, tools=[tool], tool_choice="none").choices[0].message.content


def test_a_wrong_custom_tool_is_refused_where_it_is(client: openai.OpenAI) -> None:
    wrong_form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(a"}}
    for tools, choice, sentence in (
        (
            [{"type": "custom", "custom": {"name": "go", "format": wrong_form}}],
            "auto",
            "grammar.definition is refused",
        ),
        ([{"type": "mcp"}], "auto", r"tools\[0\] is of type mcp, which is not known; it must be function or custom"),
        ([WEATHER], {"type": "custom", "custom": {"name": "get_weather"}}, "names the custom tool 'get_weather'"),
    ):
        with pytest.raises(openai.BadRequestError, match=sentence):
            ask(client, tools=tools, tool_choice=choice)
