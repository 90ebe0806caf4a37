"""`LLMEngine` with the embedded model: the behaviour of the offline API."""

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


@pytest.mark.parametrize(
    "more",
    [
        {"async_scheduling": "off"},
        {"async_scheduling": "on"},
        # Ranks in one process: tests/parity/test_speculative_decoding.py.
        pytest.param({"parallel_config": {"tensor_parallel_size": 2}}, marks=pytest.mark.slow),
    ],
    ids=["waiting", "one step ahead", "two ranks"],
)
def test_answers_with_drafts_are_answers_without(engine: LLMEngine, more: dict[str, Any]) -> None:
    """Repetitive prompts, some of which are drafted well and others badly."""
    prompts = ["Hello", "a b c d a b c d a b c d a b", "1, 2, 3, 1, 2, 3, 1, 2,", "The capital of France is"]
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.8, max_tokens=48, seed=5, repetition_penalty=1.1, stop_strings=["The"]),
    ]

    def answers(engine: LLMEngine) -> list[Any]:
        results = [each for kind in kinds for each in engine.generate(prompts, kind, use_tqdm=False)]
        return [(each["token_ids"], each["finish_reason"], each["logprobs"]) for each in results]

    drafts = {"num_speculative_tokens": 5, "prompt_lookup_min": 2}
    with LLMEngine(num_kvcache_blocks=128, speculative_config=drafts, **more) as drafting:
        found = answers(drafting)
    if "parallel_config" in more:
        # How sums over ranks are rounded depends on the number of rows.
        with LLMEngine(num_kvcache_blocks=128, **more) as plain:
            expected = answers(plain)
        assert [each[:2] for each in found] == [each[:2] for each in expected]
    else:
        assert found == answers(engine)


def test_what_the_settings_say_of_the_context_and_the_parameters_holds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 5}')
    with LLMEngine(num_kvcache_blocks=4, generation_config=str(tmp_path)) as engine:
        assert engine.default_sampling_params == SamplingParams(temperature=0, max_tokens=5)
        first, second = engine.generate(["Once upon a time"] * 2, use_tqdm=False)
        assert engine.model_info.max_model_len == 64
        with pytest.raises(ValueError, match="64 tokens"):
            engine.generate([[5] * 64], use_tqdm=False)
    assert first["token_ids"] == second["token_ids"]
    assert len(first["token_ids"]) == 5
    assert "a sequence may have 64 tokens, not max_model_len 4096: the KV" in capfd.readouterr().err


def test_default_sampling_parameters_are_those_of_the_specification(engine: LLMEngine) -> None:
    assert engine.default_sampling_params == SamplingParams()


@pytest.mark.skipif(load_library() is None, reason="the operators were not built")
@pytest.mark.parametrize("rounding", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
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


def test_what_cannot_be_served_is_refused_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    """Further reasons: tests/parity/test_startup.py."""
    with pytest.raises(EngineDeadError, match="max_model_len is 10000000, but the checkpoint's context is") as raised:
        LLMEngine(max_model_len=10**7)
    assert raised.value.usage
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow  # The short form: tests/parity/test_model_loader.py.
def test_truncated_checkpoint_is_refused_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(CHECKPOINT_DIR, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(EngineDeadError, match=r"model\.safetensors") as raised:
        LLMEngine(str(broken))
    assert raised.value.usage
    assert "Traceback" not in capfd.readouterr().err
