"""Child processes that call the library, and their end, at which the library must remove its lock files.

The library writes a lock file next to what it compiles, and waits for one that it finds there; older releases wait
forever.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import IO

from models.child_environment import code_environment

_GRACE = 10.0
"""Seconds for cleaning up before SIGKILL."""
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1


def start(call: str, stdout: IO[bytes] | int, stderr: IO[bytes] | int) -> "subprocess.Popen[bytes]":
    """Start a process, in a new process group, that runs the Python code `call` after `begin`."""
    command = [sys.executable, "-P", "-c", f"from models.ops.aiter import child; child.begin(); {call}"]
    return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=code_environment(), start_new_session=True)


def begin() -> None:
    """In the child: have signals, and the parent's death, raise an exception, after which the library cleans up."""
    # A server that a shell started in the background ignores SIGINT, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end(child: "subprocess.Popen[bytes]", grace: float = _GRACE) -> None:
    """End a child, if it runs, and the compilers that it started."""
    if child.poll() is not None:
        return
    os.killpg(child.pid, signal.SIGINT)
    late = time.monotonic() + grace
    # WNOWAIT: while the child is not reaped, no other process can get the number of its group.
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < late:
        time.sleep(_POLL_SECONDS)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
