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


Measured = tuple[tuple[str, ...], range, list[tuple[int, int]]]
"""Names, rounds, and the tokens of each workload's prompt and answer."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Measured]:
    """Contestants, rounds and workloads of each group that was measured together."""
    found: list[Measured] = []

    def measure(
        contestants: Sequence[Contestant],
        workloads: Sequence[Workload],
        rounds: range,
        root: Path,
        read_rate: Callable[[], float],
        tell: Callable[[Measurement], None],
    ) -> None:
        found.append(
            (
                tuple(each.name for each in contestants),
                rounds,
                [(each.prompt_tokens, each.max_tokens) for each in workloads],
            )
        )
        for number in rounds:
            for each in contestants:
                if each.name == "broken":
                    raise ServerError("broken: it ended")
                tell(Measurement(each.name, number, "one", 10.0))

    peers = [
        Peer(name, "int8" if name == "eight-bits" else "bf16") for name in ("good", "broken", "missing", "eight-bits")
    ]
    everyone = [Kaon("bf16"), Kaon("int8"), *peers]
    monkeypatch.setattr(program, "_contestants", lambda _: everyone)
    monkeypatch.setattr(program, "measure", measure)
    monkeypatch.setattr(program, "PEERS", tmp_path / "peers")
    monkeypatch.setattr(program, "read_probe", lambda: lambda: 25.0)
    monkeypatch.setattr(program, "measure_machine", lambda number: ("A, avx2", []))
    return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    page = tmp_path / "page.md"
    page.write_text("# Benchmarks\n")

    def call(*arguments: str) -> int:
        return program.main(["--results", str(tmp_path / "results"), "--page", str(page), *arguments])

    return call


def test_each_peer_is_measured_together_with_the_kaon_of_its_precision(run: Run, measured: list[Measured]) -> None:
    assert run("--peers", "good,eight-bits", "--rounds", "2", "--workloads", "one,many") == 0
    tokens = [(128, 128), (256, 64)]
    assert measured == [(("kaon", "good"), range(2), tokens), (("kaon-int8", "eight-bits"), range(2, 4), tokens)]


def test_a_quick_look_shortens_rates_and_leaves_the_page(run: Run, measured: list[Measured], tmp_path: Path) -> None:
    assert run("--peers", "good", "--rounds", "1", "--workloads", "one,long", "--divide", "4") == 0
    assert measured == [(("kaon", "good"), range(1), [(32, 32), (2048, 4)])]
    assert (tmp_path / "page.md").read_text() == "# Benchmarks\n"


def test_a_kaon_without_peers_is_measured_alone(run: Run, measured: list[Measured]) -> None:
    run("--peers", "kaon-int8,good", "--rounds", "1")
    assert [names for names, _, _ in measured] == [("kaon-int8",), ("kaon", "good")]


def test_those_that_fail_are_reported_and_the_others_go_on(
    run: Run, measured: list[Measured], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("--peers", "broken,missing,good", "--rounds", "1") == 1
    assert [names for names, _, _ in measured] == [("kaon", "good"), ("kaon", "broken")]
    reported = capsys.readouterr().out
    assert "broken: it ended" in reported
    assert "missing: there is none" in reported
    row = "| 1 stream 128/128 | bf16 | good | 1.00 | 1.00 to 1.00 | 1.20 |"
    assert row in reported
    assert row in (tmp_path / "page.md").read_text()


def test_a_peer_that_fails_before_its_last_round_is_unfinished(
    run: Run, measured: list[Measured], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(
        contestants: Sequence[Contestant],
        workloads: Sequence[Workload],
        rounds: range,
        root: Path,
        read_rate: Callable[[], float],
        tell: Callable[[Measurement], None],
    ) -> None:
        for each in contestants:
            tell(Measurement(each.name, rounds.start, "one", 10.0))
        raise ServerError(f"{contestants[-1].name}: its answers did not end")

    assert run("--peers", "good", "--rounds", "2", "--workloads", "one") == 0
    monkeypatch.setattr(program, "measure", measure)
    assert run("--peers", "eight-bits", "--rounds", "2", "--workloads", "one", "--append") == 1
    page = (tmp_path / "page.md").read_text()
    assert "| 1 stream 128/128, tok/s | 10.0 | unfinished | 10.0 | unfinished |" in page
    assert "| 1 stream 128/128 | bf16 | good | 1.00 |" in page
    assert "| 1 stream 128/128 | int8 |" not in page
    # A later run that ends gives the figure.
    monkeypatch.setattr(program, "measure", lambda *_: None)
    results = Results(tmp_path / "results", append=True)
    for name in ("kaon-int8", "eight-bits"):
        results.plan(name, "one", range(9, 10))
        results.add(Measurement(name, 9, "one", 30.0))
    assert run("--rounds", "0") == 0
    assert "| 1 stream 128/128 | int8 | eight-bits | 1.00 |" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "-1"], "-1 is not a number of rounds"),
        (["--rounds", "0"], "which holds no measurements, and --rounds is 0"),
        (["--page", "/nowhere.md"], "--page is /nowhere.md, which is no file"),
        (["--results", __file__, "--append"], "which is no file of measurements"),
    ],
)
def test_a_run_that_would_measure_or_write_nothing_is_refused_at_once(
    run: Run, measured: list[Measured], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(*arguments)
    assert said in capsys.readouterr().err
    assert not measured


def test_a_run_in_pieces_numbers_its_rounds_on(run: Run, measured: list[Measured], tmp_path: Path) -> None:
    run("--peers", "good", "--rounds", "1", "--no-page")
    assert (tmp_path / "page.md").read_text() == "# Benchmarks\n"
    run("--peers", "good", "--rounds", "1", "--append")
    assert [rounds for _, rounds, _ in measured] == [range(1), range(1, 2)]
    before = (tmp_path / "page.md").read_text()
    assert run("--rounds", "0") == 0
    assert (tmp_path / "page.md").read_text() == before
    assert Results(tmp_path / "results", append=True).rounds("good", "one") == 2
