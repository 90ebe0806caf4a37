"""`ServerProcess`: a server in a process group of its own, its readiness, its memory and its end."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.peers.load import LoadError, Request, Target, run

_POLL_SECONDS = 0.05
_STOP_SECONDS = 20
_LOG_TAIL = 3000


class ServerError(Exception):
    """A server ended, or was not ready in time; the message has the end of its log."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class ServerProcess:
    """Runs `command` from entry to exit of a `with`; its output goes to the file `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        self._log = log
        self._began = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)

    def wait_ready(self, target: Target, probe: Request, timeout: float) -> float:
        """Seconds from the command to the end of the first answer, which is `probe`'s. Raises `ServerError`."""
        refusal: Exception | None = None
        while (since := time.monotonic() - self._began) < timeout:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with status {self._process.returncode}:\n{self._tail()}")
            try:
                run(target, [probe], timeout - since)
            except LoadError as error:
                refusal = error
                time.sleep(_POLL_SECONDS)
            else:
                return time.monotonic() - self._began
        raise ServerError(f"not ready within {timeout:g} s; last: {refusal}\n{self._tail()}")

    def peak_resident_bytes(self) -> int:
        """The sum of the largest resident size that each process of the tree has had."""
        return sum(_peak(process) for process in _tree(self._process.pid))

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_TAIL:]


def _tree(process: int) -> Iterator[int]:
    yield process
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def _peak(process: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
