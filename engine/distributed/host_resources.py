"""What a process may use of its host: memory, cores, and its share among ranks and replicas.

In that order: control groups and the memory they leave, `plan_cores` (how many threads compute, on which cores, next
to which memory), and `Shard` and `HostShare`, which rank and which replica a process is. `root` holds `proc` and `sys`
everywhere. No torch here.
"""

import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


def group_directories(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Directories whose limits on `controller` bind this process, own group first, and whether they are version 2.

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
        # A group's parents limit it too. In a container the path may name groups that only the host sees.
        group = base / path.strip("/")
        for directory in (group, *group.parents):
            yield directory, unified
            if directory == base:
                break


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the nearest quota on this process leaves it; None where there is none."""
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
    """Bytes this process can still use: the system's MemAvailable, or less where a control group's limit is nearer."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min((available, *_control_group_headrooms(root))))


def _control_group_headrooms(root: Path) -> Iterator[int]:
    """What each limit on this process leaves (cgroup v2 and v1); reclaimable page cache counts as free."""
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
"""With this many cores, one is left to the API process; with fewer, a step would lose more than the API gains."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Where the threads of one engine run."""

    threads: int
    cpus: frozenset[int]
    """CPUs that they may run on."""
    pins: tuple[int, ...] = ()
    """One CPU a thread; none where threads move within `cpus`."""
    own: frozenset[int] = frozenset()
    """CPUs that all other threads avoid: the cores of the pins, with all their hardware threads."""
    node: int | None = None
    """NUMA node of all these CPUs, where there are several nodes."""

    def __str__(self) -> str:
        words = "1 thread computes" if self.threads == 1 else f"{self.threads} threads compute"
        if self.pins:
            words += ", each on a core of its own"
        if self.node is not None:
            words += f", on NUMA node {self.node} alone, the others' cores and memory unused"
        return words


def plan_cores(asked: int | None, allowed: Collection[int], root: Path = Path("/"), *, ranks: int = 1) -> CorePlan:
    """One thread a physical core of one NUMA node, or `asked`, on the CPUs that the process is `allowed`.

    Of four cores or more, one is left to the API process, and then threads are pinned. They are not where a control
    group's quota, which `ranks` share, or `asked`, leaves cores to others: which these are is the system's choice.
    Raises `ValueError` for more threads than CPUs.
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
        # More threads than one node has, or than one a core.
        return CorePlan(asked, frozenset(allowed))
    # A thread beyond the quota would be delayed by tens of milliseconds, and each operator waits for all threads.
    room = len(local) if quota is None else max(1, min(len(local), int(quota) // ranks))
    threads = asked or (room - 1 if room >= SPARE_FROM else room)
    cpus = frozenset(cpu for core in local for cpu in core)
    if quota is not None or threads < room - 1 or threads == len(cores) or room < SPARE_FROM:
        return CorePlan(threads, cpus, node=node)
    # The first core is where systems handle most interrupts.
    pinned = local[-threads:]
    return CorePlan(
        threads, cpus, tuple(core[0] for core in pinned), frozenset(cpu for core in pinned for cpu in core), node
    )


def physical_cores(allowed: Collection[int], root: Path = Path("/")) -> list[tuple[int, ...]]:
    """The allowed CPUs of each core, in order of the first; a CPU whose siblings the system does not tell is one."""
    cores: dict[int, tuple[int, ...]] = {}
    for cpu in sorted(allowed):
        siblings = _read_list(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") | {cpu}
        together = tuple(sorted(siblings.intersection(allowed)))
        cores[together[0]] = together
    return [cores[first] for first in sorted(cores)]


def num_nodes(root: Path = Path("/")) -> int:
    """NUMA nodes of this host."""
    return max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*"))))


def _widest_node(cores: list[tuple[int, ...]], root: Path) -> tuple[int | None, list[tuple[int, ...]]]:
    """The NUMA node with most of the cores, and those; no node where there is only one to choose from."""
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
    """The numbers of a list such as 0-3,8; empty where there is no such file."""
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
    """Among those of this host, which share out its GPUs or its cores."""
    local_size: int
    store: str
    """Where torch.distributed's process groups meet: `file://` a path, or `tcp://` a host and a port."""
    memory: int | None
    """Descriptor of the memory for collectives on the CPU; None where not all ranks are on this host."""
    available_bytes: int
    """Bytes of the host's memory for this rank's weights."""
    listener: int | None = None
    """On rank 0 the descriptor of the socket that listens at a `tcp://` store."""


class HostShare(NamedTuple):
    """One data-parallel replica, and the share of the host that it has."""

    replica: int = 0
    """Number of the replica, among those of all hosts."""
    local_index: int = 0
    """Its index among those of this host, which share out its GPUs or its cores."""
    num_local: int = 1
    """How many those are."""
    available_bytes: int | None = None
    """Bytes of the host's memory for its weights; None: what is available when they are loaded."""
    model: str = ""
    """Name of its model, where the server has several."""

    def titled(self, process: str) -> str:
        """The name of one of its processes in logs."""
        return f"{process} [{self.model}]" if self.model else process

    def command(self, module: str, process: str) -> list[str]:
        """The command of one of its processes, which `module` runs; `ps` shows its name, and the model's."""
        return [sys.executable, "-P", "-m", module, process, *filter(None, (self.model,))]


def own_cpus(rank: int, size: int, root: Path = Path("/")) -> Collection[int]:
    """The CPUs that a rank computes on: an equal number of adjacent cores; all cores where there are too few."""
    allowed = os.sched_getaffinity(0)
    cores = physical_cores(allowed, root)
    if len(cores) < size:
        return allowed
    first, end = rank * len(cores) // size, (rank + 1) * len(cores) // size
    return {cpu for core in cores[first:end] for cpu in core}
