"""Deferred output on a small random checkpoint: asynchronous steps give the results of synchronous steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.runner.device import Downloads, Uploads
from engine.sampling import sampler
from engine.sampling.parameters import RandomRows, SamplingRows
from engine.sampling.sampler import Sampler
from engine.sampling.torch_ops import TorchOps
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.text.structured.matcher import Matchers
from engine.text.structured.spec import GrammarSpec, lark_of
from tests.parity.ahead import Ahead, answers, waiting
from tests.parity.delayed_device import DelayedDevice, read
from tests.parity.test_worker_model_runner import VOCAB_SIZE, checkpoint, prompts, runner_for
from tests.sweeps import sweep

__all__ = ["checkpoint", "prompts"]

EOS = 159
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 5, "logprobs": 2},
    {"min_p": 0.1, "min_tokens": 6},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"bad_words": [[7, 9], [3]], "temperature": 0.0, "logprobs": 0},
    {"logit_bias": {5: 2.0, 9: -100.0}},
    {"allowed_token_ids": [1, 2, 3, 50, EOS]},
    {"temperature": 0.0, "prompt_logprobs": 2, "max_tokens": 9},
    {"max_tokens": 1},
    {"max_tokens": 0, "prompt_logprobs": 1},
]


class ByteTokenizer:
    """Ids are bytes, except for the end token."""

    special_ids = frozenset({EOS})

    def token(self, token_id: int) -> str | None:
        return "<|end|>" if token_id == EOS else None

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else bytes([token_id])


@pytest.fixture(scope="module")
def matchers() -> Matchers:
    matchers = Matchers(ByteTokenizer, VOCAB_SIZE, [EOS])  # type: ignore[arg-type, return-value]
    matchers.load()
    return matchers


def sequences(prompts: list[list[int]], matchers: Matchers | None = None, **fields: Any) -> list[Sequence]:
    """One sequence per prompt, each of another kind; with matchers, every other one follows a grammar."""
    seqs = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(**{"seed": i, "max_tokens": 16 + i % 5, "temperature": 0.8, **KINDS[i % len(KINDS)]})
        seq = Sequence(prompt, fields.get("block_size", 16), params, [[4, 4]] if i % 7 == 0 else None, id=i)
        if matchers is not None and i % 2:
            seq.matcher = matchers.matcher(lark_of(GrammarSpec("regex", "[a-f]{2,9}(0|1)*!?")))
        seqs.append(seq)
    return seqs


@sweep(
    fields={
        "plain": {},
        "mixed": {"scheduling_policy": "mixed", "max_num_batched_tokens": 40},
        "preempted": {"max_num_batched_tokens": 24, "num_kvcache_blocks": 16},
        "few slots": {"enable_prefix_caching": False, "max_num_seqs": 3},
    },
    structured={"free": False, "by grammars": True},
)
def test_one_step_ahead_gives_what_waiting_gives(
    checkpoint: Path, prompts: list[list[int]], matchers: Matchers, fields: dict[str, Any], structured: bool
) -> None:
    runner = runner_for(checkpoint, eos_token_id=EOS, stop_token_ids=(17, 60), **fields)
    by = matchers if structured else None
    expected = answers(waiting(runner, sequences(prompts[:24], by)))
    ahead = Ahead(runner)
    assert answers(ahead.run(sequences(prompts[:24], by))) == expected
    assert len(expected) == 24
    if "num_kvcache_blocks" in fields:
        assert ahead.scheduler.stats("decode", 0.0).preemptions > 0


def test_logits_that_are_not_finite_fail_their_request_and_no_other(
    checkpoint: Path, prompts: list[list[int]]
) -> None:
    runner = runner_for(checkpoint)
    expected = answers(waiting(runner, sequences(prompts[:12])))
    intact, steps = runner.model.compute_logits, 0

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        logits = intact(hidden)
        # The rows of the step are the decodes of all remaining sequences, in order.
        if steps == 5:
            logits[3] = torch.nan
        return logits

    runner.model.compute_logits = broken  # type: ignore[method-assign]
    ahead = Ahead(runner)
    reported = answers(ahead.run(sequences(prompts[:12])))
    failed = [seq_id for seq_id, parts in reported.items() if "error" in parts[2]]  # type: ignore[operator]
    assert len(failed) == 1
    assert "not finite" in str(reported[failed[0]])
    assert {key: parts for key, parts in reported.items() if key not in failed} == {
        key: parts for key, parts in expected.items() if key not in failed
    }


def test_a_step_that_raises_names_its_sequences_and_leaves_the_others_whole(
    checkpoint: Path, prompts: list[list[int]]
) -> None:
    runner = runner_for(checkpoint)
    ahead = Ahead(runner)
    seqs = sequences(prompts[:4])
    ahead.scheduler.extend(seqs)
    for _ in range(3):
        assert ahead.pipeline.advance(ahead.on_read) is None
    intact = runner.run_model
    runner.run_model = None  # type: ignore[method-assign, assignment]
    failed = ahead.pipeline.advance(ahead.on_read)
    assert failed is not None
    assert {seq.id for seq in failed.seqs} == {0, 1, 2, 3}
    assert not ahead.pipeline
    assert ahead.record.read() == []
    ahead.scheduler.check_integrity()
    runner.run_model = intact  # type: ignore[method-assign]
    assert answers(ahead.run([])) == answers(waiting(runner_for(checkpoint), sequences(prompts[:4])))


@pytest.mark.parametrize("vocab_size", [50, 3000])
def test_operations_for_any_device_choose_the_cpus_tokens(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, num_rows = np.random.default_rng(vocab_size), 40
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab_size)).astype(np.float32) * 3)
    # Ties, as in bfloat16.
    logits = logits.bfloat16().float()
    top_k = rng.choice([1, 5, vocab_size], size=num_rows)
    top_p = rng.choice([0.3, 0.95, 1.0], size=num_rows)
    min_p = rng.choice([0.0, 0.2], size=num_rows)
    rows = SamplingRows(
        random=RandomRows(
            rows=np.arange(num_rows),
            temperature=rng.uniform(0.2, 2.0, size=num_rows).astype(np.float32),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            key=rng.integers(2**64, size=num_rows, dtype=np.uint64),
            position=rng.integers(4096, size=num_rows),
            filtered=(top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0),
        ),
        num_logprobs={3: 4, 8: 0, 9: 20},
    )
    logits[7] = torch.nan
    logits[9, 3] = torch.inf
    expected = Sampler().sample(logits.clone(), rows)
    device = DelayedDevice()
    monkeypatch.setattr(sampler, "ops_for", lambda _: TorchOps())
    found = read(Sampler().launch(logits.clone(), rows, Uploads(device).send), Downloads(device))
    assert found.non_finite == expected.non_finite == [7, 9]
    usable = [row for row in range(num_rows) if row not in found.non_finite]
    assert found.token_ids[usable].tolist() == expected.token_ids[usable].tolist()
    assert found.logprobs.keys() == expected.logprobs.keys() == {3, 8}
    for row, reported in found.logprobs.items():
        assert (reported.token_id, reported.rank, reported.top_ids) == (
            expected.logprobs[row].token_id,
            expected.logprobs[row].rank,
            expected.logprobs[row].top_ids,
        )
        assert reported.logprob == pytest.approx(expected.logprobs[row].logprob, abs=1e-5)
        assert reported.top_logprobs == pytest.approx(expected.logprobs[row].top_logprobs, abs=1e-5)
