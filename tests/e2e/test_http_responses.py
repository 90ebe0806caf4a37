"""`/v1/responses` through the official client: answers, events, conversations, the store, and background responses."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from tests.e2e.kaon_server import MODEL, KaonServer, eventually

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather for a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": None,
}
ENDLESS: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


def ask(client: openai.OpenAI, input: Any = "What is 2 + 3?", **fields: Any) -> Response:
    return client.responses.create(model=MODEL, input=input, **{"temperature": 0, **fields})


def ended(client: openai.OpenAI, id: str) -> Response:
    eventually(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(id)


def test_an_answer_is_kept_until_it_is_deleted(client: openai.OpenAI) -> None:
    answer = ask(client, metadata={"a": "b"}, instructions="Be brief.")
    assert answer.status == "completed"
    assert "5" in answer.output_text
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert client.responses.retrieve(answer.id) == answer
    client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)


def test_the_clients_own_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="What is 2 + 3?", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == ask(client).output_text
    assert len(deltas) > 1
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_a_conversation_goes_on_from_the_stored_response(client: openai.OpenAI) -> None:
    first = ask(client, "What is 2 + 3?", instructions="Be brief.")
    second = ask(client, "And 4 + 4?", previous_response_id=first.id)
    by_hand = [
        {"role": "user", "content": "What is 2 + 3?"},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "And 4 + 4?"},
    ]
    sent = ask(client, by_hand)
    assert second.output_text == sent.output_text
    assert second.usage is not None
    assert sent.usage is not None
    assert second.usage.input_tokens == sent.usage.input_tokens
    client.responses.delete(first.id)
    assert ask(client, "And 1 + 1?", previous_response_id=second.id).status == "completed"
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message", "message", "message"]
    assert items[1].id == first.output[0].id
    newest = client.responses.input_items.list(second.id, limit=1)
    assert (newest.data[0].id, newest.has_more) == (items[2].id, True)
    reference: Any = [{"type": "item_reference", "id": items[0].id}]
    assert ask(client, reference).output_text == first.output_text


def test_a_prompt_is_counted_before_it_is_sent(client: openai.OpenAI) -> None:
    answer = ask(client, instructions="Be brief.", tools=[WEATHER])
    assert answer.usage is not None
    counted = client.responses.input_tokens.count(
        input="What is 2 + 3?",
        instructions="Be brief.",
        tools=[WEATHER],  # type: ignore[list-item]
    )
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_tool_is_called_and_its_result_is_read(client: openai.OpenAI) -> None:
    asked = ask(client, "What is the weather in Paris?", tools=[WEATHER])
    (call,) = asked.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    answer = ask(client, result, previous_response_id=asked.id, tools=[WEATHER])
    assert "sunny" in answer.output_text
    stateless = ask(
        client, [{"role": "user", "content": "What is the weather in Paris?"}, call.model_dump(), *result],
        tools=[WEATHER], store=False,
    )  # fmt: skip
    assert stateless.output_text == answer.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(stateless.id)


def test_a_streamed_call_adds_up_to_its_arguments(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input="What is the weather in Paris?", temperature=0, tools=[WEATHER]
    ) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    assert isinstance(call, ResponseFunctionToolCall)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert json.loads(call.arguments) == {"city": "Paris"}


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
)
def test_a_call_can_be_required(client: openai.OpenAI, choice: Any) -> None:
    calls = ask(client, "Hello!", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False).output
    assert [(call.type, getattr(call, "name", None)) for call in calls] == [("function_call", "get_weather")]


def test_the_client_parses_the_text_into_its_model(client: openai.OpenAI) -> None:
    class Sum(BaseModel):
        result: int
        comment: Literal["easy", "hard"]

    parsed = client.responses.parse(
        model=MODEL, input="What is 2 + 3?", text_format=Sum, temperature=0, max_output_tokens=100
    )
    assert isinstance(parsed.output_parsed, Sum)
    answer = ask(client, "Describe Paris as JSON.", text={"format": {"type": "json_object"}}, max_output_tokens=200)
    assert answer.output_text.startswith("{")
    assert answer.status == "incomplete" or isinstance(json.loads(answer.output_text), dict)


def test_the_token_limit_makes_a_response_incomplete(client: openai.OpenAI) -> None:
    answer = ask(client, "Tell me a story.", max_output_tokens=3, **ENDLESS)
    assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    stream = client.responses.create(
        model=MODEL, input="Tell me a story.", max_output_tokens=3, temperature=0, stream=True, **ENDLESS
    )
    *_, last = stream
    assert last.type == "response.incomplete"
    assert last.response.output_text == answer.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_a_token_each(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4}
    if stream:
        *_, last = client.responses.create(
            model=MODEL, input="What is 2 + 3?", temperature=0, stream=True, **fields, **ENDLESS
        )
        assert last.type == "response.incomplete"
        answer = last.response
    else:
        answer = ask(client, **fields, **ENDLESS)
    (message,) = answer.output
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs or []
    assert "".join(each.token for each in logprobs) == answer.output_text
    assert all(len(each.top_logprobs) == 2 for each in logprobs)


def test_truncation_leaves_out_the_oldest(client: openai.OpenAI) -> None:
    long: list[Any] = [{"role": "user", "content": f"What is {i} + {i}? " * 20} for i in range(60)]
    question: Any = {"role": "user", "content": "What is 2 + 3?"}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, [*long, question])
    assert refused.value.param == "input"
    answer = ask(client, [*long, question], truncation="auto", instructions="Be brief.", max_output_tokens=8)
    assert answer.usage is not None
    assert answer.usage.input_tokens > 100
    with pytest.raises(openai.BadRequestError):
        ask(client, "What is 2 + 3? " * 5000, truncation="auto")


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_ends_its_response(server: KaonServer, stream: bool) -> None:
    eventually(lambda: server.metric("kaon_requests_running") == 0)
    body = {"model": MODEL, "input": "A story without end", "stream": stream, "max_output_tokens": 3000}
    connection = server.connect("/v1/responses", {**body, "ignore_eos": True})
    eventually(lambda: server.metric("kaon_requests_running") == 1)
    connection.close()
    eventually(lambda: server.metric("kaon_requests_running") == 0)


def test_a_background_response_runs_without_its_client(client: openai.OpenAI) -> None:
    begun = ask(client, background=True)
    assert begun.status == "queued"
    answer = ended(client, begun.id)
    assert answer.status == "completed"
    assert answer.output_text == ask(client).output_text
    assert client.responses.cancel(begun.id) == answer
    with pytest.raises(openai.BadRequestError, match="was not created with background true"):
        client.responses.cancel(ask(client).id)


def test_a_background_response_can_be_cancelled(client: openai.OpenAI, server: KaonServer) -> None:
    begun = ask(client, "Tell me a story.", background=True, **ENDLESS)
    eventually(lambda: client.responses.retrieve(begun.id).output_text != "")
    assert client.responses.retrieve(begun.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="still running"):
        ask(client, previous_response_id=begun.id)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert ended(client, begun.id).output_text != ""


def test_a_background_stream_is_taken_up_where_it_was_left(client: openai.OpenAI) -> None:
    stream = client.responses.create(model=MODEL, input="What is 2 + 3?", temperature=0, background=True, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    id = first.response.id
    rest = list(client.responses.retrieve(id, stream=True, starting_after=first.sequence_number))
    assert rest[0].sequence_number == 1
    assert rest[0].type == "response.queued"
    assert rest[-1].type == "response.completed"
    assert rest[-1].response == client.responses.retrieve(id)
    with client.responses.stream(response_id=id) as again:
        assert again.get_final_response().output_text == rest[-1].response.output_text


def test_a_forced_member_of_a_namespace_follows_its_schema(client: openai.OpenAI) -> None:
    crm: Any = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [WEATHER]}
    for choice in ({"type": "function", "name": "get_weather", "namespace": "crm"}, "required"):
        (call,) = ask(client, "Hi", tools=[crm], tool_choice=choice, parallel_tool_calls=False).output
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.namespace, call.name) == ("crm", "get_weather")
        assert json.loads(call.arguments).keys() == {"city"}


def test_a_forced_custom_tool_follows_its_regular_expression(client: openai.OpenAI) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": '"(ab|c\\\\d){1,4}"\n'}
    tool: Any = {"type": "custom", "name": "code", "description": "Takes a code.", "format": form}
    choice = {"type": "custom", "name": "code"}
    (call,) = ask(client, "Hi", tools=[tool], tool_choice=choice, temperature=1, extra_body={"seed": 1}).output
    assert call.type == "custom_tool_call"
    assert re.fullmatch(form["definition"], call.input)


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}]}, None),
    ({"tools": [{"type": "telepathy"}]}, "tools[0]"),
    ({"previous_response_id": "resp_0"}, "previous_response_id"),
    ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "5"}]}, "input"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"max_output_tokens": 10**6, "extra_body": {"min_tokens": 10**5}}, "min_tokens"),
    ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ({"extra_body": {"conversation": "conv_0"}}, "conversation"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_cannot_be_answered_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **fields)
    assert refused.value.param == (param or "input[0].content[0]")
    assert str(refused.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("?stream=true", "has no events to stream"),
        ("?stream=maybe", "stream is 'maybe'"),
        ("?starting_after=2", "needs stream"),
        ("?stream=true&starting_after=-1", "starting_after is '-1'"),
        ("/input_items?limit=0", "limit is '0'"),
        ("/input_items?limit=101", "limit is '101'"),
        ("/input_items?order=up", "order is 'up'"),
        ("/input_items?after=msg_0", "after is 'msg_0'"),
    ],
)
def test_parameters_are_checked(client: openai.OpenAI, server: KaonServer, path: str, said: str) -> None:
    id = ask(client, max_output_tokens=1).id
    with server.http() as http:
        answer = http.get(f"/v1/responses/{id}{path}")
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.slow  # Owners: tests/e2e/test_http_owners.py; bounds: tests/unit/responses/test_responses_store.py.
def test_a_response_belongs_to_the_key_that_made_it(start_server: Callable[..., KaonServer], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    settings = {"api_key_file": str(keys), "max_stored_responses": 2, "drain_timeout": 0}
    server = start_server(server_config=settings).ready()
    with server.client() as client:
        mine, yours = client.with_options(api_key="one"), client.with_options(api_key="two")
        id = ask(mine, max_output_tokens=1).id
        assert mine.responses.retrieve(id).id == id
        with pytest.raises(openai.NotFoundError):
            yours.responses.retrieve(id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            ask(yours, previous_response_id=id)
        for _ in range(2):
            ask(yours, max_output_tokens=1)
        assert mine.responses.retrieve(id).id == id
        for _ in range(2):
            ask(mine, max_output_tokens=1)
        with pytest.raises(openai.NotFoundError):
            mine.responses.retrieve(id)
        running = ask(mine, "Tell me a story.", background=True, stream=True, **ENDLESS)
        assert next(iter(running)).type == "response.created"
        assert server.stop() == 0
        *_, last = running
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert "shutting down" in last.response.error.message
