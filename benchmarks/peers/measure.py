"""Measures servers that take turns: their processes, their figures for each checkpoint and workload, and the file in
which these are stored."""

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

import torch

from benchmarks.checkpoints import Checkpoint, write
from benchmarks.peers.load import WARM_UP, LoadError, Request, Target, Workload, run
from benchmarks.peers.servers import Contestant, InstallError
from benchmarks.report import processor
from models.ops.cpu import runtime
from models.ops.cpu.structures import ReadLimit, Step

_POLL_SECONDS = 0.05
_IDLE_SECONDS = 0.5
_MOST_BUSY_SECONDS = 60
_SETTLE_SECONDS = 0.2
_PROBE_BYTES = 1 << 28
_PROBE_SECONDS = 0.05
_STOP_SECONDS = 20
_LOG_TAIL = 3000

_PLANNED = "planned "

MACHINE, READ, MATRIX = "machine", "read", "matrix"
"""The contestant's name, and its quantities: 10^9 bytes, and 10^9 operations per second."""


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
        self.signal(signal.SIGCONT)
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

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each process of the tree: SIGSTOP stops the server, and SIGCONT lets it go on."""
        for process in _tree(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def wait_idle(self) -> None:
        """Wait until the server uses no processor time, or a minute: it may write caches after its first answer."""
        deadline = time.monotonic() + _MOST_BUSY_SECONDS
        before = self._ticks()
        while time.monotonic() < deadline:
            time.sleep(_IDLE_SECONDS)
            if (now := self._ticks()) - before <= 1:
                return
            before = now

    def _ticks(self) -> int:
        return sum(_processor_ticks(process) for process in _tree(self._process.pid))

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


def _processor_ticks(process: int) -> int:
    """Its processor time so far, in units of the kernel's clock, usually 10 ms."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


# Measures contestants that take turns: starts all for each checkpoint, measures each in each round, and ends them.


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure of one round. `what` is a workload's name, or `ready` or `memory` and a checkpoint's.

    With `planned` and a workload's name, it is the number of rounds that begin with this one; see `Results.plan`.
    """

    contestant: str
    round: int
    what: str
    value: float
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _Runner:
    """A started contestant."""

    contestant: Contestant
    server: ServerProcess
    target: Target

    def turn(self, workload: Workload, round_number: int) -> Measurement:
        """Measure a workload while this server alone may run."""
        self.server.signal(signal.SIGCONT)
        try:
            time.sleep(_SETTLE_SECONDS)
            answers = run(self.target, workload.requests(round_number))
        finally:
            self.server.signal(signal.SIGSTOP)
        gaps = tuple(workload.gaps(answers))
        return Measurement(self.contestant.name, round_number, workload.name, workload.figure.of(answers), gaps)


def measure(
    contestants: Sequence[Contestant],
    workloads: Sequence[Workload],
    rounds: range,
    root: Path,
    read_rate: Callable[[], float],
    tell: Callable[[Measurement], None],
) -> None:
    """Measure contestants that are in memory at the same time, workload by workload, in `rounds` rounds.

    In a round each has a turn of some seconds, in alternating order, during which the others are stopped; `read_rate`
    measures the machine before each turn. So the machine is nearly the same for all figures of a round. Each figure is
    reported as it is measured. Raises `ServerError` that names the contestant; figures reported before stay valid.
    """
    for checkpoint in dict.fromkeys(workload.checkpoint for workload in workloads):
        folder = write(checkpoint, root / "checkpoints")
        with contextlib.ExitStack() as started:
            runners = []
            for contestant in contestants:
                with _naming(contestant):
                    runners.append(_start(contestant, checkpoint, folder, rounds.start, root, started, tell))
            for workload in (workload for workload in workloads if workload.checkpoint == checkpoint):
                for number in rounds:
                    # The first of a round is the last of the next, so that drift of the machine affects all alike.
                    for each in runners if number % 2 == 0 else reversed(runners):
                        tell(Measurement(MACHINE, number, READ, read_rate()))
                        with _naming(each.contestant):
                            tell(each.turn(workload, number))
            for each in runners:
                memory = each.server.peak_resident_bytes() / 1e9
                tell(Measurement(each.contestant.name, rounds.start, f"memory {checkpoint.name}", memory))


@contextlib.contextmanager
def _naming(contestant: Contestant) -> Iterator[None]:
    try:
        yield
    except (InstallError, LoadError, ServerError) as error:
        raise ServerError(f"{contestant.name}: {error}") from error


def _start(
    contestant: Contestant,
    checkpoint: Checkpoint,
    folder: Path,
    seed: int,
    root: Path,
    started: contextlib.ExitStack,
    tell: Callable[[Measurement], None],
) -> _Runner:
    """Start a contestant, which ends with `started`, and stop it when it has answered and is idle."""
    contestant.prepare(folder)
    model = contestant.model(folder)
    port = free_port()
    command = contestant.command(checkpoint, model, port)
    target = Target(port, contestant.served_name(checkpoint, model), contestant.path, contestant.extra)
    logs = root / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{contestant.name}-{checkpoint.name}.log"
    probe, *warm_up = WARM_UP.requests(seed)
    server = started.enter_context(ServerProcess(command.arguments, command.environment, logs, log))
    ready = server.wait_ready(target, probe._replace(max_tokens=1), contestant.ready_seconds)
    tell(Measurement(contestant.name, seed, f"ready {checkpoint.name}", ready))
    run(target, warm_up)
    server.wait_idle()
    server.signal(signal.SIGSTOP)
    return _Runner(contestant, server, target)


# The machine itself: `kaon doctor`'s measurements, stored as those of a contestant with a name that no peer has.


def read_probe() -> Callable[[], float]:
    """Return a function that reads memory on all cores for 50 ms, and returns the median rate in 10^9 bytes a second.

    Raises `ServerError` if the CPU operators were not built.
    """
    if runtime.start(len(os.sched_getaffinity(0))) is None:
        raise ServerError("the CPU operators, which measure the machine, were not built; install a C compiler")
    memory, sums = torch.ones(_PROBE_BYTES, dtype=torch.uint8), torch.zeros(1024, dtype=torch.int64)
    arguments = ReadLimit(memory.data_ptr(), memory.nbytes, sums.data_ptr())

    def read_rate() -> float:
        rates = []
        until = time.perf_counter() + _PROBE_SECONDS
        while (began := time.perf_counter()) < until:
            runtime.current().run(arguments, Step(num_tokens=1), (memory, sums))
            rates.append(_PROBE_BYTES / (time.perf_counter() - began) / 1e9)
        return statistics.median(rates)

    return read_rate


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
        self._whole_bytes: int | None = None
        """Length of the whole lines if a part of a line follows them."""
        file.parent.mkdir(parents=True, exist_ok=True)
        if append and file.exists():
            text = file.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # A run that was killed may have written a part of a line.
            for line in whole.splitlines():
                fields = json.loads(line)
                self._measurements.append(Measurement(**{**fields, "gaps": tuple(fields["gaps"])}))
            if len(whole) < len(text):
                self._whole_bytes = len(whole.encode())
        else:
            file.unlink(missing_ok=True)

    def plan(self, contestant: str, what: str, rounds: range) -> None:
        """Record that a figure will be measured in each of `rounds`: a run may be cut off, or fail, before that."""
        self.add(Measurement(contestant, rounds.start, _PLANNED + what, len(rounds)))

    def is_finished(self, contestant: str, what: str) -> bool:
        """Whether any run measured the figure in all of its rounds, or none was to measure it."""
        measured = {each.round for each in self._of(contestant, what)}
        plans = [range(each.round, each.round + int(each.value)) for each in self._of(contestant, _PLANNED + what)]
        return not plans or bool(measured.difference(*plans)) or any(map(measured.issuperset, plans))

    def add(self, measurement: Measurement) -> None:
        self._measurements.append(measurement)
        with self._file.open("a", encoding="utf-8") as stream:
            if self._whole_bytes is not None:
                stream.truncate(self._whole_bytes)
                self._whole_bytes = None
            stream.write(json.dumps(asdict(measurement)) + "\n")

    def next_round(self) -> int:
        return 1 + max((each.round for each in self._measurements), default=-1)

    def contestants(self) -> list[str]:
        """Contestants with any figure, in the order of their first."""
        figures = (each for each in self._measurements if not each.what.startswith(_PLANNED))
        return list(dict.fromkeys(each.contestant for each in figures))

    def rounds(self, contestant: str, what: str) -> int:
        return len(self._values(contestant, what))

    def median(self, contestant: str, what: str) -> float | None:
        """The median over the rounds; None if nothing was measured."""
        values = self._values(contestant, what)
        return statistics.median(values) if values else None

    def gaps(self, contestant: str, what: str) -> list[float]:
        """Seconds between tokens in steady decode, of all rounds, in ascending order."""
        return sorted(gap for measurement in self._of(contestant, what) for gap in measurement.gaps)

    def pairs(
        self, ours: str, theirs: str, what: str, of: Callable[[Measurement], float] = lambda each: each.value
    ) -> list[tuple[float, float]]:
        """A figure of two contestants in each round in which it was measured for both."""
        of_round: dict[str, dict[int, float]] = {ours: {}, theirs: {}}
        for each in self._measurements:
            if each.what == what and each.contestant in of_round:
                of_round[each.contestant][each.round] = of(each)
        rounds = sorted(of_round[ours].keys() & of_round[theirs].keys())
        return [(of_round[ours][number], of_round[theirs][number]) for number in rounds]

    def _values(self, contestant: str, what: str) -> list[float]:
        return [each.value for each in self._of(contestant, what)]

    def _of(self, contestant: str, what: str) -> list[Measurement]:
        return [each for each in self._measurements if (each.contestant, each.what) == (contestant, what)]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value of `ordered` that `percent` of the values do not exceed; `ordered` must not be empty."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
