"""Measures one server: its process, its figures for each checkpoint and workload, and the file in which they are
stored."""

import contextlib
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.checkpoints import Checkpoint, write
from benchmarks.peers.load import WARM_UP, LoadError, Request, Target, Workload, run
from benchmarks.peers.servers import Contestant
from benchmarks.report import processor

_POLL_SECONDS = 0.05
_STOP_SECONDS = 20
_LOG_TAIL = 3000


class ServerError(Exception):
    """A server ended, or was not ready in time; the message contains the end of its log."""


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
        """The sum of the largest resident sizes of all processes of the tree."""
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


# Measures one contestant: starts it for each checkpoint, gives it the workloads in order, and ends it.


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure of one round. `what` is a workload's name, or `ready` or `memory` and a checkpoint's."""

    contestant: str
    round: int
    what: str
    value: float
    gaps: tuple[float, ...] = ()


def measure(
    contestant: Contestant,
    workloads: Sequence[Workload],
    round_number: int,
    root: Path,
    tell: Callable[[Measurement], None],
) -> None:
    """Report each figure as it is measured. Raises `ServerError` or `LoadError`; figures reported before stay
    valid."""
    for checkpoint in dict.fromkeys(workload.checkpoint for workload in workloads):
        chosen = [workload for workload in workloads if workload.checkpoint == checkpoint]
        _measure_checkpoint(contestant, checkpoint, chosen, round_number, root, tell)


def _measure_checkpoint(
    contestant: Contestant,
    checkpoint: Checkpoint,
    workloads: Sequence[Workload],
    round_number: int,
    root: Path,
    tell: Callable[[Measurement], None],
) -> None:
    folder = write(checkpoint, root / "checkpoints")
    contestant.prepare(folder)
    model = contestant.model(folder)
    port = free_port()
    command = contestant.command(checkpoint, model, port)
    target = Target(port, contestant.served_name(checkpoint, model), contestant.path, contestant.extra)
    logs = root / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{contestant.name}-{checkpoint.name}.log"
    probe, *warm_up = WARM_UP.requests(round_number)
    with ServerProcess(command.arguments, command.environment, logs, log) as server:
        ready = server.wait_ready(target, probe._replace(max_tokens=1), contestant.ready_seconds)
        tell(Measurement(contestant.name, round_number, f"ready {checkpoint.name}", ready))
        run(target, warm_up)
        for workload in workloads:
            answers = run(target, workload.requests(round_number))
            value, gaps = workload.figure.of(answers), workload.gaps(answers)
            tell(Measurement(contestant.name, round_number, workload.name, value, tuple(gaps)))
        memory = server.peak_resident_bytes() / 1e9
        tell(Measurement(contestant.name, round_number, f"memory {checkpoint.name}", memory))


# The machine itself: `kaon doctor`'s measurements, stored as those of a contestant with a name that no peer has.

MACHINE, READ, MATRIX = "machine", "read", "matrix"
"""The contestant's name, and its quantities: 10^9 bytes, and 10^9 operations per second."""


def measure_machine(round_number: int) -> tuple[str, list[Measurement]]:
    """Measure the processor, the path of the operators that runs on it, and its limits. Raises `ServerError`."""
    command = (sys.executable, "-m", "server", "doctor", "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        facts = json.loads(done.stdout)["facts"]
    except ValueError as error:
        raise ServerError(f"`kaon doctor --json` reported no JSON: {done.stdout}{done.stderr}") from error
    if facts["cpu_limits"] is None:
        raise ServerError(f"`kaon doctor` measured no limits of this processor: {done.stdout}")
    read, _, matrix, _ = facts["cpu_limits"]
    measured = [Measurement(MACHINE, round_number, what, value) for what, value in ((READ, read), (MATRIX, matrix))]
    return f"{processor()}, {facts['cpu_library']}", measured


# Measurements of a run, written to disk as they arrive, with their medians and ratios.


class Results:
    """A list of measurements in a file of JSON lines; a run in pieces appends to one file."""

    def __init__(self, file: Path, append: bool) -> None:
        self._file = file
        self._measurements: list[Measurement] = []
        if append and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                self._measurements.append(Measurement(**{**fields, "gaps": tuple(fields["gaps"])}))
        else:
            file.unlink(missing_ok=True)

    def add(self, measurement: Measurement) -> None:
        self._measurements.append(measurement)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(measurement)) + "\n")

    def next_round(self) -> int:
        return 1 + max((each.round for each in self._measurements), default=-1)

    def contestants(self) -> list[str]:
        """Contestants with any figure, in the order of their first."""
        return list(dict.fromkeys(each.contestant for each in self._measurements))

    def rounds(self, contestant: str, what: str) -> int:
        return len(self._values(contestant, what))

    def median(self, contestant: str, what: str) -> float | None:
        """The median over the rounds; None if nothing was measured."""
        values = self._values(contestant, what)
        return statistics.median(values) if values else None

    def gaps(self, contestant: str, what: str) -> list[float]:
        """Seconds between tokens in steady decode, of all rounds, in ascending order."""
        found = (each for each in self._measurements if (each.contestant, each.what) == (contestant, what))
        return sorted(gap for measurement in found for gap in measurement.gaps)

    def _values(self, contestant: str, what: str) -> list[float]:
        return [each.value for each in self._measurements if (each.contestant, each.what) == (contestant, what)]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value of `ordered` that `percent` of the values do not exceed; `ordered` must not be empty."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
