"""Compiles every kernel for its targets, without a GPU, and writes the results into docs/kernels.md.

`python -m tools.kernel_report`. Recorded compilations are not repeated, unless `--fresh`. `--json` prints what was
read instead, for the tests; `--targets` and files of kernels select some. `--check` compiles nothing and compares the
page's list of kernels with the code's.
"""

import argparse
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models.ops.triton as package
from models.ops.triton.compilation import Compilation
from models.ops.triton.configs import KIB, TARGETS, Target

# The compiler's output, and what is wrong with it.

_SIMDS = 4
"""Of a compute unit, of an RDNA pair of them, of a multiprocessor: what waves are shared out to."""
_WIDTHS = {"x4": 16, "128": 16, "x3": 12, "96": 12, "x2": 8, "64": 8, "rd": 4, "32": 4, "rt": 2, "16": 2}
"""Bytes of a load, by the last letters of its name: `dwordx4`, `b128`, `dword`, `ushort`; others are of one byte."""
_AMD_LOAD = re.compile(r"^\s+(?:global|buffer|flat)_load_(\w+)", re.MULTILINE)
_PTX_LOAD = re.compile(r"\bld\.global(?:\.\w+?)*?(?:\.v(\d))?\.[busf](\d+)\b")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b[^;]*?\], *\[[^]]*\], *(0x[0-9a-f]+|\d+)")


@dataclass(frozen=True, slots=True)
class Assembly:
    """A kernel as it would run."""

    registers: int
    """Vector registers of a thread, accumulation registers included."""
    spilled: int
    """Bytes of a thread that are kept in memory because registers ran out."""
    scalar_spills: int
    """Scalars of a wave that are kept in lanes of vector registers."""
    lds: int
    """Bytes of a workgroup."""
    occupancy: int
    """Waves of whole workgroups that a SIMD can hold."""
    matrix: dict[str, int]
    """Matrix instructions, by name."""
    loads: dict[int, int]
    """Instructions that load from global memory, by bytes a thread."""


def read_assembly(compilation: Compilation, compiled: Any) -> Assembly:
    """`compiled` is of `compilation.compile()`."""
    read = _read_cuda if compilation.target.backend == "cuda" else _read_amd
    return read(compilation, compiled)


def problems(compilation: Compilation, assembly: Assembly) -> list[str]:
    """What must not be, in words: spills where the target has a table of its own, narrow loads on first-class ones."""
    target = compilation.target
    found = []
    if assembly.lds > target.lds_bytes:
        found.append(f"{assembly.lds} bytes of LDS of {target.lds_bytes}")
    if assembly.spilled and not target.like:
        found.append(f"{assembly.spilled} bytes of registers are spilled")
    if compilation.has_dot and not assembly.matrix:
        found.append("has a dot and no matrix instruction")
    if not target.first_class:
        return found
    narrow = sum(count for width, count in assembly.loads.items() if width < 4)
    if narrow > compilation.narrow_loads:
        found.append(f"{narrow} loads of less than 4 bytes, {compilation.narrow_loads} expected")
    if compilation.has_wide_loads and 16 not in assembly.loads:
        found.append(f"no load of 16 bytes, only of {sorted(assembly.loads)}")
    return found


def _read_amd(compilation: Compilation, compiled: Any) -> Assembly:
    text = compiled.asm["amdgcn"]
    target, lds = compilation.target, int(compiled.metadata.shared)
    arch_registers, accumulators = _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"; NumAgprs: (\d+)", text, 0)
    waves = compilation.config.num_warps
    groups = min(_number(r"; Occupancy: (\d+)", text) * _SIMDS // waves, _groups_by_lds(target, lds))
    return Assembly(
        registers=_number(r"; TotalNumVgprs: (\d+)", text, arch_registers + accumulators),
        spilled=_number(r"; ScratchSize: (\d+)", text),
        scalar_spills=_number(r"\.sgpr_spill_count:\s+(\d+)", text),
        lds=lds,
        occupancy=groups * waves // _SIMDS,
        matrix=_matrix(target, re.findall(r"^\s+(v_(?:mfma|wmma)_\w+)", text, re.MULTILINE)),
        loads=dict(Counter(_width(name) for name in _AMD_LOAD.findall(text))),
    )


def _groups_by_lds(target: Target, lds: int) -> int:
    """LDS is a compute unit's on CDNA, and a pair's of them, twice as much, on RDNA."""
    return target.lds_bytes * (1 if target.warp_size == 64 else 2) // max(lds, 1)


def _width(name: str) -> int:
    name = name.removesuffix("_e32").removeprefix("lds_")
    name = re.sub(r"^(?:ushort|sshort|short|u16|i16|d16)(?:_\w+)?$", "b16", name)
    return next((width for letters, width in _WIDTHS.items() if name.endswith(letters)), 1)


def _read_cuda(compilation: Compilation, compiled: Any) -> Assembly:
    text = compiled.asm["ptx"]
    lds, waves = int(compiled.metadata.shared), compilation.config.num_warps
    usage = _resource_usage(compiled.asm["cubin"])
    registers = _number(r"REG:(\d+)", usage)
    groups = min(
        64 * KIB // (-(-registers // 8) * 8 * compilation.target.warp_size * waves),
        # A workgroup takes 1 KiB more than its own.
        (compilation.target.lds_bytes + KIB) // (lds + KIB),
        compilation.target.waves // waves,
    )
    loads = Counter(int(vector or 1) * int(bits) // 8 for vector, bits in _PTX_LOAD.findall(text))
    loads.update(int(size, 0) for size in _PTX_COPY.findall(text))
    return Assembly(
        registers=registers,
        spilled=_number(r"LOCAL:(\d+)", usage) + _number(r"STACK:(\d+)", usage),
        scalar_spills=0,
        lds=lds,
        occupancy=groups * waves // _SIMDS,
        matrix=_matrix(compilation.target, re.findall(r"\b((?:wgmma\.mma_async|mma\.sync)[\w.]*?m\d+n\d+k\d+)", text)),
        loads=dict(loads),
    )


def _resource_usage(cubin: bytes) -> str:
    """What `cuobjdump`, which Triton brings, says of a program."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout


def _matrix(target: Target, names: list[str]) -> dict[str, int]:
    return dict(Counter(name for name in names if name.startswith(target.matrix)))


def _number(pattern: str, text: str, default: int | None = None) -> int:
    found = re.search(pattern, text)
    if found is None:
        if default is None:
            raise ValueError(f"the compiler's output has no {pattern!r}")
        return default
    return int(found.group(1))


# The record of compilations: one that is in it is not repeated.
#
# One line a compilation, by its key, which changes with the kernel's source, its options and Triton's version.

_ROOT = Path(__file__).parents[1]
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
    source = Path(__file__).read_bytes()
    return {"read by": hashlib.sha256(source).hexdigest()[:20]}


def _assembly(line: dict[str, Any]) -> tuple[str, Assembly]:
    fields = {field.name: line[field.name] for field in dataclasses.fields(Assembly)}
    fields["loads"] = {int(width): count for width, count in line["loads"].items()}
    return line["key"], Assembly(**fields)


_BEGIN, _END = "<!-- kernels: begin -->\n", "<!-- kernels: end -->\n"
_NOT_THERE = "-"
ON_PAGE = tuple(arch for arch, target in TARGETS.items() if not target.like)
"""Those with rows of their own in the table of configurations."""


def compilations(files: Iterable[str] = (), targets: Iterable[str] = ON_PAGE) -> dict[str, list[Compilation]]:
    """What is to be compiled, by the file of kernels that exports it."""
    wanted, archs = set(files), set(targets)
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg or (wanted and module.name not in wanted):
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
    sys.stderr.write(f"{PAGE} lacks a kernel or has one too many; python -m tools.kernel_report\n")
    return False


if __name__ == "__main__":
    sys.exit(main())
