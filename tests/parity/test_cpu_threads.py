"""An engine's threads and memory on a real machine. Each test runs in a process of its own, which it changes for
good."""

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from engine.runner.build import bind_memory, node_memory
from tests.parity.clones import assert_in_clone


def test_pinned_threads_stay_on_their_cpus_and_others_off_them() -> None:
    script = """
import os, threading, time
from pathlib import Path
import torch
from engine.distributed.host_resources import CorePlan
from engine.runner.build import pin_operator_threads, pin_torch_threads
from models.ops.cpu import runtime

allowed = sorted(os.sched_getaffinity(0))
if len(allowed) < 2:
    raise SystemExit(print("skip"))
stop = threading.Event()
before = threading.Thread(target=stop.wait, daemon=True)
before.start()
plan = CorePlan(2, frozenset(allowed[:2]), (allowed[1], allowed[0]), frozenset(allowed[:1]))
pin_torch_threads(plan)
assert torch.get_num_threads() == 2
assert os.sched_getaffinity(before.native_id) == set(allowed[1:])
operators = runtime.start(2)
own = pin_operator_threads(plan, operators)
if operators is None:
    assert own == frozenset()
else:
    assert own == plan.own
    # A thread names itself, once it runs.
    while "kaon-cpu" not in (names := {
        int(task.name): (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()
    }).values():
        time.sleep(0.01)
    (thread,) = (number for number, name in names.items() if name == "kaon-cpu")
    assert os.sched_getaffinity(thread) == {allowed[0]}
    assert os.sched_getaffinity(threading.get_native_id()) == {allowed[1]}
stop.set()
"""
    command = [sys.executable, "-c", script]
    if subprocess.run(command, check=True, timeout=500, stdout=subprocess.PIPE, text=True).stdout.strip() == "skip":
        pytest.skip("one CPU")


def test_memory_is_bound_where_the_system_lets_it_and_the_node_has_room() -> None:
    def bind() -> None:
        assert not bind_memory(0, 1 << 60)
        bound = bind_memory(0, 1)
        mode = ctypes.c_int(-1)
        number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
        if number is not None and ctypes.CDLL(None).syscall(number, ctypes.byref(mode), None, 0, None, 0) == 0:
            assert (mode.value == 2) == bound
        bytearray(1 << 24)

    assert_in_clone(bind)


def test_a_nodes_room_is_what_is_free_or_holds_files(tmp_path: Path) -> None:
    meminfo = tmp_path / "sys/devices/system/node/node1/meminfo"
    meminfo.parent.mkdir(parents=True)
    meminfo.write_text(
        "Node 1 MemTotal: 100 kB\nNode 1 MemFree: 10 kB\nNode 1 Active(file): 3 kB\nNode 1 Inactive(file): 4 kB\n"
    )
    assert node_memory(1, tmp_path) == 17 * 1024
    assert node_memory(2, tmp_path) == 0
    assert not bind_memory(1, 18 * 1024, tmp_path)
