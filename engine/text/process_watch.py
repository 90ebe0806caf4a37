"""`ProcessWatch`: ends the child process that works for one request, after too long or when the client has gone.

A thread waits for the process, so neither the event loop nor that thread can interrupt the work otherwise.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ProcessWatch:
    """Kills the process of one request's work when the work has taken too long, or when `end` is called."""

    def __init__(self) -> None:
        self.is_abandoned = False
        """Whether the request that needs the result was cancelled."""
        self._lock = threading.Lock()
        """Held for the time of a system call at most, so that the event loop may call `end`."""
        self._kill: Callable[[], object] | None = None
        """Kills the process; None while it does not work for this request."""

    @contextmanager
    def limiting(self, kill: Callable[[], object], seconds: float) -> Iterator[None]:
        """Within the context, watch a process, which `kill` would end. It is ended after `seconds`."""
        timer = threading.Timer(seconds, self.end)
        timer.daemon = True
        with self._lock:
            self._kill = kill
        try:
            timer.start()
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._kill = None

    def end(self) -> None:
        """Kill the process if it works for this request."""
        with self._lock:
            if self._kill is not None:
                self._kill()
