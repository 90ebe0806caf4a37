"""`Watchdog`: notices an engine core that has work and completes no step, or is stopped.

Asked by `Supervisor` again and again.
"""

import time
from collections.abc import Callable

_STOPPED_SECONDS = 2.0
"""Without a step, before a process that the system holds stopped counts as stalled: no waiting will move it."""


class Watchdog:
    """Measures the time since the core last showed progress, or was given work when it had none."""

    def __init__(self, stall_timeout: float) -> None:
        """`stall_timeout`: seconds that the longest step may take."""
        self._timeout = stall_timeout
        self._last = self._looked = time.monotonic()
        self.interval = min(1.0, stall_timeout / 4)
        """Seconds between two looks."""

    def note_progress(self) -> None:
        """A step was completed, or the core was idle until now."""
        self._last = time.monotonic()

    def why_stalled(self, stopped_process: Callable[[], int | None], more: float = 0.0) -> str | None:
        """Why the core, which has work or is stopped, counts as stalled; None: it does not.

        `stopped_process` finds a process of it that a signal has stopped. It may take `more` seconds than a step may.
        """
        now = time.monotonic()
        late, self._looked = now - self._looked > 2 * self.interval, now
        silent = now - self._last
        if late:
            # This process was held up itself, and what the core said meanwhile may still be unread.
            return None
        if silent > self._timeout + more:
            return f"no step was completed for {silent:.0f} s (stall_timeout is {self._timeout:g})"
        if silent > _STOPPED_SECONDS:
            stopped = stopped_process()
            if stopped is not None:
                return f"its process {stopped} was stopped by a signal"
        return None
