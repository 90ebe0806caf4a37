"""`Table`: the results of a benchmark, for the terminal and for docs/benchmarks.md."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from engine.config.release import release

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


@dataclass(frozen=True, slots=True)
class Table:
    """One benchmark's result. `target`: the project's own target for it, in words."""

    title: str
    what: str
    target: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """A section of a Markdown page."""
        lines = [self.columns, tuple("---:" if i else "---" for i in range(len(self.columns))), *self.rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{self.what}\n\nTarget: {self.target}\n\n{table}\n"


def processor() -> str:
    """The processor's model, as the system names it."""
    return next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )


def machine() -> str:
    """The machine and the versions of the measurement, in a line."""
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores of {processor()}, Python {platform.python_version()}, torch {version('torch')}, "
        f"kaon {release()}, load average {os.getloadavg()[0]:.1f} at the start."
    )


def marked(name: str, text: str) -> str:
    """A section that is measured separately, between marks by which it is found again."""
    return f"<!-- {name} -->\n{text}<!-- end of {name} -->\n"


def put_section(page: Path, name: str, text: str) -> None:
    """Replace a marked section in the page, or append it."""
    old = page.read_text(encoding="utf-8")
    kept = kept_section(old, name)
    page.write_text(old.replace(kept, text) if kept else f"{old.rstrip()}\n\n{text}", encoding="utf-8")


def kept_section(page: str, name: str) -> str:
    """A section of the page, with its marks; empty if there is none."""
    end_mark = f"<!-- end of {name} -->"
    start, end = page.find(f"<!-- {name} -->"), page.find(end_mark)
    return page[start : end + len(end_mark) + 1] if 0 <= start < end else ""
