"""The stored measurements of the peers' benchmarks, and the section of the page."""

from pathlib import Path

import pytest

from benchmarks.checkpoints import QWEN3_06B, Checkpoint, words
from benchmarks.peers.__main__ import main
from benchmarks.peers.load import WORKLOADS, Answer, Workload
from benchmarks.peers.measure import MACHINE, MATRIX, READ, Measurement, Results, percentile
from benchmarks.peers.page import SECTION, put, section, section_of
from benchmarks.peers.servers import Command, Contestant
from benchmarks.report import kept_section


class Fake(Contestant):
    def __init__(self, name: str, precision: str = "bf16") -> None:
        self.name, self.title, self.precision = name, name.title(), precision

    def install(self) -> None:
        """Nothing."""

    def version(self) -> str:
        return f"{self.name} 1"

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        return Command((f"/opt/{self.name}", "serve", str(model)), {"A": "/lib/one.so:/lib/two.so", "EMPTY": ""})


KAON, PEER, OTHER = Fake("kaon"), Fake("peer"), Fake("other")


def results_of(folder: Path, *measurements: Measurement) -> Results:
    results = Results(folder / "results.jsonl", append=False)
    for measurement in measurements:
        results.add(measurement)
    return results


def text_of(results: Results, *contestants: Contestant, machine: str = "A, avx2") -> str:
    commands = {each.name: each.command(QWEN3_06B, Path("m"), 1).shown() for each in contestants}
    return section(machine, "A machine.", contestants, commands, results)


def test_figures_are_medians_of_rounds_and_ratios_those_of_rounds_with_both(tmp_path: Path) -> None:
    results = results_of(
        tmp_path,
        *(Measurement("kaon", number, "eight", value) for number, value in enumerate((90.0, 100.0, 500.0))),
        *(Measurement("peer", number, "eight", value) for number, value in enumerate((50.0, 50.0, 50.0))),
        Measurement("other", 0, "eight", 40.0),
        Measurement("kaon", 0, "long", 1.5),
        Measurement("peer", 0, "long", 4.0),
        Measurement("other", 0, "long", 3.0),
    )
    text = text_of(results, KAON, PEER, OTHER)
    assert "| 8 streams 256/64, tok/s | 100 | 50.0 | 40.0 |" in text
    assert "| 8 streams 256/64 | bf16 | Peer | 2.00 | 1.80 to 10.00 | 1.25 |" in text
    assert "| TTFT of 2048 tokens | bf16 | Other | 2.00 | 2.00 to 2.00 | 1.25 |" in text
    assert "| Peer | peer 1 | `A=one.so:two.so peer serve m` |" in text


def test_steps_are_compared_within_a_round(tmp_path: Path) -> None:
    """The second round is measured while the machine is half as fast; the peer has no third round."""
    results = results_of(
        tmp_path,
        Measurement("kaon", 0, "one", 30.0, (0.010, 0.010, 0.050)),
        Measurement("peer", 0, "one", 20.0, (0.012,)),
        Measurement("kaon", 1, "one", 15.0, (0.020,)),
        Measurement("peer", 1, "one", 10.0, (0.028,)),
        Measurement("kaon", 2, "one", 15.0, (0.040,)),
    )
    text = text_of(results, KAON, PEER)
    assert "| 1 stream 128/128 | bf16 | Peer | 1.50 | 1.50 to 1.50 | 1.20 |" in text
    assert "| 1 stream 128/128, median step | bf16 | Peer | 1.30 | 1.20 to 1.40 | - |" in text


@pytest.mark.parametrize(("precision", "target"), [("int8", "1.15"), ("int4", "1.40")])
def test_peers_are_compared_with_the_kaon_of_their_precision(tmp_path: Path, precision: str, target: str) -> None:
    results = results_of(
        tmp_path,
        Measurement("kaon", 0, "one", 10.0),
        Measurement(f"kaon-{precision}", 0, "one", 30.0),
        Measurement("quick", 0, "one", 20.0),
    )
    text = text_of(results, KAON, Fake(f"kaon-{precision}", precision), Fake("quick", precision))
    assert f"| 1 stream 128/128 | {precision} | Quick | 1.50 | 1.50 to 1.50 | {target} |" in text
    assert "| 1 stream 128/128 | bf16 |" not in text


def test_figures_are_shown_next_to_the_limits_of_the_machine(tmp_path: Path) -> None:
    """440 million parameters in the layers' matrices, 156 million in the head's, 112 KiB of keys and values per
    token."""
    results = results_of(
        tmp_path,
        Measurement(MACHINE, 0, READ, 25.0),
        Measurement(MACHINE, 0, MATRIX, 469.0),
        Measurement("kaon", 0, "one", 20.0, (0.050,)),
        Measurement("kaon", 0, "eight", 60.0, (0.100,)),
        Measurement("kaon", 0, "long", 7.0),
    )
    text = text_of(results, KAON)
    assert "| a step of 1 | 48.6 | 50.0 | 97% |" in text
    assert "| a step of 8 | 58.2 | 100 | 58% |" in text
    assert "| TTFT of 2048 tokens | 4873 | 7000 | 70% |" in text
    assert "limits" not in text_of(results_of(tmp_path, Measurement("kaon", 0, "one", 20.0, (0.050,))), KAON)


def test_a_contestant_without_figures_is_left_out(tmp_path: Path) -> None:
    assert "Other" not in text_of(results_of(tmp_path, Measurement("kaon", 0, "one", 1.0)), KAON, OTHER)


def test_the_gaps_of_all_rounds_make_the_percentiles(tmp_path: Path) -> None:
    results = results_of(
        tmp_path,
        Measurement("kaon", 0, "many", 1.0, (0.010,) * 98),
        Measurement("kaon", 1, "many", 1.0, (0.025, 0.030)),
    )
    assert "| 32 streams 256/64 | Kaon | 10.0 | 25.0 | 2.5 |" in text_of(results, KAON)


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentile([1.0], 99) == 1.0
    assert percentile([float(number) for number in range(1, 101)], 99) == 99.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0


def test_a_run_in_pieces_goes_on_with_the_rounds_of_its_file(tmp_path: Path) -> None:
    before = results_of(tmp_path, Measurement("kaon", 0, "many", 7.0, (0.5, 0.25)))
    assert before.next_round() == 1
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"contestant": "kaon", "rou')  # The run was killed while it wrote.
    again = Results(tmp_path / "results.jsonl", append=True)
    assert (again.median("kaon", "many"), again.gaps("kaon", "many"), again.next_round()) == (7.0, [0.25, 0.5], 1)
    # A reader changes nothing, since another run may be writing the line.
    assert not (tmp_path / "results.jsonl").read_text().endswith("\n")
    again.add(Measurement("kaon", 1, "many", 9.0))
    assert Results(tmp_path / "results.jsonl", append=True).median("kaon", "many") == 8.0
    assert Results(tmp_path / "results.jsonl", append=False).contestants() == []


def test_a_machine_s_section_takes_the_place_of_its_own_and_leaves_the_others(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Benchmarks\n\n## Ours\n")
    first, second, other = (
        text_of(results_of(tmp_path, Measurement("kaon", 0, "one", value)), KAON, machine=machine)
        for value, machine in ((1.0, "A, avx2"), (2.0, "A, avx2"), (3.0, "B, amx"))
    )
    put(page, "A, avx2", first)
    put(page, "B, amx", other)
    put(page, "A, avx2", second)
    text = page.read_text()
    assert text.startswith("# Benchmarks\n\n## Ours\n\n<!-- peers -->\n## Peers on the same machine\n")
    assert text.count("make bench-peers  ") == 1
    assert text.endswith(f"\n\n{second}\n{other}")
    assert kept_section(text, section_of("A, avx2")) == second
    assert kept_section(text, section_of("B, amx")) == other


def test_a_page_without_the_section_keeps_nothing() -> None:
    assert kept_section("# Benchmarks\n", SECTION) == ""


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_prompts_have_the_length_that_is_asked_for_and_differ_but_for_what_they_share(workload: Workload) -> None:
    requests = workload.requests(seed=3)
    prompts = [request.prompt.split() for request in requests]
    assert {len(prompt) for prompt in prompts} == {workload.prompt_tokens}
    assert len({tuple(prompt[: workload.shared_tokens]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == workload.streams
    assert requests == workload.requests(seed=3)
    assert requests[0].prompt[:60] != workload.requests(seed=4)[0].prompt[:60]


def test_the_words_of_prompts_differ() -> None:
    assert len(set(words())) == len(words())


def test_a_rate_counts_from_the_first_request_to_the_last_token() -> None:
    answers = [Answer(1.0, (2.0, 3.0), 10), Answer(1.5, (4.0, 6.0), 10)]
    figures = {workload.name: workload.figure.of(answers) for workload in WORKLOADS}
    assert (figures["eight"], figures["long"], figures["shared"]) == (4.0, 1.75, 5.0)


def test_an_unknown_peer_is_named_beside_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--peers", "vllm,ollama"])
    assert "ollama: there are kaon, kaon-int8, kaon-int4, vllm" in capsys.readouterr().err
