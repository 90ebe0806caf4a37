"""The chart of README.md, docs/benchmarks.svg: Kaon and its peers, drawn from the tables of docs/benchmarks.md.

`python -m benchmarks.chart` draws it again; `make bench` and `make bench-peers` do so when they have written the page.
The same page gives the same bytes.
"""

import importlib.util
import io
import re
import sys
from pathlib import Path

from benchmarks.report import PAGE, kept_section

CHART = PAGE.with_suffix(".svg")

_PANELS = (
    ("Generated tokens per second", ("1 stream", "8 streams", "32 streams"), "more is better"),
    ("TTFT of 2048 tokens, s", ("TTFT",), "less is better"),
    ("16 prompts sharing 1024, s", ("16 sharing",), "less is better"),
    ("Memory, GB", ("memory, GB",), "less is better"),
)
"""Title of a row, the beginnings of the rows of the table that it shows, and whether larger is better."""

_COLOURS = ("#d9480f", "#868e96", "#adb5bd", "#ced4da")
"""Colour of Kaon's bars, and of its peers'."""


def main() -> None:
    CHART.write_bytes(draw(PAGE.read_text(encoding="utf-8")))


def draw_where_possible(page: Path) -> None:
    """Draw the chart of this repository's page, or say why it stays as it was."""
    if page.resolve() != PAGE.resolve():
        return
    if importlib.util.find_spec("matplotlib") is None:
        sys.stderr.write(f"{CHART.name} stays as it was: matplotlib is not installed (pip install -e '.[dev]')\n")
        return
    main()


def draw(page: str) -> bytes:
    """The chart as SVG. Raises `ValueError` where the page has no comparison with peers."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    servers, rows = figures(page)
    settings = {"svg.fonttype": "none", "svg.hashsalt": "kaon", "font.size": 9, "text.color": "#6e7781"}
    settings |= {"axes.edgecolor": "#6e7781", "xtick.color": "#6e7781", "ytick.color": "#6e7781"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(8.8, 3.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, len(_PANELS), width_ratios=[max(1.6, len(panel[1])) for panel in _PANELS])
        for axis, (title, starts, better) in zip(axes, _PANELS, strict=True):
            chosen = [name for start in starts for name in rows if name.startswith(start)]
            for nth, server in enumerate(servers):
                for group, name in enumerate(chosen):
                    value = rows[name][nth]
                    if value is None:
                        continue
                    x = group + 0.8 * (nth + 0.5) / len(servers) - 0.4
                    axis.bar(x, value, 0.75 / len(servers), color=_COLOURS[nth], label=server if not group else None)
                    axis.text(x, value, f"{value:g}", ha="center", va="bottom", fontsize=7)
            axis.set_title(f"{title}\n({better})", fontsize=8, color="#6e7781", wrap=True)
            axis.set_xticks(range(len(chosen)), [_label(name) for name in chosen] if len(chosen) > 1 else [""])
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_yticks([])
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=len(servers), frameon=False)
        written = io.BytesIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return written.getvalue()


def figures(page: str) -> tuple[list[str], dict[str, list[float | None]]]:
    """The servers, Kaon first, and each row's figures, from the first table of the first machine."""
    mark = re.search(r"^<!-- (peers: .+) -->$", page, re.MULTILINE)
    section = kept_section(page, mark[1]) if mark else ""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    if not lines:
        raise ValueError("docs/benchmarks.md has no comparison with peers; run `make bench-peers`")
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    rows: dict[str, list[float | None]] = {}
    for line in section[section.index(lines[1]) :].splitlines()[1:]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = [float(cell) if re.fullmatch(r"[\d.]+", cell) else None for cell in cells]
    return header[1:], rows


def _label(name: str) -> str:
    return name.split(" ")[0] + (" streams" if not name.startswith("1 ") else " stream")


if __name__ == "__main__":
    main()
