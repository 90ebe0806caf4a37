"""Which CPUs the threads of this process run on. Used by the engine core and the API process."""

import os
from collections.abc import Collection

_THREADS = "/proc/self/task"


def keep_threads_on(cpus: Collection[int], *, but: Collection[int] = ()) -> None:
    """Let the threads of this process, and those that they start later, run on these CPUs only.

    Threads whose native ids are in `but` are left as they are. Raises `OSError` where the system refuses.
    """
    for name in os.listdir(_THREADS):
        if int(name) in but:
            continue
        try:
            os.sched_setaffinity(int(name), cpus)
        except ProcessLookupError:
            continue  # It has ended since.


def keep_off(cpus: Collection[int]) -> None:
    """Leave these CPUs to others, as far as there are more. Raises `OSError` where the system refuses."""
    rest = os.sched_getaffinity(0).difference(cpus)
    if cpus and rest:
        keep_threads_on(rest)
