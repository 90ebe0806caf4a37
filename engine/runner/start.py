"""Starts the runner of a rank, with the same sequence of phases on all ranks: rank 0 in the engine core, the others in
rank processes.

load weights (`build`) -> rendezvous with the other ranks and replicas -> check the kernels -> measure the KV cache and
agree on its size -> construct the runner -> warm up -> capture graphs. Rank 0 then sends steps, and the other ranks
execute them.
"""

from collections.abc import Callable

import torch

from engine.runner.draft_passes import DraftPasses
from engine.runner.kernel_checks import check_kernels, refuse_unchecked, watch_kernels
from engine.runner.loaded_model import LoadedModel, drafter_caches
from engine.runner.memory_sizing import KVCacheSize, cpu_budget, gpu_budget, kv_cache_size
from engine.runner.model_runner import ModelRunner
from engine.runner.warm_up import run_largest_step
from engine.speculative.drafts import max_sampled_tokens
from models.attention.context import set_kv_cache_data
from models.ops import triton
from models.ops.cpu.program import NotRecordable


def start_runner(
    loaded: LoadedModel,
    *,
    rendezvous: Callable[[], None],
    agree: Callable[[KVCacheSize], tuple[int, int]],
    on_phase: Callable[[str], None] = lambda _: None,
) -> ModelRunner:
    """Start and warm up a runner. Raises `ValueError` with one sentence for a configuration that cannot be served.

    `rendezvous` waits until all ranks have loaded, and joins their process group. `agree` takes the KV cache size that
    fits this rank and returns the number of blocks and slots that all ranks use. `on_phase` receives the name of each
    phase when it ends.
    """
    rendezvous()
    on_phase("load")
    checked = watch_kernels() if triton.active() else None
    loaded = check_kernels(loaded, checked)
    num_blocks, num_slots = agree(measure_kv_cache(loaded))
    runner = ModelRunner(loaded, num_blocks, num_slots)
    on_phase("kv-cache")
    runner.warm_up()
    if checked is not None:
        # The warm-up steps run over the cache that will serve, and launch every kernel that requests need.
        other = refuse_unchecked(loaded, checked)
        if other is not None:
            del runner  # This frees its KV cache before the next runner allocates one.
            runner = ModelRunner(other, num_blocks, num_slots)
            runner.warm_up()
        checked.refuse_others()
    runner.loaded.require_invariance()
    runner.capture_at_start()
    if loaded.packs is not None:
        loaded.packs.write_in_background()
    return runner


def measure_kv_cache(loaded: LoadedModel) -> KVCacheSize:
    """The size of the KV cache that fits in memory with the model. Raises `ValueError` when none fits."""
    config, caches = loaded.config, loaded.layer_caches()
    sizes = {"block_bytes": caches.block_bytes, "slot_bytes": caches.slot_bytes}
    return kv_cache_size(
        config,
        max_model_len=loaded.max_model_len,
        budget=lambda: (
            cpu_budget(
                config,
                activations=_activation_bytes(loaded) + proposal_bytes(loaded),
                ranks=loaded.num_local_ranks,
            )
            if (memory := loaded.device_api.memory) is None
            else gpu_budget(
                config,
                memory,
                lambda num_seqs: run_worst_case(loaded, num_seqs),
                agree=lambda is_so: loaded.parallel.all_agree(is_so, loaded.device),
                kept_bytes=proposal_bytes(loaded),
                **sizes,
            )
        ),
        **sizes,
    )


def run_worst_case(loaded: LoadedModel, num_seqs: int) -> None:
    """Run the step that takes most memory, of at most `num_seqs` sequences, with a cache of one block.

    Raises `ValueError` with one sentence where the device has too little memory.
    """
    runner = ModelRunner(loaded, 1, num_seqs)
    run_largest_step(runner.step_sizes, runner.run_dummy_step)
    set_kv_cache_data({})


def proposal_bytes(loaded: LoadedModel) -> int:
    """Bytes that rejection sampling holds between steps: the distribution of each draft that a step may verify."""
    config = loaded.config
    if loaded.drafter is None or not config.drafts_by_rejection:
        return 0
    num_drafts = min(config.max_num_seqs * config.num_drafts, max_sampled_tokens(config.max_num_seqs))
    return num_drafts * loaded.model_config.vocab_size * torch.float32.itemsize


def _activation_bytes(loaded: LoadedModel) -> int:
    """An estimate, before any step has run, of the bytes that the largest step takes besides weights and cache."""
    if loaded.operators is None or loaded.is_encoder:
        return 0
    try:
        caches = loaded.layer_caches().allocate(1, 1)
        recorded = loaded.record_pass(caches).num_bytes
        if loaded.drafter is not None:
            recorded += DraftPasses(loaded, loaded.drafter, drafter_caches(caches), loaded.operators).num_bytes
    except NotRecordable:
        return 0
    return recorded + (0 if loaded.exchange is None else loaded.exchange.num_bytes)
