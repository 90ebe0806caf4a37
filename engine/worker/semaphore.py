"""`Semaphore`: the C library's counting semaphore in memory that processes share. Used by the ranks' step ring.

It is the one primitive that every Linux brings without a compiler, orders memory on any processor, and sleeps in the
kernel: what was written before a `post` is seen after the `wait` that takes it.
"""

import ctypes
import os
import time

_library = ctypes.CDLL(None, use_errno=True)
_init, _post, _wait, _try = (getattr(_library, f"sem_{name}") for name in ("init", "post", "wait", "trywait"))
_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
for _function in (_post, _wait, _try):
    _function.argtypes = [ctypes.c_void_p]

_SPIN_NS = 500_000
"""Before a waiter sleeps: what lies between two steps of a busy engine. A sleeper takes 100 microseconds to wake."""
_NAP_SECONDS = 0.0005


class Semaphore:
    """A semaphore at an address."""

    BYTES = 64
    """Of memory that each takes: a line of the processor's cache."""

    def __init__(self, address: int) -> None:
        """Use the one that is there. Its memory is the caller's, and must outlive it."""
        self._address = ctypes.c_void_p(address)

    def initialise(self, value: int) -> None:
        """Make it, before any other process uses it."""
        if _init(self._address, 1, value):
            raise OSError(ctypes.get_errno(), "sem_init failed")

    def post(self) -> None:
        """Let one waiter on. Never blocks."""
        if _post(self._address):
            raise OSError(ctypes.get_errno(), "sem_post failed")

    def wait(self) -> None:
        """Take one post: at once, within microseconds while yielding the processor, or asleep."""
        address = self._address
        if not _try(address):
            return
        end = time.perf_counter_ns() + _SPIN_NS
        while time.perf_counter_ns() < end:
            os.sched_yield()
            if not _try(address):
                return
        while _wait(address):  # Interrupted by a signal.
            pass

    def wait_for(self, seconds: float) -> bool:
        """Take one post, if there is one within so many seconds; whether there was."""
        end = time.monotonic() + seconds
        while _try(self._address):
            if time.monotonic() >= end:
                return False
            time.sleep(_NAP_SECONDS)
        return True
