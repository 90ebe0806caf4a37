"""The official client: `chat.completions`, its helpers and its raw forms."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

QUESTION: Any = [{"role": "user", "content": "What is 2 + 3?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
STORY: Any = [{"role": "user", "content": "Tell me a story"}]
GET_WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    """Get the weather for a city"""

    city: str


PERSON: Any = [{"role": "user", "content": "Extract name and age as JSON: Alice is 30 years old and lives in Paris."}]


@pytest.fixture
def client() -> openai.OpenAI:
    return openai.OpenAI(max_retries=0)


def ask(client: openai.OpenAI, model: str, messages: Any = QUESTION, **fields: Any) -> ChatCompletion:
    return client.chat.completions.create(**{"model": model, "messages": messages, "temperature": 0, **fields})


def test_a_question_is_answered(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("2 + 3 = 5", "assistant", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 3


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_limit_ends_the_answer(client: openai.OpenAI, model: str, limit: str) -> None:
    answer = ask(client, model, **{limit: 3})
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


def test_chunks_make_the_answer(client: openai.OpenAI, model: str) -> None:
    with ask(client, model, STORY, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (
        ask(client, model, STORY).choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert len({chunk.id for chunk in (*chunks, last)}) == 1


def test_the_stream_helper_accumulates(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=STORY, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.delta") > 20
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content == ask(client, model, STORY).choices[0].message.content


def test_log_probabilities_cover_the_answer(client: openai.OpenAI, model: str) -> None:
    choice = ask(client, model, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(each.bytes or ()) for each in content).startswith(b"2 + 3 = 5")
    assert all(len(each.top_logprobs) == 3 for each in content)


def test_several_choices_come_streamed_and_whole(client: openai.OpenAI, model: str) -> None:
    fields = {"n": 3, "seed": 11, "temperature": 1.2, "max_tokens": 12}
    whole = [choice.message.content for choice in ask(client, model, STORY, **fields).choices]
    texts = ["", "", ""]
    with ask(client, model, STORY, **fields, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == whole


def test_parse_returns_the_models_type(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(model=model, messages=PERSON, temperature=0, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Alice", age=30)


def test_a_streamed_answer_is_parsed_too(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=PERSON, temperature=0, response_format=Person) as stream:
        snapshots = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Alice", age=30)
    assert len(snapshots) > 3


def test_a_schema_holds_whatever_is_asked(client: openai.OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}, "score": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["mood", "score"],
        "additionalProperties": False,
    }
    answer_format: Any = {"type": "json_schema", "json_schema": {"name": "mood", "strict": True, "schema": schema}}
    for temperature in (0, 2):
        text = ask(client, model, response_format=answer_format, temperature=temperature).choices[0].message.content
        value = json.loads(text or "")
        assert value["mood"] in ("good", "bad")
        assert 1 <= value["score"] <= 9


def test_json_mode_gives_an_object(client: openai.OpenAI, model: str) -> None:
    text = ask(client, model, PERSON, response_format={"type": "json_object"}).choices[0].message.content
    assert json.loads(text or "") == {"name": "Alice", "age": 30}


def test_a_tool_is_called_and_its_result_is_sent(client: openai.OpenAI, model: str) -> None:
    choice = ask(client, model, WEATHER, tools=[GET_WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        {"city": "Paris"},
    )
    messages = [*WEATHER, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    reported = ask(client, model, messages, tools=[GET_WEATHER]).choices[0]
    assert (reported.message.content, reported.finish_reason) == ("The weather in Paris is sunny.", "stop")


def test_a_streamed_call_is_the_same_call(client: openai.OpenAI, model: str) -> None:
    name, arguments, identifiers, reasons = "", "", [], []
    with ask(client, model, WEATHER, tools=[GET_WEATHER], stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                reasons.append(choice.finish_reason)
                for call in choice.delta.tool_calls or ():
                    assert call.index == 0
                    identifiers.append(call.id)
                    if call.function is not None:
                        name += call.function.name or ""
                        arguments += call.function.arguments or ""
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Paris"})
    assert len([each for each in identifiers if each]) == 1
    assert [each for each in reasons if each] == ["tool_calls"]


def test_parse_takes_a_models_type_as_a_strict_tool(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model,
        messages=WEATHER,
        temperature=0,
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
        tool_choice="required",
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == GetWeather(city="Paris")


def test_the_stream_helper_accumulates_calls(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model,
        messages=WEATHER,
        temperature=0,
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.parsed_arguments for event in done] == [GetWeather(city="Paris")]
    (call,) = final.choices[0].message.tool_calls or ()
    assert call.function.name == "get_weather"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_can_be_forced_of_any_prompt(client: openai.OpenAI, model: str, choice: Any, stream: bool) -> None:
    fields: dict[str, Any] = {"tools": [GET_WEATHER], "tool_choice": choice, "max_tokens": 100}
    if stream:
        with ask(client, model, **fields, stream=True) as chunks:
            parts = [each for chunk in chunks for c in chunk.choices for each in c.delta.tool_calls or ()]
        arguments = "".join(part.function.arguments or "" for part in parts if part.function)
    else:
        (call,) = ask(client, model, **fields).choices[0].message.tool_calls or ()
        arguments = call.function.arguments
    assert json.loads(arguments).keys() == {"city"}


def test_tool_choice_none_calls_nothing(client: openai.OpenAI, model: str) -> None:
    message = ask(client, model, WEATHER, tools=[GET_WEATHER], tool_choice="none").choices[0].message
    assert not message.tool_calls
    assert message.content


def test_roles_and_text_parts_are_read(client: openai.OpenAI, model: str) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi, my name is"}, {"type": "text", "text": " Bob"}]},
        {"role": "assistant", "content": "Hello Bob!"},
        {"role": "user", "content": "What is my name?", "name": "bob"},
    ]
    assert "Bob" in (ask(client, model, messages).choices[0].message.content or "")


def test_fields_that_change_nothing_are_taken(client: openai.OpenAI, model: str) -> None:
    fields: dict[str, Any] = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "user": "u",
        "modalities": ["text"],
        "parallel_tool_calls": True,
    }
    assert ask(client, model, **fields, tools=[GET_WEATHER]).choices[0].message.content == "2 + 3 = 5"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("audio", {"audio": {"voice": "alloy", "format": "wav"}}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("web_search_options", {"web_search_options": {}}),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        ),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    client: openai.OpenAI, model: str, name: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match=name):
        ask(client, model, **fields)


def test_the_raw_answer_has_its_headers(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=QUESTION, temperature=0, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.request_id == "mine-1"
    assert raw.parse().choices[0].message.content == "2 + 3 = 5"


def test_the_raw_stream_is_events_up_to_done(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.with_streaming_response.create(
        model=model, messages=QUESTION, temperature=0, stream=True
    ) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


async def test_the_async_client_streams_answers_side_by_side(model: str) -> None:
    import asyncio

    async with openai.AsyncOpenAI(max_retries=0) as client:

        async def text() -> str:
            async with client.chat.completions.stream(model=model, messages=STORY, temperature=0) as stream:
                return (await stream.get_final_completion()).choices[0].message.content or ""

        texts = await asyncio.gather(*(text() for _ in range(4)))
    assert len(set(texts)) == 1
    assert texts[0].endswith("The end.")


async def test_the_async_client_parses(model: str) -> None:
    async with openai.AsyncOpenAI(max_retries=0) as client:
        answer = await client.chat.completions.parse(
            model=model, messages=PERSON, temperature=0, response_format=Person
        )
    assert answer.choices[0].message.parsed == Person(name="Alice", age=30)


def test_a_stream_may_be_left(client: openai.OpenAI, model: str) -> None:
    stream = ask(client, model, STORY, stream=True)
    next(iter(stream))
    stream.close()
    assert ask(client, model).choices[0].message.content == "2 + 3 = 5"
