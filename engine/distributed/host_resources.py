"""The memory and cores of the host that a process may use, and their division among ranks and replicas.

In this order: control groups and the memory that they allow; `plan_cores`, the number of computing threads, their
cores and NUMA node; and `Shard` and `HostShare`, the rank and replica of a process. `root` is always the directory
with `proc` and `sys`. Imports no torch.
"""

import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


def group_directories(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the control group directories that limit `controller` for this process, its own group first, each with
    whether it is version 2.

    `root` holds `proc` and `sys`.
    """
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        unified = controllers == ""
        if unified:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        # A group's parents limit it too. In a container, the path may contain groups that only the host can see.
        group = base / path.strip("/")
        for directory in (group, *group.parents):
            yield directory, unified
            if directory == base:
                break


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the lowest CPU quota of this process in cores; None without a quota."""
    quotas = []
    for directory, unified in group_directories("cpu", root):
        try:
            if unified:
                quota, period = (directory / "cpu.max").read_text().split()
            else:
                quota = (directory / "cpu.cfs_quota_us").read_text().strip()
                period = (directory / "cpu.cfs_period_us").read_text().strip()
        except FileNotFoundError:
            continue
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def available_host_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still use: MemAvailable, or less if a control group's limit is lower."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min((available, *_control_group_headrooms(root))))


def _control_group_headrooms(root: Path) -> Iterator[int]:
    """Yield the bytes below each memory limit of this process (cgroup v1, v2). Reclaimable page cache counts as
    free."""
    for directory, unified in group_directories("memory", root):
        if unified:
            headroom = _headroom(directory, "memory.max", "memory.current", "inactive_file")
        else:
            headroom = _headroom(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if headroom is not None:
            yield headroom


def _headroom(directory: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    try:
        limit = (directory / limit_file).read_text().strip()
        usage = int((directory / usage_file).read_text())
        stat = (directory / "memory.stat").read_text()
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    counters = dict(line.split() for line in stat.splitlines())
    return int(limit) - usage + int(counters.get(reclaimable, 0))


SPARE_FROM = 4
"""From this number of cores, one is left to the API process. With fewer, steps would lose more than the API gains."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """The number and the CPUs of an engine's threads."""

    threads: int
    cpus: frozenset[int]
    """CPUs that the threads may run on."""
    pins: tuple[int, ...] = ()
    """One CPU per thread; empty if threads are not pinned."""
    own: frozenset[int] = frozenset()
    """CPUs that all other threads avoid: all hardware threads of the pinned cores."""
    node: int | None = None
    """NUMA node of all these CPUs, if the host has several nodes, else None."""

    def __str__(self) -> str:
        words = "1 thread computes" if self.threads == 1 else f"{self.threads} threads compute"
        if self.pins:
            words += ", each on a core of its own"
        if self.node is not None:
            words += f", on NUMA node {self.node} alone, the others' cores and memory unused"
        return words


def plan_cores(asked: int | None, allowed: Collection[int], root: Path = Path("/"), *, ranks: int = 1) -> CorePlan:
    """Plan one thread per physical core of one NUMA node, or `asked` threads, on the CPUs in `allowed`.

    With four or more cores, one is left to the API process, and threads are pinned. They are not pinned if a control
    group's quota, which `ranks` share, or `asked` leaves further cores free: the system chooses which. Raises
    `ValueError` for more threads than CPUs.
    """
    if asked is not None and asked > len(allowed):
        who = "this process" if ranks == 1 else f"each of {ranks} ranks"
        raise ValueError(
            f"cpu_threads is {asked}, but {who} may use {len(allowed)} CPUs; set it to at most {len(allowed)}"
        )
    cores = physical_cores(allowed, root)
    quota = cpu_quota(root)
    node, local = (None, cores) if quota is not None else _widest_node(cores, root)
    if asked is not None and asked > len(local):
        # More threads than cores of one node.
        return CorePlan(asked, frozenset(allowed))
    # A thread beyond the quota would be throttled for tens of milliseconds, and each operator waits for all threads.
    room = len(local) if quota is None else max(1, min(len(local), int(quota) // ranks))
    threads = asked or (room - 1 if room >= SPARE_FROM else room)
    cpus = frozenset(cpu for core in local for cpu in core)
    if quota is not None or threads < room - 1 or threads == len(cores) or room < SPARE_FROM:
        return CorePlan(threads, cpus, node=node)
    # Most systems handle interrupts on the first core.
    pinned = local[-threads:]
    return CorePlan(
        threads, cpus, tuple(core[0] for core in pinned), frozenset(cpu for core in pinned for cpu in core), node
    )


def physical_cores(allowed: Collection[int], root: Path = Path("/")) -> list[tuple[int, ...]]:
    """Return the allowed CPUs of each core, in order of the first CPU. A CPU with unknown siblings counts as a
    core."""
    cores: dict[int, tuple[int, ...]] = {}
    for cpu in sorted(allowed):
        siblings = _read_list(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") | {cpu}
        together = tuple(sorted(siblings.intersection(allowed)))
        cores[together[0]] = together
    return [cores[first] for first in sorted(cores)]


def num_nodes() -> int:
    """Return the number of NUMA nodes of this host."""
    return max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


def _widest_node(cores: list[tuple[int, ...]], root: Path) -> tuple[int | None, list[tuple[int, ...]]]:
    """Return the NUMA node with the most of `cores`, and those; None as node if there is only one."""
    by_node: dict[int, list[tuple[int, ...]]] = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = _read_list(path / "cpulist")
        on_node = [core for core in cores if cpus.intersection(core)]
        if on_node:
            by_node[int(path.name.removeprefix("node"))] = on_node
    if len(by_node) < 2:
        return None, cores
    node = max(by_node, key=lambda number: (len(by_node[number]), -number))
    return node, by_node[node]


def _read_list(path: Path) -> set[int]:
    """Parse a file with a list such as 0-3,8; empty if there is no such file."""
    try:
        parts = [part.partition("-") for part in path.read_text().strip().split(",") if part]
    except OSError:
        return set()
    return {number for first, _, last in parts for number in range(int(first), int(last or first) + 1)}


class Shard(NamedTuple):
    """One of several tensor-parallel ranks."""

    rank: int
    size: int
    local_rank: int
    """Index among the ranks of this host, which divide its GPUs or cores."""
    local_size: int
    store: str
    """Rendezvous of torch.distributed's process groups: a `file://` path, or a `tcp://` host and port."""
    memory: int | None
    """Descriptor of the shared memory for collectives on the CPU; None if not all ranks are on this host."""
    available_bytes: int
    """Bytes of the host's memory for this rank's weights."""
    listener: int | None = None
    """On rank 0, the descriptor of the socket that listens at a `tcp://` store."""


class HostShare(NamedTuple):
    """One data-parallel replica, and its share of the host."""

    replica: int = 0
    """Number of the replica, among those of all hosts."""
    local_index: int = 0
    """Index among the replicas of this host, which divide its GPUs or cores."""
    num_local: int = 1
    """Number of replicas on this host."""
    available_bytes: int | None = None
    """Bytes of the host's memory for its weights; None: the memory available when they are loaded."""
    model: str = ""
    """Name of its model, if the server has several, else empty."""

    def titled(self, process: str) -> str:
        """Return the name of one of its processes in logs."""
        return f"{process} [{self.model}]" if self.model else process

    def command(self, module: str, process: str) -> list[str]:
        """Return the command that runs `module` as one of its processes. `ps` shows the process' and the model's
        name."""
        return [sys.executable, "-P", "-m", module, process, *filter(None, (self.model,))]


def own_cpus(rank: int, size: int, root: Path = Path("/")) -> Collection[int]:
    """Return the CPUs of a rank: an equal number of adjacent cores each, or all cores if there are too few."""
    allowed = os.sched_getaffinity(0)
    cores = physical_cores(allowed, root)
    if len(cores) < size:
        return allowed
    first, end = rank * len(cores) // size, (rank + 1) * len(cores) // size
    return {cpu for core in cores[first:end] for cpu in core}
