"""Logging of every Kaon process: a thread writes the lines to standard error, so that nothing waits for their reader.

A pipe whose reader has stalled blocks whoever writes to it. Here the thread that logs only formats its line and queues
it; when the queue is full the line is dropped and counted, and one line reports the count once writing works again.
"""

import logging
import os
import queue
import select
import sys
import threading
from types import TracebackType

BARE = {"is_bare": True}
"""`extra` of a record whose message is the whole line: no time, no process, no level."""

_MAX_WAITING_BYTES = 4 * 2**20
"""Most characters of queued lines; a thousand lines a second fill it in about 40 s."""

_MAX_WRITE = 256
"""Most lines that one system call writes."""

_FLUSH_SECONDS = 2.0
"""How long the end of a process waits for lines that are still queued."""

_STDERR = 2


def configure_logging(process: str, level: str, more: str = "") -> logging.Handler:
    """Have this process log to standard error from `level` on, and name itself so; what writes the lines.

    An exception that ends the process is logged too. `more`: of the record, for the end of each line. A process that
    ends by `os._exit` calls `logging.shutdown` first.
    """
    name = process.replace("%", "%%")
    form = _LineFormatter(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s{more}")
    form.default_msec_format = "%s.%03d"
    handler = LogWriter()
    handler.setFormatter(form)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    sys.excepthook = _log_uncaught
    return handler


def dropped_lines() -> int:
    """Lines that this process has dropped so far."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, LogWriter))


class LogWriter(logging.Handler):
    """Queues lines; a thread of its own writes them to a descriptor."""

    def __init__(self, descriptor: int = _STDERR, max_bytes: int = _MAX_WAITING_BYTES) -> None:
        super().__init__()
        self.dropped = 0
        """Lines dropped so far, because the queue was full or the descriptor refused them."""
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        """Lines, and events to set once all lines before them are written."""
        # Each of the two has one writer: `emit`, which the handler's lock serialises, and the thread.
        self._queued = self._written = 0
        self._reported = 0
        """Of the dropped lines, those that a line has reported."""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:  # noqa: BLE001 - as in the standard library's handlers
            self.handleError(record)
            return
        if self._queued - self._written + len(line) > self._max_bytes:
            self.dropped += 1
            return
        self._queued += len(line)
        self._lines.put(line)

    def flush(self) -> None:
        """Wait until what was logged is written, or for two seconds if it cannot be."""
        done = threading.Event()
        self._lines.put(done)
        done.wait(_FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            waiting = [self._lines.get()]
            while len(waiting) < _MAX_WRITE and not self._lines.empty():
                waiting.append(self._lines.get())
            lines = [each for each in waiting if isinstance(each, str)]
            if lines:
                self._write(lines)
            for each in waiting:
                if isinstance(each, threading.Event):
                    each.set()

    def _write(self, lines: list[str]) -> None:
        text = "".join(lines)
        is_written = self._write_out(text)
        self._written += len(text)
        if not is_written:
            self.dropped += len(lines)
        elif self.dropped > self._reported and self._lines.empty():
            missing, self._reported = self.dropped - self._reported, self.dropped
            sentence = "%d lines of this log were dropped because standard error was not read"
            record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, sentence, (missing,), None)
            self.filter(record)
            self._write_out(self.format(record) + "\n")

    def _write_out(self, text: str) -> bool:
        """Write all of `text`, however long that takes; whether the descriptor took it."""
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:
                return False
        return True


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if getattr(record, "is_bare", False) else super().format(record)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log what ends the process. Written to `sys.stderr`, a traceback would wait for a reader that has stalled."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger(__name__).critical("the process ends", exc_info=(kind, error, trace))
