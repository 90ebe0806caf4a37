"""`load_rank` makes a `LoadedModel` from a configuration and a checkpoint, in the same way on every rank.

In this order: check the configuration against the checkpoint, choose the device and its kernels, pin threads and bind
memory by a `CorePlan`, set up collectives, and read the weights. The core's start and rank processes call it on
the thread that will run the steps.
"""

import ctypes
import logging
import os
import platform
import socket
import sys
import threading
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import torch

from engine.config.config import Config, SpeculativeConfig
from engine.distributed.curve import endpoint
from engine.distributed.host_resources import CorePlan, HostShare, Shard, own_cpus, plan_cores
from engine.distributed.lockstep import BarrierCounters, LockstepMember
from engine.distributed.processes import keep_threads_on
from engine.distributed.rank_steps import RankGroup
from engine.runner.loaded_model import LoadedModel, load_model, start_operators
from engine.runner.memory_sizing import GIB, MAX_CPU_BYTES
from models.architectures.config import CheckpointConfig, ModelConfig
from models.architectures.encoder_config import EncoderConfig
from models.architectures.pooling import PoolingConfig, read_pooling
from models.attention.backend import require_backend
from models.loading.checkpoint import read_checkpoint_config
from models.ops import registry as backends
from models.ops import triton
from models.ops.aiter.cases import Sizes
from models.ops.cpu import runtime as library
from models.ops.cpu.collectives import SharedMemoryCollectives, SharedMemoryExchange
from models.ops.cpu.runtime import Library
from models.ops.triton import probe as ptxas
from models.ops.weight_formats import FP8_GROUP
from models.parallel.process_group import ProcessGroupCollectives, Rendezvous, ReplicaWorld
from models.parallel.tensor_parallel import Collectives, ExpertParallel, TensorParallel
from models.quantization.config import ROUNDINGS

logger = logging.getLogger(__name__)

_OWN_HEAD_DRAFTS = 3
"""Most drafts of the embedded model's own head by default."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The number of the system call `set_mempolicy`."""
_MPOL_BIND = 2
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def choose_threads(config: Config, cpus: Collection[int] | None = None, *, ranks: int = 1) -> CorePlan:
    """A plan with `cpu_threads`, or OMP_NUM_THREADS, or the number that `plan_cores` chooses.

    `cpus`: the CPUs that this rank of `ranks` may use; None for those of the process. Raises `ValueError` for more
    threads than CPUs.
    """
    allowed = os.sched_getaffinity(0) if cpus is None else cpus
    asked = config.cpu_threads
    if asked is None and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        asked = max(1, min(int(os.environ["OMP_NUM_THREADS"]), len(allowed)))
    return plan_cores(asked, allowed, ranks=ranks)


def pin_torch_threads(plan: CorePlan, *, is_rank: bool = False) -> None:
    """Start torch's threads and pin them to their cores, before operators start or weights are read.

    One of several ranks computes only on the CPUs of its plan, since the system might let two ranks share a CPU.
    """
    torch.set_num_threads(plan.threads)
    caller = threading.get_native_id()
    try:
        if plan.pins:
            keep_threads_on(os.sched_getaffinity(0) - plan.own, but=(caller,))
            os.sched_setaffinity(caller, plan.cpus)
        elif plan.node is not None:
            keep_threads_on(plan.cpus)
        elif is_rank:
            os.sched_setaffinity(caller, plan.cpus)
    except OSError as error:
        logger.warning("threads run on any core: the system refused to keep them on some (%s)", error)
    if plan.pins:
        # Torch starts its threads now, since later threads would inherit the CPUs that the caller is pinned to.
        torch.ones(1 << 20).add_(1)


def pin_operator_threads(plan: CorePlan, operators: Library | None) -> frozenset[int]:
    """Pin the operators' threads to the plan's cores, and all other threads outside them. Returns the pinned CPUs.

    Torch's threads sleep while operators run.
    """
    if operators is None or not plan.pins:
        return frozenset()
    try:
        # Threads that the caller starts later run on CPUs outside the plan; the caller itself stays where it is.
        os.sched_setaffinity(0, {plan.pins[0], *(plan.cpus - plan.own)})
        if not operators.pin(plan.pins):
            raise OSError("pthread_setaffinity_np failed")
    except OSError as error:
        logger.warning("threads are not pinned: the system refused (%s)", error)
        return frozenset()
    return plan.own


def bind_memory(node: int, needed: int, root: Path = Path("/")) -> bool:
    """Bind this process's later allocations to a NUMA node that has `needed` bytes. Returns whether they are bound.

    An unbound page comes from the node of the thread that first writes to it, while that node has free memory.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or needed > node_memory(node, root):
        return False
    words = (ctypes.c_ulong * (node // _LONG_BITS + 1))()
    words[node // _LONG_BITS] = 1 << node % _LONG_BITS
    # The kernel reads one bit less than the number it receives.
    last = ctypes.c_ulong(len(words) * _LONG_BITS + 1)
    refused: int = ctypes.CDLL(None).syscall(number, _MPOL_BIND, words, last)
    return not refused


def node_memory(node: int, root: Path = Path("/")) -> int:
    """Bytes of a NUMA node that are free or hold only file pages; 0 where the system does not report them."""
    try:
        lines = (root / f"sys/devices/system/node/node{node}/meminfo").read_text().splitlines()
    except OSError:
        return 0
    fields = {words[2].rstrip(":"): int(words[3]) for words in map(str.split, lines) if len(words) > 3}
    return 1024 * (fields.get("MemFree", 0) + fields.get("Active(file)", 0) + fields.get("Inactive(file)", 0))


World: TypeAlias = ReplicaWorld | SharedMemoryExchange
"""The transport between the ranks of all replicas that compute in lockstep."""
_FP8_BLOCK = FP8_GROUP, FP8_GROUP
"""Rows and columns per scale in the FP8 experts that aiter computes."""


class RankCollectives(Collectives, RankGroup, Protocol):
    """A rank's collectives, with the methods that join and leave its group."""


class Checkpoint(NamedTuple):
    """A checkpoint's configuration, and the settings after the checkpoint's values have been filled in."""

    config: Config
    model_config: CheckpointConfig
    pooling: PoolingConfig | None


def read_checkpoint(config: Config, path: Path) -> Checkpoint:
    """Read everything but the weights. Raises `ValueError` for settings that the checkpoint excludes."""
    pooling = read_pooling(path, config.task, matryoshka=config.matryoshka)
    model_config = read_checkpoint_config(path, config.model_impl, pooling)
    _require_quantization(config.quantization_config.quantization, path, model_config)
    return Checkpoint(_with_checkpoint(config, model_config, pooling), model_config, pooling)


def dtype_of(config: Config, model_config: CheckpointConfig) -> torch.dtype:
    """The dtype of activations."""
    dtype: torch.dtype = getattr(torch, model_config.dtype if config.dtype == "auto" else config.dtype)
    return dtype


class LoadedRank(NamedTuple):
    """A rank's model before the rank has joined the others."""

    loaded: LoadedModel
    own_cpus: frozenset[int]
    """CPUs on which no other process of this engine should run."""
    group: RankCollectives | None
    """The collectives of several ranks, not joined yet."""
    world: World | None
    """The collectives of all replicas that compute in lockstep; joined before `group`."""


def load_rank(
    config: Config,
    path: Path,
    shard: Shard | None = None,
    lockstep_member: LockstepMember | None = None,
    share: HostShare = HostShare(),  # noqa: B008, immutable
) -> LoadedRank:
    """Load the checkpoint, or a rank's shard of it. Raises `ValueError` with one sentence if it cannot be served.

    `lockstep_member`: this replica's rank among those in lockstep. `share`: this replica's share of the host.
    """
    config, model_config, pooling = read_checkpoint(config, path)
    device = _resolve_device(config, shard, share)
    _leave_default_stream(device)
    sizes = sizes_of(model_config, config.kv_cache_block_size, 1 if shard is None else shard.size)
    # If an operator is named several times, the last name counts.
    _choose_kernels(device, (*config.kernel_backend, *(["triton"] if config.batch_invariant else [])), sizes)
    if config.batch_invariant:
        triton.keep_invariant()
    dtype = dtype_of(config, model_config)
    type_name = str(dtype).removeprefix("torch.")
    _require_rounding(config.quantization_config.quantization, model_config, device, dtype)
    logger.info("%s runs by %s, in %s on %s", model_config.architecture, model_config.runs_by, type_name, device)
    plan = None
    if device.type == "cpu":
        rank, ranks = _rank_on_host(shard, share)
        plan = choose_threads(config, None if ranks == 1 else own_cpus(rank, ranks), ranks=ranks)
        pin_torch_threads(plan, is_rank=ranks > 1)
        if plan.node is not None:
            _bind_memory(plan.node, path, config, share.num_local)
    world = None if lockstep_member is None else _world(config, lockstep_member, shard, device)
    experts = None
    if config.parallel_config.enable_expert_parallel:
        experts = (
            ExpertParallel()
            if lockstep_member is None
            else ExpertParallel(lockstep_member.replica, lockstep_member.num_replicas, world)
        )
    group = None if shard is None else _collectives(config, shard, device, world)
    parallel = TensorParallel(experts=experts)
    if shard is not None:
        parallel = TensorParallel(shard.rank, shard.size, group, experts)
    operators = start_operators(config, device, dtype)
    if operators is not None and shard is None and lockstep_member is None and pooling is None:
        config = _with_own_head(config, model_config)
    pinned: frozenset[int] = frozenset()
    if plan is not None:
        pinned = pin_operator_threads(plan, operators)
        by = "torch" if operators is None else f"the {library.INSTRUCTION_SETS[operators.isa]} operators"
        logger.info("%s, by %s", plan, by)
    loaded = load_model(
        config,
        path,
        model_config,
        device,
        dtype,
        operators=operators,
        parallel=parallel,
        available_bytes=share.available_bytes if shard is None else shard.available_bytes,
        num_local_replicas=share.num_local,
        pooling=pooling,
        progress=sys.stderr.isatty() and (shard is None or shard.rank == 0),
    )
    if config.enable_prefix_caching and not loaded.config.enable_prefix_caching:
        why = "keeps a state that no prefix shares" if pooling is None else "pools the hidden states of whole prompts"
        logger.info("prefix caching is off: %s %s", model_config.architecture, why)
    if loaded.layer_caches().have_states and (caution := ptxas.caution(device)) is not None:
        logger.info("%s", caution)
    return LoadedRank(loaded, pinned, group, world)


def _with_own_head(config: Config, model_config: CheckpointConfig) -> Config:
    """The config with drafts by the embedded model's own head, unless it has settings of drafts or adapters.

    Called where one rank computes by the compiled operators, which verify and draft in one call with exact answers.
    """
    is_embedded = config.model is None and isinstance(model_config, ModelConfig)
    if not is_embedded or config.speculative_config is not None or config.lora:
        return config
    drafts = SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=_OWN_HEAD_DRAFTS)
    return config.model_copy(update={"speculative_config": drafts})


def _rank_on_host(shard: Shard | None, share: HostShare) -> tuple[int, int]:
    """This rank's index among the ranks on this host, and their number; each has a GPU or a share of the cores."""
    rank, size = (0, 1) if shard is None else (shard.local_rank, shard.local_size)
    return share.local_index * size + rank, share.num_local * size


def _world(config: Config, lockstep_member: LockstepMember, shard: Shard | None, device: torch.device) -> World:
    """How replicas in lockstep exchange tokens: by shared memory, or by torch.distributed."""
    rank, size = (0, 1) if shard is None else (shard.rank, shard.size)
    operators = library.load_library()
    shares_memory = config.parallel_config.cpu_collectives == "shared_memory" and bool(lockstep_member.memory)
    if device.type == "cpu" and operators is not None and shares_memory:
        most_tokens = config.max_num_batched_tokens
        return SharedMemoryExchange(
            operators, lockstep_member.replica, lockstep_member.num_replicas, lockstep_member.memory[rank], most_tokens
        )
    # A replica that hangs is detected by its supervisor, not by the replicas that wait for it.
    timeout = max(config.parallel_config.rank_start_timeout, 2 * config.stall_timeout)
    counters = (
        BarrierCounters(lockstep_member.memory[rank], lockstep_member.num_replicas) if lockstep_member.memory else None
    )
    count_arrival = partial(counters.count, lockstep_member.replica) if counters is not None else None
    return ReplicaWorld(
        replica=lockstep_member.replica,
        num_replicas=lockstep_member.num_replicas,
        rank=rank,
        size=size,
        device=device,
        rendezvous=_rendezvous_of_replicas(lockstep_member, rank, timeout, config.parallel_config.cluster_interface),
        on_collective=count_arrival,
    )


def _rendezvous_of_replicas(member: LockstepMember, rank: int, timeout: float, interface: str | None) -> Rendezvous:
    """Return the address at which the ranks of all replicas in lockstep connect."""
    if member.hub is None:
        return Rendezvous((Path(member.directory) / "ranks").as_uri(), timeout)
    host, port, listener = member.hub.address, member.hub.port + 1, None
    if member.replica == rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family).detach()
        except OSError as error:
            raise ValueError(
                f"the ranks of all replicas cannot meet at port {port} of {host}, the second one after the replicas' "
                f"own from master_port on: {error.strerror}"
            ) from error
    return Rendezvous(endpoint(host, port), timeout, listener, interface)


def _collectives(config: Config, shard: Shard, device: torch.device, world: World | None) -> RankCollectives:
    """The ranks' collectives: by shared memory, or by torch.distributed."""
    operators = library.load_library()
    shares_memory = config.parallel_config.cpu_collectives == "shared_memory" and shard.memory is not None
    if device.type == "cpu" and operators is not None and shares_memory:
        assert shard.memory is not None
        return SharedMemoryCollectives(operators, shard.rank, shard.size, shard.memory)
    assert not isinstance(world, SharedMemoryExchange), "ranks share memory where replicas do"
    parallel = config.parallel_config
    rendezvous = Rendezvous(shard.store, parallel.rank_start_timeout, shard.listener, parallel.cluster_interface)
    return ProcessGroupCollectives(shard.rank, shard.size, device, rendezvous, world)


def _bind_memory(node: int, path: Path, config: Config, replicas: int) -> None:
    """Bind a rank's weights and cache to a NUMA node, if those of all replicas of this host fit there."""
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    cache = MAX_CPU_BYTES if config.cpu_kvcache_gib is None else int(config.cpu_kvcache_gib * GIB)
    # Weights may be stored in a wider dtype than the checkpoint's, and several replicas may share a node.
    needed = (2 * weights * replicas + cache) // config.parallel_config.tensor_parallel_size
    bound = config.num_kvcache_blocks is None and bind_memory(node, needed)
    logger.info("memory is %s NUMA node %d", "bound to" if bound else "taken by preference from", node)


def _require_quantization(wanted: str, path: Path, model_config: CheckpointConfig) -> None:
    """Raise `ValueError` if the checkpoint's quantization is not the one that the user named."""
    if wanted == "auto" or _is_rounding(wanted, model_config):
        return
    found = "none" if model_config.quantization is None else model_config.quantization.quant_method
    if wanted != found:
        raise ValueError(
            f"quantization is {wanted}, but that of {path} is {found}; set it to auto, or serve another checkpoint"
        )


def _is_rounding(wanted: str, model_config: CheckpointConfig) -> bool:
    """Whether weights are rounded while they are read. A rounding and a checkpoint's method are both named MXFP4."""
    return wanted in ROUNDINGS and (wanted != "mxfp4" or model_config.quantization is None)


def _require_rounding(wanted: str, model_config: CheckpointConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `ValueError` if weights cannot be rounded while they are read."""
    if not _is_rounding(wanted, model_config):
        return
    type_name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        found = f"the device is {device.type}; set device to cpu"
    elif type_name != "bfloat16":
        found = f"dtype is {type_name}; set it to bfloat16"
    elif not isinstance(model_config, ModelConfig | EncoderConfig):
        found = f"{model_config.architecture} runs by transformers' own code, which cannot use rounded weights"
    elif library.load_library() is None:
        found = "Kaon was installed without a C compiler; install one, then Kaon again"
    else:
        return
    raise ValueError(f"quantization is {wanted}, which rounds weights for the CPU's compiled operators, but {found}")


def _leave_default_stream(device: torch.device) -> None:
    """Set a non-default stream for this thread on AMD GPUs, where the default stream and other streams wait for each
    other in more of the runtime's calls than on NVIDIA GPUs."""
    if device.type == "cuda" and torch.version.hip is not None:
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _resolve_device(config: Config, shard: Shard | None, share: HostShare) -> torch.device:
    """The device to run on. Raises `ValueError` if the device or its attention backend does not exist."""
    wanted = config.device
    rank, ranks = _rank_on_host(shard, share)
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        if wanted == "cpu" and Path("/dev/kfd").exists():
            logger.warning(
                "Models run on the CPU, though there is an AMD GPU (/dev/kfd); run `kaon doctor` for the reason"
            )
    device = torch.device(wanted)
    require_backend(device)
    if device.type == "cpu" or (shard is None and ranks == 1):
        return device
    count = torch.cuda.device_count()
    if ranks > count:
        parallel = config.parallel_config
        sizes = {
            "data_parallel_size": parallel.data_parallel_size,
            "tensor_parallel_size": parallel.tensor_parallel_size,
        }
        given = [f"{field} is {size}" for field, size in sizes.items() if size > 1]
        hosts = parallel.data_parallel_size // share.num_local
        if shard is not None:
            hosts *= shard.size // shard.local_size
        raise ValueError(
            f"{' and '.join(given)}, which takes {ranks} GPUs{' on each host' if hosts > 1 else ''}, but this machine "
            f"has {count}; set {'it to' if len(given) == 1 else 'them to a product of'} at most {count * hosts}"
        )
    device = torch.device(device.type, rank)
    torch.cuda.set_device(device)
    return device


def sizes_of(config: CheckpointConfig, block: int, ranks: int) -> Sizes:
    """Sizes of one rank's shard of a model, for the probe of aiter; defaults for layers that the model lacks."""
    usual = Sizes(block=block)
    if not isinstance(config, ModelConfig):
        return usual
    inner = config.intermediate_size
    known = usual._replace(
        hidden=config.hidden_size,
        inner=inner // ranks if inner % ranks == 0 else inner,
        heads=max(1, config.num_attention_heads // ranks),
        kv_heads=max(1, config.num_key_value_heads // ranks),
        head_dim=config.head_dim,
        has_windows=any(window is not None for window in config.sliding_windows),
    )
    experts = _first(config, "num_experts", "n_routed_experts", "num_local_experts")
    if experts is None:
        return known
    quantization = None if config.quantization is None else config.quantization.global_quant_config
    expert_inner = _first(config, "moe_intermediate_size") or inner
    return known._replace(
        experts=experts,
        top_k=min(_first(config, "num_experts_per_tok", "num_experts_per_token") or usual.top_k, experts),
        expert_inner=expert_inner // ranks if expert_inner % ranks == 0 else expert_inner,
        has_fp8_experts=quantization is not None
        and (quantization.quant_dtype, quantization.block_shape) == ("fp8", _FP8_BLOCK),
    )


def _first(config: ModelConfig, *names: str) -> int | None:
    """A configuration field by any of its names. The model's constructor checks its value."""
    found = (config.fields.values.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _choose_kernels(device: torch.device, wanted: Sequence[str], sizes: Sizes) -> None:
    """Choose the implementation of each operator, and log it. Raises `ValueError` for an unknown backend.

    `sizes`: sizes of the model's layers.
    """
    if device.type == "cpu":
        backends.parse(wanted)
        return
    for choice in backends.start(device, wanted, sizes):
        logger.log(logging.WARNING if choice.reason else logging.INFO, "%s", choice)


def _with_checkpoint(config: Config, model: CheckpointConfig, pooling: PoolingConfig | None) -> Config:
    """`config` with the checkpoint's values. Raises `ValueError` for a context longer than the model's."""
    own = model.default_max_len
    if pooling is not None and pooling.max_length is not None:
        own = max(2, min(own, pooling.max_length))
    max_model_len = config.max_model_len or own
    max_num_batched_tokens = config.max_num_batched_tokens
    if pooling is not None and pooling.is_encoder:
        # An encoder computes a whole prompt in one step.
        max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
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
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "bos_token_id": model.bos_token_id if config.bos_token_id is None else config.bos_token_id,
            "eos_token_id": eos,
            "stop_token_ids": config.stop_token_ids or tuple(token for token in model.eos_token_ids if token != eos),
        }
    )
