"""Compiles every kernel for every target, without a GPU, and writes what came out into docs/kernels.md.

`python -m models.kernels.triton.report`. `--json` prints what was read instead, for the tests; `--targets` and files
of kernels choose some. `--check` compiles nothing and compares the page's list of kernels with the code's.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import pkgutil
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import models.kernels.triton as package
from models.kernels.triton.assembly import Assembly, problems, read_assembly
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS

PAGE = Path(__file__).parents[3] / "docs" / "kernels.md"
_BEGIN, _END = "<!-- kernels: begin -->\n", "<!-- kernels: end -->\n"
_NOT_THERE = "-"


def compilations(files: Iterable[str] = (), targets: Iterable[str] = TARGETS) -> dict[str, list[Compilation]]:
    """What is to be compiled, by the file of kernels that exports it."""
    wanted, archs = set(files), set(targets)
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg or module.name == "report" or (wanted and module.name not in wanted):
            continue
        exported = getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "COMPILATIONS", ())
        chosen = [compilation for compilation in exported if compilation.target.arch in archs]
        if chosen:
            found[module.name] = chosen
    return found


def table(results: Sequence[tuple[Compilation, Assembly]]) -> str:
    """A row a form of a kernel, a column a target."""
    by_name: dict[str, dict[str, str]] = {}
    for compilation, assembly in results:
        by_name.setdefault(compilation.name, {})[compilation.target.arch] = _cell(assembly)
    lines = ["| Kernel | " + " | ".join(TARGETS) + " |", "| --- |" + " --- |" * len(TARGETS)]
    for name, cells in by_name.items():
        lines.append(f"| {name} | " + " | ".join(cells.get(arch, _NOT_THERE) for arch in TARGETS) + " |")
    return "\n".join(lines) + "\n"


def _cell(assembly: Assembly) -> str:
    parts = [f"{assembly.registers} r", f"{assembly.occupancy} w"]
    if assembly.lds:
        parts.append(f"{assembly.lds / 1024:.3g} K")
    if assembly.matrix:
        parts.append(_matrix_shape(assembly.matrix))
    if assembly.spilled:
        parts.append(f"**{assembly.spilled} B spilled**")
    return ", ".join(parts)


def _matrix_shape(matrix: dict[str, int]) -> str:
    """Rows x columns x depth of the commonest; WGMMA is told from MMA by its 64 rows."""
    commonest = max(matrix, key=lambda name: matrix[name])
    return "x".join(re.findall(r"(?:m|n|k|x|_)(\d+)(?=\D|$)", commonest)[:3])


def names_on_page() -> list[str]:
    """The forms of kernels that the page has rows for."""
    rows = PAGE.read_text().split(_BEGIN)[1].split(_END)[0]
    return re.findall(r"^\| (?!Kernel|---)([^|]+?) \|", rows, re.MULTILINE)


def write_page(results: Sequence[tuple[Compilation, Assembly]]) -> None:
    """Puts the table where the page has its marks."""
    before, rest = PAGE.read_text().split(_BEGIN)
    _, after = rest.split(_END)
    PAGE.write_text(before + _BEGIN + table(results) + _END + after)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="files of kernels, without .py; all of them by default")
    parser.add_argument("--targets", default=",".join(TARGETS), help="architectures, with commas between")
    parser.add_argument("--json", action="store_true", help="print one line a compilation, and write no page")
    parser.add_argument("--check", action="store_true", help="compile nothing; is every kernel on the page?")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        sys.stderr.write("Triton is not installed, and has no build for every machine: nothing is looked at\n")
        return 0 if options.check else 1
    chosen = compilations(options.files, options.targets.split(","))
    if options.check:
        wanted = list(dict.fromkeys(one.name for several in chosen.values() for one in several))
        if wanted != names_on_page():
            sys.stderr.write(f"{PAGE} lacks a kernel or has one too many; python -m {package.__name__}.report\n")
            return 1
        return 0
    results, is_wrong = [], False
    for file, several in chosen.items():
        for compilation in several:
            assembly = read_assembly(compilation, compilation.compile())
            wrong = problems(compilation, assembly)
            is_wrong |= bool(wrong)
            results.append((compilation, assembly))
            head = {"file": file, "name": compilation.name, "target": compilation.target.arch, "problems": wrong}
            if options.json:
                sys.stdout.write(json.dumps(head | dataclasses.asdict(assembly)) + "\n")
            elif wrong:
                sys.stderr.write(f"{compilation.name} on {compilation.target.arch}: {'; '.join(wrong)}\n")
    if not options.json:
        write_page(results)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
