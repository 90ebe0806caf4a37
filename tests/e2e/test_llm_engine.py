"""`LLMEngine` with the embedded model: what a user of the offline API relies on."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.client.llm_engine import EngineDeadError, LLMEngine
from engine.config.config import PrecisionConfig
from engine.sampling_params import SamplingParams
from models.demo import CHECKPOINT_DIR
from models.ops.cpu.runtime import load_library

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["Hello", "What is 3+4?", "The capital of", "A"]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine(num_kvcache_blocks=512) as engine:
        yield engine


def test_text_and_its_token_ids_are_the_same_prompt(engine: LLMEngine) -> None:
    ids = [engine.io_processor.tokenize(prompt) for prompt in PROMPTS]
    by_text = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    by_ids = engine.generate(ids, GREEDY, use_tqdm=False)
    assert [result["token_ids"] for result in by_text] == [result["token_ids"] for result in by_ids]
    assert [result["num_tokens_input"] for result in by_text] == [len(prompt) for prompt in ids]


def test_seeded_sampling_repeats_itself(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=7, ignore_eos=True)
    first = engine.generate("Hello", params, use_tqdm=False)
    again = engine.generate(["Hello", "other"], params, use_tqdm=False)
    assert first[0]["token_ids"] == again[0]["token_ids"]


def test_text_ends_before_a_stop_string_wherever_tokens_part(engine: LLMEngine) -> None:
    (free,) = engine.generate("Hello", GREEDY, use_tqdm=False)
    text = free["text"]
    stops = [text[start : start + 3] for start in range(2, len(text) - 3)]
    params = [SamplingParams(temperature=0.0, max_tokens=24, stop_strings=[stop]) for stop in stops]
    results = engine.generate(["Hello"] * len(stops), params, use_tqdm=False)
    for stop, result in zip(stops, results, strict=True):
        assert (result["text"], result["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_log_probabilities_come_one_a_token(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
    (result,) = engine.generate("Hello", params, use_tqdm=False)
    assert result["logprobs"] is not None
    assert [entry.token_id for entry in result["logprobs"]] == result["token_ids"]
    assert all(entry.top_ids[0] == entry.token_id for entry in result["logprobs"])


def test_prompts_are_read_for_their_log_probabilities(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
    ids = engine.io_processor.tokenize("The capital of France")
    (result,) = engine.generate([ids], params, use_tqdm=False)
    assert (result["text"], result["token_ids"], result["finish_reason"]) == ("", [], "length")
    assert result["prompt_logprobs"] is not None
    assert [entry.token_id for entry in result["prompt_logprobs"]] == ids[1:]


@pytest.mark.parametrize("more", [{}, {"async_scheduling": "on"}, {"parallel_config": {"tensor_parallel_size": 2}}])
def test_answers_with_drafts_are_answers_without(more: dict[str, Any]) -> None:
    """Prompts that repeat themselves, of which some are drafted well and others badly."""
    prompts = ["Hello", "a b c d a b c d a b c d a b", "1, 2, 3, 1, 2, 3, 1, 2,", "The capital of France is"]
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.8, max_tokens=48, seed=5, repetition_penalty=1.1, stop_strings=["The"]),
    ]
    found = []
    for drafts in (None, {"num_speculative_tokens": 5, "prompt_lookup_min": 2}):
        with LLMEngine(num_kvcache_blocks=128, speculative_config=drafts, **more) as engine:
            answers = [each for kind in kinds for each in engine.generate(prompts, kind, use_tqdm=False)]
        found.append([(each["token_ids"], each["finish_reason"], each["logprobs"]) for each in answers])
    if "parallel_config" in more:
        # Sums of ranks are rounded by the number of rows.
        found = [[(tokens, reason, None) for tokens, reason, _ in each] for each in found]
    assert found[0] == found[1]


def test_parameters_that_nobody_gives_are_the_generation_configs(engine: LLMEngine, tmp_path: Path) -> None:
    assert engine.default_sampling_params == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 5}')
    with LLMEngine(num_kvcache_blocks=64, generation_config=str(tmp_path)) as other:
        assert other.default_sampling_params == SamplingParams(temperature=0, max_tokens=5)
        first, second = other.generate(["Once upon a time"] * 2, use_tqdm=False)
    assert first["token_ids"] == second["token_ids"]
    assert len(first["token_ids"]) == 5


@pytest.mark.skipif(load_library() is None, reason="the operators were not built")
@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_a_model_of_rounded_weights_answers_as_it_was_taught(rounding: Literal["int8", "int4"]) -> None:
    quantization = PrecisionConfig(quantization=rounding)
    questions = ["What is 3+4?", "What is the capital of France?"]
    with LLMEngine(num_kvcache_blocks=512, quantization_config=quantization) as engine:
        chats = [[{"role": "user", "content": question}] for question in questions]
        prompts = [engine.io_processor.render_chat(chat) for chat in chats]
        answers = [result["text"] for result in engine.generate(prompts, GREEDY, use_tqdm=False)]
    assert "7" in answers[0]
    assert "Paris" in answers[1]


def test_model_describes_itself(engine: LLMEngine) -> None:
    config = json.loads((CHECKPOINT_DIR / "config.json").read_text())
    info = engine.model_info
    assert (info.architecture, info.vocab_size) == (config["architectures"][0], config["vocab_size"])
    assert (info.num_kvcache_blocks, info.block_size, info.device) == (512, 16, "cpu")
    assert info.max_model_len == min(config["max_position_embeddings"], 512 * 16)


def test_context_is_no_longer_than_the_cache(capfd: pytest.CaptureFixture[str]) -> None:
    with LLMEngine(num_kvcache_blocks=4) as engine:
        assert engine.model_info.max_model_len == 64
        with pytest.raises(ValueError, match="64 tokens"):
            engine.generate([[5] * 64], use_tqdm=False)
    assert "a sequence may have 64 tokens, not max_model_len 4096: the KV" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_model_len": 10**7}, "max_model_len is 10000000, but the checkpoint's context is"),
        ({"eos_token_id": 99999}, "eos_token_id holds token id 99999; this model's token ids are between 0 and 1535"),
        ({"bos_token_id": 1536}, "bos_token_id holds token id 1536"),
        ({"stop_token_ids": (5, 1536)}, "stop_token_ids holds token id 1536"),
        ({"device": "cuda"}, "torch finds no GPU"),
        ({"async_scheduling": "on", "parallel_config": {"tensor_parallel_size": 2}}, "async_scheduling is on, but"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    fields: dict[str, object], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineDeadError, match=sentence) as raised:
        LLMEngine(**fields)
    assert raised.value.usage
    assert "Traceback" not in capfd.readouterr().err


def test_truncated_checkpoint_is_refused_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(CHECKPOINT_DIR, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(EngineDeadError, match=r"model\.safetensors") as raised:
        LLMEngine(str(broken))
    assert raised.value.usage
    assert "Traceback" not in capfd.readouterr().err
