"""`Signals`: what SIGINT, SIGTERM and SIGHUP do to the process of `kaon serve`, from its first instruction on.

Python's own handler raises `KeyboardInterrupt` anywhere, also where a process has just been started or is being ended;
without a handler, SIGTERM and SIGHUP end the process at once. So until the server starts other processes, SIGINT and
SIGTERM end this one with exit code 0 (`end_at_once`). From then on all signals are recorded (`Signals`), and the event
loop looks at the record. Imports little, because `kaon serve` calls it first.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM)


def end_at_once() -> None:
    """Let SIGINT and SIGTERM end this process with exit code 0, and ignore SIGHUP except on a terminal.

    The process must not have started others or written files that it has to remove.
    """
    for each in _ENDING:
        signal.signal(each, lambda number, frame: os._exit(0))
    if not _is_on_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def interrupt() -> None:
    """Let SIGINT and SIGTERM raise `KeyboardInterrupt`."""
    for each in _ENDING:
        signal.signal(each, signal.default_int_handler)


class Signals:
    """Records the signals that arrive from now on, until the process has ended."""

    def __init__(self) -> None:
        self.endings: list[int] = []
        """Signals that ask the server to end. The first one lets live requests end, the second one does not."""
        self.asks_reload = False
        """Whether a SIGHUP has arrived. On a terminal it means that the terminal has closed, and ends the process."""
        self._interrupts = False
        for each in _ENDING:
            signal.signal(each, self._end)
        if not _is_on_terminal():
            signal.signal(signal.SIGHUP, self._ask_reload)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise `KeyboardInterrupt` at the first signal that asks the server to end, or if there has been one.

        The block must be one that may end anywhere.
        """
        self._interrupts = True
        try:
            if self.endings:
                raise KeyboardInterrupt
            yield
        finally:
            self._interrupts = False

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.endings.append(number)
        # Importlib deletes a module's lock in a callback `cb`, an exception in which is printed and has no effect.
        if self._interrupts and (frame is None or frame.f_code.co_name != "cb"):
            self._interrupts = False
            raise KeyboardInterrupt

    def _ask_reload(self, number: int, frame: object) -> None:
        self.asks_reload = True


def _is_on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
