"""What the compiler made of each kernel here, kept in the checkout's cache: what is in it is not compiled again.

A line a compilation, by its key, which changes with the kernel's source, its options and Triton's version.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from models.kernels.triton import assembly
from models.kernels.triton.assembly import Assembly
from models.kernels.triton.compilation import Compilation

_ROOT = Path(__file__).parents[3]
PAGE = _ROOT / "docs" / "kernels.md"
RECORD = _ROOT / ".kernels.jsonl"


def read_record() -> dict[str, Assembly]:
    """By key; empty where the compiler's output was read in another way."""
    if not RECORD.is_file():
        return {}
    reader, *lines = RECORD.read_text().splitlines()
    if json.loads(reader) != _reader():
        return {}
    return dict(_assembly(json.loads(line)) for line in lines)


def add_to_record(results: Iterable[tuple[Compilation, Assembly]]) -> None:
    """Keep these too. Of processes that do so at the same time, what one adds may be lost, and is compiled again."""
    found = read_record() | {compilation.key: assembly for compilation, assembly in results}
    entries = [{"key": key} | dataclasses.asdict(assembly) for key, assembly in found.items()]
    unfinished = RECORD.with_suffix(f".{os.getpid()}")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in (_reader(), *entries)))
    unfinished.replace(RECORD)


def _reader() -> dict[str, str]:
    """What reads the compiler's output."""
    source = Path(assembly.__file__).read_bytes()
    return {"read by": hashlib.sha256(source).hexdigest()[:20]}


def _assembly(line: dict[str, Any]) -> tuple[str, Assembly]:
    fields = {field.name: line[field.name] for field in dataclasses.fields(Assembly)}
    fields["loads"] = {int(width): count for width, count in line["loads"].items()}
    return line["key"], Assembly(**fields)
