"""Assignment of an engine's threads to cores, over machines that are trees of files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.distributed.host_resources import CorePlan, cpu_quota, own_cpus, physical_cores, plan_cores


def machine(
    root: Path, *, nodes: int = 1, cores: int, siblings: int = 1, files: dict[str, object] | None = None
) -> Path:
    """A machine with `cores` per node; the first hardware threads of all cores are numbered before the second ones, as
    usual."""
    whole = nodes * cores
    for core in range(whole):
        together = [core + sibling * whole for sibling in range(siblings)]
        for cpu in together:
            write(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", ",".join(map(str, together)))
    for node in range(nodes):
        first = node * cores
        ranges = [f"{first + s * whole}-{first + cores - 1 + s * whole}" for s in range(siblings)]
        write(root, f"sys/devices/system/node/node{node}/cpulist", ",".join(ranges))
    for name, content in (files or {}).items():
        write(root, name, content)
    return root


def write(root: Path, name: str, content: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def test_hardware_threads_of_a_core_count_once(tmp_path: Path):
    root = machine(tmp_path, cores=2, siblings=2)
    assert physical_cores(range(4), root) == [(0, 2), (1, 3)]
    assert physical_cores([1, 2, 3], root) == [(1, 3), (2,)]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (3, [{0, 4}, {1, 5}, {2, 3, 6, 7}]),
        (4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (5, [{0, 1, 2, 3, 4, 5, 6, 7}] * 5),
    ],
)
def test_each_rank_has_neighbouring_cores_of_its_own(
    size: int, expected: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On two nodes with two cores each, two ranks get one node each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    root = machine(tmp_path, nodes=2, cores=2, siblings=2)
    assert [set(own_cpus(rank, size, root)) for rank in range(size)] == expected


def test_ranks_share_a_control_groups_quota(tmp_path: Path):
    files = {"proc/self/cgroup": "0::/pod", "sys/fs/cgroup/pod/cpu.max": "800000 100000"}
    root = machine(tmp_path, cores=16, files=files)
    assert plan_cores(None, range(16), root).threads == 7
    assert plan_cores(None, range(8), root, ranks=4).threads == 2


def test_cpus_without_a_topology_are_cores(tmp_path: Path):
    assert physical_cores([5, 3], tmp_path) == [(3,), (5,)]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 3), (4, 3), (16, 15)])
def test_from_four_cores_on_one_is_left_to_the_api(tmp_path: Path, cores: int, threads: int):
    assert plan_cores(None, range(cores), machine(tmp_path, cores=cores)).threads == threads


def test_threads_that_leave_a_core_are_pinned_and_own_their_cores_whole(tmp_path: Path):
    plan = plan_cores(None, range(8), machine(tmp_path, cores=4, siblings=2))
    assert plan.pins == (1, 2, 3)
    assert plan.own == {1, 2, 3, 5, 6, 7}


def test_threads_that_leave_no_core_are_not_pinned(tmp_path: Path):
    assert plan_cores(None, range(2), machine(tmp_path / "small", cores=2)) == CorePlan(2, frozenset({0, 1}))
    assert plan_cores(8, range(8), machine(tmp_path / "all", cores=8)).pins == ()


def test_threads_that_leave_cores_to_other_engines_are_not_pinned(tmp_path: Path):
    plan = plan_cores(3, range(8), machine(tmp_path, cores=8))
    assert (plan.threads, plan.pins, plan.own) == (3, (), frozenset())


def test_the_affinity_bounds_the_cores(tmp_path: Path):
    plan = plan_cores(None, [2, 3, 4, 5], machine(tmp_path, cores=16))
    assert (plan.threads, plan.pins) == (3, (3, 4, 5))


@pytest.mark.parametrize(("quota", "threads"), [("50000", 1), ("250000", 2), ("400000", 3), ("max", 15)])
def test_a_quota_bounds_the_threads_to_the_whole_cores_that_it_pays_for(tmp_path: Path, quota: str, threads: int):
    files = {"proc/self/cgroup": "0::/pod", "sys/fs/cgroup/pod/cpu.max": f"{quota} 100000"}
    plan = plan_cores(None, range(16), machine(tmp_path, cores=16, files=files))
    assert plan.threads == threads
    assert bool(plan.pins) == (quota == "max"), "which cores a quota is used on is the system's choice"


def test_one_engine_stays_on_the_node_that_has_most_cores(tmp_path: Path):
    root = machine(tmp_path, nodes=2, cores=8)
    plan = plan_cores(None, range(16), root)
    assert (plan.node, plan.threads, plan.pins) == (0, 7, tuple(range(1, 8)))
    assert "NUMA node 0 alone" in str(plan)
    assert plan_cores(None, range(5, 16), root).node == 1


def test_all_of_a_nodes_cores_are_pinned_where_the_api_finds_another_node(tmp_path: Path):
    plan = plan_cores(8, range(16), machine(tmp_path, nodes=2, cores=8))
    assert (plan.node, plan.pins) == (0, tuple(range(8)))


def test_more_threads_than_a_node_has_cores_run_anywhere(tmp_path: Path):
    plan = plan_cores(12, range(16), machine(tmp_path, nodes=2, cores=8))
    assert plan == CorePlan(12, frozenset(range(16)))


def test_more_threads_than_cpus_are_refused_with_the_limit(tmp_path: Path):
    with pytest.raises(ValueError, match="cpu_threads is 3, but this process may use 2 CPUs; set it to at most 2"):
        plan_cores(3, range(2), machine(tmp_path, cores=2))


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/pod/kaon", {"pod/cpu.max": "50000 100000", "pod/kaon/cpu.max": "max 100000"}),
        ("3:cpu,cpuacct:/kaon", {"cpu/kaon/cpu.cfs_quota_us": 50000, "cpu/kaon/cpu.cfs_period_us": 100000}),
    ],
    ids=["v2", "v1"],
)
def test_the_nearest_quota_of_a_control_group_counts(tmp_path: Path, cgroup: str, files: dict[str, object]):
    write(tmp_path, "proc/self/cgroup", cgroup)
    for name, content in files.items():
        write(tmp_path, f"sys/fs/cgroup/{name}", content)
    assert cpu_quota(tmp_path) == 0.5


def test_without_a_quota_there_is_none(tmp_path: Path):
    assert cpu_quota(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "3:cpu:/kaon")
    write(tmp_path, "sys/fs/cgroup/cpu/kaon/cpu.cfs_quota_us", -1)
    write(tmp_path, "sys/fs/cgroup/cpu/kaon/cpu.cfs_period_us", 100000)
    assert cpu_quota(tmp_path) is None


def test_the_api_keeps_off_the_engines_cpus_and_keeps_one_where_it_has_no_other():
    script = """
import os, threading
from engine.distributed.processes import avoid_cpus
allowed = os.sched_getaffinity(0)
blocked = threading.Event()
thread = threading.Thread(target=blocked.wait)
thread.start()
avoid_cpus(allowed)
assert os.sched_getaffinity(0) == allowed
rest = {min(allowed)}
avoid_cpus(allowed - rest)
assert os.sched_getaffinity(0) == rest == os.sched_getaffinity(thread.native_id)
blocked.set()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, env={**os.environ})
