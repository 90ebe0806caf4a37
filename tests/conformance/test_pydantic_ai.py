"""`pydantic-ai`: agents with tools and typed output, over chat completions and over responses."""

from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = ModelSettings(temperature=0)
ALICE = "Extract name and age as JSON: Alice is 30 years old and lives in Paris."


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def served(request: pytest.FixtureRequest, model: str, base_url: str, api_key: str) -> Any:
    return request.param(model, provider=OpenAIProvider(base_url=base_url, api_key=api_key))


def with_weather(served: Any) -> Agent[None, str]:
    agent = Agent(served, model_settings=SETTINGS)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather for a city"""
        return "sunny"

    return agent


async def test_a_question_is_answered(served: Any) -> None:
    result = await Agent(served, model_settings=SETTINGS, system_prompt="Be brief.").run("What is 2 + 3?")
    assert result.output == "2 + 3 = 5"
    assert result.usage.output_tokens > 3


async def test_a_tool_is_called_and_its_result_is_sent(served: Any) -> None:
    result = await with_weather(served).run("What is the weather in Paris?")
    assert result.output == "The weather in Paris is sunny."
    calls = [
        part
        for message in result.all_messages()
        if isinstance(message, ModelResponse)
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]
    assert [(call.tool_name, call.args_as_dict()) for call in calls] == [("get_weather", {"city": "Paris"})]


async def test_a_streamed_tool_loop(served: Any) -> None:
    async with with_weather(served).run_stream("What is the weather in Paris?") as result:
        texts = [text async for text in result.stream_text()]
    assert texts[-1] == "The weather in Paris is sunny."


async def test_the_history_goes_on(served: Any) -> None:
    agent = Agent(served, model_settings=SETTINGS)
    first = await agent.run("Hi, my name is Bob")
    second = await agent.run("What is my name?", message_history=first.all_messages())
    assert "Bob" in second.output


@pytest.mark.parametrize("output", [NativeOutput, ToolOutput], ids=["json_schema", "tool"])
async def test_a_typed_output(served: Any, output: Any) -> None:
    result = await Agent(served, output_type=output(Person), model_settings=SETTINGS, retries=0).run(ALICE)
    assert isinstance(result.output, Person)


async def test_a_typed_output_is_streamed(served: Any) -> None:
    agent = Agent(served, output_type=NativeOutput(Person), model_settings=SETTINGS, retries=0)
    async with agent.run_stream(ALICE) as result:
        outputs = [output async for output in result.stream_output()]
    assert outputs[-1] == Person(name="Alice", age=30)
