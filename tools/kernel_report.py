"""Compiles every kernel for its targets, without a GPU, and writes docs/kernels.md and docs/kernels.json.

`python -m tools.kernel_report`. The page is for readers. The record, docs/kernels.json, has each compilation by a key
of all inputs on which the compiler's output depends; recorded compilations are not repeated, neither here nor by the
tests, unless `--fresh` is given. `--check` compiles nothing and reports whether both files are complete.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tools.kernels as package
from models.ops.triton.configs import KIB, TARGETS, Target
from tools.kernel_prediction import DEVICES, READERS, SIMDS, Prediction, Timing, predict, read_timing, width_of_load
from tools.kernel_work import work_of
from tools.kernels.compilation import Compilation, source_of

# The compiler's output, and its faults.

_AMD_LOAD = re.compile(r"^\s+(?:global|buffer|flat)_load_(\w+)", re.MULTILINE)
_PTX_LOAD = re.compile(r"\bld\.global(?:\.\w+?)*?(?:\.v(\d))?\.[busf](\d+)\b")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b[^;]*?\], *\[[^]]*\], *(0x[0-9a-f]+|\d+)")


@dataclass(frozen=True, slots=True)
class Assembly:
    """A compiled kernel."""

    registers: int
    """Vector registers of a thread, accumulation registers included."""
    spilled: int
    """Bytes of a thread that are spilled to memory because registers ran out."""
    scalar_spills: int
    """Scalars of a wave that are stored in lanes of vector registers."""
    lds: int
    """Bytes of LDS or shared memory of a workgroup."""
    occupancy: int
    """Waves of whole workgroups that a SIMD can hold."""
    matrix: dict[str, int]
    """Matrix instructions, by name."""
    loads: dict[int, int]
    """Instructions that load from global memory, by bytes per thread."""
    timing: Timing | None = None
    """The timing that predictions need; None if no predictions are made."""


def read_assembly(compilation: Compilation, compiled: Any) -> Assembly:
    """Create it from the result of `compilation.compile()`."""
    read = _read_cuda if compilation.target.backend == "cuda" else _read_amd
    return read(compilation, compiled)


def problems(compilation: Compilation, assembly: Assembly) -> list[str]:
    """Faults in words: spills, where the target has a table of its own; narrow loads, on first-class targets."""
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
    groups = min(_number(r"; Occupancy: (\d+)", text) * SIMDS // waves, _groups_by_lds(target, lds))
    return Assembly(
        registers=_number(r"; TotalNumVgprs: (\d+)", text, arch_registers + accumulators),
        spilled=_number(r"; ScratchSize: (\d+)", text),
        scalar_spills=_number(r"\.sgpr_spill_count:\s+(\d+)", text),
        lds=lds,
        occupancy=groups * waves // SIMDS,
        matrix=_matrix(target, re.findall(r"^\s+(v_(?:mfma|wmma)_\w+)", text, re.MULTILINE)),
        loads=dict(Counter(width_of_load(name) for name in _AMD_LOAD.findall(text))),
        timing=read_timing(text, target) if work_of(compilation) else None,
    )


def _groups_by_lds(target: Target, lds: int) -> int:
    """LDS belongs to a compute unit on CDNA, and to a pair of them, twice as much, on RDNA."""
    return target.lds_bytes * (1 if target.warp_size == 64 else 2) // max(lds, 1)


def _read_cuda(compilation: Compilation, compiled: Any) -> Assembly:
    text = compiled.asm["ptx"]
    target, lds, waves = compilation.target, int(compiled.metadata.shared), compilation.config.num_warps
    usage = _dump(compiled.asm["cubin"], "cuobjdump", "-res-usage")
    registers = _number(r"REG:(\d+)", usage)
    groups = min(
        64 * KIB // (-(-registers // 8) * 8 * target.warp_size * waves),
        # A workgroup takes 1 KiB in addition to its own.
        (target.lds_bytes + KIB) // (lds + KIB),
        target.waves // waves,
    )
    loads = Counter(int(vector or 1) * int(bits) // 8 for vector, bits in _PTX_LOAD.findall(text))
    loads.update(int(size, 0) for size in _PTX_COPY.findall(text))
    return Assembly(
        registers=registers,
        spilled=_number(r"LOCAL:(\d+)", usage) + _number(r"STACK:(\d+)", usage),
        scalar_spills=0,
        lds=lds,
        occupancy=groups * waves // SIMDS,
        matrix=_matrix(target, re.findall(r"\b((?:wgmma\.mma_async|mma\.sync)[\w.]*?m\d+n\d+k\d+)", text)),
        loads=dict(loads),
        timing=read_timing(_dump(compiled.asm["cubin"], "nvdisasm", "-c"), target) if work_of(compilation) else None,
    )


def _dump(cubin: bytes, tool: str, option: str) -> str:
    """The output of one of Triton's bundled tools for a program."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], check=True, capture_output=True, text=True).stdout


def _matrix(target: Target, names: list[str]) -> dict[str, int]:
    return dict(Counter(name for name in names if name.startswith(target.matrix)))


def _number(pattern: str, text: str, default: int | None = None) -> int:
    found = re.search(pattern, text)
    if found is None:
        if default is None:
            raise ValueError(f"the compiler's output has no {pattern!r}")
        return default
    return int(found.group(1))


# The record of compilations in the repository: a compilation whose key is in it is not repeated.

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "kernels.md"
RECORD = _ROOT / "docs" / "kernels.json"


def read_record(path: Path = RECORD) -> dict[str, Assembly]:
    """The recorded compilations by key; none if other code than this has read them from the compiler's output."""
    record = json.loads(path.read_text()) if path.is_file() else {}
    if record.get("reader") != _reader():
        return {}
    found = {entry["key"]: _assembly(entry) for entry in record["kernels"]}
    if record.get("replay") != _replay_reader():
        return {key: dataclasses.replace(assembly, timing=None) for key, assembly in found.items()}
    return found


Accepted = dict[str, dict[str, list[float]]]
"""By kernel with its problem, and target: ratio to the roofline, and microseconds."""


def write_record(
    results: Iterable[tuple[Compilation, Assembly]], path: Path = RECORD, predicted: Accepted | None = None
) -> None:
    """One line for each compilation, sorted by name and target, and one for the predictions of each problem."""
    entries = sorted(
        (
            {"name": one.name, "target": one.target.arch, "key": one.key} | dataclasses.asdict(assembly)
            for one, assembly in results
        ),
        key=lambda entry: (entry["name"], entry["target"]),
    )
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    shares = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in (predicted or {}).items())
    head = f'"triton": "{triton_release()}", "reader": "{_reader()}", "replay": "{_replay_reader()}"'
    path.write_text(f'{{{head}, "kernels": [\n{lines}\n], "predictions": {{\n{shares}\n}}}}\n')


def read_accepted(path: Path = RECORD) -> Accepted:
    """The predictions in the record, whichever code has read the compilations."""
    predicted: Accepted = json.loads(path.read_text()).get("predictions", {}) if path.is_file() else {}
    return predicted


def predictions(results: Iterable[tuple[Compilation, Assembly]]) -> dict[str, dict[str, Prediction]]:
    """By kernel with its problem, and target, in the order of the results."""
    found: dict[str, dict[str, Prediction]] = {}
    for one, assembly in results:
        if (timing := assembly.timing) is None:
            continue
        for work in work_of(one):
            made = predict(timing, work, DEVICES[one.target.arch], one.config.num_warps, assembly.occupancy)
            found.setdefault(f"{one.name}: {work.name}", {})[one.target.arch] = made
    return found


_TOLERANCE = 1.1


def lowered(made: Mapping[str, Mapping[str, Prediction]], recorded: Accepted) -> list[str]:
    """Predictions that are more than a tenth worse than those in the record, in words."""
    found = []
    for name, by_arch in made.items():
        for arch, one in by_arch.items():
            share, microseconds = recorded.get(name, {}).get(arch, (0.0, float("inf")))
            # Ratios are recorded in thousandths.
            if one.share * _TOLERANCE + 0.001 < share or one.seconds * 1e6 > microseconds * _TOLERANCE:
                now = f"{one.share:.0%} of the roofline and {one.seconds * 1e6:.1f} µs"
                found.append(f"{name} on {arch}: {now} are predicted, {share:.0%} and {microseconds:.1f} µs before")
    return found


def accepted(made: Mapping[str, Mapping[str, Prediction]], recorded: Accepted, *, all_of: bool = False) -> Accepted:
    """The predictions to record: the best so far, unless a change that makes some worse is accepted."""
    found: Accepted = {}
    for name, by_arch in made.items():
        for arch, one in by_arch.items():
            before = recorded.get(name, {}).get(arch)
            share, microseconds = round(one.share, 3), round(one.seconds * 1e6, 2)
            if before is not None and not all_of:
                share, microseconds = max(share, before[0]), min(microseconds, before[1])
            found.setdefault(name, {})[arch] = [share, microseconds]
    return found


def _reader() -> str:
    """A hash of the code that reads the compiler's output."""
    functions = (_read_amd, _groups_by_lds, width_of_load, _read_cuda, _dump, _matrix, _number)
    return _hash(functions, SIMDS, _AMD_LOAD.pattern, _PTX_LOAD.pattern, _PTX_COPY.pattern)


def _replay_reader() -> str:
    """The same hash for timings, which kernels without predictions do not have."""
    return _hash(READERS, SIMDS, DEVICES)


def _hash(functions: Iterable[Callable[..., object]], *constants: object) -> str:
    sources = [source_of(function) for function in functions]
    return hashlib.sha256(repr((sources, constants)).encode()).hexdigest()[:20]


def lacks(one: Compilation, known: Mapping[str, Assembly]) -> bool:
    """Whether a compilation, or the timing that its predictions need, is missing from the known ones."""
    assembly = known.get(one.key)
    return assembly is None or (assembly.timing is None and one.target.arch in DEVICES and bool(work_of(one)))


def _assembly(entry: dict[str, Any]) -> Assembly:
    fields = {field.name: entry[field.name] for field in dataclasses.fields(Assembly)}
    fields["loads"] = {int(width): count for width, count in entry["loads"].items()}
    fields["timing"] = Timing(*entry["timing"]) if entry["timing"] else None
    return Assembly(**fields)


_BEGIN, _END = "<!-- kernels: begin -->\n", "<!-- kernels: end -->\n"
_OTHERS, _OTHERS_END = "<!-- others: begin -->\n", "<!-- others: end -->\n"
_PREDICTED, _PREDICTED_END = "<!-- predictions: begin -->\n", "<!-- predictions: end -->\n"
_NOT_THERE = "-"
ON_PAGE = tuple(arch for arch, target in TARGETS.items() if not target.like)
"""Targets with rows of their own in the table of configurations."""
OTHERS = tuple(arch for arch, target in TARGETS.items() if target.like)
"""Targets that use another's rows: kernels are recorded for them on request, and otherwise compiled by long tests."""


def compilations(targets: Iterable[str] = ON_PAGE) -> list[Compilation]:
    """Every form of every kernel for some targets, in the order of the modules of `tools.kernels`."""
    archs = set(targets)
    modules = (
        importlib.import_module(f"{package.__name__}.{one.name}") for one in pkgutil.iter_modules(package.__path__)
    )
    exported = (one for module in modules for one in getattr(module, "COMPILATIONS", ()))
    return [one for one in exported if one.target.arch in archs]


def table(results: Sequence[tuple[Compilation, Assembly]], targets: Sequence[str] = ON_PAGE) -> str:
    """A table with a row for each form of a kernel and a column for each target."""
    by_name: dict[str, dict[str, str]] = {}
    for compilation, assembly in results:
        if compilation.target.arch in targets:
            by_name.setdefault(compilation.name, {})[compilation.target.arch] = _cell(assembly)
    lines = ["| Kernel | " + " | ".join(targets) + " |", "| --- |" + " --- |" * len(targets)]
    for name, cells in by_name.items():
        lines.append(f"| {name} | " + " | ".join(cells.get(arch, _NOT_THERE) for arch in targets) + " |")
    return "\n".join(lines) + "\n"


def prediction_table(made: Mapping[str, Mapping[str, Prediction]]) -> str:
    """A table with a row for each kernel and problem and a column for each target."""
    lines = ["| Kernel and problem | " + " | ".join(ON_PAGE) + " |", "| --- |" + " --- |" * len(ON_PAGE)]
    for name, by_arch in made.items():
        cells = [
            f"{one.share:.0%} {one.limit[0].upper()}, {one.in_flight / 1e6:.2g} MB, {one.seconds * 1e6:.3g} µs"
            if (one := by_arch.get(arch))
            else _NOT_THERE
            for arch in ON_PAGE
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def device_table() -> str:
    """The devices for which times are predicted."""
    lines = [
        "| Target | Device | Units | Memory, TB/s | Latency, ns | In flight, MB | bf16, TFLOP/s |",
        "| --- |" + " --- |" * 6,
    ]
    for arch, device in DEVICES.items():
        need = device.bandwidth * device.latency / 1e6
        lines.append(
            f"| {arch} | {device.name} | {device.units} | {device.bandwidth / 1e12:.3g} | {device.latency * 1e9:.0f} "
            f"| {need:.2g} | {device.matrix[16] / 1e12:.0f} |"
        )
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
    """Rows x columns x depth of the most common shape; WGMMA differs from MMA by its 64 rows."""
    commonest = max(matrix, key=lambda name: matrix[name])
    return "x".join(re.findall(r"(?:m|n|k|x|_)(\d+)(?=\D|$)", commonest)[:3])


def names_on_page() -> list[str]:
    """The forms of kernels that the page has rows for."""
    rows = PAGE.read_text().split(_BEGIN)[1].split(_END)[0]
    return re.findall(r"^\| (?!Kernel|---)([^|]+?) \|", rows, re.MULTILINE)


def write_page(results: Sequence[tuple[Compilation, Assembly]]) -> None:
    """Insert the tables at the page's marks."""
    page = PAGE.read_text()
    tables = (
        (_PREDICTED, _PREDICTED_END, device_table() + "\n" + prediction_table(predictions(results))),
        (_BEGIN, _END, table(results)),
        (_OTHERS, _OTHERS_END, table(results, OTHERS)),
    )
    for begin, end, text in tables:
        before, rest = page.split(begin)
        page = before + begin + text + end + rest.split(end)[1]
    PAGE.write_text(page)


def compile_all(wanted: Sequence[Compilation]) -> Iterator[Assembly]:
    """Compile each kernel on all cores, and return the results in order. Not to be called under the interpreter."""
    cores = min(len(os.sched_getaffinity(0)), len(wanted))
    if cores <= 1:
        yield from (read_assembly(one, one.compile()) for one in wanted)
        return
    # Kernels cannot be pickled: processes find them by index among those that they inherit.
    with multiprocessing.get_context("fork").Pool(cores, _inherit, (wanted,)) as pool:
        yield from pool.imap(_compile_inherited, range(len(wanted)))


_inherited: Sequence[Compilation] = ()


def _inherit(wanted: Sequence[Compilation]) -> None:
    global _inherited
    _inherited = wanted


def _compile_inherited(number: int) -> Assembly:
    return read_assembly(_inherited[number], _inherited[number].compile())


def compile_apart(keys: Iterable[str], cache: Path) -> dict[str, Assembly]:
    """Compilations by key, made in a process that does not interpret kernels; `cache` is Triton's cache folder
    there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.kernel_report", "--compile", *keys]
    environment["TRITON_CACHE_DIR"] = str(cache)
    result = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    entries = [json.loads(line) for line in result.stdout.splitlines()]
    return {entry["key"]: _assembly(entry) for entry in entries}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="compile also what docs/kernels.json has")
    parser.add_argument("--accept-slower", action="store_true", help="record predictions that are worse than before")
    parser.add_argument("--check", action="store_true", help="compile nothing; are page and record complete?")
    parser.add_argument("--others", nargs="+", metavar="KERNEL", help=f"compile these for {', '.join(OTHERS)} too")
    parser.add_argument("--compile", nargs="+", metavar="KEY", help="compile these and print one JSON line for each")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        sys.stderr.write("Triton is not installed, as it is not built for every platform: no kernel is compiled\n")
        return 0 if options.check else 1
    if options.compile:
        wanted = list({one.key: one for one in compilations(TARGETS) if one.key in options.compile}.values())
        for one, assembly in zip(wanted, compile_all(wanted), strict=True):
            sys.stdout.write(json.dumps({"key": one.key} | dataclasses.asdict(assembly)) + "\n")
        return 0
    every = compilations()
    known = {} if options.fresh else read_record()
    if options.check:
        return 0 if is_complete(every, known) else 1
    asked = tuple(f"{name} " for name in options.others or ())
    every += [one for one in compilations(OTHERS) if one.key in known or one.name.startswith(asked)]
    new = {one.key: one for one in every if lacks(one, known)}
    known |= zip(new, compile_all(list(new.values())), strict=True)
    results = [(one, known[one.key]) for one in every]
    wrong = [(one, found) for one, assembly in results if (found := problems(one, assembly))]
    for one, found in wrong:
        sys.stderr.write(f"{one.name} on {one.target.arch}: {'; '.join(found)}\n")
    made, recorded = predictions(results), read_accepted()
    slower = [] if options.accept_slower else lowered(made, recorded)
    for sentence in slower:
        sys.stderr.write(f"{sentence}; --accept-slower if it must be\n")
    write_record(results, predicted=accepted(made, recorded, all_of=options.accept_slower))
    write_page(results)
    return int(bool(wrong or slower))


def is_complete(every: Sequence[Compilation], known: Mapping[str, Assembly]) -> bool:
    """Whether the page has a row for each form of a kernel and no other, and the record has each compilation.

    Writes to stderr what is missing. The record belongs to one release of Triton, and is compared under that release
    only.
    """
    missing = [one for one in every if lacks(one, known)]
    if list(dict.fromkeys(one.name for one in every)) != names_on_page():
        sys.stderr.write(f"{PAGE} lacks a kernel or has one too many; run python -m tools.kernel_report\n")
        return False
    if missing and recorded_release() == triton_release():
        sys.stderr.write(
            f"{RECORD} lacks {len(missing)} compilations, the first of {missing[0].name} on {missing[0].target.arch}; "
            "run python -m tools.kernel_report\n"
        )
        return False
    return True


def triton_release() -> str:
    """The installed release of Triton."""
    import triton

    return str(triton.__version__)


def recorded_release(path: Path = RECORD) -> str | None:
    """The release of Triton with which the record was made."""
    return str(json.loads(path.read_text())["triton"]) if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
