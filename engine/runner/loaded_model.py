"""`LoadedModel`: a rank's model and every decision made before its KV cache exists; `load_model` reads the weights."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.config.release import release
from engine.distributed.host_resources import available_host_memory, num_nodes
from engine.runner.device import Device, device_of, oom_at_start
from engine.runner.kv_cache import KV_CACHE_DTYPES, LayerCaches
from models.architectures.config import CheckpointConfig, ModelConfig
from models.architectures.encoder_config import EncoderConfig
from models.architectures.llama import DecoderBody
from models.architectures.pooling import PoolingConfig
from models.architectures.registry import ENCODERS
from models.attention.backend import NO_ROWS, AttentionBackend, select_backend
from models.attention.context import Context, DPMetadata, forward_context
from models.layers.base import CausalLM, DraftLM, KVCacheSpec
from models.layers.pooling import PoolingHead
from models.loading import loader
from models.loading.drafters import DraftedModel, load_drafter
from models.loading.packs import PackCache, cache_directory
from models.loading.pooling import load_head
from models.lora.adapters import load_adapters
from models.ops import triton
from models.ops.cpu import runtime
from models.ops.cpu.program import NotRecordable, Program, record
from models.ops.cpu.runtime import Library
from models.ops.types import LayerCache
from models.parallel.tensor_parallel import SINGLE_RANK, Exchange, TensorParallel, TokenExchange
from models.quantization.config import ROUNDINGS, Rounding

_log = logging.getLogger(__name__)

DRAFT_PREFIX = "draft."
"""Prefix of the names of a drafter's caches, which share a mapping with the target's."""


def drafter_caches(caches: Mapping[str, LayerCache]) -> dict[str, LayerCache]:
    """The drafter's caches, by the names of its layers, from those that `LoadedModel.layer_caches` lays out."""
    return {name.removeprefix(DRAFT_PREFIX): cache for name, cache in caches.items() if name.startswith(DRAFT_PREFIX)}


_WITH_OWN_PRODUCTS = ("Gemma3n",)
"""Prefixes of the names of architectures with matrix products outside linear layers, attention and experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on one device. A runner adds the KV cache and the rows of the running sequences."""

    config: Config
    """Prefix caching is off here where the model has recurrent states, which a prefix cannot share."""
    model_config: CheckpointConfig
    model: CausalLM
    device: torch.device
    device_api: Device
    """Copies, events and graphs of `device`."""
    dtype: torch.dtype
    backend: AttentionBackend
    parallel: TensorParallel = SINGLE_RANK
    operators: Library | None = None
    """The CPU's compiled operators, where they compute the model."""
    packs: PackCache | None = None
    """Cache on disk of packed weights, from this start and from earlier ones."""
    num_local_replicas: int = 1
    """Number of replicas that share the host's memory."""
    pooling: PoolingConfig | None = None
    """How the model pools prompts; None where it generates only."""
    pooling_head: PoolingHead | None = None
    """On rank 0, the layers that compute on pooled vectors."""
    drafter: DraftLM | None = None
    """The draft model for this one, if there is one."""
    why_unrecorded: str | None = None
    """The reason why `record_pass` failed in the runner, so that torch may compute a part; None if it did not."""

    @property
    def generates(self) -> bool:
        """Whether the model generates tokens."""
        return self.pooling is None or "generate" in self.config.task

    @property
    def is_encoder(self) -> bool:
        """Whether each token of a prompt sees all others, so that prompts are computed whole."""
        return self.pooling is not None and self.pooling.is_encoder

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence."""
        return self.config.max_model_len or self.model_config.max_model_len

    @property
    def num_local_ranks(self) -> int:
        """Number of ranks, over all replicas, that share the host's memory."""
        return self.parallel.size * self.num_local_replicas

    @property
    def exchange(self) -> Exchange | TokenExchange | None:
        """How replicas exchange tokens, where they compute each step together."""
        return None if self.parallel.experts is None else self.parallel.experts.exchange

    @property
    def compilation_level(self) -> int:
        """Whether torch compiles the layers: 3, or 0."""
        return self.config.compilation_config.compilation_level

    @property
    def is_invariant(self) -> bool:
        """Whether greedy and seeded answers are independent of the other requests in the batch."""
        return self.why_varying is None

    @property
    def why_varying(self) -> str | None:
        """The reason why answers may depend on the other requests in the batch; None where they do not."""
        if self.config.drafts_by_rejection:
            return "speculative_acceptance is rejection, whose seeded answers depend on where drafts begin"
        # Adapters may be loaded later from a directory.
        adapters = {"lora": self.config.lora, "lora_directories": self.config.server_config.lora_directories}
        if name := next((name for name, is_set in adapters.items() if is_set), None):
            return f"{name} is set, and torch computes the products of adapters"
        if self.operators is not None and self.backend.name == "cpu-native":
            return self.why_unrecorded and f"torch may compute a part of a step: {self.why_unrecorded}"
        if not triton.is_invariant():
            return "torch's libraries choose the order of sums by the batch"
        parts = {
            "tensor_parallel_size": self.parallel.size > 1,
            "enable_expert_parallel": self.parallel.experts is not None,
            "task": self.pooling is not None,
            "compilation_level": self.compilation_level > 0,
        }
        if name := next((name for name, is_set in parts.items() if is_set), None):
            return f"{name} is set, whose sums are not computed in a fixed order"
        architecture = self.model_config.architecture
        if not isinstance(self.model_config, ModelConfig) or architecture.startswith(_WITH_OWN_PRODUCTS):
            return f"{architecture} has matrix products that torch's libraries compute"
        if not all(isinstance(spec, KVCacheSpec) for spec in self.model.kv_cache_layers()):
            return f"{architecture} has layers of another kind than attention over keys and values"
        if self.backend.name != "triton" or (left := triton.left()):
            which = ", ".join(sorted(left)) if self.backend.name == "triton" else "attention"
            return f"Triton's kernels do not compute {which}"
        return None

    def require_invariance(self) -> None:
        """Raise `ValueError` with a sentence if `batch_invariant` is set and answers may depend on other work."""
        if self.config.batch_invariant and (why := self.why_varying) is not None:
            raise ValueError(f"batch_invariant is set, but {why}; unset batch_invariant, or change that")

    @property
    def kernels(self) -> str:
        """See `ModelInfo.kernels`. Operators that are left to torch after the start are not reflected."""
        config, device = self.config, self.device
        speculative = config.speculative_config
        if speculative is not None and speculative.speculative_acceptance == "coupled" and self.why_varying is None:
            speculative = None  # Answers with such drafts are equal to those without.
        parts = [
            release(),
            torch.__version__,
            self.dtype,
            self.backend.name,
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            None if self.operators is None else self.operators.isa,
            (triton.version(), sorted(triton.left())) if triton.active() else None,
            config.kernel_backend,
            config.quantization_config.model_dump_json(),
            self.compilation_level,
            None if speculative is None else speculative.model_dump_json(),
            self.parallel.size,
            config.kv_cache_block_size,
            self.max_model_len,
        ]
        return hashlib.sha256(repr([str(part) for part in parts]).encode()).hexdigest()[:8]

    @property
    def hidden_size(self) -> int:
        """Features of the model's hidden states."""
        assert isinstance(self.model_config, ModelConfig | EncoderConfig)
        return self.model_config.hidden_size

    @property
    def stream_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose input residual stream a drafter reads."""
        return () if self.drafter is None else tuple(layer for layer in self.drafter.hidden_layers if layer >= 0)

    def layer_caches(self) -> LayerCaches:
        """The layout of all layers' caches, not allocated; the names of a drafter's begin with `DRAFT_PREFIX`."""
        specs = self.model.kv_cache_layers()
        if self.drafter is not None:
            own = self.drafter.kv_cache_layers()
            specs = [*specs, *(spec._replace(name=DRAFT_PREFIX + spec.name) for spec in own)]
        return LayerCaches(
            specs,
            self.backend,
            block_size=self.config.kv_cache_block_size,
            num_slots=self.config.max_num_seqs,
            dtype=self.dtype,
            device=self.device,
            kv_dtype=KV_CACHE_DTYPES[self.config.quantization_config.kv_cache_dtype],
            states_per_slot=1 + self.config.num_drafts,
        )

    def dp_metadata(self, num_tokens: int, tokens_across_dp: tuple[int, ...] = ()) -> DPMetadata | None:
        """The number of tokens of each replica, dummy tokens included, in a pass of `num_tokens` here.

        None where this replica computes alone. `tokens_across_dp`: the numbers that the replicas agreed on; where it
        is empty, all compute the same number, as in the steps of the start.
        """
        if self.parallel.experts is None or self.exchange is None:
            return None
        return DPMetadata(tokens_across_dp or (num_tokens,) * self.parallel.experts.num_replicas)

    def record_pass(
        self, kv_cache_data: dict[str, LayerCache] | None = None, num_tokens: int | None = None
    ) -> Program:
        """Record the model's pass of up to `num_tokens` as one call of the compiled operators.

        `num_tokens`: None for `max_num_batched_tokens`. `kv_cache_data` is as in `forward_context`. Of the memory for
        the largest step, pages are committed when steps first use them. Raises `NotRecordable`.
        """
        assert self.operators is not None, "the operators record a pass"
        most = self.config.max_num_batched_tokens if num_tokens is None else num_tokens
        metadata = self.backend.build_metadata(NO_ROWS)
        if metadata.step is None:
            raise NotRecordable(f"the attention backend {self.backend.name} does not attend by the compiled operators")
        layers = self.stream_layers

        def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
            context = Context(positions=positions, is_prefill=False, batch_size=0)
            dp_metadata = self.dp_metadata(most)
            with forward_context(
                metadata, context, dp_metadata, kv_cache_data=kv_cache_data, stream_layers=layers
            ) as recorded:
                hidden = self.model(input_ids, positions)
                return hidden, *(recorded.streams[layer] for layer in layers)

        return record(self.operators, forward, most)

    def compiling(self) -> AbstractContextManager[None]:
        """A context for steps of the start. Raises `ValueError` where torch fails to compile the step's layers."""
        if self.compilation_level == 0:
            return nullcontext()
        from models.layers.compilation import compile_errors_as_value_errors

        return compile_errors_as_value_errors()


def start_operators(config: Config, device: torch.device, dtype: torch.dtype) -> Library | None:
    """Start the CPU's compiled operators with as many threads as torch has; None where torch computes the model.

    Raises `ValueError` for an instruction set that this processor does not support.
    """
    if device.type != "cpu" or dtype is not torch.bfloat16 or not config.cpu_operators:
        return None
    isa = None if config.cpu_isa == "auto" else runtime.INSTRUCTION_SETS.index(config.cpu_isa)
    return runtime.start(torch.get_num_threads(), isa)


def load_model(
    config: Config,
    path: Path,
    model_config: CheckpointConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    operators: Library | None,
    parallel: TensorParallel = SINGLE_RANK,
    available_bytes: int | None = None,
    num_local_replicas: int = 1,
    backend: AttentionBackend | None = None,
    device_api: Device | None = None,
    progress: bool = False,
    read_weights: Callable[..., CausalLM] | None = None,
    pooling: PoolingConfig | None = None,
) -> LoadedModel:
    """Read the checkpoint.

    `available_bytes`: host memory for the weights; None for what is available now. `backend`: the attention backend;
    None for the device's default. `device_api`: None for the device's default. `read_weights` replaces
    `loader.load_model`. `pooling`: how the model pools prompts, None for a model that generates.

    Raises `CheckpointError` for an invalid checkpoint, `ValueError` for one that these settings cannot run.
    """
    generates = pooling is None or "generate" in config.task
    if config.speculative_config is not None and not config.num_drafts:
        config = config.model_copy(update={"speculative_config": None})
    if pooling is not None and pooling.body in ENCODERS and config.lora:
        raise ValueError(f"lora names adapters, but {model_config.architecture} is an encoder, which takes none")
    available = available_host_memory() if available_bytes is None else available_bytes
    # Some rope types choose their frequencies by the largest context length, which is the one that is served.
    served = dataclasses.replace(model_config, max_model_len=config.max_model_len or model_config.max_model_len)
    packs = None if operators is None else _pack_cache(config)
    with oom_at_start("the model", "serve a smaller or a quantised one"):
        model = (read_weights or loader.load_model)(
            path,
            served,
            dtype=dtype,
            device=device,
            progress=progress,
            parallel=parallel,
            available_bytes=available if device.type == "cpu" else None,
            rounding=_rounding(config, model_config, operators),
            packs=packs,
            is_compiled=config.compilation_config.compilation_level > 0,
            generates=generates,
        )
    load_adapters(model, config.lora_paths, dtype=dtype, device=device)
    loaded = LoadedModel(
        config=config,
        model_config=model_config,
        model=model,
        device=device,
        device_api=device_of(device) if device_api is None else device_api,
        dtype=dtype,
        backend=select_backend(device) if backend is None else backend,
        parallel=parallel,
        operators=operators,
        packs=packs,
        num_local_replicas=num_local_replicas,
        pooling=pooling,
        pooling_head=None if pooling is None or parallel.rank else load_head(path, pooling, device),
    )
    if config.drafts_by_model and generates:
        drafter = _load_drafter(loaded, path, served, available, progress=progress)
        loaded = dataclasses.replace(loaded, drafter=drafter)
    _compile(loaded)
    if pooling is not None:
        loaded = _for_pooling(loaded, pooling)
    if not loaded.layer_caches().have_states:
        return loaded
    # A recurrent layer stores a prefix in its sequence's state, not in blocks that other sequences could share.
    return dataclasses.replace(loaded, config=config.model_copy(update={"enable_prefix_caching": False}))


def _pack_cache(config: Config) -> PackCache | None:
    """The cache of packed weights on disk; None where weights are not cached.

    They are not on several NUMA nodes, where mapped pages would be on the node that read the file first.
    """
    if not config.pack_cache or num_nodes() > 1:
        return None
    try:
        return PackCache(cache_directory(), int(config.pack_cache_gib * 2**30), torch.get_num_threads())
    except RuntimeError:  # The user has no home directory.
        return None


def _rounding(config: Config, model_config: CheckpointConfig, operators: Library | None) -> Rounding | None:
    """How the loader rounds weights: by the settings, or as recorded in a checkpoint that `kaon quantize` wrote."""
    wanted, stored = config.quantization_config.quantization, model_config.quantization
    if wanted == "auto":
        return stored.rounding if stored is not None and operators is not None else None
    # Both a rounding and a checkpoint's quantization method are named MXFP4.
    if wanted not in ROUNDINGS or (wanted == "mxfp4" and stored is not None):
        return None
    return cast(Rounding, wanted)


def _load_drafter(
    loaded: LoadedModel, path: Path, served: CheckpointConfig, available: int, *, progress: bool
) -> DraftLM:
    """Load the draft model for `loaded`. Raises `ValueError` with one sentence where none can draft for it."""
    config, device = loaded.config, loaded.device
    assert config.speculative_config is not None
    method, name = config.speculative_config.speculative_method, config.speculative_config.speculative_model
    if not isinstance(served, ModelConfig):
        raise ValueError(
            f"speculative_method is {method}, but {served.architecture} runs by {served.runs_by}; set it to ngram, "
            "which drafts for any model"
        )
    if loaded.exchange is not None:
        raise ValueError(
            f"speculative_method is {method}, but enable_expert_parallel has replicas compute each step together, "
            "which drafters do not; set it to ngram"
        )
    weights = sum(parameter.numel() * parameter.itemsize for parameter in loaded.model.parameters())
    with oom_at_start("the model that drafts", "serve a smaller or a quantised one"):
        drafter = load_drafter(
            method,
            DraftedModel(
                model=loaded.model,
                config=served,
                path=path,
                options=loader.LoadOptions(
                    dtype=loaded.dtype,
                    device=device,
                    progress=progress,
                    parallel=loaded.parallel,
                    available_bytes=max(0, available - weights) if device.type == "cpu" else None,
                    rounding=_rounding(config, served, loaded.operators),
                ),
            ),
            None if name is None else resolve_checkpoint(name, setting="speculative_model"),
        )
    body = getattr(loaded.model, "model", None)
    kept = body.kept_streams if isinstance(body, DecoderBody) else ()
    if any(layer >= 0 and layer not in kept for layer in drafter.hidden_layers):
        raise ValueError(
            f"speculative_method is {method}, but {served.architecture} does not keep the states of its layers that "
            f"{name} reads; choose another method"
        )
    return drafter


def _for_pooling(loaded: LoadedModel, pooling: PoolingConfig) -> LoadedModel:
    """The model with the settings that pooling needs. Raises `ValueError` for settings that pooling excludes."""
    config, architecture = loaded.config, loaded.model_config.architecture
    if config.num_drafts and not loaded.generates:
        raise ValueError(
            f"num_speculative_tokens is {config.num_drafts}, but {architecture} is served to {pooling.task} and "
            "generates nothing; leave it out"
        )
    if pooling.is_encoder and loaded.model.kv_cache_layers():
        raise ValueError(
            f"the checkpoint asks for attention in both directions, which {architecture} does not have here"
        )
    if not pooling.reads_all_positions and not pooling.is_encoder:
        return loaded
    # Pooling reads the hidden states of every token, but a cached prefix has only its keys and values.
    return dataclasses.replace(loaded, config=config.model_copy(update={"enable_prefix_caching": False}))


def _compile(loaded: LoadedModel) -> None:
    """Have torch compile the layers in the steps of the start, at `compilation_level` 3. Raises `ValueError`.

    `models.layers.compilation`, which imports torch's compiler, is imported only if the setting asks for it.
    """
    level, architecture = loaded.compilation_level, loaded.model_config.architecture
    if level == 0:
        return
    reason = None
    if loaded.operators is not None:
        reason = "the CPU's operators compute this model already; set cpu_operators to false"
    elif not isinstance(loaded.model_config, ModelConfig):
        reason = f"{architecture} runs by {loaded.model_config.runs_by}, which is not cut at its attention"
    if reason is not None:
        raise ValueError(f"compilation_level is {level}, but {reason}, or set compilation_level to 0")
    from models.layers.compilation import compile_layers

    _log.info("torch compiles %d layers, between their calls of attention", compile_layers(loaded.model))
