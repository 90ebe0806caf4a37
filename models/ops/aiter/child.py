"""Child processes that call the library: how one is started, and how it is ended so that its lock files are removed.

The library puts a lock file beside what it compiles, and waits for one that it finds there; older releases for ever.
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
"""Seconds to clean up before SIGKILL."""
_LOOK_AGAIN = 0.05
_PR_SET_PDEATHSIG = 1


def start(call: str, stdout: IO[bytes] | int, stderr: IO[bytes] | int) -> "subprocess.Popen[bytes]":
    """A process, and the group of those that it starts, which runs some Python after `begin`."""
    command = [sys.executable, "-P", "-c", f"from models.ops.aiter import child; child.begin(); {call}"]
    return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=code_environment(), start_new_session=True)


def begin() -> None:
    """In the child: what ends it, its parent's death too, is an exception, after which the library cleans up."""
    # A shell that starts the server in the background has it ignore SIGINT, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end(child: "subprocess.Popen[bytes]", grace: float = _GRACE) -> None:
    """End a child that runs, and the compilers that it started."""
    if child.poll() is not None:
        return
    os.killpg(child.pid, signal.SIGINT)
    late = time.monotonic() + grace
    # Not taken note of before its group is ended: until then the number is nobody else's.
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < late:
        time.sleep(_LOOK_AGAIN)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
