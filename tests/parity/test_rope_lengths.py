"""Ropes that depend on a sequence's length: requests of all lengths are computed as transformers computes each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.scheduler import Scheduler
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import Reference, prompt
from tests.parity.runners import steps
from tests.parity.test_worker_model_runner import runner_for
from tests.parity.variants import phi3

ORIGINAL = 48
SHORT = [1.0, 1.1, 1.3, 1.7, 2.2, 3.0, 4.1, 5.0]
LONG = [1.0, 1.5, 2.5, 4.0, 9.0, 16.0, 30.0, 60.0]
NUM_TOKENS = 24


def longrope(directory: Path) -> Path:
    """Phi-3, which transformers computes again when it passes the original context."""
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG}
    return make_checkpoint(
        directory,
        phi3.VARIANTS[0].family,
        max_position_embeddings=256,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=parameters | {"original_max_position_embeddings": ORIGINAL},
        sliding_window=None,
    )


def dynamic(directory: Path) -> Path:
    return make_checkpoint(
        directory,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    )


def expected_tokens(path: Path, tokens: list[int]) -> list[int]:
    """A new model: transformers keeps the frequencies of the longest sequence so far."""
    ids = torch.tensor([tokens])
    found = Reference(path).model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    return found[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


def completions(runner: ModelRunner, prompts: list[list[int]]) -> tuple[list[list[int]], list[int], int]:
    """Greedy completions of prompts, every second of which arrives later; cached tokens of each; preemptions."""
    scheduler = Scheduler(runner.config, rope=runner.rope)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    size = runner.config.kv_cache_block_size
    seqs = [Sequence(list(tokens), size, params, id=i) for i, tokens in enumerate(prompts)]
    hits = [0] * len(seqs)
    arrivals = {0: seqs[::2], 6: seqs[1::2]}
    for batch in steps(scheduler, runner, arrivals):
        for id, cached in zip(batch.req_ids, batch.num_cached_tokens, strict=True):
            hits[id] = cached
        scheduler.check_integrity()
    return [seq.completion_token_ids for seq in seqs], hits, len(scheduler.take_preempted())


SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"scheduling_policy": "mixed", "max_num_batched_tokens": 24},
    "drafts": {"speculative_config": {"num_speculative_tokens": 3}, "scheduling_policy": "mixed"},
}


@pytest.mark.parametrize("checkpoint", [longrope, dynamic])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("route", ["kaon", pytest.param("transformers", marks=pytest.mark.slow)])
def test_requests_of_all_lengths_share_steps(
    tmp_path: Path, checkpoint: Callable[[Path], Path], settings: str, route: str
) -> None:
    path = checkpoint(tmp_path)
    shared = prompt(40, seed=1)
    prompts = [
        prompt(9, seed=2),  # stays within the original context
        prompt(70, seed=3),  # is beyond it
        prompt(ORIGINAL - 8, seed=4),  # passes it while it generates
        prompt(ORIGINAL, seed=5),
        prompt(ORIGINAL + 1, seed=6),
        shared + prompt(60, seed=7),
        shared,
        shared + prompt(60, seed=7),
    ]
    runner = runner_for(path, max_model_len=160, model_impl=route, **SETTINGS[settings])
    found, hits, num_preempted = completions(runner, prompts)
    assert found == [expected_tokens(path, tokens) for tokens in prompts]
    assert hits[7] >= 80, "prompts of one length share keys"
    if checkpoint is longrope:
        assert num_preempted >= 3, "sequences that pass the original context are computed again"


def dynamic_for_operators(directory: Path) -> Path:
    """With sizes that the CPU's operators support."""
    return make_checkpoint(
        directory,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    )


@pytest.mark.parametrize(
    ("checkpoint", "dtype"),
    [(longrope, torch.float32), (dynamic, torch.float32), (dynamic_for_operators, torch.bfloat16)],
)
def test_a_drafter_takes_the_length_of_each_request(
    tmp_path: Path, checkpoint: Callable[[Path], Path], dtype: torch.dtype
) -> None:
    """A model that drafts for itself is always right if it uses the target's frequencies."""
    path = checkpoint(tmp_path)
    drafts = {"num_speculative_tokens": 3, "speculative_method": "draft", "speculative_model": str(path)}
    prompts = [prompt(9, seed=2), prompt(ORIGINAL - 8, seed=4), prompt(70, seed=3)]
    expected = completions(runner_for(path, dtype, max_model_len=160), prompts)[0]
    runner = runner_for(path, dtype, max_model_len=160, speculative_config=drafts)
    scheduler = Scheduler(runner.config, rope=runner.rope)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    seqs = [Sequence(list(tokens), 16, params, id=i) for i, tokens in enumerate(prompts)]
    for _ in steps(scheduler, runner, {0: seqs}):
        pass
    assert [seq.completion_token_ids for seq in seqs] == expected
    assert scheduler.total_accepted_tokens == scheduler.total_draft_tokens > 0


def test_within_the_original_context_nothing_depends_on_lengths(tmp_path: Path) -> None:
    path = longrope(tmp_path)
    runner = runner_for(path, max_model_len=ORIGINAL)
    assert runner.rope is None
    tokens = prompt(ORIGINAL - NUM_TOKENS, seed=8)
    assert completions(runner, [tokens])[0] == [expected_tokens(path, tokens)]
