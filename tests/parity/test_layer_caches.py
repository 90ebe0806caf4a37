"""Caches are allocated as layers declare them, and the memory's sizing counts the same bytes."""

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.core.startup import PhaseClock, start_model
from engine.runner.kv_cache import LayerCaches
from engine.runner.start import measure_kv_cache
from models.attention.backend import select_backend
from models.attention.cpu_native import NativeCPUAttentionBackend
from models.layers.base import KVCacheSpec, VectorCacheSpec
from models.ops.types import StateCache
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import prompt, tensors_of
from tests.parity.test_worker_model_runner import generate, runner_for
from tests.parity.variants import all_variants

# Full, windowed next to full, latent, latent with an index, recurrent.
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
    config = runner.config.model_copy(update={"num_kvcache_blocks": 5})
    states = [layer for layer in runner.caches.allocate(5).values() if isinstance(layer, StateCache)]
    allocated = [*runner.caches.pools, *(tensor for layer in states for tensor in layer.tensors)]
    num_bytes = sum(tensor.nbytes for tensor in allocated)
    assert measure_kv_cache(dataclasses.replace(runner.loaded, config=config)).num_bytes == num_bytes


def test_a_blocks_pages_of_all_layers_lie_together_an_odd_number_of_them() -> None:
    num_layers, num_heads, block_size, dim = 10, 4, 16, 64
    specs = [
        *(KVCacheSpec(f"layers.{layer}", num_kv_heads=num_heads, head_dim=dim) for layer in range(num_layers)),
        VectorCacheSpec("indexer", dim=32),
    ]
    backend, cpu = select_backend(torch.device("cpu")), torch.device("cpu")
    caches = LayerCaches(specs, backend, block_size=block_size, num_slots=1, dtype=torch.bfloat16, device=cpu)
    allocated = caches.allocate(7)
    keys_and_values, vectors = caches.pools
    assert keys_and_values.shape == (7, 2 * num_layers * num_heads + 1, block_size, dim)
    assert vectors.shape == (7, 1, block_size, 32)
    marks = iter(range(1, 1000))
    for cache in allocated.values():
        for tensor in tensors_of(cache):
            tensor[3] = next(marks)
    counts = keys_and_values[3, :, 0, 0].int().bincount()
    assert counts.tolist() == [1] + [num_heads] * 2 * num_layers, "nothing lies over anything else"
    assert keys_and_values[:3].count_nonzero() == keys_and_values[4:].count_nonzero() == 0
    assert caches.block_bytes == sum(pool.nbytes for pool in caches.pools) // 7


@pytest.mark.parametrize(("kv_dtype", "sizes"), [(None, {32, 96}), (torch.float8_e4m3fn, {16, 72})])
def test_vectors_are_padded_only_in_the_dtype_that_operators_read(
    kv_dtype: torch.dtype | None, sizes: set[int]
) -> None:
    specs = [
        KVCacheSpec("attention", num_kv_heads=2, head_dim=16),
        VectorCacheSpec("latents", dim=72, is_latent=True),
    ]
    cpu = torch.device("cpu")
    caches = LayerCaches(
        specs,
        NativeCPUAttentionBackend(cpu),
        block_size=16,
        num_slots=1,
        dtype=torch.bfloat16,
        device=cpu,
        kv_dtype=kv_dtype,
    )
    caches.allocate(3)
    assert {pool.shape[-1] for pool in caches.pools} == sizes


def test_a_recurrent_models_states_come_out_of_the_caches_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = checkpoint(tmp_path, "Qwen3NextForCausalLM")
    caches = runner_for(path).caches
    room = 5 * caches.slot_bytes + 100 * caches.block_bytes
    config = Config(model=str(path), device="cpu", dtype="float32", cpu_kvcache_gib=room / 2**30)
    loaded = start_model(config, PhaseClock(time.monotonic()))
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
    loaded = start_model(Config(model=str(path), device="cpu", max_num_seqs=4), PhaseClock(time.monotonic()))
    (answer,) = generate(loaded.runner, Scheduler(loaded.config), [prompt(20)])
    assert answer
