"""Measures one contestant: starts it for each checkpoint, gives it the workloads in order, and ends it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.checkpoints import Checkpoint, write
from benchmarks.peers.contestant import Contestant
from benchmarks.peers.load import Target, run
from benchmarks.peers.server_process import ServerProcess, free_port
from benchmarks.peers.workloads import WARM_UP, Workload


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
    """Tell each figure as it is found. Raises `ServerError` or `LoadError`; then what was told stands."""
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
