"""Writes the tables of docs/configuration.md: `python -m tools.config_docs [--check]`.

The tables are between two markers of the page; all other text is written by hand. `make lint` checks them.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.config.settings import SETTINGS, Setting
from tools.written import write_or_compare

OPENING = "<!-- configuration table: written by `make docs` -->\n"
CLOSING = "<!-- end of the configuration table -->"


def full_tables() -> str:
    """The tables of docs/configuration.md: name, type and default of every setting, one table for each section."""
    lines: list[str] = []
    for section in dict.fromkeys(setting.section for setting in SETTINGS):
        heading = section.__name__.removesuffix("Config") or "Model and engine"
        lines += [f"\n## {heading}\n", "\n"]
        rows = (_full_row(setting) for setting in SETTINGS if setting.section is section)
        lines += _table(("Flag", "Environment", "YAML", "Type", "Default", "Meaning"), rows)
    return "".join(lines) + "\n"


PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"


def main(arguments: Sequence[str]) -> int:
    """Write or check the page. Returns the exit code."""
    return write_or_compare({PAGE: with_table(PAGE.read_text("utf-8"), full_tables())}, arguments, "make docs")


def with_table(page: str, table: str) -> str:
    """Return `page` with `table` between its markers. Raises `ValueError` if a marker is missing."""
    before, opening, rest = page.partition(OPENING)
    _, closing, after = rest.partition(CLOSING)
    if not opening or not closing:
        raise ValueError(f"a page of the configuration tables needs the lines {OPENING.strip()} and {CLOSING}")
    return before + opening + table + closing + after


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cells)} |\n"


def _full_row(setting: Setting) -> Sequence[str]:
    return (
        _code(setting.flag),
        _code(setting.env),
        _code(setting.name),
        _cell(setting.type_name),
        _code(setting.default),
        _cell(setting.meaning),
    )


def _code(text: str | None) -> str:
    return "" if text is None else f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
