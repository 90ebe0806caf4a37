"""An engine with asynchronous steps gives the same answers as one with synchronous steps."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine.client.llm_engine import LLMEngine
from engine.config.config import ParallelConfig
from engine.sampling_params import SamplingParams
from engine.text.structured.spec import GrammarSpec, lark_of

PROMPTS = ["Hello", "What is 3+4?", "The capital of", "A", "Once upon a time", "My name is"]
NAME = lark_of(GrammarSpec("json", {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}}))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    "top_k": {"temperature": 0.7, "seed": 6, "top_k": 8, "min_p": 0.01},
    "penalties": {"temperature": 0.5, "seed": 7, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    "log_probabilities": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    "structured": {"temperature": 0.8, "seed": 8, "grammar": NAME},
    "stops": {"temperature": 0.0, "stop_strings": ["e"], "min_tokens": 3},
    "bad_words": {"temperature": 0.0, "bad_words": [[1], [7, 8]]},
    "prompt_only": {"max_tokens": 0},
}


@pytest.fixture(scope="module", params=[pytest.param("prefill_first", marks=pytest.mark.slow), "mixed"])
def engines(request: pytest.FixtureRequest) -> Iterator[list[LLMEngine]]:
    """One with synchronous steps, and one with asynchronous steps."""
    fields: dict[str, Any] = {"num_kvcache_blocks": 96, "dtype": "float32", "scheduling_policy": request.param}
    with LLMEngine(**fields, async_scheduling="off") as off, LLMEngine(**fields, async_scheduling="on") as on:
        yield [off, on]


def assert_same(ahead: list[dict[str, Any]], waiting: list[dict[str, Any]]) -> None:
    for found, expected in zip(ahead, waiting, strict=True):
        for field in ("text", "token_ids", "finish_reason"):
            assert found[field] == expected[field]
        for field in ("logprobs", "prompt_logprobs"):
            tokens, numbers = [], []
            for reported in (found, expected):
                entries = reported[field] or ()
                tokens.append([each.token_id for each in entries])
                numbers.append([number for each in entries for number in (each.logprob, *each.top_logprobs)])
            assert tokens[0] == tokens[1]
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-3)


@pytest.mark.slow  # All kinds together: the next test.
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_request_gets_the_same_answer(engines: list[LLMEngine], kind: str) -> None:
    params = SamplingParams(**{"max_tokens": 16, **KINDS[kind]})
    waiting, ahead = (engine.generate(PROMPTS, params, use_tqdm=False) for engine in engines)
    assert_same(ahead, waiting)


def test_all_kinds_in_one_batch_get_the_same_answers(engines: list[LLMEngine]) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in KINDS]
    params = [SamplingParams(**{"max_tokens": 16, **kind}) for _ in PROMPTS for kind in KINDS.values()]
    waiting, ahead = (engine.generate(prompts, params, use_tqdm=False) for engine in engines)
    assert_same(ahead, waiting)


@pytest.mark.slow  # One replica: the tests above.
def test_several_replicas_are_each_one_step_ahead(engines: list[LLMEngine]) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in KINDS]
    params = [SamplingParams(**{"max_tokens": 16, **kind}) for _ in PROMPTS for kind in KINDS.values()]
    with LLMEngine(
        num_kvcache_blocks=96,
        dtype="float32",
        async_scheduling="on",
        parallel_config=ParallelConfig(data_parallel_size=2, data_parallel_placement="round_robin"),
    ) as replicas:
        found = replicas.generate(prompts, params, use_tqdm=False)
    assert_same(found, engines[0].generate(prompts, params, use_tqdm=False))
