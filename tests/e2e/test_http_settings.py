"""A server with other settings than the defaults."""

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.kaon_server import MODEL, KaonServer, free_port
from tests.e2e.test_http_bad_input import completion
from tests.e2e.test_http_tools import ask


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    directory = tmp_path_factory.mktemp("configured")
    (directory / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 7}')
    settings = {"allow_unknown_fields": True, "max_stop_strings": 6, "max_n": 3, "tool_call_parser": "none"}
    running = KaonServer(
        directory / "log", free_port(), generation_config=str(directory), server_config=settings
    ).ready()
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


def test_sampling_fields_left_out_follow_the_generation_config(configured: KaonServer) -> None:
    body = {"model": MODEL, "prompt": "The quick brown fox", "ignore_eos": True, "n": 3}
    plain = configured.post("/v1/completions", body).json()
    hot = configured.post("/v1/completions", {**body, "temperature": 1.9, "max_tokens": 20}).json()
    assert len({choice["text"] for choice in plain["choices"]}) == 1
    assert plain["usage"]["completion_tokens"] == 3 * 7
    assert len({choice["text"] for choice in hot["choices"]}) == 3
    assert hot["usage"]["completion_tokens"] == 3 * 20


def test_unknown_fields_are_ignored_by_a_server_configured_so(configured: KaonServer) -> None:
    with configured.http() as http:
        path, body = completion(temprature=1, stop=list("abcdef"), max_tokens=2)
        assert http.post(path, content=body).status_code == 200
        path, body = completion(n=4)
        assert "max_n" in http.post(path, content=body).json()["error"]["message"]


def test_tool_calls_are_text_where_no_dialect_is_chosen(configured: KaonServer) -> None:
    with configured.client() as client:
        answer = ask(client)
        assert "<tool_call>" in (answer.choices[0].message.content or "")
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            ask(client, tool_choice="required")
