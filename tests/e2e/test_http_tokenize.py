"""`/tokenize` and `/detokenize` over the embedded model: the exact number of a prompt's tokens."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.kaon_server import MODEL, KaonServer


@pytest.fixture
def http(server: KaonServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def test_a_text_comes_back_as_it_was(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": "Héllo 世界 😀", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == http.get(f"/v1/models/{MODEL}").json()["max_model_len"]
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "Héllo 世界 😀"}


@pytest.mark.parametrize("extra", [{}, {"add_generation_prompt": False}])
def test_a_chat_counts_what_its_completion_is_billed(http: httpx.Client, extra: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}], **extra}
    counted = http.post("/tokenize", json=chat).json()
    assert counted["token_strs"] is None
    body = {"model": MODEL, "max_completion_tokens": 1, **chat}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == counted["count"]
    text = http.post("/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"]
    assert "Be brief." in text


def test_a_prompt_that_is_somewhat_too_long_is_counted_and_a_hopeless_one_refused(http: httpx.Client) -> None:
    context = http.get(f"/v1/models/{MODEL}").json()["max_model_len"]
    counted = http.post("/tokenize", json={"prompt": "a b " * (context // 2 + 8)})
    assert counted.status_code == 200
    assert counted.json()["count"] > context
    refused = http.post("/tokenize", json={"prompt": "x" * 500_000})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "either prompt or messages"),
        ("/tokenize", {"prompt": 1}, "prompt is 1; it must be a string"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "does not serve"),
        ("/tokenize", {"messages": []}, "at least 1 item"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0]"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0] is -1"),
        ("/detokenize", {"tokens": [2**31]}, "token ids are between 0 and"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 100_000}, "the model's context"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(http: httpx.Client, path: str, body: dict[str, Any], said: str) -> None:
    answer = http.post(path, json=body)
    assert 400 <= answer.status_code < 500
    assert said in answer.json()["error"]["message"]
