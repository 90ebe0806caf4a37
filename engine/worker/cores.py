"""`plan_cores`: how many threads compute on the CPU, on which cores, beside which memory. Called at start-up.

No torch here. `root` holds `proc` and `sys` everywhere.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from engine.worker.control_groups import cpu_quota

SPARE_FROM = 4
"""Cores of which one is left to the API process: of fewer, a step would miss it more than the API gains."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Where the threads of one engine run."""

    threads: int
    cpus: frozenset[int]
    """What they may run on."""
    pins: tuple[int, ...] = ()
    """One CPU a thread; none where threads move within `cpus`."""
    own: frozenset[int] = frozenset()
    """What everything else keeps off: the pins' cores, with the hardware threads that share them."""
    node: int | None = None
    """The one NUMA node of several that all this is on."""

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
        # What one node, or one thread a core, cannot give.
        return CorePlan(asked, frozenset(allowed))
    # A thread beyond the quota would be held up for tens of milliseconds, and each operator waits for all threads.
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
