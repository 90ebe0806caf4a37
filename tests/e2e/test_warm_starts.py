"""A process that starts warm is as one that imports everything itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.warm_starts import COLD_START

REPORT = """from server.process import run; import json, os, resource, signal, sys
print(json.dumps([
    "libtorch" in open("/proc/self/maps").read(),
    os.getppid(), os.getpgid(0) == os.getpid(), os.getcwd(), sys.argv, sys.orig_argv, sys.path, "torch" in sys.modules,
    __name__, [each for each in sys.modules if each.partition(".")[0] == "tests"],
    {name: value for name, value in os.environ.items() if name != "TEST_COLD_START"},
    [each for each in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{each}") and each < 600],
    sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))), resource.getrlimit(resource.RLIMIT_NOFILE),
    [str(signal.getsignal(each)) for each in signal.valid_signals()], sorted(os.sched_getaffinity(0)),
    os.read(int(sys.argv[1]), 9).decode(), sys.stdin.read(), open("/proc/self/cmdline").read().lstrip("/"),
]))
sys.exit(3)"""


def report_of(tmp_path: Path, **environment: str) -> list[object]:
    readable, writable = os.pipe()
    os.write(writable, b"inherited")
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", REPORT, str(readable), "an argument"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        pass_fds=[readable],
        process_group=0,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path), "OF_THIS_TEST": "1", **environment},
    )
    output, _ = process.communicate("written to it", timeout=120)
    os.close(readable)
    os.close(writable)
    assert process.returncode == 3
    found: list[object] = json.loads(output)
    found[-1] = str(found[-1]).removeprefix(sys.executable.lstrip("/"))
    return found


def test_it_has_the_same_parent_environment_descriptors_and_signals(tmp_path: Path) -> None:
    warm, *found = report_of(tmp_path)
    cold, *expected = report_of(tmp_path, **COLD_START)
    assert found == expected
    assert not cold
    if not warm:
        pytest.skip("make test-long, no clones here, or a GPU may be used: servers and cores of tests start as usual")


def test_a_failure_is_reported_as_python_does(tmp_path: Path) -> None:
    failing = [sys.executable, "-P", "-c", "from server.process import run; raise ValueError('of this test')", ""]
    ended = subprocess.run(failing, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: of this test\n")
