"""Log probabilities of prompts through the official client: `echo` with `logprobs`, and `prompt_logprobs`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from openai.types import Completion, CompletionChoice
from transformers import Qwen3ForCausalLM

from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from tests.e2e.kaon_server import MODEL

NEAR = 0.15
"""The server computes in bfloat16; tests/parity/test_prompt_logprobs.py compares exactly."""
PROMPT = "The capital of France is Paris, and 12 + 7 = 19. Zebras naïvely queue up: 日本."
OTHER = "One two three"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(CHECKPOINT_DIR)


@pytest.fixture(scope="module")
def reference() -> Iterator[Qwen3ForCausalLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Qwen3ForCausalLM.from_pretrained(Path(CHECKPOINT_DIR), dtype=torch.float32).eval()
    torch.set_num_threads(threads)


def complete(client: OpenAI, prompt: Any = PROMPT, **fields: Any) -> Completion:
    fields = {"max_tokens": 0, "temperature": 0, **fields}
    return client.completions.create(model=MODEL, prompt=prompt, **fields)


def streamed(client: OpenAI, prompt: Any = PROMPT, **fields: Any) -> list[CompletionChoice]:
    fields = {"max_tokens": 4, "temperature": 0, **fields}
    stream = client.completions.create(model=MODEL, prompt=prompt, stream=True, **fields)
    return [choice for chunk in stream for choice in chunk.choices]


def log_softmax(reference: Qwen3ForCausalLM, ids: list[int]) -> torch.Tensor:
    """transformers' log probabilities of each position but the first. # [len(ids) - 1, V]"""
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echoed_prompt_has_the_log_probabilities_of_transformers(
    client: OpenAI, tokenizer: Tokenizer, reference: Qwen3ForCausalLM, as_ids: bool
) -> None:
    ids = tokenizer.encode(PROMPT)
    answer = complete(client, ids if as_ids else PROMPT, echo=True, logprobs=3)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    logprobs = choice.logprobs
    assert logprobs is not None
    tokens, own, tops, offsets = logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset
    assert tokens is not None
    assert own is not None
    assert tops is not None
    assert offsets is not None
    assert len(tokens) == len(own) == len(tops) == len(offsets) == len(ids)
    assert own[0] is None
    assert tops[0] is None
    expected = log_softmax(reference, ids)
    assert own[1:] == pytest.approx(expected.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), abs=NEAR)
    for top, best in zip(tops[1:], expected.topk(3).values.tolist(), strict=True):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best, abs=NEAR)
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:"):
            assert PROMPT[offset:].startswith(token)


def test_what_lm_eval_asks_for_scores_a_continuation(
    client: OpenAI, tokenizer: Tokenizer, reference: Qwen3ForCausalLM
) -> None:
    texts = [("The capital of France is", " Paris"), ("One two", " three"), ("12 + 7 =", " 20")]
    contexts = [tokenizer.encode(context) for context, _ in texts]
    ids = [tokenizer.encode(context + answer) for context, answer in texts]
    answer = complete(client, ids, max_tokens=1, echo=True, logprobs=1, seed=1234)
    for choice, context, tokens in zip(answer.choices, contexts, ids, strict=True):
        expected = log_softmax(reference, tokens)
        assert choice.logprobs is not None
        spelled, own, tops = choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert spelled is not None
        assert own is not None
        assert tops is not None
        assert len(own) == len(tokens) + 1
        scored = own[len(context) : -1]
        at = range(len(context) - 1, len(tokens) - 1)
        assert scored == pytest.approx([expected[i, tokens[i + 1]].item() for i in at], abs=NEAR)
        greedy = [
            max(top, key=lambda name: top[name]) == token
            for token, top in zip(spelled[len(context) : -1], tops[len(context) : -1], strict=True)
        ]
        assert greedy == [int(expected[i].argmax()) == tokens[i + 1] for i in at]


def test_prompt_log_probabilities_name_rank_and_token_by_id(
    client: OpenAI, tokenizer: Tokenizer, reference: Qwen3ForCausalLM
) -> None:
    ids = tokenizer.encode(PROMPT)
    expected = log_softmax(reference, ids)
    for count in (0, 2):
        (choice,) = complete(client, max_tokens=1, extra_body={"prompt_logprobs": count}).choices
        assert choice.logprobs is None
        first, *rest = choice.prompt_logprobs  # type: ignore[attr-defined]
        assert first is None
        assert len(rest) == len(ids) - 1
        for place, entry in enumerate(rest):
            own = entry[str(ids[place + 1])]
            assert own["decoded_token"] == tokenizer.token_text(ids[place + 1])
            assert own["logprob"] == pytest.approx(expected[place, ids[place + 1]].item(), abs=NEAR)
            ranks = [1 + int((expected[place] > own["logprob"] + error).sum()) for error in (NEAR, -NEAR)]
            assert ranks[0] <= own["rank"] <= ranks[1]
            ranks = sorted(candidate["rank"] for candidate in entry.values())
            assert ranks[:count] == [1, 2][:count]
            assert count <= len(entry) <= count + 1


def test_a_stream_begins_with_the_prompt_and_its_log_probabilities(client: OpenAI) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "n": 2, "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    prompts = [PROMPT, OTHER]
    whole = complete(client, prompts, **fields).choices
    chunks = streamed(client, prompts, **fields)
    for index, expected in enumerate(whole):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert own[0].text == prompts[index // 2]
        assert "".join(chunk.text for chunk in own) == expected.text
        parts = [chunk.logprobs for chunk in own if chunk.logprobs is not None]
        assert expected.logprobs is not None
        for field in ("tokens", "token_logprobs", "text_offset"):
            joined = [value for part in parts for value in getattr(part, field)]
            if field == "token_logprobs":
                assert joined[0] is None
                assert joined[1:] == pytest.approx(getattr(expected.logprobs, field)[1:], abs=NEAR)
            else:
                assert joined == getattr(expected.logprobs, field)


def test_a_stream_reports_prompt_log_probabilities_once_a_choice(client: OpenAI) -> None:
    chunks = streamed(client, OTHER, n=2, extra_body={"prompt_logprobs": 1})
    for index in range(2):
        found = [chunk for chunk in chunks if chunk.index == index and "prompt_logprobs" in (chunk.model_extra or {})]
        assert len(found) == 1
        assert len(found[0].prompt_logprobs) > 1  # type: ignore[attr-defined]


def test_only_copies_in_the_answer_count_against_its_bound(client: OpenAI) -> None:
    """A chat has its prompt's log probabilities once, a completion once for each choice."""
    fields: dict[str, Any] = {"n": 64, "max_tokens": 1, "extra_body": {"prompt_logprobs": 20}}
    prompt = "x " * 1200
    with pytest.raises(BadRequestError, match="log probabilities to report"):
        client.completions.create(model=MODEL, prompt=prompt, **fields)
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": prompt}], **fields)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens * 21 * 64 > 2**20
    assert len(answer.choices) == 64


def test_a_cached_prompt_is_computed_again_for_its_log_probabilities(client: OpenAI) -> None:
    prompt = "A prompt of several blocks which first is cached and then is read for its log probabilities. " * 3
    complete(client, prompt, max_tokens=1)
    first, second = (complete(client, prompt, echo=True, logprobs=1) for _ in range(2))
    cached = complete(client, prompt, max_tokens=1)
    for answer in (first, second):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert answer.choices[0].logprobs is not None
        assert len(answer.choices[0].logprobs.token_logprobs or ()) == answer.usage.prompt_tokens
    assert cached.usage is not None
    assert cached.usage.prompt_tokens_details is not None
    assert (cached.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_nothing_is_generated_for_max_tokens_zero_and_the_context_may_be_full(client: OpenAI) -> None:
    (choice,) = complete(client).choices
    assert (choice.text, choice.finish_reason) == ("", "length")
    (chunk,) = streamed(client, max_tokens=0)
    assert (chunk.text, chunk.finish_reason) == ("", "length")
    context = client.models.retrieve(MODEL).max_model_len  # type: ignore[attr-defined]
    first, *_ = streamed(client, [5] * context, max_tokens=0, logprobs=1, echo=True)
    assert first.logprobs is not None
    assert len(first.logprobs.tokens or ()) == context


def test_a_prompt_of_one_token_has_no_log_probability(client: OpenAI, tokenizer: Tokenizer) -> None:
    (choice,) = complete(client, [5], echo=True, logprobs=1, extra_body={"prompt_logprobs": 1}).choices
    assert choice.logprobs is not None
    assert (choice.logprobs.token_logprobs, choice.logprobs.top_logprobs) == ([None], [None])
    assert choice.prompt_logprobs == [None]  # type: ignore[attr-defined]
