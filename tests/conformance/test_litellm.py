"""`litellm`: the server as an OpenAI-compatible provider, by its `openai/`, `hosted_vllm/` and text prefixes."""

import json
from typing import Any

import litellm
import pytest

litellm.telemetry = False
litellm.num_retries = 0

WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM: Any = [{"role": "user", "content": "What is 2 + 3?"}]
GET_WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(params=["openai", "hosted_vllm"])
def call(request: pytest.FixtureRequest, model: str, base_url: str, api_key: str) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{model}",
        "api_base": base_url,
        "api_key": api_key,
        "temperature": 0,
        "num_retries": 0,
    }


def test_a_question_is_answered(call: dict[str, Any]) -> None:
    answer = litellm.completion(messages=SUM, **call)
    assert answer.choices[0].message.content == "2 + 3 = 5"
    assert answer.usage.total_tokens > 0


def test_chunks_make_the_answer(call: dict[str, Any]) -> None:
    chunks = list(litellm.completion(messages=SUM, stream=True, stream_options={"include_usage": True}, **call))
    whole = litellm.stream_chunk_builder(chunks, messages=SUM)
    assert whole.choices[0].message.content == "2 + 3 = 5"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens > 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(call: dict[str, Any], stream: bool) -> None:
    answer = litellm.completion(messages=WEATHER, tools=[GET_WEATHER], stream=stream, **call)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=WEATHER)
    choice = answer.choices[0]
    (tool_call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (tool_call.function.name, json.loads(tool_call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_a_schema_is_kept(call: dict[str, Any]) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    answer_format = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": schema}}
    answer = litellm.completion(messages=SUM, response_format=answer_format, **call)
    assert json.loads(answer.choices[0].message.content).keys() == {"answer"}


async def test_the_async_call_streams(call: dict[str, Any]) -> None:
    stream = await litellm.acompletion(messages=SUM, stream=True, **call)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "2 + 3 = 5"


def test_text_is_completed(model: str, base_url: str, api_key: str) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        prompt="The capital of France is",
        api_base=base_url,
        api_key=api_key,
        temperature=0,
    )
    assert answer.choices[0].text == " Paris."


def test_a_response_is_created_and_streamed(model: str, base_url: str, api_key: str) -> None:
    call: Any = {"model": f"openai/{model}", "api_base": base_url, "api_key": api_key, "temperature": 0}
    whole = litellm.responses(input="What is 2 + 3?", **call)
    assert whole.output[0].content[0].text == "2 + 3 = 5"
    kinds = [event.type for event in litellm.responses(input="What is 2 + 3?", stream=True, **call)]
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"messages": SUM, "temperature": 3}, litellm.BadRequestError),
        ({"messages": SUM, "model": "openai/gpt-17"}, litellm.NotFoundError),
        ({"messages": SUM, "api_key": "wrong"}, litellm.AuthenticationError),
        (
            {"messages": [{"role": "user", "content": "word " * 20_000}]},
            litellm.ContextWindowExceededError,
        ),
    ],
    ids=["bad value", "unknown model", "wrong key", "over the context"],
)
def test_refusals_are_its_own_errors(call: dict[str, Any], fields: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        litellm.completion(**{**call, **fields})
