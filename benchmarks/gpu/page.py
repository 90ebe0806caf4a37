"""The findings as tables: for the terminal, for a JSON file, and for their section of docs/benchmarks.md."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.case import Finding, Part
from benchmarks.gpu.parts import PARTS
from benchmarks.report import marked, put_section

SECTION = "gpu"


def write_json(path: Path, described: Mapping[str, str], findings: Sequence[Finding]) -> None:
    """All that was found so far."""
    told = {"device": dict(described), "findings": [finding.as_json() for finding in findings]}
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def put(page: Path, described: Mapping[str, str], findings: Sequence[Finding]) -> None:
    """Put the section in the place of the page's, or at its end."""
    put_section(page, SECTION, marked(SECTION, section(described, findings)))


def section(described: Mapping[str, str], findings: Sequence[Finding]) -> str:
    """The section's Markdown."""
    where = ", ".join(f"{name} {value}" for name, value in described.items())
    parts = [f"## On a GPU\n\nWritten by `make bench-gpu`. {where}.\n"]
    for part in PARTS:
        found = [finding for finding in findings if finding.part == part.name]
        if found:
            parts.append(
                f"### {part.title}\n\n{part.what}\n\nTarget: {part.target}\n\n" + "\n".join(_table(found)) + "\n"
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


def _table(findings: Sequence[Finding]) -> list[str]:
    """Lines of a Markdown table."""
    heads, *rows = _cells(findings)
    dashes = ["---", *("---:" for _ in heads[1:])]
    return ["| " + " | ".join(row) + " |" for row in (heads, dashes, *rows)]


def _cells(findings: Sequence[Finding]) -> list[list[str]]:
    """Heads and rows: every column that a finding has, and in the last one what failed."""
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
