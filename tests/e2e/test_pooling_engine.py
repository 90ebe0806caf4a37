"""Pooled prompts in real engine processes: over ranks, asynchronously, with compiled operators, after a death."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from engine.sampling_params import SamplingParams
from engine.text.io_processor import InvalidRequest
from engine.text.tokenizer import Tokenizer
from kaon import LLM, AsyncLLM
from models.ops.cpu.runtime import load_library
from tests.e2e.engines import until_replaced
from tests.parity.embedding_checkpoints import add_modules, encoder, qwen3_classifier, qwen3_embedding

TEXTS = ["The quick brown fox", "a lazy dog sleeps; the fox and the dog are friends.", "jumps", "x" * 90]
TOLERANCE = 1e-5
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
needs_operators = pytest.mark.skipif(load_library() is None, reason="the operators were not built")


def engine_of(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), **{"num_kvcache_blocks": 512, "dtype": "float32", "device": "cpu", **settings})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_embedding(tmp_path_factory.mktemp("embedder"))


def reference(path: Path, texts: list[str] = TEXTS) -> list[list[float]]:
    """Normalised last states, or an encoder's means, by transformers."""
    model, tokenizer = AutoModel.from_pretrained(path, dtype=torch.float32).eval(), Tokenizer.from_checkpoint(path)
    vectors = []
    for text in texts:
        with torch.inference_mode():
            states = model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
        vector = states.mean(0) if "bert" in model.config.model_type else states[-1]
        vectors.append((vector / vector.norm()).tolist())
    return vectors


def assert_close(found: list[list[float]], expected: list[list[float]], tolerance: float = TOLERANCE) -> None:
    for vector, other in zip(found, expected, strict=True):
        assert vector == pytest.approx(other, abs=tolerance)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="step by step", marks=pytest.mark.slow),
        pytest.param({"async_scheduling": "on", "num_speculative_tokens": 3}, id="ahead, with drafts"),
    ],
)
def test_texts_are_embedded_next_to_generation(checkpoint: Path, settings: dict[str, Any]) -> None:
    with engine_of(checkpoint, task=("generate", "embed"), **settings) as engine:
        alone = [result["token_ids"] for result in engine.generate(TEXTS, GREEDY, use_tqdm=False)]
        ids = engine.add_request(TEXTS, GREEDY)
        assert_close(engine.embed(TEXTS), reference(checkpoint))
        assert [result["token_ids"] for result in engine.collect(ids)] == alone
        with pytest.raises(InvalidRequest, match="dimensions is 65"):
            engine.embed(TEXTS, dimensions=65)
        with pytest.raises(InvalidRequest, match="served to embed, and not to classify"):
            engine.classify(TEXTS)


@pytest.mark.slow
def test_two_ranks_give_an_encoders_vectors(tmp_path: Path) -> None:
    path = add_modules(encoder(tmp_path, "modernbert", num_attention_heads=4), "mean_tokens")
    with engine_of(path, parallel_config={"tensor_parallel_size": 2}, cpu_threads=1) as engine:
        assert_close(engine.embed(TEXTS), reference(path))


@pytest.mark.slow  # One rank: the test above; ranks: test_tensor_parallel.py.
def test_two_ranks_pool_a_language_model_next_to_generation(checkpoint: Path) -> None:
    settings: dict[str, Any] = {"task": ("generate", "embed"), "max_num_batched_tokens": 64, "max_num_seqs": 16}
    with engine_of(checkpoint, parallel_config={"tensor_parallel_size": 2}, cpu_threads=1, **settings) as engine:
        alone = [result["token_ids"] for result in engine.generate(TEXTS, GREEDY, use_tqdm=False)]
        ids = engine.add_request(TEXTS, GREEDY)
        assert_close(engine.embed(TEXTS), reference(checkpoint))
        assert [result["token_ids"] for result in engine.collect(ids)] == alone


def test_texts_that_a_dead_core_had_are_embedded_by_the_next(checkpoint: Path) -> None:
    texts = [f"{index} {text}" for index in range(30) for text in TEXTS]
    with engine_of(checkpoint, max_num_batched_tokens=64, max_num_seqs=16) as engine:
        assert engine.pooling is not None
        expected = engine.embed(texts)
        prompts = [engine.pooling.prompt(text, "texts") for text in texts]
        sequences = [engine.pooling.sequence(prompt, next(engine._ids)) for prompt in prompts]
        ids = engine._submit(sequences)
        killed = engine._core.pid
        finished = engine._receive()
        assert 0 < len(finished) < len(texts)
        os.kill(killed, signal.SIGKILL)
        until_replaced(engine, killed)
        states = engine._wait(ids)
        assert [state.finish_reason for state in states] == ["stop"] * len(texts)
        found = [torch.frombuffer(bytearray(state.vector or b""), dtype=torch.float32).tolist() for state in states]
        assert_close(found, expected, 1e-6)


@needs_operators
@pytest.mark.parametrize("kind", ["language model", "bert"])
def test_compiled_operators_give_the_same_bits_in_any_company(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    path = checkpoint if kind == "language model" else add_modules(encoder(tmp_path, kind), "mean_tokens")
    with engine_of(path, dtype="bfloat16", enable_prefix_caching=False) as engine:
        alone = [engine.embed(text)[0] for text in TEXTS]
        assert engine.embed(TEXTS) == alone
        assert_close(alone, reference(path), 0.05)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with engine_of(qwen3_classifier(tmp_path_factory.mktemp("classifier"), num_labels=3)) as engine:
        yield engine


def test_texts_are_classified(classifier: LLM) -> None:
    for label, probabilities in classifier.classify(TEXTS):
        assert sum(probabilities) == pytest.approx(1, abs=1e-6)
        assert label == f"LABEL_{max(range(3), key=probabilities.__getitem__)}"


def test_a_model_that_only_pools_refuses_to_generate(classifier: LLM) -> None:
    with pytest.raises(InvalidRequest, match="served to classify, and generates nothing"):
        classifier.generate(TEXTS)
    with pytest.raises(InvalidRequest, match="3 classes, and no single score"):
        classifier.score("x", TEXTS)


def test_pairs_are_scored_by_an_encoder(tmp_path: Path) -> None:
    with engine_of(encoder(tmp_path, "bert", num_labels=1)) as engine:
        scores = engine.score("a dog", TEXTS)
        assert all(0 < score < 1 for score in scores)
        assert [engine.score("a dog", [text])[0] for text in TEXTS] == pytest.approx(scores, abs=1e-6)
        assert engine.score("a dog", []) == []
        with pytest.raises(InvalidRequest, match=r"documents\[1\] is not accepted: its prompt has"):
            engine.score("a dog", ["x", "y " * 400])


async def test_asyncio_programs_embed_and_score(checkpoint: Path) -> None:
    async with AsyncLLM(str(checkpoint), num_kvcache_blocks=512, dtype="float32") as llm:
        vectors, other = await asyncio.gather(llm.embed(TEXTS), llm.embed(TEXTS[0], dimensions=8))
        assert_close(vectors, reference(checkpoint))
        assert len(other[0]) == 8
        scores = await llm.score("a dog", TEXTS)
        assert len(scores) == len(TEXTS)
        with pytest.raises(InvalidRequest, match=r"texts\[1\] is not accepted"):
            await llm.embed(["x", [5] * 600])  # type: ignore[list-item]
