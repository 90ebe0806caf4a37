"""Hooks of mkdocs for the documentation site, named by mkdocs.yml: README.md becomes its first page, and links into
the source tree, which the site does not contain, become plain text."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
_SOURCE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
_README_LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add README.md as index.md."""
    files.append(File.generated(config, "index.md", content=_index((_ROOT / "README.md").read_text(encoding="utf-8"))))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links that leave docs/ by their text."""
    return _SOURCE_LINK.sub(r"\1", markdown)


def _index(readme: str) -> str:
    """README.md with its links relative to docs/."""

    def from_docs(match: re.Match[str]) -> str:
        target = match[1]
        return f"]({target.removeprefix('docs/')})" if target.startswith("docs/") else f"](../{target})"

    return _README_LINK.sub(from_docs, readme)
