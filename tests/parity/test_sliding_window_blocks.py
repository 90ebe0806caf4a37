"""Blocks that a windowed model's sequences have freed are never read again, whether poisoned or reused."""

import time
from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.core.startup import PhaseClock, start_model
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from kvcache.block_manager import RELEASED
from models.attention.context import set_kv_cache_data
from models.ops.types import KVCacheTensor
from tests.parity.checkpoints import Family, make_checkpoint
from tests.parity.paged_model import Reference, prompt
from tests.parity.test_worker_model_runner import runner_for

WINDOW = 24
BLOCK_SIZE = 16
NUM_NEW = 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = Family(MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW})
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), family)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The later two begin like the first."""
    shared = prompt(70, seed=1)
    return [shared + prompt(11, seed=2), prompt(100, seed=3), shared + prompt(2, seed=4), shared + prompt(60, seed=5)]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.mark.parametrize("caching", [False, True], ids=["poisoned", "reused and shared"])
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_greedy_tokens_are_those_of_transformers_in_a_cache_too_small_for_all_blocks(
    checkpoint: Path, prompts: list[list[int]], reference: Reference, policy: str, caching: bool
) -> None:
    runner = runner_for(
        checkpoint,
        num_kvcache_blocks=24,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        scheduling_policy=policy,
        enable_prefix_caching=caching,
    )
    assert runner.window == WINDOW
    layers = runner.caches.allocate(24)
    set_kv_cache_data(layers)
    scheduler = Scheduler(runner.config, window=runner.window)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    seqs = [Sequence(list(tokens), BLOCK_SIZE, params, id=number) for number, tokens in enumerate(prompts)]
    scheduler.add(seqs[0])
    most = step = 0
    while (scheduled := scheduler.schedule()) is not None:
        if not caching:
            for layer in layers.values():
                assert isinstance(layer, KVCacheTensor)
                free = list(scheduler.block_manager.free_block_ids)
                layer.k_cache[free], layer.v_cache[free] = torch.nan, torch.nan
        batch, running = scheduled
        output = runner.forward(batch)
        assert not output.errors
        scheduler.postprocess(list(running.values()), output)
        scheduler.check_integrity()
        if step == 4:
            scheduler.extend(seqs[1:])
        if step == 60:
            scheduler.preempt(next(iter(scheduler.running)))
        decoding = list(running.values())[: batch.total_seqs_num_decode]
        most = max([most, *(len(seq.block_table) - seq.num_released_blocks for seq in decoding)])
        step += 1
    found = [seq.completion_token_ids for seq in seqs]
    assert {len(tokens) for tokens in found} == {NUM_NEW}
    assert found == reference.argmax_tokens(prompts, found)
    # The blocks of the 23 tokens before a query, and its own.
    assert most == 3
    # All four sequences at their full length would fill 52 blocks.
    assert sum(seq.num_blocks for seq in seqs) > 2 * len(scheduler.block_manager.blocks)
    assert scheduler.stats("decode", 0.0).preemptions == 1


def test_start_up_finds_the_window(checkpoint: Path) -> None:
    config = Config(model=str(checkpoint), device="cpu", num_kvcache_blocks=8)
    assert start_model(config, PhaseClock(time.monotonic())).scheduler.window == WINDOW


def test_only_a_model_whose_every_paged_layer_is_windowed_has_a_window(checkpoint: Path, tmp_path: Path) -> None:
    half = make_checkpoint(tmp_path, Family(MistralConfig, MistralForCausalLM, {"sliding_window": None}))
    assert runner_for(half).window is None
    assert runner_for(checkpoint).window == WINDOW


def test_released_entries_are_marked_in_the_table(checkpoint: Path) -> None:
    """A reader of one would access memory outside the cache instead of another sequence's block."""
    runner: ModelRunner = runner_for(checkpoint, max_num_batched_tokens=32, scheduling_policy="mixed")
    scheduler = Scheduler(runner.config, window=runner.window)
    seq = Sequence(prompt(150), BLOCK_SIZE, SamplingParams(temperature=0.0, max_tokens=2))
    scheduler.add(seq)
    for _ in range(5):
        scheduled = scheduler.schedule()
        assert scheduled is not None
        scheduler.postprocess([seq], runner.forward(scheduled[0]))
    # The last chunk begins at 128, and attends from position 105 on: block 6.
    assert seq.block_table[:6] == [RELEASED] * 6
    assert RELEASED not in seq.block_table[6:]
