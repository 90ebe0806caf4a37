"""The start-up of an engine core: loads the model that a `Config` names, in measured phases.

Imports torch inside `start_model`, so that the busy loop and its tests need no torch.
"""

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.core.scheduler import Scheduler
from engine.distributed.host_resources import HostShare
from engine.distributed.lockstep import ReplicaLinks
from engine.messages import ModelInfo
from models.torch_import import importing_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from engine.distributed.rank_manager import AsyncIOProcManager
    from engine.runner.build import World
    from engine.runner.memory_sizing import KVCacheSize
    from engine.runner.model_runner import ModelRunner
    from engine.text.tokenizer import Tokenizer
    from models.architectures.config import CheckpointConfig

logger = logging.getLogger(__name__)

_CPU_STEP_SECONDS = 0.75
"""Default of `max_step_seconds` on CPUs."""


class PhaseClock:
    """Measures the seconds of each phase, beginning at `start` on the `time.monotonic` clock."""

    def __init__(self, start: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last = start

    def end(self, phase: str) -> None:
        """End a phase: record the time since the last call as `phase`."""
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now


class StartedModel(NamedTuple):
    """A model with its KV cache. In `config`, all fields that depend on the checkpoint and the memory are set."""

    runner: "ModelRunner"
    scheduler: Scheduler
    config: Config
    info: ModelInfo
    load_tokenizer: "Callable[[], Tokenizer]"
    world: "World | None" = None
    """The group of replicas that compute in lockstep; None without lockstep."""


def start_model(
    config: Config,
    phases: PhaseClock,
    start_ranks: "Callable[[Path], AsyncIOProcManager] | None" = None,
    links: ReplicaLinks | None = None,
    share: HostShare = HostShare(),  # noqa: B008, immutable
) -> StartedModel:
    """Load the model of `config` and warm it up. Raises `ValueError` with a sentence if it cannot be served.

    `start_ranks` starts the processes with the other shards of the checkpoint at the given path; None: there are none.
    `links` connect the cores of replicas in lockstep; raises `RendezvousError` if not all connect. `share` is this
    replica's share of the host's memory and CPUs.
    """
    path = resolve_checkpoint(config.model)
    ranks = None if start_ranks is None else start_ranks(path)
    with importing_torch():
        from engine.runner.build import load_rank
        from engine.runner.start import start_runner

    phases.end("import")
    shard, lockstep_member = None if ranks is None else ranks.shard, None if links is None else links.member
    loaded, own_cpus, group, world = load_rank(config, path, shard, lockstep_member, share)
    _check_token_ids(config, loaded.model_config.vocab_size)
    config = loaded.config
    others_cpus, others_parameters = frozenset[int](), 0

    def rendezvous() -> None:
        nonlocal others_cpus, others_parameters
        if ranks is not None:
            others_cpus, others_parameters = ranks.wait_loaded()
        if links is not None:
            links.connect(config.parallel_config.rank_start_timeout)
        if ranks is not None:
            assert group is not None
            ranks.join(group, None if world is None else world.join)
        elif world is not None:
            world.join()

    def agree(size: "KVCacheSize") -> tuple[int, int]:
        nonlocal config
        if ranks is not None:
            size = size.of_ranks(ranks.shard.size, *ranks.agree(size.num_blocks, size.num_slots))
        _log_cache(config, size, loaded.model_config.architecture)
        config = _with_async_scheduling(_with_cache(config, size), loaded.device.type)
        return size.num_blocks, size.num_slots

    runner = start_runner(loaded, rendezvous=rendezvous, agree=agree, on_phase=phases.end)
    info = _model_info(config, loaded.model_config, runner, own_cpus)
    if ranks is not None:
        assert group is not None
        runner.lead(ranks.open_steps(group))
        info = msgspec.structs.replace(
            info,
            own_cpus=sorted(own_cpus | others_cpus),
            num_parameters=info.num_parameters + others_parameters,
        )
    scheduler = Scheduler(
        config,
        window=runner.window,
        rope=runner.rope,
        blocks_at_first=runner.blocks_at_first,
        splits_prompts=not loaded.is_encoder,
        default_step_seconds=_CPU_STEP_SECONDS if loaded.device.type == "cpu" else 0.0,
        max_interposed_tokens=runner.max_interposed_tokens if links is None else 0,
        max_rounds=runner.max_rounds if links is None else 1,
    )
    return StartedModel(runner, scheduler, config, info, lambda: _load_tokenizer(path), world)


def _log_cache(config: Config, size: "KVCacheSize", architecture: str) -> None:
    logger.info("KV cache of %d blocks, %.2f GiB: %s", size.num_blocks, size.num_bytes / 2**30, size.reason)
    if size.num_slots < config.max_num_seqs:
        logger.warning(
            "%d sequences run at a time, not max_num_seqs %d: %s keeps a state for each, and those of more would fill "
            "over half of the KV cache's memory",
            size.num_slots,
            config.max_num_seqs,
            architecture,
        )
    if config.speculative_config is not None:
        drafts = config.speculative_config
        source = (
            "looked up" if not drafts.drafts_by_model else f"made by {drafts.speculative_model or 'the checkpoint'}"
        )
        how = drafts.num_speculative_tokens, source, drafts.speculative_method
        logger.info("steps verify up to %d drafts a sequence, which are %s (%s)", *how)


def _load_tokenizer(path: "Path") -> "Tokenizer":
    from engine.text.tokenizer import Tokenizer

    return Tokenizer.from_checkpoint(path)


def _check_token_ids(asked: Config, vocab_size: int) -> None:
    """Raise `ValueError` for a token id of the settings beyond the vocabulary.

    Such an id would never end an answer, or would index a missing row of the embedding.
    """
    for name, token_ids in (
        ("bos_token_id", (asked.bos_token_id,)),
        ("eos_token_id", (asked.eos_token_id,)),
        ("stop_token_ids", asked.stop_token_ids),
    ):
        for token_id in token_ids:
            if token_id is not None and token_id >= vocab_size:
                raise ValueError(
                    f"{name} holds token id {token_id}; this model's token ids are between 0 and {vocab_size - 1}"
                )


def _with_cache(config: Config, size: "KVCacheSize") -> Config:
    """Return `config` with the KV cache's size, and with a context length that fits it."""
    assert config.max_model_len is not None
    capacity = size.num_blocks * config.kv_cache_block_size
    if capacity < config.max_model_len:
        logger.warning(
            "a sequence may have %d tokens, not max_model_len %d: the KV cache holds no more",
            capacity,
            config.max_model_len,
        )
    return config.model_copy(
        update={
            "num_kvcache_blocks": size.num_blocks,
            "max_num_seqs": size.num_slots,
            "max_model_len": min(config.max_model_len, capacity),
        }
    )


def _with_async_scheduling(config: Config, device_type: str) -> Config:
    """Return `config` with `async_scheduling` resolved. A step on the CPU has ended when `launch` returns, so
    launching the next one before reading it would only delay its tokens.
    """
    if config.async_scheduling != "auto":
        return config
    return config.model_copy(update={"async_scheduling": "off" if device_type == "cpu" else "on"})


def _model_info(
    config: Config, model: "CheckpointConfig", runner: "ModelRunner", own_cpus: "Collection[int]"
) -> ModelInfo:
    assert config.max_model_len is not None
    assert config.num_kvcache_blocks is not None
    return ModelInfo(
        architecture=model.architecture,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        attention_backend=runner.backend.name,
        num_parameters=sum(weight.numel() for weight in runner.model.parameters()),
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=[token for token in (config.eos_token_id, *config.stop_token_ids) if token is not None],
        block_size=config.kv_cache_block_size,
        num_kvcache_blocks=config.num_kvcache_blocks,
        own_cpus=sorted(own_cpus),
        shares_prefixes=config.enable_prefix_caching,
        kernels=runner.loaded.kernels,
        is_invariant=runner.loaded.is_invariant,
    )
