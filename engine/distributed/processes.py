"""Functions for all of Kaon's processes: start and end of child processes, CPU affinity, and anonymous memory.

A child has one end of a socket pair, its lifeline, as standard input. It ignores Ctrl-C, and ends when its parent ends
for any reason. Imports no torch.
"""

import contextlib
import ctypes
import faulthandler
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that the parent handles. Those to a whole process group or container reach its children too."""


def name_process(name: str) -> None:
    """Show this process as `name` in `ps`, `top` and `/proc`; the kernel keeps the first 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode())


@contextlib.contextmanager
def starting_child() -> Iterator[None]:
    """Start a process in this context: the signals that it will ignore are blocked in it until `begin_child`, which it
    calls after it has imported its modules."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_child() -> socket.socket:
    """Ignore signals that the parent handles, log stacks at faults and SIGUSR2, and return the lifeline."""
    for each in _PARENTS_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    return take_lifeline()


def take_lifeline() -> socket.socket:
    """Take the socket that the parent passed as standard input, and replace standard input by /dev/null.

    It moves to another descriptor, so that no grandchild inherits it: the parent treats its end of file as the end of
    this process.
    """
    lifeline = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return lifeline


REMOVED = b"\n"
"""Message on a lifeline: the parent has removed the directories itself."""
ENDED = b"."
"""Message on a lifeline: the parent, which is alive, ends this process. The reason follows; "" at an orderly end."""


def end_with_parent(
    lifeline: socket.socket, *directories: str, on_ended: Callable[[str], object] = lambda why: None
) -> None:
    """Exit as soon as the parent's end of `lifeline` closes for any reason, and remove `directories`.

    It runs in a separate thread, because the main thread may be computing a long step. After `REMOVED`, the kernel may
    end this process without running Python. After `ENDED`, that thread calls `on_ended` with the reason.
    """

    def watch() -> None:
        while word := lifeline.recv(1):
            if word == ENDED:
                on_ended(lifeline.makefile("rb").read().decode())
            else:
                end_with_parent_even_if_stuck()
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def end_with_parent_even_if_stuck() -> None:
    """Make the kernel kill this process when the thread that started it ends, even if Python is blocked."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def forbid_inspection() -> None:
    """Prevent core dumps, and reading of this process' memory and environment by others of this user, except root.

    Children that run another program are not affected.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def wait_or_kill(process: "subprocess.Popen[Any]", timeout: float) -> None:
    """Wait for a child to end; after `timeout` seconds end it by SIGKILL."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def family(pid: int) -> list[int]:
    """Return the ids of a process and of its existing children, itself first. Unreadable ones are left out."""
    children: list[str] = []
    # Listing the threads needs a free descriptor.
    with contextlib.suppress(OSError):
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            # A thread may end while they are read.
            with contextlib.suppress(OSError):
                children += listing.read_text().split()
    return [pid, *map(int, children)]


def stopped_process(pid: int) -> int | None:
    """Return a stopped process among a process and its children; None if none is found. Takes a millisecond."""
    return next((each for each in family(pid) if _is_stopped(each)), None)


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; False if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name, in parentheses, may contain any characters.
    return stat.rpartition(")")[2].split()[0] == "T"


def _prctl(option: int, argument: bytes | int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}) failed: {os.strerror(number)}")


_THREADS = "/proc/self/task"


def keep_threads_on(cpus: Collection[int], *, but: Collection[int] = ()) -> None:
    """Restrict the threads of this process, and threads that they start later, to these CPUs.

    Threads with native ids in `but` are not changed. Raises `OSError` if the system refuses.
    """
    for name in os.listdir(_THREADS):
        if int(name) in but:
            continue
        try:
            os.sched_setaffinity(int(name), cpus)
        except ProcessLookupError:
            continue  # It has ended since.


def avoid_cpus(cpus: Collection[int]) -> None:
    """Do not use these CPUs, if there are others. Raises `OSError` if the system refuses."""
    rest = os.sched_getaffinity(0).difference(cpus)
    if cpus and rest:
        keep_threads_on(rest)


def anonymous_file(name: str, num_bytes: int) -> int:
    """Create a file of zeros. Returns its descriptor, which the caller closes.

    It is in no directory, and disappears with its processes. `name` appears in lists of open files.
    """
    descriptor = os.memfd_create(name)
    os.truncate(descriptor, num_bytes)
    return descriptor
