"""Compiles every kernel for its targets, without a GPU, and writes what came out into docs/kernels.md.

`python -m models.kernels.triton.report`. What .kernels.jsonl has is not compiled again, unless `--fresh`. `--json`
prints what was read instead, for the tests; `--targets` and files of kernels choose some. `--check` compiles nothing
and compares the page's list of kernels with the code's.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import multiprocessing
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import models.kernels.triton as package
from models.kernels.triton.assembly import Assembly, problems, read_assembly
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS
from models.kernels.triton.record import PAGE, add_to_record, read_record

_BEGIN, _END = "<!-- kernels: begin -->\n", "<!-- kernels: end -->\n"
_NOT_THERE = "-"
ON_PAGE = tuple(arch for arch, target in TARGETS.items() if not target.like)
"""Those with rows of their own in the table of configurations."""


def compilations(files: Iterable[str] = (), targets: Iterable[str] = ON_PAGE) -> dict[str, list[Compilation]]:
    """What is to be compiled, by the file of kernels that exports it."""
    wanted, archs = set(files), set(targets)
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg or module.name in ("report", "record") or (wanted and module.name not in wanted):
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
    lines = ["| Kernel | " + " | ".join(ON_PAGE) + " |", "| --- |" + " --- |" * len(ON_PAGE)]
    for name, cells in by_name.items():
        lines.append(f"| {name} | " + " | ".join(cells.get(arch, _NOT_THERE) for arch in ON_PAGE) + " |")
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


def compiled(wanted: Sequence[Compilation], known: Mapping[str, Assembly]) -> Iterator[Assembly]:
    """What the compiler makes of each, in their order; those that are not known are compiled once, on all cores."""
    new = {one.key: one for one in wanted if one.key not in known}
    found = dict(known)
    cores = min(len(os.sched_getaffinity(0)), len(new))
    # Kernels cannot be sent to another process: it finds them by number among those that it inherits.
    _waiting[:] = new.values()
    with multiprocessing.get_context("fork").Pool(cores) if cores > 1 else nullcontext() as pool:
        made = iter(map(_compile_nth, range(len(new))) if pool is None else pool.imap(_compile_nth, range(len(new))))
        for one in wanted:
            if one.key not in found:
                found[one.key] = next(made)
            yield found[one.key]


_waiting: list[Compilation] = []


def _compile_nth(nth: int) -> Assembly:
    return read_assembly(_waiting[nth], _waiting[nth].compile())


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="files of kernels, without .py; all of them by default")
    parser.add_argument("--targets", default=",".join(ON_PAGE), help="architectures, with commas between")
    parser.add_argument("--json", action="store_true", help="print one line a compilation, and write no page")
    parser.add_argument("--fresh", action="store_true", help="compile also what .kernels.jsonl has")
    parser.add_argument("--check", action="store_true", help="compile nothing; is every kernel on the page?")
    options = parser.parse_args(arguments)
    targets = options.targets.split(",")
    if not options.json and not options.check and (options.files or set(targets) != set(ON_PAGE)):
        parser.error("the page has all kernels on its own targets; others are for --json")
    if importlib.util.find_spec("triton") is None:
        sys.stderr.write("Triton is not installed, and has no build for every machine: nothing is looked at\n")
        return 0 if options.check else 1
    chosen = compilations(options.files, targets)
    if options.check:
        return 0 if is_page_complete(chosen) else 1
    files = [(file, compilation) for file, several in chosen.items() for compilation in several]
    wanted = [compilation for _, compilation in files]
    results, is_wrong = [], False
    known = {} if options.fresh else read_record()
    for (file, compilation), assembly in zip(files, compiled(wanted, known), strict=True):
        wrong = problems(compilation, assembly)
        is_wrong |= bool(wrong)
        results.append((compilation, assembly))
        if options.json:
            head = {"file": file, "name": compilation.name, "target": compilation.target.arch, "problems": wrong}
            sys.stdout.write(json.dumps(head | dataclasses.asdict(assembly)) + "\n")
            sys.stdout.flush()
        elif wrong:
            sys.stderr.write(f"{compilation.name} on {compilation.target.arch}: {'; '.join(wrong)}\n")
    add_to_record(results)
    if not options.json:
        write_page(results)
    return int(is_wrong)


def is_page_complete(chosen: Mapping[str, Sequence[Compilation]]) -> bool:
    """Whether the page has a row for each form of a kernel, and no other; says on stderr if not."""
    wanted = list(dict.fromkeys(one.name for several in chosen.values() for one in several))
    if wanted == names_on_page():
        return True
    sys.stderr.write(f"{PAGE} lacks a kernel or has one too many; python -m {package.__name__}.report\n")
    return False


if __name__ == "__main__":
    sys.exit(main())
