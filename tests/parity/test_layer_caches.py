"""What the layers declare is what is allocated, and what the memory's sizing counts."""

import time
from pathlib import Path

import pytest

from engine.config import Config
from engine.core_startup import PhaseClock, load_model
from engine.scheduler import Scheduler
from models.forward_context import StateCache
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import prompt, tensors_of
from tests.parity.test_worker_model_runner import generate, runner_for
from tests.parity.variants import all_variants

# Full, windowed beside full, latent, latent with an index, recurrent.
_ARCHITECTURES = [
    "LlamaForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Qwen3NextForCausalLM",
]


def checkpoint(directory: Path, architecture: str, **overrides: object) -> Path:
    variant = next(variant for variant in all_variants() if variant.architecture == architecture)
    return make_checkpoint(directory, variant.family, **{**variant.overrides, **overrides})


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_what_is_allocated_is_what_was_counted(tmp_path: Path, architecture: str, kv_cache_dtype: str) -> None:
    path = checkpoint(tmp_path, architecture)
    runner = runner_for(path, max_num_seqs=3, quantization_config={"kv_cache_dtype": kv_cache_dtype})
    runner.config = runner.config.model_copy(update={"num_kvcache_blocks": 5})
    allocated = runner.caches.allocate(5).values()
    num_bytes = sum(tensor.nbytes for layer in allocated for tensor in tensors_of(layer))
    assert runner.kv_cache_size().num_bytes == num_bytes


def test_a_recurrent_models_states_come_out_of_the_caches_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = checkpoint(tmp_path, "Qwen3NextForCausalLM")
    caches = runner_for(path).caches
    room = 5 * caches.slot_bytes + 100 * caches.block_bytes
    config = Config(model=str(path), device="cpu", dtype="float32", cpu_kvcache_gib=room / 2**30)
    loaded = load_model(config, PhaseClock(time.monotonic()))
    num_slots = room // 2 // caches.slot_bytes
    assert loaded.config.max_num_seqs == num_slots < config.max_num_seqs
    assert "Qwen3NextForCausalLM runs by Kaon's own code, in float32 on cpu" in caplog.messages
    assert any(f"{num_slots} sequences run at a time, not max_num_seqs 512" in line for line in caplog.messages)
    prompts = [prompt(9, seed=number) for number in range(2 * num_slots)]
    answers = generate(loaded.runner, Scheduler(loaded.config), prompts)
    assert answers[-1] == generate(loaded.runner, Scheduler(loaded.config), prompts[-1:])[0]
    states = [layer for layer in loaded.runner.caches.allocate(1, num_slots).values() if isinstance(layer, StateCache)]
    assert {len(tensor) for state in states for tensor in state.tensors} == {num_slots}


def test_a_model_of_recurrent_layers_alone_is_served(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "Qwen3NextForCausalLM", layer_types=["linear_attention"] * 4)
    loaded = load_model(Config(model=str(path), device="cpu", max_num_seqs=4), PhaseClock(time.monotonic()))
    (answer,) = generate(loaded.runner, Scheduler(loaded.config), [prompt(20)])
    assert answer
