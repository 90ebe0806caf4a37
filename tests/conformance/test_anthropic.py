"""Anthropic's official client: every method that maps to this server, plain, streamed, raw and async."""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent, ToolUseBlock
from pydantic import BaseModel, TypeAdapter

GREEDY = {"temperature": 0}
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
PARIS: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather for a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PERSON = "Extract name and age as JSON: Alice is 30 years old and lives in Paris."


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def client(api_key: str, base_url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key=api_key, base_url=base_url.removesuffix("/v1"), max_retries=0)


@pytest.fixture
def async_client(api_key: str, base_url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(auth_token=api_key, base_url=base_url.removesuffix("/v1"), max_retries=0)


@pytest.fixture
def ask(client: anthropic.Anthropic, model: str) -> Callable[..., Message]:
    def asked(messages: Any = FRANCE, **fields: Any) -> Message:
        message: Message = client.messages.create(
            model=model, messages=messages, **{"max_tokens": 60, "extra_body": GREEDY, **fields}
        )
        return message

    return asked


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def calls_of(message: Message) -> list[ToolUseBlock]:
    return [block for block in message.content if block.type == "tool_use"]


def test_an_answer_has_text_usage_and_an_end(ask: Callable[..., Message], model: str) -> None:
    message = ask()
    assert text_of(message) == "The capital of France is Paris."
    assert (message.role, message.model, message.stop_reason) == ("assistant", model, "end_turn")
    assert message.usage.output_tokens > 0


def test_a_stream_adds_up_to_the_answer(client: anthropic.Anthropic, ask: Callable[..., Message], model: str) -> None:
    fields: Any = {"model": model, "max_tokens": 60, "messages": FRANCE, "extra_body": GREEDY}
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(ask())


def test_every_event_is_of_the_clients_types(client: anthropic.Anthropic, model: str) -> None:
    types: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    kinds = []
    fields: Any = {"model": model, "max_tokens": 60, "messages": PARIS, "tools": [WEATHER], "extra_body": GREEDY}
    for event in client.messages.create(**fields, stream=True):
        types.validate_python(event.to_dict())
        if not kinds or kinds[-1] != event.type:
            kinds.append(event.type)
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_the_async_client_asks_and_streams(
    async_client: anthropic.AsyncAnthropic, ask: Callable[..., Message], model: str
) -> None:
    fields: Any = {"model": model, "max_tokens": 60, "messages": FRANCE, "extra_body": GREEDY}
    whole = await async_client.messages.create(**fields)
    async with async_client.messages.stream(**fields) as stream:
        streamed = await stream.get_final_text()
    assert streamed == text_of(whole) == text_of(ask())


async def test_the_beta_client_sends_its_fields(async_client: anthropic.AsyncAnthropic, model: str) -> None:
    message = await async_client.beta.messages.create(
        model=model,
        max_tokens=60,
        messages=FRANCE,
        betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        extra_body=GREEDY,
    )
    assert message.context_management is not None
    assert message.context_management.applied_edits == []
    assert text_of(message)


def test_the_raw_answer_has_the_request_id(client: anthropic.Anthropic, model: str) -> None:
    raw = client.messages.with_raw_response.create(model=model, max_tokens=5, messages=FRANCE)
    assert raw.headers["request-id"] == raw.request_id
    assert raw.parse().role == "assistant"


def test_a_system_prompt_may_be_text_or_blocks(ask: Callable[..., Message]) -> None:
    rules = "Answer in one word."
    assert text_of(ask(system=rules)) == text_of(ask(system=[{"type": "text", "text": rules}]))


def test_a_tool_loop_of_two_turns(ask: Callable[..., Message]) -> None:
    asked = ask(PARIS, tools=[WEATHER])
    (call,) = calls_of(asked)
    assert (asked.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turn = [*PARIS, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    assert text_of(ask(turn, tools=[WEATHER])) == "The weather in Paris is sunny."


def test_a_streamed_call_adds_up_to_its_input(client: anthropic.Anthropic, model: str) -> None:
    fields: Any = {"model": model, "max_tokens": 60, "messages": PARIS, "tools": [WEATHER], "extra_body": GREEDY}
    with client.messages.stream(**fields) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (call,) = calls_of(stream.get_final_message())
    assert json.loads("".join(pieces)) == call.input == {"city": "Paris"}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
@pytest.mark.parametrize("alone", [False, True])
def test_a_call_can_be_forced(ask: Callable[..., Message], choice: dict[str, Any], alone: bool) -> None:
    message = ask(tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": alone}, max_tokens=200)
    calls = calls_of(message)
    assert calls
    assert len(calls) == 1 or not alone
    assert {call.name for call in calls} == {"get_weather"}


def test_its_tool_runner_goes_on_without_a_stored_thread(client: anthropic.Anthropic, model: str) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather for a city"""
        asked.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=60, tools=[get_weather], messages=PARIS, extra_body=GREEDY
    )
    assert "sunny" in text_of(runner.until_done())
    assert asked == ["Paris"]


def test_no_tool_is_called_where_none_may_be(ask: Callable[..., Message]) -> None:
    message = ask(PARIS, tools=[WEATHER], tool_choice={"type": "none"})
    assert calls_of(message) == []


def test_a_strict_tool_is_called_as_its_schema_says(ask: Callable[..., Message]) -> None:
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["kelvin"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tool = {**WEATHER, "input_schema": schema, "strict": True}
    (call,) = calls_of(ask(PARIS, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}))
    assert call.input == {"unit": "kelvin"}


def test_hosted_tools_are_left_out(client: anthropic.Anthropic, model: str) -> None:
    raw = client.messages.with_raw_response.create(
        model=model, max_tokens=5, messages=FRANCE, tools=[{"type": "web_search_20250305", "name": "web_search"}]
    )
    assert "web_search" in raw.headers["x-kaon-ignored"]


def test_text_is_parsed_into_a_model(client: anthropic.Anthropic, model: str) -> None:
    parsed = client.messages.parse(
        model=model,
        max_tokens=100,
        messages=[{"role": "user", "content": PERSON}],
        output_format=Person,
        extra_body=GREEDY,
    )
    assert parsed.parsed_output == Person(name="Alice", age=30)


def test_a_streamed_text_is_parsed_into_a_model(client: anthropic.Anthropic, model: str) -> None:
    fields: Any = {"messages": [{"role": "user", "content": PERSON}], "max_tokens": 100, "extra_body": GREEDY}
    with client.messages.stream(model=model, output_format=Person, **fields) as stream:
        assert stream.get_final_message().parsed_output == Person(name="Alice", age=30)


@pytest.mark.parametrize(
    "thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}]
)
def test_thinking_may_be_set(ask: Callable[..., Message], thinking: Any) -> None:
    assert text_of(ask(thinking=thinking, max_tokens=2000)) == "The capital of France is Paris."


def test_an_answer_is_continued(ask: Callable[..., Message]) -> None:
    begun = [*FRANCE, {"role": "assistant", "content": "The capital of"}]
    assert text_of(ask(begun)) == " France is Paris."


def test_stop_sequences_and_limits_end_an_answer(ask: Callable[..., Message]) -> None:
    stopped = ask(stop_sequences=["Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    assert ask(max_tokens=1).stop_reason == "max_tokens"
    # The client itself refuses so large a number without a timeout of its own.
    assert ask(max_tokens=32_000, timeout=60).stop_reason == "end_turn"


def test_tokens_are_counted(client: anthropic.Anthropic, ask: Callable[..., Message], model: str) -> None:
    usage = ask(system="Be brief.", tools=[WEATHER]).usage
    counted = client.messages.count_tokens(model=model, messages=FRANCE, system="Be brief.", tools=[WEATHER])
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models_are_listed(client: anthropic.Anthropic, model: str) -> None:
    (listed,) = client.models.list()
    assert listed == client.models.retrieve(model)
    assert (listed.id, listed.type, bool(listed.max_input_tokens)) == (model, "model", True)


# -- errors -----------------------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
LONG = [{"role": "user", "content": "word " * 20_000}]
CHANGED = [
    *FRANCE,
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "changed"}]},
    *FRANCE,
]


@pytest.mark.parametrize(
    ("fields", "kind", "type"),
    [
        ({"max_tokens": -1}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": CHANGED}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": LONG}, anthropic.BadRequestError, "invalid_request_error"),
        ({"model": "gpt-17"}, anthropic.NotFoundError, "not_found_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_its_exception_and_type(
    client: anthropic.Anthropic, model: str, fields: dict[str, Any], kind: Any, type: str, stream: bool
) -> None:
    with pytest.raises(kind) as raised:
        client.messages.create(**{"model": model, "max_tokens": 9, "messages": FRANCE, **fields}, stream=stream)
    assert raised.value.type == type
    assert raised.value.request_id
    assert raised.value.api_message


@pytest.mark.parametrize("credentials", [{"api_key": "wrong"}, {"api_key": None, "auth_token": "wrong"}])
def test_a_wrong_key_is_an_authentication_error(base_url: str, model: str, credentials: dict[str, Any]) -> None:
    stranger = anthropic.Anthropic(**credentials, base_url=base_url.removesuffix("/v1"), max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as raised:
        stranger.messages.create(model=model, max_tokens=9, messages=FRANCE)
    assert raised.value.type == "authentication_error"
    assert "wrong" not in str(raised.value.api_message)


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_a_key_may_come_in_either_header(client: anthropic.Anthropic, api_key: str, model: str, header: str) -> None:
    sent = api_key if header == "x-api-key" else f"Bearer {api_key}"
    unset = {"Authorization": anthropic.Omit(), "X-Api-Key": anthropic.Omit()}
    assert client.models.retrieve(model, extra_headers={**unset, header: sent}).id == model  # type: ignore[arg-type]


def test_an_api_that_is_not_here_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.beta.skills.list()
    assert raised.value.type == "not_found_error"


def test_no_tokens_only_cache_the_prompt(client: anthropic.Anthropic, model: str) -> None:
    message = client.messages.create(model=model, max_tokens=0, messages=FRANCE)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


def test_what_is_refused_is_not_tried_again(api_key: str, base_url: str, model: str) -> None:
    seen: list[Any] = []
    http = anthropic.DefaultHttpxClient(event_hooks={"request": [seen.append]})
    url = base_url.removesuffix("/v1")
    with (
        anthropic.Anthropic(api_key=api_key, base_url=url, max_retries=3, http_client=http) as client,
        pytest.raises(anthropic.BadRequestError),
    ):
        client.messages.create(model=model, max_tokens=-1, messages=FRANCE)
    assert len(seen) == 1
