"""The README's examples have the results that the README shows."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.kaon_server import KaonServer

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```\n\n```(?:json|text)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
CURLS = [(command, json.loads(output)) for language, command, output in BLOCKS if language == "sh"]
SCRIPTS = [(script, output) for language, script, output in BLOCKS if language == "python"]

OF_ONE_ANSWER = ("id", "created", "system_fingerprint")
"""Fields that differ between answers."""


def test_the_readme_has_examples_for_curl_and_for_the_sdk() -> None:
    assert CURLS
    assert SCRIPTS


@pytest.mark.parametrize(("command", "said"), CURLS)
def test_a_curl_example_gives_the_answer_shown(server: KaonServer, command: str, said: dict[str, Any]) -> None:
    path = re.search(r"http://127\.0\.0\.1:8000(\S+)", command)
    body = re.search(r"-d '(.*)'", command)
    assert path
    assert body
    answer = server.post(path[1], json.loads(body[1])).json()
    # Another test may have filled the prefix cache.
    for usage in (answer.get("usage"), said.get("usage")):
        if usage:
            del usage["prompt_tokens_details"]
    assert {**answer, **dict.fromkeys(OF_ONE_ANSWER)} == {**said, **dict.fromkeys(OF_ONE_ANSWER)}


@pytest.mark.parametrize(("script", "said"), SCRIPTS)
def test_a_python_example_prints_what_is_shown(server: KaonServer, script: str, said: str) -> None:
    script = script.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\n") == said.rstrip("\n")
