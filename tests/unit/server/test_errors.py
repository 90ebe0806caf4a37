"""Every failure is answered with OpenAI's error object, by one handler."""

import json

import httpx
import pytest
from fastapi import FastAPI

from engine.text.io_processor import DoesNotFit, InvalidRequest
from server import error_answers, errors


@pytest.fixture
def client() -> httpx.AsyncClient:
    app = FastAPI()
    error_answers.install(app)

    @app.get("/raise/{kind}")
    async def fail(kind: str) -> None:
        raise {
            "bad": errors.BadRequest("n is 0; it must be at least 1", param="n"),
            "model": errors.ModelNotFound("model is 'x'; use y", param="model"),
            "large": errors.BodyTooLarge("the request body is larger"),
            "loading": errors.NotReady("the model is still loading"),
            "engine": errors.EngineError("the engine core was killed by SIGKILL"),
            "invalid": InvalidRequest("prompt is empty; it must have at least 1 token", "prompt"),
            "long": DoesNotFit("prompt has 9 tokens, but this model's maximum context length is 8 tokens", "prompt"),
            "bug": ZeroDivisionError("division by zero"),
        }[kind]

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://kaon")


@pytest.mark.parametrize(
    ("kind", "status", "error"),
    [
        ("bad", 400, {"type": "invalid_request_error", "param": "n", "code": None}),
        ("model", 404, {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}),
        ("large", 413, {"type": "invalid_request_error", "param": None, "code": "request_too_large"}),
        ("loading", 503, {"type": "server_error", "param": None, "code": "not_ready"}),
        ("engine", 500, {"type": "server_error", "param": None, "code": "engine_error"}),
        ("invalid", 400, {"type": "invalid_request_error", "param": "prompt", "code": None}),
        ("long", 400, {"type": "invalid_request_error", "param": "prompt", "code": "context_length_exceeded"}),
        ("bug", 500, {"type": "server_error", "param": None, "code": None}),
    ],
)
async def test_an_exception_becomes_an_openai_error_object(
    client: httpx.AsyncClient, kind: str, status: int, error: dict[str, str | None]
) -> None:
    response = await client.get(f"/raise/{kind}")
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    reported = response.json()["error"]
    assert reported.pop("message")
    assert reported == error


async def test_a_bug_shows_the_client_nothing_of_its_insides(client: httpx.AsyncClient) -> None:
    assert "division" not in (await client.get("/raise/bug")).text


async def test_not_ready_says_when_to_come_back(client: httpx.AsyncClient) -> None:
    assert (await client.get("/raise/loading")).headers["retry-after"] == "1"


async def test_an_unknown_path_and_a_wrong_method_are_error_objects_too(client: httpx.AsyncClient) -> None:
    missing = await client.get("/v2/completions")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    assert "/v2/completions" in missing.json()["error"]["message"]
    wrong = await client.put("/raise/bad")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
    assert "does not take PUT; use GET" in wrong.json()["error"]["message"]


def test_error_bodies_hold_any_text() -> None:
    body = errors.BadRequest('prompt is "\n漢😀"', param="prompt").body()
    assert json.loads(body)["error"]["message"] == 'prompt is "\n漢😀"'
