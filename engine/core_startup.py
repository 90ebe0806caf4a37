"""From a `Config` to a loaded `ModelRunner`: the engine core's start-up, phase by phase.

Imports torch inside `load_model`, so that the core's loop and its tests do without.
"""

import logging
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from engine.checkpoint import resolve_checkpoint
from engine.config import Config
from engine.messages import ModelInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    import torch

    from engine.tokenizer import Tokenizer
    from engine.worker.memory import KVCacheSize
    from engine.worker.model_runner import ModelRunner
    from models.checkpoint_config import CheckpointConfig

logger = logging.getLogger(__name__)
_ROUNDINGS = ("int8", "int4")
"""Values of `quantization` that say what to do, not what the checkpoint must be."""


class PhaseClock:
    """Seconds by phase of something that began at `start` on `time.monotonic`'s clock."""

    def __init__(self, start: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last = start

    def end(self, phase: str) -> None:
        """The time since the last call went into `phase`."""
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now


class LoadedModel(NamedTuple):
    """A model with its KV cache. `config` has everything filled in that the checkpoint and the memory decide."""

    runner: "ModelRunner"
    config: Config
    info: ModelInfo
    load_tokenizer: "Callable[[], Tokenizer]"
    window: int | None = None
    """Tokens that a query sees in the widest layer, its own included; None: all before it."""
    blocks_at_first: int | None = None
    """Of a KV cache that grows with its use; None: all."""


def load_model(config: Config, phases: PhaseClock) -> LoadedModel:
    """Load what `config` names and warm it up. Raises `ValueError`, a sentence, for what cannot be served."""
    _refuse_unsupported(config)
    import torch

    from engine.worker.model_runner import ModelRunner
    from engine.worker.threads import choose_threads, pin, settle
    from models.kernels.cpu.library import INSTRUCTION_SETS
    from models.model_config import read_checkpoint_config

    phases.end("import")
    path = resolve_checkpoint(config.model)
    _require_quantization(config.quantization_config.quantization, path)
    model_config = read_checkpoint_config(path, config.model_impl)
    config = _with_checkpoint(config, model_config)
    device = _resolve_device(config.device)
    dtype: torch.dtype = getattr(torch, model_config.dtype if config.dtype == "auto" else config.dtype)
    type_name = str(dtype).removeprefix("torch.")
    _require_rounding(config.quantization_config.quantization, model_config, device, dtype)
    logger.info("%s runs by %s, in %s on %s", model_config.architecture, model_config.runs_by, type_name, device)
    plan = choose_threads(config) if device.type == "cpu" else None
    if plan is not None:
        settle(plan)
        if plan.node is not None:
            _bind_memory(plan.node, path, config)
    runner = ModelRunner(config, path, model_config, device, dtype)
    own_cpus: frozenset[int] = frozenset()
    if plan is not None:
        own_cpus = pin(plan, runner.operators)
        by = "torch" if runner.operators is None else f"the {INSTRUCTION_SETS[runner.operators.isa]} operators"
        logger.info("%s, by %s", plan, by)
    runner.load(progress=sys.stderr.isatty())
    phases.end("load")
    if config.enable_prefix_caching and not runner.config.enable_prefix_caching:
        logger.info("prefix caching is off: %s keeps a state that no prefix shares", model_config.architecture)
    config = runner.config
    size = runner.kv_cache_size()
    logger.info("KV cache of %d blocks, %.2f GiB: %s", size.num_blocks, size.num_bytes / 2**30, size.reason)
    if size.num_slots < config.max_num_seqs:
        logger.warning(
            "%d sequences run at a time, not max_num_seqs %d: %s keeps a state for each, and those of more would fill "
            "over half of the KV cache's memory",
            size.num_slots,
            config.max_num_seqs,
            model_config.architecture,
        )
    config = _with_cache(config, size)
    runner.allocate_kv_cache(size.num_blocks, size.num_slots)
    phases.end("kv-cache")
    runner.warm_up()
    info = _model_info(config, model_config, runner, own_cpus)
    return LoadedModel(
        runner,
        config,
        info,
        lambda: _load_tokenizer(path),
        window=runner.window,
        blocks_at_first=runner.blocks_at_first,
    )


def _bind_memory(node: int, path: "Path", config: Config) -> None:
    """Keep weights and cache on a NUMA node that has room for both, with room to spare."""
    from engine.worker.memory import GIB, MAX_CPU_BYTES
    from engine.worker.threads import bind_memory

    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    cache = MAX_CPU_BYTES if config.cpu_kvcache_gib is None else int(config.cpu_kvcache_gib * GIB)
    # Weights may be widened.
    bound = config.num_kvcache_blocks is None and bind_memory(node, 2 * weights + cache)
    logger.info("memory is %s NUMA node %d", "bound to" if bound else "taken by preference from", node)


def _load_tokenizer(path: "Path") -> "Tokenizer":
    from engine.tokenizer import Tokenizer

    return Tokenizer.from_checkpoint(path)


def _refuse_unsupported(config: Config) -> None:
    if config.speculative_config is not None:
        raise ValueError("num_speculative_tokens is set, but this release has no draft proposer; leave it out")


def _require_quantization(wanted: str, path: "Path") -> None:
    """Raise `ValueError` where the checkpoint is not quantised as the user says."""
    from models.config_fields import Fields
    from models.quantization import parse_quantization

    if wanted in ("auto", *_ROUNDINGS):
        return
    quantization = parse_quantization(Fields.from_file(path / "config.json"), path)
    found = "none" if quantization is None else quantization.quant_method
    if wanted != found:
        raise ValueError(
            f"quantization is {wanted}, but that of {path} is {found}; set it to auto, or serve another checkpoint"
        )


def _require_rounding(
    wanted: str, model_config: "CheckpointConfig", device: "torch.device", dtype: "torch.dtype"
) -> None:
    """Raise `ValueError` where weights cannot be rounded as they are read."""
    from models.kernels.cpu.library import load_library
    from models.model_config import ModelConfig

    if wanted not in _ROUNDINGS:
        return
    type_name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        found = f"the device is {device.type}; set device to cpu"
    elif type_name != "bfloat16":
        found = f"dtype is {type_name}; set it to bfloat16"
    elif not isinstance(model_config, ModelConfig):
        found = f"{model_config.architecture} runs by transformers' own code, which has no place for them"
    elif load_library() is None:
        found = "Kaon was installed without a C compiler; install one, then Kaon again"
    else:
        return
    raise ValueError(f"quantization is {wanted}, which rounds weights for the CPU's compiled operators, but {found}")


def _resolve_device(wanted: str) -> "torch.device":
    """The device to run on; its attention backend must exist. Raises `ValueError` where it does not."""
    import torch

    from models.attention import select_backend

    if wanted == "auto" and torch.cuda.is_available():
        try:
            select_backend(torch.device("cuda"))
        except ValueError as error:
            logger.warning("the model runs on the CPU: %s", error)
            wanted = "cpu"
    device = torch.device("cpu" if wanted == "auto" else wanted)
    select_backend(device)
    return device


def _with_checkpoint(config: Config, model: "CheckpointConfig") -> Config:
    """`config` with what the checkpoint decides. Raises `ValueError` for a context beyond the model's own."""
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but the checkpoint's context is {model.max_model_len} tokens; "
            f"set it to at most {model.max_model_len}"
        )
    eos = config.eos_token_id
    if eos is None and model.eos_token_ids:
        eos = model.eos_token_ids[0]
    return config.model_copy(
        update={
            "max_model_len": config.max_model_len or model.max_model_len,
            "bos_token_id": model.bos_token_id if config.bos_token_id is None else config.bos_token_id,
            "eos_token_id": eos,
            "stop_token_ids": config.stop_token_ids or tuple(token for token in model.eos_token_ids if token != eos),
        }
    )


def _with_cache(config: Config, size: "KVCacheSize") -> Config:
    """`config` with the KV cache's size, and a context that fits it."""
    assert config.max_model_len is not None
    capacity = size.num_blocks * config.kv_cache_block_size
    return config.model_copy(
        update={
            "num_kvcache_blocks": size.num_blocks,
            "max_num_seqs": size.num_slots,
            "max_model_len": min(config.max_model_len, capacity),
        }
    )


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
    )
