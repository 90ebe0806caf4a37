"""The parts of a benchmark run on a GPU, and their findings as tables and JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from benchmarks.gpu.bench import Bench, Case, Values
from benchmarks.report import marked, put_section


@dataclass(frozen=True, slots=True)
class Finding:
    """A row: figures, or the reason why there are none."""

    part: str
    case: str
    values: Values = field(default_factory=dict)
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Its fields that are not empty."""
        return {name: value for name, value in asdict(self).items() if value}


_MODULES = {
    "ceilings": "bench",
    "decode": "steps",
    "prefill": "steps",
    "gap": "steps",
    "attention": "kernels",
    "latents": "kernels",
    "quantized": "kernels",
    "experts": "kernels",
    "dense": "kernels",
    "sampling": "kernels",
    "launch": "launch",
    "engine": "engine",
}
"""The module of each part's cases; imported only when they are measured, since some need Triton."""


class Part(NamedTuple):
    """Cases of one subject, measured in a process of their own."""

    name: str
    title: str
    what: str
    target: str
    seconds: float
    """Time limit."""
    quick_seconds: float
    """Time limit of a quick run."""

    def cases(self, bench: Bench) -> Iterator[Case]:
        """The cases in order; inputs that several share are made when the first of them runs."""
        module = import_module(f"benchmarks.gpu.{_MODULES[self.name]}")
        return cast("Iterator[Case]", getattr(module, f"{self.name}_cases")(bench))


# The measurements, the most important first, so that an interrupted run has the most important results.

PARTS = (
    Part(
        "ceilings",
        "What the device can do",
        "Large copies, counting bytes read and written, and products of square bfloat16 matrices of random numbers. "
        "The figures below are held against the copy of 4 GiB and the product of 8192.",
        "none; they are the measure.",
        20,
        15,
    ),
    Part(
        "decode",
        "Decode steps",
        "Steps of the model runner, each launched before the one ahead of it is read, from one end of a step on the "
        "device to the next; greedy, 1k contexts, random weights and caches. The bound is the time to read the "
        "weights and each sequence's keys and values once at the copy's bandwidth.",
        "with graphs at least 80 % of the bound up to 64 sequences of 1k contexts, 70 % at 256.",
        110,
        50,
    ),
    Part(
        "prefill",
        "Prefill",
        "One prompt at the 8B shape, against its floating-point operations at the matrix product's rate.",
        "8k tokens: at least 60 % of the matrix rate.",
        40,
        20,
    ),
    Part(
        "gap",
        "Between two decode steps",
        "The engine's loop with deferred output, at the 0.6B shape with graphs and 1k contexts: how long the device "
        "does nothing between the end of one replayed pass and the start of the next, by the profiler's record of "
        "its activity; median and 99th percentile.",
        "at most 30 us at 64 sequences, 60 us at 256.",
        45,
        20,
    ),
    Part(
        "attention",
        "Attention kernels",
        "32 query heads, 8 of keys and values, of 128; blocks of 16 tokens in shuffled order. Kernels are replayed "
        "from a graph with caches flushed in between; medians. SDPA is torch's, on keys and values that lie together.",
        "decode at least 85 % of the bound from 4k contexts on.",
        60,
        20,
    ),
    Part(
        "launch",
        "Launching kernels",
        "Host time to call an operator outside graphs, less the time of Triton's own launches in it with the same "
        "arguments. `an empty kernel` is what Triton takes for one without arguments.",
        "at most 5 us each kernel beyond Triton's own.",
        60,
        25,
    ),
    Part(
        "engine",
        "Throughput",
        "`LLMEngine` on random weights of Qwen3-0.6B's shape, greedy: generated tokens a second from the first "
        "request to the last token. Next to it transformers' continuous batching on the same device, in turn in the "
        "same run; where all prompts are of 1024 tokens, both are compared at 128 generated ones.",
        "more than transformers' continuous batching.",
        190,
        60,
    ),
    Part(
        "experts",
        "Mixtures of experts",
        "128 experts of which a token takes 8, hidden size 2048, of 768 features (Qwen3-30B-A3B), and MXFP4 ones of "
        "2880 by 2880, 4 of 32 (gpt-oss-20b). The bound reads each chosen expert's weight once.",
        "none is set.",
        50,
        12,
    ),
    Part(
        "quantized",
        "Quantised products",
        "A weight of 12288 by 4096, read as stored. Next to it torch's bfloat16 product of the same shape.",
        "none is set; FP8's bound counts twice the bfloat16 matrix rate.",
        60,
        12,
    ),
    Part(
        "dense",
        "Norms, activations and products",
        "At 4096 features, and gated at 12288. `F.linear` is what the linear layers call: torch's library.",
        "none is set; the bound is the bytes read and written once, or the matrix rate.",
        40,
        12,
    ),
    Part(
        "sampling",
        "Sampling",
        "A vocabulary of 151936. The bound reads the logits once.",
        "none is set.",
        40,
        12,
    ),
    Part(
        "latents",
        "Latent attention and recurrent layers",
        "128 heads over latents of 512 + 64 (DeepSeek-V3); gated delta net of 16 key and 32 value heads of 128.",
        "none is set.",
        40,
        12,
    ),
)
BY_NAME = {part.name: part for part in PARTS}


# The findings as tables: for the terminal, for a JSON file, and for their section of docs/benchmarks.md.

SECTION = "gpu"


def write_json(path: Path, described: Mapping[str, str], findings: Sequence[Finding]) -> None:
    """Write all findings so far."""
    reported = {"device": dict(described), "findings": [finding.as_json() for finding in findings]}
    path.write_text(json.dumps(reported, indent=1) + "\n", encoding="utf-8")


def put(page: Path, described: Mapping[str, str], findings: Sequence[Finding]) -> None:
    """Replace the section in the page, or append it."""
    put_section(page, SECTION, marked(SECTION, section(described, findings)))


def section(described: Mapping[str, str], findings: Sequence[Finding]) -> str:
    """The section's Markdown."""
    where = ", ".join(f"{name} {value}" for name, value in described.items())
    parts = [f"## On a GPU\n\nWritten by `make bench-gpu`. {where}.\n"]
    for part in PARTS:
        found = [finding for finding in findings if finding.part == part.name]
        if found:
            parts.append(
                f"### {part.title}\n\n{part.what}\n\nTarget: {part.target}\n\n" + "\n".join(table(found)) + "\n"
            )
    return "\n".join(parts)


def as_text(part: Part, findings: Sequence[Finding]) -> str:
    """A part's table for the terminal."""
    heads, *rows = _cells(findings)
    widths = [max(len(row[place]) for row in (heads, *rows)) for place in range(len(heads))]
    lines = []
    for first, *others in (heads, *rows):
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join((part.title, *lines, ""))


def table(findings: Sequence[Finding]) -> list[str]:
    """Lines of a Markdown table."""
    heads, *rows = _cells(findings)
    dashes = ["---", *("---:" for _ in heads[1:])]
    return ["| " + " | ".join(row) + " |" for row in (heads, dashes, *rows)]


def _cells(findings: Sequence[Finding]) -> list[list[str]]:
    """Heads and rows: every column of any finding, and a last column of errors."""
    columns = list(dict.fromkeys(column for finding in findings for column in finding.values))
    has_errors = any(finding.error is not None for finding in findings)
    lines = [["", *columns, *(["not measured"] if has_errors else [])]]
    for finding in findings:
        cells = [_cell(column, finding.values.get(column, "")) for column in columns]
        lines.append([finding.case, *cells, *([finding.error or ""] if has_errors else [])])
    return lines


def _cell(column: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if column.startswith("of the "):
        return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"
    magnitude = abs(value)
    return f"{value:.0f}" if magnitude >= 100 else f"{value:.1f}" if magnitude >= 10 else f"{value:.3g}"
