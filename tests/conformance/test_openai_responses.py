"""The official client: `responses`."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

WEATHER = "What is the weather in Paris?"
GET_WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather for a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
PERSON = "Extract name and age as JSON: Alice is 30 years old and lives in Paris."


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def client() -> openai.OpenAI:
    return openai.OpenAI(max_retries=0)


def respond(client: openai.OpenAI, model: str, input: Any, **fields: Any) -> Response:
    return client.responses.create(**{"model": model, "input": input, "temperature": 0, **fields})


def test_an_input_is_answered(client: openai.OpenAI, model: str) -> None:
    response = respond(client, model, "What is 2 + 3?")
    assert (response.output_text, response.status, response.object) == ("2 + 3 = 5", "completed", "response")
    (message,) = response.output
    assert (message.type, message.role) == ("message", "assistant")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_instructions_and_items_are_read(client: openai.OpenAI, model: str) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi, my name is Bob"}]},
        {"role": "assistant", "content": "Hello Bob!"},
        {"role": "user", "content": "What is my name?"},
    ]
    assert "Bob" in respond(client, model, items, instructions="Be brief.").output_text


def test_a_response_goes_on_from_the_one_before(client: openai.OpenAI, model: str) -> None:
    first = respond(client, model, "Hi, my name is Bob")
    second = respond(client, model, "What is my name?", previous_response_id=first.id)
    assert "Bob" in second.output_text
    assert second.previous_response_id == first.id


def test_a_stream_is_typed_events_in_order(client: openai.OpenAI, model: str) -> None:
    with respond(client, model, "Tell me a story", stream=True) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for kind in (
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ):
        assert kinds.count(kind) == 1, kind
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == respond(client, model, "Tell me a story").output_text


def test_the_stream_helper_gives_the_final_response(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input="Tell me a story", temperature=0) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text
    assert final.output_text.endswith("The end.")


def test_a_limit_leaves_the_response_incomplete(client: openai.OpenAI, model: str) -> None:
    response = respond(client, model, "Tell me a story", max_output_tokens=16)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_parse_returns_the_models_type(client: openai.OpenAI, model: str) -> None:
    response = client.responses.parse(model=model, input=PERSON, temperature=0, text_format=Person)
    assert response.output_parsed == Person(name="Alice", age=30)


def test_a_streamed_response_is_parsed_too(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input=PERSON, temperature=0, text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Alice", age=30)


def test_json_mode_gives_an_object(client: openai.OpenAI, model: str) -> None:
    response = respond(client, model, PERSON, text={"format": {"type": "json_object"}})
    assert json.loads(response.output_text) == {"name": "Alice", "age": 30}


@pytest.mark.parametrize("stored", [True, False])
def test_a_function_is_called_and_its_output_is_sent(client: openai.OpenAI, model: str, stored: bool) -> None:
    first = respond(client, model, WEATHER, tools=[GET_WEATHER], store=stored)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    if stored:
        second = respond(client, model, [output], tools=[GET_WEATHER], previous_response_id=first.id)
    else:
        items = [{"role": "user", "content": WEATHER}, *first.output, output]
        second = respond(client, model, items, tools=[GET_WEATHER], store=False)
    assert second.output_text == "The weather in Paris is sunny."


def test_a_streamed_call_is_the_same_call(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input=WEATHER, tools=[GET_WEATHER], temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert "".join(deltas) == call.arguments
    assert json.loads(call.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_call_can_be_forced_of_any_input(client: openai.OpenAI, model: str, choice: Any) -> None:
    response = respond(client, model, "Hello", tools=[GET_WEATHER], tool_choice=choice, max_output_tokens=100)
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments).keys() == {"city"}


def test_a_stored_response_is_retrieved_listed_and_deleted(client: openai.OpenAI, model: str) -> None:
    response = respond(client, model, "Hello", metadata={"a": "b"})
    kept = client.responses.retrieve(response.id)
    assert (kept.output_text, kept.status, kept.metadata) == (response.output_text, "completed", {"a": "b"})
    (item,) = client.responses.input_items.list(response.id)
    assert item.content[0].text == "Hello"
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_response_that_was_not_to_be_stored_is_not(client: openai.OpenAI, model: str) -> None:
    response = respond(client, model, "Hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_an_inputs_tokens_are_counted(client: openai.OpenAI, model: str) -> None:
    response = respond(client, model, "What is 2 + 3?")
    assert response.usage is not None
    assert client.responses.input_tokens.count(model=model, input="What is 2 + 3?").input_tokens == (
        response.usage.input_tokens
    )


def test_an_unknown_previous_response_is_refused(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        respond(client, model, "Hello", previous_response_id="resp_none")
    assert raised.value.status_code in (400, 404)
    assert "resp_none" in raised.value.message


def test_a_background_response_is_polled_or_cancelled(client: openai.OpenAI, model: str) -> None:
    import time

    response = respond(client, model, "Tell me a story", background=True)
    assert response.status in ("queued", "in_progress")
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        response = client.responses.retrieve(response.id)
    assert response.output_text.endswith("The end.")
    long = respond(client, model, "Tell me a story", background=True, extra_body={"ignore_eos": True})
    assert client.responses.cancel(long.id).status == "cancelled"


def test_a_response_that_is_done_cannot_be_cancelled(client: openai.OpenAI, model: str) -> None:
    response = respond(client, model, "Hello")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(response.id)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("prompt", {"prompt": {"id": "pmpt_1"}}), ("conversation", {"conversation": "conv_1"})],
)
def test_what_is_not_supported_is_refused_by_name(
    client: openai.OpenAI, model: str, name: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match=name):
        respond(client, model, "Hello", **fields)


def test_a_hosted_tool_is_left_out_by_name(client: openai.OpenAI, model: str) -> None:
    raw = client.responses.with_raw_response.create(
        model=model, input="What is 2 + 3?", tools=[{"type": "web_search"}]
    )
    assert raw.headers["x-kaon-ignored"] == "tools[0] (web_search)"
    assert raw.parse().output_text


def test_a_member_of_a_namespace_is_called(client: openai.OpenAI, model: str) -> None:
    tools: Any = [{"type": "namespace", "name": "world", "description": "Of the world.", "tools": [GET_WEATHER]}]
    (call,) = respond(client, model, WEATHER, tools=tools, tool_choice="required", parallel_tool_calls=False).output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == ("world", "get_weather")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = respond(client, model, [{"role": "user", "content": WEATHER}, call, output], tools=tools)
    assert answer.output_text


def test_a_custom_tool_is_called_and_streamed(client: openai.OpenAI, model: str) -> None:
    form: Any = {"type": "grammar", "syntax": "regex", "definition": "(red|green) (light|dark)"}
    tools: Any = [{"type": "custom", "name": "paint", "format": form}]
    with client.responses.stream(
        model=model, input="Paint it.", temperature=0, tools=tools, tool_choice={"type": "custom", "name": "paint"}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "custom_tool_call"
    assert "".join(deltas) == call.input
    assert call.input in ("red light", "red dark", "green light", "green dark")
    second = respond(
        client,
        model,
        [{"role": "user", "content": "Paint it."}, call, custom_output(call.call_id, "Painted.")],
        tools=tools,
    )
    assert second.output


def custom_output(call_id: str, text: str) -> dict[str, str]:
    return {"type": "custom_tool_call_output", "call_id": call_id, "output": text}


def test_a_conversation_is_compacted(client: openai.OpenAI, model: str) -> None:
    chat: Any = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "2 + 3 = 5"}]
    compacted = client.responses.compact(model=model, input=chat)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.total_tokens > 0
    items = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    assert respond(client, model, [*items, {"role": "user", "content": "Hello"}]).status == "completed"


def test_the_raw_response_has_its_request_id(client: openai.OpenAI, model: str) -> None:
    raw = client.responses.with_raw_response.create(model=model, input="Hello", temperature=0)
    assert raw.request_id
    assert raw.parse().output_text


async def test_the_async_client_streams(model: str) -> None:
    async with openai.AsyncOpenAI(max_retries=0) as client:
        stream = await client.responses.create(model=model, input="What is 2 + 3?", temperature=0, stream=True)
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        parsed = await client.responses.parse(model=model, input=PERSON, temperature=0, text_format=Person)
    assert "".join(deltas) == "2 + 3 = 5"
    assert parsed.output_parsed == Person(name="Alice", age=30)
