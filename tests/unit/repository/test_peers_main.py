"""The order in which `python -m benchmarks.peers` measures, and its treatment of peers that fail."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.checkpoints import Checkpoint
from benchmarks.peers import __main__ as program
from benchmarks.peers.load import Workload
from benchmarks.peers.measure import Measurement, Results, ServerError
from benchmarks.peers.servers import Command, Contestant, InstallError, Kaon


class Peer(Contestant):
    def __init__(self, name: str, precision: str = "bf16") -> None:
        self.name, self.title, self.precision = name, name, precision

    def install(self) -> None:
        if self.name == "missing":
            raise InstallError("there is none")

    def version(self) -> str:
        return "1"

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        return Command((self.name,))


Run = Callable[..., int]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, str, int]]:
    """Round, contestant and number of workloads of each measurement."""
    found: list[tuple[int, str, int]] = []

    def measure(
        contestant: Contestant,
        workloads: Sequence[Workload],
        number: int,
        root: Path,
        tell: Callable[[Measurement], None],
    ) -> None:
        found.append((number, contestant.name, len(workloads)))
        if contestant.name == "broken":
            raise ServerError("it ended")
        tell(Measurement(contestant.name, number, "one", 10.0))

    peers = [
        Peer(name, "int8" if name == "eight-bits" else "bf16") for name in ("good", "broken", "missing", "eight-bits")
    ]
    everyone = [Kaon("bf16"), Kaon("int8"), *peers]
    monkeypatch.setattr(program, "_contestants", lambda _: everyone)
    monkeypatch.setattr(program, "measure", measure)
    monkeypatch.setattr(program, "PEERS", tmp_path / "peers")
    monkeypatch.setattr(program, "measure_machine", lambda number: ("A, avx2", []))
    return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    page = tmp_path / "page.md"
    page.write_text("# Benchmarks\n")

    def call(*arguments: str) -> int:
        return program.main(["--results", str(tmp_path / "results"), "--page", str(page), *arguments])

    return call


def test_the_order_turns_round_by_round(run: Run, measured: list[tuple[int, str, int]]) -> None:
    assert run("--peers", "good,eight-bits", "--rounds", "2") == 0
    order = ["kaon", "kaon-int8", "good", "eight-bits"]
    assert [name for _, name, _ in measured] == [*order, *reversed(order)]


def test_a_peer_brings_the_kaon_of_its_precision(run: Run, measured: list[tuple[int, str, int]]) -> None:
    run("--peers", "eight-bits", "--rounds", "1", "--workloads", "one,many")
    assert measured == [(0, "kaon-int8", 2), (0, "eight-bits", 2)]


def test_those_that_fail_are_reported_and_the_others_go_on(
    run: Run, measured: list[tuple[int, str, int]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("--peers", "broken,missing,good", "--rounds", "1") == 1
    assert [name for _, name, _ in measured] == ["kaon", "good", "broken"]
    reported = capsys.readouterr().out
    assert "broken: round 0: it ended" in reported
    assert "missing: there is none" in reported
    assert "| 1 stream 128/128 | bf16 | good | 1.00 | 1.20 |" in (tmp_path / "page.md").read_text()


def test_a_run_in_pieces_numbers_its_rounds_on(run: Run, measured: list[tuple[int, str, int]], tmp_path: Path) -> None:
    run("--peers", "good", "--rounds", "1", "--no-page")
    assert (tmp_path / "page.md").read_text() == "# Benchmarks\n"
    run("--peers", "good", "--rounds", "1", "--append")
    assert [(number, name) for number, name, _ in measured] == [(0, "kaon"), (0, "good"), (1, "good"), (1, "kaon")]
    before = (tmp_path / "page.md").read_text()
    assert run("--rounds", "0", "--append") == 0
    assert (tmp_path / "page.md").read_text() == before
    assert Results(tmp_path / "results", append=True).rounds("good", "one") == 2
