"""What Kaon's processes have in common: how children start and end, CPU affinity, and anonymous memory.

A child holds one end of a socket pair, its lifeline, as standard input. It ignores Ctrl-C, and ends when its parent
does, for whatever reason. No torch here.
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
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15


def name_process(name: str) -> None:
    """Show this process as `name` in `ps`, `top` and `/proc`; the kernel keeps the first 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode())


def begin_child() -> socket.socket:
    """Ignore signals that the parent handles; the lifeline. Stacks are logged at a fault, and at SIGUSR2."""
    # Signals to a whole group or container reach this process too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    return take_lifeline()


def take_lifeline() -> socket.socket:
    """The socket that the parent passed as standard input, which is /dev/null from now on.

    Moved off descriptor 0 so that no grandchild inherits it: the parent takes its end of file for this process' death.
    """
    lifeline = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return lifeline


REMOVED = b"\n"
"""On a lifeline: the parent has removed the directories itself."""
ENDED = b"."
"""On a lifeline: the parent lives, and ends this process for good. The reason follows; "" at an orderly end."""


def end_with_parent(
    lifeline: socket.socket, *directories: str, on_ended: Callable[[str], object] = lambda why: None
) -> None:
    """Exit as soon as the parent's end of `lifeline` closes, for whatever reason, and remove `directories`.

    Runs in a thread of its own: the main one may be computing a long step. Once the parent has `REMOVED` them itself
    the kernel may end this process, Python's help or not. `on_ended` is called, by that thread, where it was `ENDED`,
    with why.
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
    """Have the kernel kill this process when the thread that started it ends: no Python needs to run for it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def forbid_inspection() -> None:
    """Keep other processes of this user from this one's memory and environment, and it from core dumps; root may look.

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
    """That process and its children that exist, itself first; without those that cannot be read of now."""
    children: list[str] = []
    # Without a free descriptor, there is no list of threads.
    with contextlib.suppress(OSError):
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            # A thread may end while they are read.
            with contextlib.suppress(OSError):
                children += listing.read_text().split()
    return [pid, *map(int, children)]


def stopped_process(pid: int) -> int | None:
    """A process, of that one and its children, that a signal has stopped, if one is seen. Takes a millisecond."""
    return next((each for each in family(pid) if _is_stopped(each)), None)


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped that process; False for one that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name, in parentheses, may hold anything.
    return stat.rpartition(")")[2].split()[0] == "T"


def _prctl(option: int, argument: bytes | int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}) failed: {os.strerror(number)}")


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


def avoid_cpus(cpus: Collection[int]) -> None:
    """Leave these CPUs to others, as far as there are more. Raises `OSError` where the system refuses."""
    rest = os.sched_getaffinity(0).difference(cpus)
    if cpus and rest:
        keep_threads_on(rest)


def anonymous_file(name: str, num_bytes: int) -> int:
    """A descriptor of a new file of zeros, which is the caller's to close.

    No directory names it, and nothing is left of it when its processes are gone; `name` is for people who look at
    what a process has open.
    """
    descriptor = os.memfd_create(name)
    os.truncate(descriptor, num_bytes)
    return descriptor
