"""The official client: the exception for each refusal, and its attributes."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client() -> openai.OpenAI:
    return openai.OpenAI(max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_value_is_a_bad_request_that_names_the_field(client: openai.OpenAI, model: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=model, messages=HELLO, temperature=3, stream=stream)
    error = raised.value
    assert (error.status_code, error.param, error.type) == (400, "temperature", "invalid_request_error")
    assert "3" in error.message
    assert error.request_id


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="gpt-17", messages=HELLO)
    assert raised.value.code == "model_not_found"


def test_a_wrong_key_is_an_authentication_error(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.AuthenticationError) as raised:
        client.with_options(api_key="wrong").chat.completions.create(model=model, messages=HELLO)
    assert raised.value.code == "invalid_api_key"
    assert "wrong" not in raised.value.message


def test_no_key_is_an_authentication_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.models.list(extra_headers={"Authorization": openai.Omit()})


def test_a_prompt_over_the_context_has_openais_code(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 20_000}])
    assert raised.value.code == "context_length_exceeded"


def test_a_body_over_the_limit_is_refused(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(model=model, prompt="x" * 11 * 2**20)
    assert raised.value.status_code == 413


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.embeddings.create(model="kaon-demo", input="Hello"),
        lambda client: client.moderations.create(input="Hello"),
        lambda client: client.images.generate(prompt="a cat"),
        lambda client: client.chat.completions.retrieve("chatcmpl-1"),
        lambda client: client.conversations.create(),
        lambda client: client.fine_tuning.jobs.list(),
    ],
    ids=["embeddings", "moderations", "images", "stored chat completions", "conversations", "fine-tuning"],
)
def test_an_endpoint_that_is_not_there_is_not_found(client: openai.OpenAI, call: Callable[[Any], object]) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        call(client)
    assert raised.value.body


def test_a_clients_timeout_is_its_own(client: openai.OpenAI, model: str) -> None:
    patient = client.with_options(timeout=openai.Timeout(30, read=0.05))
    with pytest.raises(openai.APITimeoutError):
        patient.completions.create(model=model, prompt="A", max_tokens=2000, extra_body={"ignore_eos": True})
    assert client.models.list().data


def test_what_is_refused_is_not_tried_again(model: str) -> None:
    seen: list[Any] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [seen.append]})
    with openai.OpenAI(max_retries=3, http_client=http) as client, pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, messages=HELLO, n=0)
    assert len(seen) == 1
