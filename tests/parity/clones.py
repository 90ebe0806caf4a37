"""Clones of the test process, for what changes a process for good: a second, which new imports would take, cheaper."""

import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch

MOST_SECONDS = 250


def clone(work: Callable[[], object]) -> int:
    """Start a process that ends after `work`: with status 0, or with 1 if it raises. Returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        # pytest-timeout's handler is in Python, which does not run while the clone hangs in C.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(MOST_SECONDS)
        # Threads of OpenMP are not cloned, and operators of torch would wait for them for ever.
        torch.set_num_threads(1)
        work()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def assert_in_clone(work: Callable[[], object]) -> None:
    """Fail, with the traceback on stderr, if `work` raises in a clone or takes `MOST_SECONDS`."""
    child = clone(work)
    try:
        status = os.waitpid(child, 0)[1]
    except BaseException:  # the test's time is over
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    assert status == 0
