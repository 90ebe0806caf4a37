"""Logging of every Kaon process: a thread writes the lines to standard error, so that no other thread waits for a
reader.

A pipe whose reader has stalled blocks its writers. Here the logging thread only formats its line and queues it. If the
queue is full, the line is dropped and counted, and one line reports the count when writing works again.
"""

import logging
import os
import queue
import select
import sys
import threading
from types import TracebackType

BARE = {"is_bare": True}
"""`extra` of a record that is written as the bare message, without time, process and level."""

_MAX_WAITING_BYTES = 4 * 2**20
"""Most characters of queued lines; a thousand lines a second fill it in about 40 s."""

_MAX_WRITE = 256
"""Most lines that one system call writes."""

_FLUSH_SECONDS = 2.0
"""Seconds that the end of a process waits for queued lines."""

_STDERR = 2

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"} | {
    code: f"\\u{code:04x}" for code in (*range(0x200E, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}
"""Characters that could steer a reader's terminal or reorder a line: control characters, and Unicode's separators of
lines and marks of direction. Exceptions' texts and stacks quote what clients sent."""


def configure_logging(process: str, level: str, more: str = "") -> logging.Handler:
    """Configure the log of this process with its name and `level`. Returns the handler that writes the lines.

    An exception that ends the process is logged too. `more` is a format that is appended to each line. A process that
    ends by `os._exit` must call `logging.shutdown` first.
    """
    name = process.replace("%", "%%")
    form = _LineFormatter(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s{more}")
    form.default_msec_format = "%s.%03d"
    handler = LogWriter()
    handler.setFormatter(form)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    sys.excepthook = _log_uncaught
    return handler


def before_stack(stack: str) -> dict[str, str]:
    """Return the `extra` of a record whose line the stack of another process follows."""
    return {"foreign_stack": stack}


def dropped_lines() -> int:
    """Return the number of lines that this process has dropped so far."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, LogWriter))


class LogWriter(logging.Handler):
    """Queues lines, which a separate thread writes to a descriptor."""

    def __init__(self, descriptor: int = _STDERR, max_bytes: int = _MAX_WAITING_BYTES) -> None:
        super().__init__()
        self.dropped = 0
        """Number of lines dropped so far, because the queue was full or writing failed."""
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        """Lines, and events that are set when all earlier lines are written."""
        # Each of the two counts has one writer: `emit`, serialised by the handler's lock, and the thread.
        self._queued = self._written = 0
        self._reported = 0
        """Number of dropped lines that were reported."""
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
        """Wait until the queued lines are written, at most two seconds."""
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
        """Write all of `text`, however long that takes. Returns whether it succeeded."""
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
        line = record.getMessage() if getattr(record, "is_bare", False) else super().format(record)
        return line.translate(_ESCAPED)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format all but the stack of an exception. A line break in the message must not begin what looks like a
        record."""
        record.message = record.message.replace("\n", "\\n")
        stack = getattr(record, "foreign_stack", "")
        return super().formatMessage(record) + (stack and "\n" + stack)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log the exception that ends the process. Writing it to `sys.stderr` would block if the reader has stalled."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger(__name__).critical("the process ends", exc_info=(kind, error, trace))
