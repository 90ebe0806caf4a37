"""The official client: `completions`."""

from typing import Any

import openai
import pytest
from openai.types import Completion

PROMPT = "The capital of France is"


@pytest.fixture
def client() -> openai.OpenAI:
    return openai.OpenAI(max_retries=0)


def complete(client: openai.OpenAI, model: str, **fields: Any) -> Completion:
    return client.completions.create(**{"model": model, "prompt": PROMPT, "temperature": 0, **fields})


def test_a_prompt_is_completed(client: openai.OpenAI, model: str) -> None:
    answer = complete(client, model)
    assert answer.choices[0].text == " Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_sixteen_tokens_are_the_most_by_default(client: openai.OpenAI, model: str) -> None:
    answer = complete(client, model, prompt="A story", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, model: str) -> None:
    with complete(client, model, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    whole = complete(client, model)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_usage_can_come_with_every_chunk(client: openai.OpenAI, model: str) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    story = {"prompt": "Once upon a time", "max_tokens": 100, "extra_body": {"ignore_eos": True}}
    with complete(client, model, stream=True, stream_options=options, **story) as stream:
        counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert len(counts) > 2
    assert counts == sorted(counts)


def test_prompts_come_as_texts_or_token_ids(client: openai.OpenAI, model: str) -> None:
    asked = complete(client, model, echo=True, max_tokens=0, extra_body={"return_token_ids": True})
    prompt_ids: Any = asked.choices[0].model_extra["prompt_token_ids"]
    for prompt in ([PROMPT, PROMPT], prompt_ids, [prompt_ids, prompt_ids]):
        texts = [choice.text for choice in complete(client, model, prompt=prompt).choices]
        assert set(texts) == {" Paris."}
        assert len(texts) == (1 if prompt is prompt_ids else 2)


def test_echo_scores_the_prompt(client: openai.OpenAI, model: str) -> None:
    choice = complete(client, model, echo=True, max_tokens=0, logprobs=2).choices[0]
    assert choice.text == PROMPT
    logprobs: Any = choice.logprobs
    assert "".join(logprobs.tokens) == PROMPT
    assert logprobs.token_logprobs[0] is None
    assert all(each <= 0 for each in logprobs.token_logprobs[1:])
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    assert len(logprobs.top_logprobs) == len(logprobs.tokens)


def test_choices_of_a_seed_repeat(client: openai.OpenAI, model: str) -> None:
    fields = {"temperature": 1.5, "seed": 7, "n": 3, "prompt": "Once upon a time", "max_tokens": 12}
    first, second = (complete(client, model, **fields).choices for _ in range(2))
    assert [choice.text for choice in first] == [choice.text for choice in second]
    assert len({choice.text for choice in first}) > 1


def test_best_of_returns_the_choice_of_highest_probability(client: openai.OpenAI, model: str) -> None:
    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    fields = {"temperature": 1.5, "seed": 3, "prompt": "Once upon a time", "max_tokens": 8, "logprobs": 0}
    candidates = complete(client, model, **fields, n=4).choices
    (best,) = complete(client, model, **fields, best_of=4).choices
    assert mean(best) == pytest.approx(max(map(mean, candidates)))


def test_a_stop_string_ends_the_text(client: openai.OpenAI, model: str) -> None:
    for stop in (".", ["?", "."]):
        choice = complete(client, model, stop=stop).choices[0]
        assert (choice.text, choice.finish_reason) == (" Paris", "stop")


def test_a_biased_token_is_all_there_is(client: openai.OpenAI, model: str) -> None:
    choice = complete(client, model, logit_bias={"300": 100}, max_tokens=4, logprobs=0).choices[0]
    assert choice.logprobs is not None
    assert len(set(choice.logprobs.tokens or ())) == 1


def test_a_suffix_is_refused_in_words(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix"):
        complete(client, model, suffix="!")


async def test_the_async_client_streams(model: str) -> None:
    async with openai.AsyncOpenAI(max_retries=0) as client:
        stream = await client.completions.create(model=model, prompt=PROMPT, temperature=0, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == " Paris."
