"""The stand-in for ROCm's library `aiter`: `library` puts a copy of it where this process and its children find it."""

import importlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.ops import aiter

_HERE = Path(__file__).parent


class Library:
    """A copy, which a test may break."""

    def __init__(self, root: Path) -> None:
        self.root = root / "aiter"
        shutil.copytree(_HERE / "aiter", self.root, ignore=shutil.ignore_patterns("__pycache__"))

    def replace(self, file: str, *pairs: tuple[str, str]) -> None:
        """Change some words of a file, each of which must be there."""
        path = self.root / file
        source = path.read_text()
        for before, after in pairs:
            assert before in source, f"{file} has no {before!r}"
            source = source.replace(before, after)
        path.write_text(source)

    def write(self, file: str, source: str) -> None:
        """A file as a whole."""
        (self.root / file).write_text(source)

    def remove(self, file: str) -> None:
        """Leave a module out."""
        (self.root / file).unlink()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """Gone after the test, with what was started."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Where processes take turns: those of other tests are not waited for.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Of a file that changes twice within a second there may be old code.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Library(tmp_path)
    forget()


def forget() -> None:
    """Have the library be imported anew."""
    aiter.stop()
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]
    importlib.invalidate_caches()
