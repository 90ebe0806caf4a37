"""`llm`: its command line, with the server in `extra-openai-models.yaml`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Llm = Callable[..., str]


@pytest.fixture
def llm(tmp_path: Path, base_url: str, api_key: str, model: str) -> Llm:
    """Run `llm` with a configuration of its own. Returns its output."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: kaon\n  model_name: {model}\n  api_base: {base_url}\n  api_key_name: kaon\n"
        "  supports_tools: true\n  supports_schema: true\n"
        f"- model_id: kaon-text\n  model_name: {model}\n  api_base: {base_url}\n  api_key_name: kaon\n"
        "  completion: true\n"
    )
    (tmp_path / "keys.json").write_text(json.dumps({"kaon": api_key}))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_the_models_are_listed(llm: Llm) -> None:
    assert "kaon" in llm("models", "list")


@pytest.mark.parametrize("stream", [[], ["--no-stream"]])
def test_a_prompt_is_answered(llm: Llm, stream: list[str]) -> None:
    assert llm("-m", "kaon", *stream, "-o", "temperature", "0", "What is 2 + 3?") == "2 + 3 = 5"


def test_a_system_prompt_is_sent(llm: Llm) -> None:
    assert llm("-m", "kaon", "-s", "Be brief.", "-o", "temperature", "0", "Hello").startswith("Hello")


def test_a_conversation_goes_on(llm: Llm) -> None:
    llm("-m", "kaon", "-o", "temperature", "0", "Hi, my name is Bob")
    assert "Bob" in llm("-c", "-o", "temperature", "0", "What is my name?")


@pytest.mark.parametrize("stream", [[], ["--no-stream"]])
def test_a_schema_is_kept(llm: Llm, stream: list[str]) -> None:
    question = "Extract name and age as JSON: Alice is 30 years old and lives in Paris."
    answer = llm("-m", "kaon", *stream, "-o", "temperature", "0", "--schema", "name, age int", question)
    assert json.loads(answer) == {"name": "Alice", "age": 30}


@pytest.mark.parametrize("stream", [[], ["--no-stream"]])
def test_a_tool_is_run_and_its_result_is_sent(llm: Llm, stream: list[str]) -> None:
    tool = 'def get_weather(city: str) -> str:\n    "Get the weather for a city"\n    return "sunny"\n'
    answer = llm(
        *("-m", "kaon", *stream, "-o", "temperature", "0", "--functions", tool), "What is the weather in Paris?"
    )
    assert answer.endswith("The weather in Paris is sunny.")


def test_text_is_completed(llm: Llm) -> None:
    assert llm("-m", "kaon-text", "-o", "temperature", "0", "The capital of France is").startswith("Paris")
