"""Computes how many KV-cache blocks fit: in a GPU's free memory after a worst-case step, or in host memory on CPU.

Called at the start, before the cache is allocated. Imports no torch: a GPU's figures come from `device.DeviceMemory`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.config import Config
from engine.distributed.host_resources import available_host_memory

if TYPE_CHECKING:
    from engine.runner.device import DeviceMemory

GIB = 2**30
MAX_CPU_BYTES = 4 * GIB
"""Most bytes of host memory that the cache takes by default."""
CPU_BYTES_AT_FIRST = GIB
"""Bytes of the cache that are used before blocks of cached prefixes are reused."""
MAX_CPU_TOKENS = 2**19
"""Most tokens that a cache on CPU holds by default: a tiny model would spend its start on bookkeeping for millions."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes that the KV cache may take, the reason for that limit, and the setting that changes it."""

    num_bytes: int
    reason: str
    field: str
    max_tokens: int | None = None
    max_seqs: int | None = None
    """The most sequences of the worst-case step that was measured."""


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """Size of the KV cache, with one line for the log."""

    num_blocks: int
    num_slots: int
    """The most sequences that run at a time: recurrent layers hold a state for each."""
    num_bytes: int
    """Bytes of blocks and states together."""
    reason: str

    def of_ranks(self, num_ranks: int, num_blocks: int, num_slots: int) -> "KVCacheSize":
        """The total size on all ranks, for the numbers of blocks and slots that they agreed on."""
        num_bytes = self.num_bytes * num_ranks * num_blocks // max(1, self.num_blocks)
        return KVCacheSize(num_blocks, num_slots, num_bytes, f"{self.reason}, on {num_ranks} ranks")


def kv_cache_size(
    config: Config, *, block_bytes: int, slot_bytes: int, max_model_len: int, budget: Callable[[], MemoryBudget]
) -> KVCacheSize:
    """The number of blocks: `num_kvcache_blocks`, else as many as fit `budget()` and all slots could fill.

    `block_bytes` is one block's K and V in all layers, `slot_bytes` one sequence's states. States take at most half
    of the budget: fewer sequences than `max_num_seqs` run where more would not fit. Raises `ValueError` when not even
    one block, or one sequence's states, fit.
    """
    num_slots = config.max_num_seqs
    if config.num_kvcache_blocks is not None:
        num_blocks = config.num_kvcache_blocks
        num_bytes = num_blocks * block_bytes + num_slots * slot_bytes
        return KVCacheSize(num_blocks, num_slots, num_bytes, f"num_kvcache_blocks is {num_blocks}")
    found = budget()
    if found.max_seqs is not None:
        num_slots = min(num_slots, found.max_seqs)
    if slot_bytes:
        num_slots = min(num_slots, found.num_bytes // 2 // slot_bytes)
        if num_slots < 1:
            raise _too_small(found, "twice the states of one sequence take", 2 * slot_bytes)
    # The blocks of a model with recurrent layers only take no memory.
    num_blocks = (found.num_bytes - num_slots * slot_bytes) // max(1, block_bytes)
    if num_blocks < 1:
        raise _too_small(found, f"one block of {config.kv_cache_block_size} tokens takes", block_bytes)
    reason = found.reason
    useful = num_slots * -(-max_model_len // config.kv_cache_block_size)
    if useful < num_blocks:
        num_blocks = useful
        reason = f"all that {num_slots} sequences of {max_model_len} tokens could fill"
    if found.max_tokens is not None:
        most = -(-max(found.max_tokens, max_model_len) // config.kv_cache_block_size)
        if most < num_blocks:
            num_blocks = most
            reason = f"by default at most {max(found.max_tokens, max_model_len)} tokens; num_kvcache_blocks sets more"
    return KVCacheSize(num_blocks, num_slots, num_blocks * block_bytes + num_slots * slot_bytes, reason)


def _too_small(found: MemoryBudget, what_takes: str, num_bytes: int) -> ValueError:
    return ValueError(
        f"the KV cache may take {max(0, found.num_bytes)} bytes ({found.reason}), but {what_takes} {num_bytes}; "
        f"{gib(num_bytes - found.num_bytes)} are missing: free memory or raise {found.field}"
    )


def gpu_budget(
    config: Config,
    memory: "DeviceMemory",
    worst_case_step: Callable[[int], None],
    *,
    block_bytes: int,
    slot_bytes: int,
    kept_bytes: int = 0,
    agree: Callable[[bool], bool] = bool,
) -> MemoryBudget:
    """The bytes that `gpu_memory_utilization` allows beyond weights, a worst-case step and other processes' memory.

    `worst_case_step` runs a step as large as the configuration allows, with the number of sequences it receives,
    over their states and one block, which count as part of the cache; the weights are loaded already. `kept_bytes`:
    memory held between steps that this step does not allocate. `agree`: whether a condition holds on all ranks,
    which run the step together.
    """
    memory.give_back()
    memory.reset_peak()
    num_seqs = _seqs_with_states(config.max_num_seqs, memory.free() // 2, slot_bytes, agree)
    worst_case_step(num_seqs)
    peak = memory.peak() - block_bytes - num_seqs * slot_bytes + kept_bytes
    outside = memory.total() - memory.free() - memory.held()
    usable = int(memory.total() * config.gpu_memory_utilization)
    return MemoryBudget(
        usable - peak - outside,
        f"{config.gpu_memory_utilization:.0%} of {gib(memory.total())}, less {gib(peak)} at the peak of "
        f"a worst-case step and {gib(outside)} held outside it",
        "gpu_memory_utilization",
        max_seqs=num_seqs,
    )


def _seqs_with_states(most: int, num_bytes: int, slot_bytes: int, agree: Callable[[bool], bool]) -> int:
    """The number of sequences, at least 1, whose states fit on each rank: `most`, or a multiple of a sixteenth of it.

    States take at most half of the remaining memory, so more sequences would not run, and their step may not fit.
    """
    shares = (max(1, most * share // 16) for share in range(16, 0, -1))
    return next((count for count in shares if count == 1 or agree(count * slot_bytes <= num_bytes)), 1)


def cpu_budget(config: Config, root: Path = Path("/"), *, activations: int = 0, ranks: int = 1) -> MemoryBudget:
    """`cpu_kvcache_gib`, or by default a quarter of the memory available beyond `activations`, at most 4 GiB.

    The result is one rank's share. `activations`: bytes that the largest step takes on each. `root`
    holds `proc` and `sys`. Raises `ValueError` where both do not fit.
    """
    if config.cpu_kvcache_gib is not None:
        num_bytes = int(config.cpu_kvcache_gib * GIB)
        activations *= ranks
        if activations and num_bytes + activations > (available := available_host_memory(root)):
            raise ValueError(
                f"cpu_kvcache_gib is {config.cpu_kvcache_gib:g} and a step of max_num_batched_tokens "
                f"{config.max_num_batched_tokens} takes {gib(activations)}, but {gib(available)} are available; "
                "lower one of the two"
            )
        return MemoryBudget(num_bytes // ranks, f"cpu_kvcache_gib is {config.cpu_kvcache_gib:g}", "cpu_kvcache_gib")
    available = max(0, available_host_memory(root) - ranks * activations)
    num_bytes = min(available // 4, MAX_CPU_BYTES)
    after_step = f" after {gib(activations)} for the largest step" if activations else ""
    return MemoryBudget(
        num_bytes // ranks,
        f"a quarter of {gib(available)} available{after_step}, at most {gib(MAX_CPU_BYTES)}",
        "cpu_kvcache_gib",
        MAX_CPU_TOKENS,
    )


def gib(num_bytes: int) -> str:
    """A number of bytes for messages: in GiB, or in a smaller unit if it is below 0.01 GiB."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size / 100:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"
