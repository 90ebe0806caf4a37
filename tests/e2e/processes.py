"""Processes that tests start and end, or for whose end they wait."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from engine.config.config import Config

END_SECONDS = 120
"""Timeout of all waits for an end here."""

_IDLE_SECONDS, _IDLE_SPENDS = 2.0, 0.1

_RUN = "import sys; from engine.config.config import Config; from server.process import run; "
_RUN += "sys.exit(run(Config.model_validate_json(sys.argv[1])))"

STUB_CORES = "from engine.distributed import core_process; core_process.CORE_MODULE = 'stub_core'; "
"""Code for `before` of `run_config`: engine cores run `stub_core`, which must be on the import path."""


def run_config(config: Config, before: str = "") -> list[str]:
    """The command that runs `kaon serve` with a configuration; `before` is Python code that runs first."""
    return [sys.executable, "-P", "-c", before + _RUN, config.model_dump_json()]


class LoggedProcess:
    """A process whose standard error goes to a file; its standard output is `process.stdout`."""

    def __init__(self, command: Sequence[str], log: Path, **environment: str) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = psutil.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        code: int = self.process.wait(END_SECONDS)
        return code

    def end_by(self, number: signal.Signals) -> int:
        """End it by a signal. Returns its exit code."""
        if self.process.is_running():
            self.process.send_signal(number)
        try:
            return self.wait()
        except psutil.TimeoutExpired:
            self.process.kill()
            raise


def command_line(process: psutil.Process) -> list[str]:
    """Child processes of a process; empty once it has ended."""
    try:
        line: list[str] = process.cmdline()
    except psutil.NoSuchProcess:
        return []
    return line


def until_idle(processes: Sequence[psutil.Process]) -> None:
    """Return once none of the processes has used a processor for more than a moment within two seconds.

    A process that has just become idle may still do some last work, which on a busy machine is late.
    """
    deadline = time.monotonic() + END_SECONDS
    while True:
        before = [sum(each.cpu_times()[:2]) for each in processes]
        time.sleep(_IDLE_SECONDS)
        spent = [sum(each.cpu_times()[:2]) - start for each, start in zip(processes, before, strict=True)]
        if max(spent) <= _IDLE_SPENDS:
            return
        assert time.monotonic() < deadline, f"idle processes used {spent} s of {_IDLE_SECONDS:g} s"


def wait_gone(pids: Iterable[int]) -> None:
    """Wait until processes, which may be others' children, have ended."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([pidfd], [], [], END_SECONDS)[0], f"process {pid} lives on"
        finally:
            os.close(pidfd)
