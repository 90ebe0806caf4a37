"""Further fields of `/v1/completions`, through the official client."""

import json
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types import Completion

from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from tests.e2e.kaon_server import MODEL, KaonServer

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(CHECKPOINT_DIR)


def complete(
    client: OpenAI, prompt: Any = PROMPT, *, extra: dict[str, Any] | None = None, **fields: Any
) -> Completion:
    fields = {"max_tokens": 8, "temperature": 0, **fields}
    return client.completions.create(
        model=MODEL, prompt=prompt, extra_body={"ignore_eos": True, **(extra or {})}, **fields
    )


def events(server: KaonServer, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream as they are sent."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    with server.http() as http:
        text = http.post("/v1/completions", json={**body, "stream": True}).text
    *chunks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def test_best_of_answers_with_the_choices_of_highest_probability_and_counts_all(client: OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 11, "max_tokens": 12}
    every = complete(client, n=5, logprobs=0, **fields)
    means = {
        choice.text: sum(choice.logprobs.token_logprobs) / 12  # type: ignore[union-attr, arg-type]
        for choice in every.choices
    }
    assert len(means) == 5
    best = complete(client, n=2, best_of=5, **fields)
    assert [choice.text for choice in best.choices] == sorted(means, key=lambda text: means[text], reverse=True)[:2]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage is not None
    assert best.usage.completion_tokens == 5 * 12
    with_logprobs = complete(client, best_of=5, logprobs=1, echo=True, **fields).choices[0]
    assert with_logprobs.text == PROMPT + best.choices[0].text
    assert with_logprobs.logprobs is not None


def test_best_of_equal_to_n_may_be_streamed(client: OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, n=2, best_of=2, max_tokens=2, stream=True))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_token_ids_of_prompt_and_answer_are_reported_on_request(
    client: OpenAI, server: KaonServer, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(PROMPT)
    (choice,) = complete(client, extra={"return_token_ids": True}).choices
    assert choice.prompt_token_ids == ids  # type: ignore[attr-defined]
    assert len(choice.token_ids) == 8  # type: ignore[attr-defined]
    assert tokenizer.decode(choice.token_ids) == choice.text  # type: ignore[attr-defined]
    assert "token_ids" not in (complete(client).choices[0].model_extra or {})
    first, *rest = [chunk["choices"][0] for chunk in events(server, max_tokens=8, return_token_ids=True, stop="\x00")]
    assert first["prompt_token_ids"] == ids
    assert all("prompt_token_ids" not in chunk for chunk in rest)
    assert [token for chunk in (first, *rest) for token in chunk["token_ids"]] == choice.token_ids  # type: ignore[attr-defined]


def test_usage_can_come_with_each_chunk(server: KaonServer, tokenizer: Tokenizer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(server, n=2, stream_options=options)
    reported = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert reported == sorted(reported)
    assert reported[-1] == last["usage"]["completion_tokens"] == 12
    prompt_tokens = len(tokenizer.encode(PROMPT))
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {prompt_tokens}
    assert last["choices"] == []
    assert all(
        chunk["usage"]["total_tokens"] == prompt_tokens + count for chunk, count in zip(chunks, reported, strict=True)
    )


def test_a_prompt_can_be_cut_to_its_last_tokens(client: OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    kept = complete(client, ids[-2:]).choices[0].text
    for prompt in (PROMPT, ids):
        cut = complete(client, prompt, extra={"truncate_prompt_tokens": 2, "return_token_ids": True})
        assert cut.choices[0].prompt_token_ids == ids[-2:]  # type: ignore[attr-defined]
        assert cut.choices[0].text == kept
    assert complete(client, echo=True, extra={"truncate_prompt_tokens": 2}).choices[0].text == (
        tokenizer.decode(ids[-2:]) + kept
    )
    assert complete(client, extra={"truncate_prompt_tokens": 1000}).choices[0].text == complete(client).choices[0].text


def test_as_much_of_a_prompt_as_fits_can_be_kept(client: OpenAI) -> None:
    context = client.models.retrieve(MODEL).max_model_len  # type: ignore[attr-defined]
    answer = complete(client, "word " * 20_000, max_tokens=8, extra={"truncate_prompt_tokens": -1})
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (context - 8, 8)


def test_fields_of_clients_that_want_nothing_special_are_accepted(client: OpenAI) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("logprobs", "stop", "stream_options", "suffix", "best_of", "n", "seed"))
    answer = complete(client, user="", extra={**nothing, "max_tokens": None, "temperature": 0, "priority": -5})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert complete(client, stop=[], suffix="", extra={"logit_bias": {}}).choices[0].text


def test_a_model_without_marks_for_filling_in_refuses_a_suffix(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="no marks for filling in") as caught:
        complete(client, suffix="end")
    assert caught.value.param == "suffix"


def test_requests_of_every_priority_are_served(server: KaonServer) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    for priority in (2**31 - 1, -(2**31), 3):
        assert server.post("/v1/completions", {**body, "priority": priority}).status_code == 200


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_stopped_the_text_is_reported(server: KaonServer, path: str, stream: bool) -> None:
    asked: dict[str, Any] = (
        {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    )
    asked |= {"model": MODEL, "max_tokens": 20, "temperature": 0, "stream": stream, "stop": [" ", "e", "o"]}
    with server.http() as http:
        text = http.post(f"/v1/{path}", json=asked).text
    answers = [json.loads(block[6:]) for block in text.split("\n\n")[:-2]] if stream else [json.loads(text)]
    reported = [choice["stop_reason"] for answer in answers for choice in answer["choices"] if "stop_reason" in choice]
    assert reported in ([" "], ["e"], ["o"])
    assert answers[-1]["choices"][0]["stop_reason"] == reported[0]


def test_integers_may_be_written_as_whole_floats(server: KaonServer) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3.0, "n": 2.0, "temperature": 0, "ignore_eos": True}
    with server.http() as http:
        answer = http.post("/v1/completions", json=body).json()
    assert len(answer["choices"]) == 2
    assert answer["usage"]["completion_tokens"] == 6
