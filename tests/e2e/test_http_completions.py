"""`/v1/completions` through the official client."""

import asyncio
import re
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion

from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from tests.e2e.kaon_server import MODEL, KaonServer

PROMPT = "The quick brown fox"
LONG: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(CHECKPOINT_DIR)


def greedy(client: OpenAI, prompt: Any = PROMPT, max_tokens: int = 24, **fields: Any) -> Completion:
    fields = {**LONG, **fields}
    return client.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, **fields)


def streamed(client: OpenAI, **fields: Any) -> list[Completion]:
    stream = client.completions.create(
        **{"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **LONG, **fields}, stream=True
    )
    return list(stream)


def text_of(chunks: list[Completion], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def test_an_answer_has_openais_shape(client: OpenAI) -> None:
    answer = greedy(client)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.system_fingerprint is not None
    assert re.fullmatch(r"kaon-\S+-[0-9a-f]{8}-[0-9a-f]{8}-(invariant|batched)", answer.system_fingerprint)
    assert greedy(client).system_fingerprint == answer.system_fingerprint
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_streamed_text_equals_whole_text(client: OpenAI) -> None:
    chunks = streamed(client)
    assert text_of(chunks) == greedy(client).choices[0].text
    assert len({chunk.id for chunk in chunks}) == 1
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: OpenAI) -> None:
    *chunks, last = streamed(client, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks)


def test_choices_and_prompts_fan_out_in_order(client: OpenAI) -> None:
    answer = greedy(client, prompt=[PROMPT, "One two three"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = [greedy(client, prompt=prompt).choices[0].text for prompt in (PROMPT, "One two three")]
    assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 * 24


def test_streamed_choices_are_distinguished_by_index(client: OpenAI) -> None:
    chunks = streamed(client, prompt=[PROMPT, "One two three"], n=2)
    whole = greedy(client, prompt=[PROMPT, "One two three"], n=2)
    assert [text_of(chunks, index) for index in range(4)] == [choice.text for choice in whole.choices]


def test_token_ids_and_their_text_are_the_same_prompt(client: OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    expected = greedy(client).choices[0].text
    assert greedy(client, prompt=ids).choices[0].text == expected
    assert [choice.text for choice in greedy(client, prompt=[ids, ids]).choices] == [expected, expected]


def test_echo_begins_the_text_with_the_prompt(client: OpenAI, tokenizer: Tokenizer) -> None:
    expected = PROMPT + greedy(client).choices[0].text
    assert greedy(client, echo=True).choices[0].text == expected
    assert greedy(client, prompt=tokenizer.encode(PROMPT), echo=True).choices[0].text == expected
    assert text_of(streamed(client, echo=True)) == expected


def test_max_tokens_is_sixteen_unless_said(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, **LONG)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_repeated_prompt_comes_from_the_prefix_cache(client: OpenAI) -> None:
    prompt = "One prompt that fills several blocks of the cache, and that no other test sends. " * 3
    first, second, salted = (
        greedy(client, prompt=prompt, extra_body=extra) for extra in ({}, {}, {"cache_salt": "x"})
    )
    usages = [answer.usage.prompt_tokens_details for answer in (first, second, salted) if answer.usage]
    cached = [details.cached_tokens for details in usages if details]
    assert cached[0] == cached[2] == 0
    assert (cached[1] or 0) > 0
    assert first.choices[0].text == second.choices[0].text == salted.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_align_with_the_text(client: OpenAI, stream: bool) -> None:
    if stream:
        choices = [choice for chunk in streamed(client, logprobs=3) for choice in chunk.choices]
        parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
        text = "".join(choice.text for choice in choices)
    else:
        (choice,) = greedy(client, logprobs=3).choices
        parts, text = [choice.logprobs], choice.text  # type: ignore[list-item]
    tokens = [token for part in parts for token in part.tokens or ()]
    logprobs = [logprob for part in parts for logprob in part.token_logprobs or ()]
    tops = [top for part in parts for top in part.top_logprobs or ()]
    offsets = [offset for part in parts for offset in part.text_offset or ()]
    assert len(tokens) == len(logprobs) == len(tops) == len(offsets) == 24
    for token, logprob, top, offset in zip(tokens, logprobs, tops, offsets, strict=True):
        assert logprob == max(top.values()) <= 0
        assert 3 <= len(top) <= 4
        assert top[token] == logprob
        if not token.startswith(("bytes:", "<|")):
            assert text[offset:].startswith(token)


def test_a_seed_makes_sampling_reproducible_and_choices_differ(client: OpenAI) -> None:
    def sample(seed: int, n: int = 2) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=24, temperature=1.5, seed=seed, n=n, **LONG
        )
        return [choice.text for choice in answer.choices]

    first = sample(7)
    assert first == sample(7)
    assert first[0] != first[1]
    assert first[1] == sample(8, n=1)[0]
    assert first != sample(9)


def test_logit_bias_and_stop_token_ids_act(client: OpenAI, tokenizer: Tokenizer) -> None:
    (token_id,) = tokenizer.encode("A", add_special_tokens=False)
    bias = {str(token_id): 100}
    assert greedy(client, logit_bias=bias, max_tokens=5).choices[0].text == "AAAAA"
    extra = {"stop_token_ids": [token_id]}
    stopped = greedy(client, logit_bias=bias, max_tokens=5, extra_body=extra).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


async def test_sixty_four_concurrent_streams_are_each_what_they_are_alone(server: KaonServer) -> None:
    async with server.async_client() as client:

        async def stream(number: int) -> str:
            chunks = await client.completions.create(
                model=MODEL, prompt=f"Story {number % 8}:", max_tokens=16, temperature=0, stream=True, **LONG
            )
            return "".join([chunk.choices[0].text async for chunk in chunks])

        alone = [await stream(number) for number in range(8)]
        together = await asyncio.gather(*map(stream, range(64)))
    assert together == alone * 8
