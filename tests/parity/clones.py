"""Clones of the test process, for what changes a process for good: a second, which new imports would take, cheaper."""

import os
import signal
import sys
import traceback
from collections.abc import Callable

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
        signal.alarm(MOST_SECONDS)
        work()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def assert_in_clone(work: Callable[[], object]) -> None:
    """Fail, with the traceback on stderr, if `work` raises in a clone or takes `MOST_SECONDS`."""
    assert os.waitpid(clone(work), 0)[1] == 0
