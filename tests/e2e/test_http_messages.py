"""`/v1/messages` through Anthropic's official client: answers, streams, tools, structured output, counts, errors."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, TextBlock, ToolUseBlock
from pydantic import BaseModel

from tests.e2e.kaon_server import MODEL, START_SECONDS, KaonServer

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather for a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
GREEDY = {"temperature": 0}
"""The newest client has no argument for it."""

FRANCE = "What is the capital of France?"


@pytest.fixture(scope="module")
def claude(server: KaonServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=START_SECONDS) as client:
        yield client


def ask(claude: anthropic.Anthropic, messages: Any = FRANCE, **fields: Any) -> Message:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    extra = {**GREEDY, **fields.pop("extra_body", {})}
    message: Message = claude.messages.create(
        model=MODEL, messages=messages, extra_body=extra, **{"max_tokens": 60, **fields}
    )
    return message


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def call_of(message: Message) -> ToolUseBlock:
    (block,) = message.content
    assert isinstance(block, ToolUseBlock)
    return block


def test_an_answer_is_a_message(claude: anthropic.Anthropic) -> None:
    message = ask(claude)
    assert "Paris" in text_of(message)
    assert (message.role, message.type, message.stop_reason, message.model) == (
        "assistant",
        "message",
        "end_turn",
        MODEL,
    )
    assert message.id.startswith("msg_")
    assert message._request_id
    usage, counted = (
        message.usage,
        claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": FRANCE}]),
    )
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert usage.output_tokens > 0


def test_the_clients_own_stream_adds_up_to_the_answer(claude: anthropic.Anthropic) -> None:
    whole = ask(claude)
    with claude.messages.stream(
        model=MODEL, max_tokens=60, messages=[{"role": "user", "content": FRANCE}], extra_body=GREEDY
    ) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == text_of(final) == text_of(whole)
    assert len(pieces) > 1
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == "end_turn"


async def test_the_beta_client_streams_alike(server: KaonServer, claude: anthropic.Anthropic) -> None:
    async with (
        anthropic.AsyncAnthropic(
            base_url=server.url, auth_token="none", max_retries=0, timeout=START_SECONDS
        ) as client,
        client.beta.messages.stream(
            model=MODEL,
            max_tokens=60,
            messages=[{"role": "user", "content": FRANCE}],
            betas=["context-management-2025-06-27"],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            extra_body=GREEDY,
        ) as stream,
    ):
        final = await stream.get_final_message()
    assert final.content[0].to_dict()["text"] == text_of(ask(claude))  # type: ignore[index]


def test_a_tool_is_called_and_its_result_is_read(claude: anthropic.Anthropic) -> None:
    asked = ask(claude, "What is the weather in Paris?", tools=[WEATHER])
    call = call_of(asked)
    assert (asked.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    turn: list[Any] = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    answer = ask(claude, turn, tools=[WEATHER])
    assert "sunny" in text_of(answer)
    assert answer.usage.cache_read_input_tokens
    blocks = [{"type": "text", "text": "sunny"}]
    turn[2] = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": blocks}]}
    assert text_of(ask(claude, turn, tools=[WEATHER])) == text_of(answer)


def test_a_streamed_call_adds_up_to_its_input(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model=MODEL,
        max_tokens=60,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],  # type: ignore[list-item]
        extra_body=GREEDY,
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == call_of(final).input == {"city": "Paris"}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_can_be_required(claude: anthropic.Anthropic, choice: dict[str, Any]) -> None:
    asked = ask(claude, "Hello!", tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert (asked.stop_reason, call_of(asked).name) == ("tool_use", "get_weather")
    assert isinstance(call_of(asked).input["city"], str)


def test_tools_that_anthropic_defines_are_left_out_and_named(server: KaonServer) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
    }
    answer = server.post("/v1/messages?beta=true", body)
    assert answer.status_code == 200
    assert answer.headers["x-kaon-ignored"] == "tools[0] (web_search_20250305)"


def test_the_client_parses_the_text_into_its_model(claude: anthropic.Anthropic) -> None:
    class Person(BaseModel):
        name: str
        age: int

    parsed = claude.messages.parse(
        model=MODEL,
        max_tokens=100,
        messages=[
            {"role": "user", "content": "Extract name and age as JSON: Alice is 30 years old and lives in Paris."}
        ],
        output_format=Person,
        extra_body=GREEDY,
    )
    assert parsed.parsed_output == Person(name="Alice", age=30)


def test_an_answer_begun_by_the_client_is_continued(claude: anthropic.Anthropic) -> None:
    begun: list[Any] = [{"role": "user", "content": FRANCE}, {"role": "assistant", "content": "The capital of"}]
    assert "The capital of" + text_of(ask(claude, begun)) == text_of(ask(claude))


def test_stops_have_their_reasons(claude: anthropic.Anthropic) -> None:
    whole = text_of(ask(claude))
    stopped = ask(claude, stop_sequences=[*map(str, range(10)), "Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    assert text_of(stopped) == whole.partition("Paris")[0]
    assert ask(claude, max_tokens=2).stop_reason == "max_tokens"


def test_a_prompt_marked_to_be_cached_is_counted_so_once(claude: anthropic.Anthropic) -> None:
    mark: Any = {"type": "ephemeral"}
    system: Any = [{"type": "text", "text": "These words are cached. " * 30, "cache_control": mark}]
    first, second = (ask(claude, system=system).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation_input_tokens
    assert second.cache_creation_input_tokens == 0
    assert second.cache_read_input_tokens
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens


def test_conversations_that_differ_in_the_billing_line_share_their_prefix(claude: anthropic.Anthropic) -> None:
    def prompt(line: str) -> Any:
        rules = "Answer in one short sentence, and only what you were asked. " * 20
        return [{"type": "text", "text": line}, {"type": "text", "text": rules}]

    lines = [f"x-anthropic-billing-header: cc_version=2.1.0.{n}; cc_entrypoint=cli; cch={n}0f;" for n in ("a1", "b2")]
    question: list[Any] = [{"role": "user", "content": FRANCE}]
    ask(claude, question, system=prompt(lines[0]), tools=[WEATHER])
    prefix = claude.messages.count_tokens(
        model=MODEL,
        messages=question,
        system=prompt(lines[0]),
        tools=[WEATHER],  # type: ignore[list-item]
    ).input_tokens
    follow_up = [*question, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy?"}]
    cached = ask(claude, follow_up, system=prompt(lines[1]), tools=[WEATHER]).usage.cache_read_input_tokens
    assert cached is not None
    assert cached > 0.9 * prefix


def test_models_are_listed_in_anthropics_form(claude: anthropic.Anthropic) -> None:
    (model,) = claude.models.list()
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert claude.models.retrieve(MODEL) == model
    assert list(claude.models.list(after_id=MODEL)) == []
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("gpt-17")
    with pytest.raises(anthropic.BadRequestError):
        claude.models.list(after_id="gpt-17")


IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
HOSTED: Any = {"type": "bash_20250124", "name": "bash"}
ENDLESS: Any = {**WEATHER, "input_schema": {"$ref": "#/nowhere"}}
REFUSED: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str, str]] = [
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "text only",
    ),
    ({"extra_body": {"model": "gpt-17"}}, anthropic.NotFoundError, "not_found_error", "gpt-17"),
    ({"messages": "word " * 20_000}, anthropic.BadRequestError, "invalid_request_error", "prompt is too long: "),
    (
        {"tools": [HOSTED, ENDLESS], "tool_choice": {"type": "any"}},
        anthropic.BadRequestError,
        "invalid_request_error",
        "tools[1].input_schema",
    ),
    ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "invalid_request_error", "no tools to call"),
    (
        {"stop_sequences": [f"end {number}" for number in range(65)]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "stop_sequences holds 65 strings; it may hold 64",
    ),
    ({"extra_headers": {"anthropic-version": "latest"}}, anthropic.BadRequestError, "invalid_request_error", "a date"),
    (
        {"extra_body": {"x": "x" * 11 * 2**20}},
        anthropic.ContentTooLargeError,
        "request_too_large",
        "max_request_bytes",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "kind", "type", "words"), REFUSED)
def test_what_cannot_be_answered_is_refused_in_anthropics_form(
    claude: anthropic.Anthropic,
    fields: dict[str, Any],
    kind: type[anthropic.APIStatusError],
    type: str,
    words: str,
    stream: bool,
) -> None:
    with pytest.raises(kind) as raised:
        ask(claude, **fields, stream=stream)
    error = raised.value
    assert (error.type, error.request_id == error.body["request_id"]) == (type, True)  # type: ignore[index,call-overload]
    assert words in str(error.api_message)


async def test_bad_messages_leave_a_neighbours_stream_as_it_is(server: KaonServer) -> None:
    body = {"model": MODEL, "max_tokens": 150, "messages": [{"role": "user", "content": FRANCE}], "stream": True}
    neighbour = {**body, "temperature": 0, "system": "Tell a long story."}
    bad = [
        b"{",
        b"[]",
        *(
            json.dumps({**body, **fields}).encode()
            for fields in ({"messages": 1}, {"tools": [{}]}, {"system": [{"type": "image"}]}, {"thinking": "yes"})
        ),
    ]
    async with httpx.AsyncClient(base_url=server.url, timeout=START_SECONDS, verify=False) as client:

        async def reported() -> str:
            """The text, however many tokens an event has."""
            async with client.stream("POST", "/v1/messages", json=neighbour) as answer:
                events = [line.removeprefix("data: ") async for line in answer.aiter_lines() if '"text_delta"' in line]
            assert events
            return "".join(json.loads(event)["delta"]["text"] for event in events)

        alone = await reported()
        streamed, *answers = await asyncio.gather(
            reported(), *(client.post("/v1/messages", content=each) for each in bad * 5)
        )
    assert streamed == alone
    for answer in answers:
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
