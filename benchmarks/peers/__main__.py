"""`python -m benchmarks.peers`: Kaon and each peer in turn, and this machine's section of docs/benchmarks.md.

`make bench-peers` calls it. A peer that cannot be installed, started or measured is reported, and the others continue.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import chart
from benchmarks.checkpoints import QWEN3_06B
from benchmarks.peers import page
from benchmarks.peers.load import WORKLOADS
from benchmarks.peers.measure import (
    Measurement,
    Results,
    ServerError,
    measure,
    measure_machine,
    percentile,
    read_probe,
)
from benchmarks.peers.servers import (
    PEERS,
    ROOT,
    Contestant,
    InstallError,
    Kaon,
    LlamaCpp,
    OpenVino,
    TransformersServe,
    Vllm,
)
from benchmarks.report import machine

_PAGE = ROOT / "docs" / "benchmarks.md"
_SHOWN_PORT = 8000


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a contestant failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.no_page and not options.page.is_file():
        parser.error(f"--page is {options.page}, which is no file; name a page, or give --no-page")
    PEERS.mkdir(exist_ok=True)
    everyone = _contestants(shlex.split(options.kaon))
    chosen = _choose(everyone, options.peers)
    workloads = [
        workload.divided(options.divide)
        for workload in WORKLOADS
        if not options.workloads or workload.name in options.workloads
    ]
    described, read_rate = machine(), read_probe()
    try:
        results = Results(options.results, options.append or not options.rounds)
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"--results is {options.results}, which is no file of measurements: {error}")
    if not options.rounds and not results.contestants():
        parser.error(f"--results is {options.results}, which holds no measurements, and --rounds is 0")
    failures: list[str] = []
    for contestant in chosen if options.rounds else ():
        try:
            contestant.install()
        except InstallError as error:
            failures.append(f"{contestant.name}: {error}")
    runners = [each for each in chosen if not any(line.startswith(f"{each.name}:") for line in failures)]
    first = results.next_round()
    name, limits = measure_machine(first)
    for limit in limits if options.rounds else ():
        _tell(results, limit)
    for group in _groups(runners) if options.rounds else ():
        rounds = range(first, first + options.rounds)
        first = rounds.stop
        for each in group:
            for workload in workloads:
                results.plan(each.name, workload.name, rounds)
        try:
            measure(group, workloads, rounds, PEERS, read_rate, lambda found: _tell(results, found))
        except ServerError as error:
            failures.append(str(error))
            _say(failures[-1])
    ratios = page.ratios([each for each in everyone if each.name in results.contestants()], results)
    if ratios.rows:
        _say(ratios.markdown())
    if options.divide > 1:
        _say(f"Prompts and answers of rates were {options.divide} times as short as their names say.")
    if not options.no_page and options.divide == 1:
        _write(options.page, name, described, everyone, results)
    for line in failures:
        _say(line)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__, allow_abbrev=False)
    names = [each.name for each in _contestants(())]
    parser.add_argument("--peers", type=_Names(names), help=f"which of {','.join(names)}; by default all")
    workloads = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", type=_Names(workloads), help=f"which of {','.join(workloads)}; by default all")
    parser.add_argument(
        "--rounds", type=_count, default=5, help="rounds with each peer; 0 only writes the page (default: 5)"
    )
    parser.add_argument("--results", type=Path, default=PEERS / "results.jsonl", help="file of the measurements")
    parser.add_argument("--append", action="store_true", help="go on with that file's rounds, instead of a new one")
    parser.add_argument("--page", type=Path, default=_PAGE, help="page that gets the section (default: %(default)s)")
    parser.add_argument("--no-page", action="store_true", help="leave the page as it is")
    parser.add_argument(
        "--divide",
        type=int,
        choices=(1, 2, 4),
        default=1,
        help="how many times as short the prompts and answers of rates are; more than 1 leaves the page as it is",
    )
    parser.add_argument("--kaon", default="", metavar="COMMAND", help="another Kaon's command, such as /old/bin/kaon")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of rounds from 0 on")
    return int(text)


class _Names:
    """The type of a comma-separated list of known names, for argparse."""

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def __call__(self, text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in self._known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(self._known)}")
        return names


def _contestants(kaon: Sequence[str]) -> list[Contestant]:
    return [
        Kaon("bf16", kaon),
        Kaon("int8", kaon),
        Kaon("int4", kaon),
        Vllm(),
        OpenVino("bf16"),
        OpenVino("int8"),
        OpenVino("int4"),
        LlamaCpp("bf16"),
        LlamaCpp("q8_0"),
        LlamaCpp("q4_k_m"),
        TransformersServe(),
    ]


def _choose(everyone: Sequence[Contestant], names: Sequence[str] | None) -> list[Contestant]:
    """The contestants that are named, or all. With peers of a precision goes the Kaon of that precision."""
    if names is None:
        return list(everyone)
    precisions = {each.precision for each in everyone if each.name in names}
    return [
        each for each in everyone if each.name in names or (isinstance(each, Kaon) and each.precision in precisions)
    ]


def _groups(chosen: Sequence[Contestant]) -> list[tuple[Contestant, ...]]:
    """Those that are in memory together: each peer and the Kaon of its precision, or a Kaon without peers."""
    kaons = {each.precision: each for each in chosen if isinstance(each, Kaon)}
    peers = [each for each in chosen if not isinstance(each, Kaon)]
    alone = [kaon for precision, kaon in kaons.items() if precision not in {peer.precision for peer in peers}]
    together = [(kaons[peer.precision], peer) if peer.precision in kaons else (peer,) for peer in peers]
    return [*((kaon,) for kaon in alone), *together]


def _tell(results: Results, found: Measurement) -> None:
    results.add(found)
    gaps = sorted(found.gaps)
    spread = f"  p50 {percentile(gaps, 50) * 1e3:.1f} ms, p99 {percentile(gaps, 99) * 1e3:.1f} ms" if gaps else ""
    _say(f"round {found.round}  {found.contestant:16} {found.what:18} {found.value:10.2f}{spread}")


def _write(path: Path, name: str, described: str, everyone: Sequence[Contestant], results: Results) -> None:
    commands = {
        each.name: each.command(QWEN3_06B, each.model(Path(QWEN3_06B.name)), _SHOWN_PORT).shown()
        for each in everyone
        if each.name in results.contestants()
    }
    page.put(path, name, page.section(name, described, everyone, commands, results))
    chart.draw_where_possible(path)
    _say(f"the section is in {path}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # Stopped servers must not outlive this process: the exit leaves every `with`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
