"""Puts an engine's threads and memory where its `CorePlan` says. Called once, by the engine core's start-up.

The calling thread is the one that runs the steps.
"""

import ctypes
import logging
import os
import platform
import threading
from collections.abc import Collection
from pathlib import Path

import torch

from engine.affinity import keep_threads_on
from engine.config import Config
from engine.worker.cores import CorePlan, plan_cores
from models.kernels.cpu.library import Library

_log = logging.getLogger(__name__)

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The system call's number."""
_MPOL_BIND = 2
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def choose_threads(config: Config, cpus: Collection[int] | None = None, *, ranks: int = 1) -> CorePlan:
    """`cpu_threads`, else OMP_NUM_THREADS, else what `plan_cores` finds. Raises `ValueError` for too many.

    `cpus`: that this rank of `ranks` may use; None: those of the process.
    """
    allowed = os.sched_getaffinity(0) if cpus is None else cpus
    asked = config.cpu_threads
    if asked is None and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        asked = max(1, min(int(os.environ["OMP_NUM_THREADS"]), len(allowed)))
    return plan_cores(asked, allowed, ranks=ranks)


def settle(plan: CorePlan, *, is_rank: bool = False) -> None:
    """Before there are operators or weights: torch's threads, and the NUMA node.

    One of several ranks computes on the CPUs of its plan alone: the system would let two share one for a while.
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
        _log.warning("threads run on any core: the system refused to keep them on some (%s)", error)
    if plan.pins:
        # Torch makes its threads now: they would stay on whatever its caller is pinned to by then.
        torch.ones(1 << 20).add_(1)


def pin(plan: CorePlan, operators: Library | None) -> frozenset[int]:
    """Keep the operators' threads on cores of their own, and other threads off them; the CPUs kept.

    Torch's threads sleep while operators run.
    """
    if operators is None or not plan.pins:
        return frozenset()
    try:
        # Threads that the caller starts later find room beside it; the caller itself has no reason to move.
        os.sched_setaffinity(0, {plan.pins[0], *(plan.cpus - plan.own)})
        if not operators.pin(plan.pins):
            raise OSError("pthread_setaffinity_np failed")
    except OSError as error:
        _log.warning("threads are not pinned: the system refused (%s)", error)
        return frozenset()
    return plan.own


def bind_memory(node: int, needed: int, root: Path = Path("/")) -> bool:
    """Have what this process allocates from now on lie on a NUMA node that has `needed` bytes; whether it will.

    Where it will not, memory still comes from the node of the thread that first writes to it, while that has any.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or needed > node_memory(node, root):
        return False
    words = (ctypes.c_ulong * (node // _LONG_BITS + 1))()
    words[node // _LONG_BITS] = 1 << node % _LONG_BITS
    # The kernel reads one bit less than it is told of.
    last = ctypes.c_ulong(len(words) * _LONG_BITS + 1)
    refused: int = ctypes.CDLL(None).syscall(number, _MPOL_BIND, words, last)
    return not refused


def node_memory(node: int, root: Path = Path("/")) -> int:
    """Bytes of a NUMA node that are free or hold files only; 0 where the system does not tell."""
    try:
        lines = (root / f"sys/devices/system/node/node{node}/meminfo").read_text().splitlines()
    except OSError:
        return 0
    fields = {words[2].rstrip(":"): int(words[3]) for words in map(str.split, lines) if len(words) > 3}
    return 1024 * (fields.get("MemFree", 0) + fields.get("Active(file)", 0) + fields.get("Inactive(file)", 0))
