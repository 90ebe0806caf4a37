"""`second_process`: the other of the two processes that a benchmark of ranks or replicas needs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def second_process(module: str, *arguments: object, descriptors: tuple[int, ...] = ()) -> Iterator[None]:
    """Run a module beside this process, which inherits `descriptors`; each on CPUs of its own, as ranks are.

    Raises `RuntimeError` where it fails.
    """
    # Not above: what lists the benchmarks needs no torch.
    from engine.worker.shard import own_cpus

    command = [sys.executable, "-m", module, *map(str, arguments)]
    allowed = os.sched_getaffinity(0)
    mine, theirs = own_cpus(0, 2), own_cpus(1, 2)
    os.sched_setaffinity(0, theirs)
    try:
        with subprocess.Popen(command, pass_fds=descriptors, cwd=Path(__file__).parent.parent) as process:
            os.sched_setaffinity(0, mine)
            yield
            if process.wait():
                raise RuntimeError(f"the second process of {module} failed")
    finally:
        os.sched_setaffinity(0, allowed)
