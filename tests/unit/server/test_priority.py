"""The event loop's thread precedes others where the system permits it; what it starts has the usual priority."""

import json
import os
import subprocess
import sys

import pytest

from server.process import prefer_event_loop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the priority is not changed")

_PROGRAM = """
import json, os, subprocess, sys, threading
from server.process import prefer_event_loop

def niceness(id=0):
    return os.getpriority(os.PRIO_PROCESS, id)

os.nice(int(sys.argv[1]))
prefer_event_loop()
seen = [niceness()]
thread = threading.Thread(target=lambda: seen.append(niceness(threading.get_native_id())))
thread.start()
thread.join()
child = [sys.executable, "-S", "-c", "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"]
print(json.dumps([*seen, int(subprocess.check_output(child))]))
"""


def niceness_after(start: int) -> list[int]:
    """Start a process with a niceness. Returns that of its main thread, of another thread, and of a child."""
    if os.getpriority(os.PRIO_PROCESS, 0) > 0:
        pytest.skip("the tests were started with a niceness")
    seen: list[int] = json.loads(subprocess.check_output([sys.executable, "-c", _PROGRAM, str(start)]))
    return seen


def test_only_the_event_loop_s_thread_is_preferred() -> None:
    own, thread, child = niceness_after(0)
    assert own in (-3, 0)  # 0 without the right to it.
    assert (thread, child) == (0, 0)


def test_a_niceness_that_the_operator_gave_stays() -> None:
    assert niceness_after(3) == [3, 3, 3]


def test_without_the_right_to_it_the_server_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(os, "getpriority", lambda which, who: 0)
    monkeypatch.setattr(os, "setpriority", refuse)
    prefer_event_loop()
