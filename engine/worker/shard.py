"""`Shard`: which rank of which group a process is, and what it needs to be one. No torch here."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from engine.worker.cores import physical_cores


class Shard(NamedTuple):
    """One of several tensor-parallel ranks on this host."""

    rank: int
    size: int
    store: Path
    """File by which torch.distributed's process groups meet."""
    memory: int
    """Descriptor of the memory for collectives on the CPU."""
    available_bytes: int
    """Of the host's memory, for this rank's weights."""


class HostShare(NamedTuple):
    """What of the host is one data-parallel replica's."""

    replica: int = 0
    available_bytes: int | None = None
    """Of the memory, for its weights; None: what is available when they are loaded."""


def own_cpus(rank: int, size: int, root: Path = Path("/")) -> Collection[int]:
    """The CPUs that a rank computes on: as many neighbouring cores for each; all for all where cores are too few."""
    allowed = os.sched_getaffinity(0)
    cores = physical_cores(allowed, root)
    if len(cores) < size:
        return allowed
    first, end = rank * len(cores) // size, (rank + 1) * len(cores) // size
    return {cpu for core in cores[first:end] for cpu in core}
