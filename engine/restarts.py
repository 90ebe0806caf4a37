"""`RestartPolicy`: whether an engine core that died is started again, and when. Asked by `Supervisor`."""

import math
import time
from collections import deque

_MOST_FUTILE = 5
"""Cores in a row that died before they completed a step, or were ready and idle: more would change nothing."""

_FIRST_DELAY_SECONDS = 0.25
"""Before the start that follows a futile one; doubled each time: memory or a device may yet be freed."""


class RestartPolicy:
    """Counts deaths over a window of time."""

    def __init__(self, most: int, window: float) -> None:
        """At most `most` restarts within `window` seconds; 0: none at all."""
        self._most = most
        self._window = window
        self._restarts: deque[float] = deque()
        self._futile = 0

    def next_start(self, *, futile: bool) -> float | None:
        """A core died; when to start the next, on `time.monotonic`'s clock. None: no more, `why_not` says why."""
        now = time.monotonic()
        self._futile = self._futile + 1 if futile else 0
        while self._restarts and self._restarts[0] <= now - self._window:
            self._restarts.popleft()
        if len(self._restarts) >= self._most or self._futile >= _MOST_FUTILE:
            return None
        self._restarts.append(now)
        return now + (_FIRST_DELAY_SECONDS * 2.0 ** (self._futile - 2) if self._futile > 1 else 0.0)

    @property
    def why_not(self) -> str:
        """After `next_start` gave None: why, to end a sentence with; empty where restarts are off."""
        if not self._most:
            return ""
        if self._futile >= _MOST_FUTILE:
            return f"; {self._futile} engine cores in a row died before they served, so no other is started"
        times = "once" if len(self._restarts) == 1 else f"{len(self._restarts)} times"
        window = math.ceil(self._window)
        return f"; it was started again {times} within {window} s (max_core_restarts), and is not once more"
