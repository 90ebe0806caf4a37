"""`Shard`: which rank of which group a process is, and what it needs to be one. No torch here."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from engine.worker.cores import physical_cores


class Shard(NamedTuple):
    """One of several tensor-parallel ranks."""

    rank: int
    size: int
    local_rank: int
    """Among those of this host, which share out its GPUs or its cores."""
    local_size: int
    store: str
    """Where torch.distributed's process groups meet: `file://` a path, or `tcp://` a host and a port."""
    memory: int | None
    """Descriptor of the memory for collectives on the CPU; None where not all ranks are on this host."""
    available_bytes: int
    """Of the host's memory, for this rank's weights."""
    listener: int | None = None
    """On rank 0 the descriptor of the socket that listens at a `tcp://` store."""


class HostShare(NamedTuple):
    """What of the host is one data-parallel replica's."""

    replica: int = 0
    """Its number among those of all hosts."""
    place: int = 0
    """Its number among those of this host, which share out its GPUs or its cores."""
    places: int = 1
    """How many those are."""
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
