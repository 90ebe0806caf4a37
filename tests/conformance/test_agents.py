"""`openai-agents`: tool loops over chat completions and over responses."""

from typing import Any

import openai
import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

set_tracing_disabled(True)

asked: list[str] = []


@function_tool(strict_mode=False)
def get_weather(city: str) -> str:
    """Get the weather for a city"""
    asked.append(city)
    return "sunny"


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])
def served(request: pytest.FixtureRequest, model: str) -> Model:
    asked.clear()
    made: Model = request.param(model=model, openai_client=openai.AsyncOpenAI(max_retries=0))
    return made


def agent_of(served: Model, **fields: Any) -> Agent[Any]:
    return Agent(name="Kaon", model=served, model_settings=ModelSettings(temperature=0), **fields)


async def test_a_tool_loop_of_two_turns(served: Model) -> None:
    agent = agent_of(served, tools=[get_weather])
    first = await Runner.run(agent, "What is the weather in Paris?")
    assert first.final_output == "The weather in Paris is sunny."
    assert len(first.raw_responses) == 2
    turn = [*first.to_input_list(), {"role": "user", "content": "Thank you!"}]
    second = await Runner.run(agent, turn)
    assert second.final_output == "You are welcome!"
    assert asked == ["Paris"]


async def test_a_streamed_tool_loop(served: Model) -> None:
    result = Runner.run_streamed(agent_of(served, tools=[get_weather]), "What is the weather in Paris?")
    kinds, text = [], ""
    async for event in result.stream_events():
        if event.type == "run_item_stream_event":
            kinds.append(event.name)
        elif event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    assert kinds == ["tool_called", "tool_output", "message_output_created"]
    assert text == result.final_output == "The weather in Paris is sunny."


async def test_a_session_remembers(served: Model) -> None:
    session = SQLiteSession("conformance")
    agent = agent_of(served)
    await Runner.run(agent, "Hi, my name is Bob", session=session)
    result = await Runner.run(agent, "What is my name?", session=session)
    assert "Bob" in result.final_output


async def test_a_typed_output(served: Model) -> None:
    agent = agent_of(served, output_type=Person)
    result = await Runner.run(agent, "Extract name and age as JSON: Alice is 30 years old and lives in Paris.")
    assert result.final_output == Person(name="Alice", age=30)


async def test_usage_is_summed(served: Model) -> None:
    result = await Runner.run(agent_of(served, tools=[get_weather]), "What is the weather in Paris?")
    usage = result.context_wrapper.usage
    assert usage.requests == 2
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


async def test_responses_go_on_from_the_server_s_store(model: str) -> None:
    served = OpenAIResponsesModel(model=model, openai_client=openai.AsyncOpenAI(max_retries=0))
    agent = agent_of(served)
    first = await Runner.run(agent, "Hi, my name is Bob")
    second = await Runner.run(agent, "What is my name?", previous_response_id=first.last_response_id)
    assert "Bob" in second.final_output
