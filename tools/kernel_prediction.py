"""How long a kernel is predicted to take on a device that is not there: from its binary, its launch and data sheets.

`read_timing` replays a binary's instructions in order, as one wave alone on a unit: each takes its cycles, a load
arrives after the memory's latency, and a wait stops the wave until what it waits for has arrived. From this come the
time of a pass through the loop that loads most, and of all instructions outside it. `predict` lets as many waves run
at a time as registers and LDS allow (Little's law: bytes in flight = bandwidth x latency), and bounds the result by
bandwidth and by the rate of matrix units.

It leaves out launches, misses of the TLB, conflicts of LDS banks, latency that grows with load, clocks that fall
under power limits. No device has confirmed these predictions; they order variants of a kernel, and find binaries whose
waves wait.
"""

import re
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from models.ops.triton.configs import Target

SIMDS = 4
"""SIMDs of a compute unit, of an RDNA pair of compute units or of a multiprocessor; waves run on them."""


class Device(NamedTuple):
    """A GPU of a target: bandwidth and rates by its maker's data sheet, latencies rounded up from pointer chases."""

    name: str
    units: int
    """Compute units on CDNA, pairs of them on RDNA, multiprocessors on NVIDIA."""
    bandwidth: float
    """Bytes of memory a second."""
    latency: float
    """Seconds until a load from memory arrives."""
    near: float
    """The same from the L2 cache, where tables and scalars are taken to be."""
    clock: float
    """Cycles a second."""
    matrix: Mapping[int, float]
    """Operations a second of all matrix units, dense, by bits of an operand."""
    issue: int
    """Cycles of a SIMD that an instruction takes."""


_TERA, _NANO, _GIGA = 1e12, 1e-9, 1e9
DEVICES: Mapping[str, Device] = {
    "gfx90a": Device(
        "MI210", 104, 1.6 * _TERA, 700 * _NANO, 350 * _NANO, 1.7 * _GIGA,
        {32: 45.3 * _TERA, 16: 181 * _TERA, 8: 181 * _TERA}, 4,
    ),
    "gfx942": Device(
        "MI300X", 304, 5.3 * _TERA, 700 * _NANO, 300 * _NANO, 2.1 * _GIGA,
        {32: 163.4 * _TERA, 16: 1307 * _TERA, 8: 2614 * _TERA}, 4,
    ),
    "gfx950": Device(
        "MI355X", 256, 8.0 * _TERA, 700 * _NANO, 300 * _NANO, 2.4 * _GIGA,
        {32: 157.3 * _TERA, 16: 2516 * _TERA, 8: 5033 * _TERA}, 4,
    ),
    "gfx1100": Device(
        "RX 7900 XTX", 48, 0.96 * _TERA, 400 * _NANO, 150 * _NANO, 2.5 * _GIGA,
        {32: 61.4 * _TERA, 16: 122.8 * _TERA, 8: 122.8 * _TERA}, 2,
    ),
    "gfx1201": Device(
        "RX 9070 XT", 32, 0.64 * _TERA, 400 * _NANO, 150 * _NANO, 2.97 * _GIGA,
        {32: 48.7 * _TERA, 16: 195 * _TERA, 8: 389 * _TERA}, 2,
    ),
    "sm_90": Device(
        "H100 SXM", 132, 3.35 * _TERA, 600 * _NANO, 200 * _NANO, 1.755 * _GIGA,
        {32: 495 * _TERA, 16: 989 * _TERA, 8: 1979 * _TERA}, 2,
    ),
}  # fmt: skip
"""One device for each target that has rows of its own in the table of configurations."""


class Work(NamedTuple):
    """A problem of serving, as one launch of a kernel splits it."""

    name: str
    programs: int
    passes: int
    """Passes of a program through its loop."""
    bytes: float
    """Bytes that memory must move, each counted once."""
    extra: float = 0.0
    """Bytes that memory moves in addition, because programs split the problem."""
    operations: float = 0.0
    """Additions and multiplications of matrices."""
    bits: int = 16
    """Bits of an operand of these operations."""


class Timing(NamedTuple):
    """One wave alone on a unit, in cycles."""

    pass_cycles: int
    """A pass through the loop that loads most; of a kernel without such a loop, all of it."""
    pass_busy: int
    """Cycles of these that its instructions take of their SIMD, which issues one a cycle to several pipes."""
    pass_bytes: int
    """Bytes that a wave loads in a pass."""
    outside_cycles: int
    """Cycles of all instructions outside the loop."""


class Prediction(NamedTuple):
    """The prediction for one kernel, problem and device."""

    share: float
    """Of the roofline, 0 to 1, once programs have begun: bytes in flight against those that the memory needs."""
    seconds: float
    """From the first program's first instruction to the last's end, start and end of programs included."""
    in_flight: float
    """Bytes under way at a time."""
    limit: str
    """What bounds `share`: "latency", "bandwidth", "matrix"."""


def predict(timing: Timing, work: Work, device: Device, warps: int, occupancy: int) -> Prediction:
    """`occupancy`: waves of whole workgroups that a SIMD holds; `warps` of a workgroup."""
    groups = max(occupancy * SIMDS // warps, 1)
    resident = min(work.programs, device.units * groups)
    rounds = work.programs / resident if work.programs > 4 * resident else -(-work.programs // resident)
    # Programs go to the emptiest unit: where there are few, each has a unit for itself.
    waves = -(-resident // device.units) * warps / SIMDS
    slowed = max(1.0, waves * timing.pass_busy / max(timing.pass_cycles, 1))
    a_pass = timing.pass_cycles * slowed / device.clock
    outside = timing.outside_cycles / device.clock
    looping = rounds * work.passes * a_pass
    by_memory = (work.bytes + work.extra) / device.bandwidth
    by_matrix = work.operations / device.matrix[work.bits]
    moving = max(looping, by_memory, by_matrix)
    # While a program starts or ends, others of its unit go on.
    seconds = max(looping + rounds * outside, max(by_memory, by_matrix) + outside)
    return Prediction(
        max(work.bytes / device.bandwidth, by_matrix) / moving,
        seconds,
        work.bytes / moving * device.latency,
        "latency" if moving == looping else "bandwidth" if moving == by_memory else "matrix",
    )


# Replays: of the instructions of a wave, in order, with what they wait for.


class _Step(NamedTuple):
    """One instruction."""

    cycles: int
    """Until the wave issues the next one."""
    kind: str = ""
    """"load" and "local" begin something to wait for, "commit" closes a group of loads, "wait" waits until at most
    `left` of `queue` remain, "branch" goes to `label`, "label" is one."""
    queue: str = ""
    arrives: int = 0
    """Cycles until what it begins has arrived."""
    left: int = 0
    bytes: int = 0
    label: str = ""
    loop: str = ""
    """On AMD, the label of the innermost loop that has it, as the compiler's comments say."""
    pipe: str = ""
    """The unit of a SIMD that runs it; units of different names run instructions of different waves at a time."""
    registers: frozenset[int] = frozenset()
    """On NVIDIA, those that a load sets, or that another instruction names and so waits for."""


def read_timing(assembly: str, target: Target) -> Timing | None:
    """`assembly` is AMD's or NVIDIA's own (SASS), not PTX. None where `DEVICES` has none of the target."""
    device = DEVICES.get(target.arch)
    if device is None:
        return None
    parse = _sass_steps if target.backend == "cuda" else _amd_steps
    steps = list(parse(assembly, target, device))
    body = _hot_loop(steps)
    if not body:
        cycles, busy, loaded = _replay(steps, 1)
        return Timing(cycles, busy, loaded, 0)
    inside = [step for index, step in enumerate(steps) if index in body]
    few, many = _replay(inside, 4), _replay(inside, 12)
    outside, _, _ = _replay([step for index, step in enumerate(steps) if index not in body], 1)
    cycles, busy, loaded = ((more - less) // 8 for more, less in zip(many, few, strict=True))
    return Timing(cycles, busy, loaded, outside)


def _hot_loop(steps: list[_Step]) -> Collection[int]:
    """Indices of the innermost loop that loads most; none where no loop loads."""
    loops: list[Collection[int]]
    if names := {step.loop for step in steps} - {""}:
        loops = [[index for index, step in enumerate(steps) if step.loop == name] for name in names]
    else:
        labels = {step.label: index for index, step in enumerate(steps) if step.kind == "label"}
        # Of branches back to the same label the last ends the loop.
        ends = {
            labels[step.label]: index + 1
            for index, step in enumerate(steps)
            if step.kind == "branch" and labels.get(step.label, len(steps)) < index
        }
        found = [range(first, end) for first, end in ends.items()]
        loops = [one for one in found if not any(two != one and two[0] in one and two[-1] in one for two in found)]
    most, best = max(((sum(steps[index].bytes for index in one), one) for one in loops), key=_first, default=(0, ()))
    return frozenset(best) if most else ()


def _first(pair: tuple[int, Collection[int]]) -> int:
    return pair[0]


def _replay(steps: list[_Step], passes: int) -> tuple[int, int, int]:
    """Cycles until the last load has arrived, those that the instructions take of their SIMD, and bytes loaded."""
    now = issued = loaded = 0
    busy = Counter[str]()
    queues: dict[str, deque[int]] = {}
    ready: dict[int, int] = {}
    open_group = 0
    for _ in range(passes):
        for step in steps:
            if step.kind == "wait":
                queue = queues.setdefault(step.queue, deque())
                while len(queue) > step.left:
                    now = max(now, queue.popleft())
            elif step.registers and ready:
                for register in step.registers & ready.keys():
                    now = max(now, ready.pop(register))
            now += step.cycles
            busy[step.pipe] += step.cycles
            issued += step.cycles > 0
            loaded += step.bytes
            if step.kind == "load" and step.queue == "group":
                open_group = max(open_group, now + step.arrives)
            elif step.kind == "commit":
                queues.setdefault("group", deque()).append(open_group)
            elif step.kind == "load" and step.registers:
                ready |= dict.fromkeys(step.registers, now + step.arrives)
            elif step.kind == "load":
                queues.setdefault(step.queue, deque()).append(now + step.arrives)
    pending = [*ready.values(), *(time for queue in queues.values() for time in queue)]
    return max([now, *pending]), max([issued, *busy.values()]), loaded


_LOCAL_CYCLES = 100
"""Until a read of LDS or shared memory arrives."""
_BARRIER_CYCLES = 30
_SLOW = ("v_exp", "v_log", "v_rcp", "v_rsq", "v_sqrt", "v_sin", "v_cos", "MUFU")
"""Instructions that have a quarter of the others' rate."""
_FLOATS = ("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2")
"""NVIDIA's additions and multiplications of floats, which have 32 lanes of a multiprocessor's SIMD; others have 16,
and so two cycles (CUDA programming guide, "Arithmetic Instructions", compute capability 9.0)."""
_PRODUCTS = ("IMAD", "IMUL")
"""Those of integers, which run on the lanes of floats, next to shifts and logic (Nsight Compute, "Pipelines")."""


def _matrix_cycles(operations: int, bits: int, device: Device) -> int:
    """Of a SIMD."""
    return max(round(operations * SIMDS * device.units * device.clock / device.matrix[bits]), device.issue)


_WIDTHS = {"x4": 16, "128": 16, "x3": 12, "96": 12, "x2": 8, "64": 8, "rd": 4, "32": 4, "rt": 2, "16": 2}
"""Bytes of a load, by the last letters of its name: `dwordx4`, `b128`, `dword`, `ushort`; others are of one byte."""


def width_of_load(name: str) -> int:
    """Bytes a thread of AMD's load, by its name without what it loads from: `dwordx4`."""
    name = name.removesuffix("_e32").removeprefix("lds_")
    name = re.sub(r"^(?:ushort|sshort|short|u16|i16|d16)(?:_\w+)?$", "b16", name)
    return next((width for letters, width in _WIDTHS.items() if name.endswith(letters)), 1)


_AMD = re.compile(r"^\s+([a-z][a-z0-9]*_\w+)\b(.*)")
_AMD_COUNTS = (("vm", r"vmcnt\((\d+)\)"), ("lgkm", r"lgkmcnt\((\d+)\)"))
_AMD_WAITS = {"s_wait_loadcnt": "vm", "s_wait_dscnt": "lgkm", "s_wait_kmcnt": "scalar"}


def _amd_steps(assembly: str, target: Target, device: Device) -> Iterator[_Step]:
    loop = block = ""
    inner = set(re.findall(r"\.L(BB\w+):[^\n]*\n?(?:\s*;[^\n]*\n)*?[^\n]*This Inner Loop Header", assembly))
    for line in assembly.splitlines():
        if begins := re.match(r"(?:\.L|; %)(BB\d+_\d+|bb\.\d+):", line):
            block, loop = begins[1], ""
        if "This Inner Loop Header" in line:
            loop = block
        elif member := re.search(r"in Loop: Header=(\w+)", line):
            loop = member[1]
        if found := _AMD.match(line):
            for step in _amd_instruction(found[1], found[2], target, device):
                yield step._replace(loop=loop if loop in inner else "")


def _amd_instruction(name: str, rest: str, target: Target, device: Device) -> Iterator[_Step]:
    if name == "s_waitcnt":
        for queue, pattern in _AMD_COUNTS:
            if count := re.search(pattern, rest):
                yield _Step(0, "wait", queue, left=int(count[1]))
    elif name == "s_wait_loadcnt_dscnt":
        both = int(rest.split()[0], 0)
        yield _Step(0, "wait", "vm", left=both >> 8)
        yield _Step(0, "wait", "lgkm", left=both & 63)
    elif name in _AMD_WAITS:
        yield _Step(0, "wait", _AMD_WAITS[name], left=int(rest.split()[0], 0))
    elif load := re.match(r"(?:global|buffer|flat)_load_(\w+)", name):
        width = width_of_load(load[1])
        arrives = round((device.latency if width >= 8 else device.near) * device.clock)
        yield _Step(device.issue, "load", "vm", arrives, bytes=width * target.warp_size, pipe="memory")
    elif "_store_" in name and target.warp_size == 64:
        # CDNA counts stores among the loads; nothing here waits for them.
        yield _Step(device.issue, "load", "vm", pipe="memory")
    elif name.startswith("s_load"):
        queue = "scalar" if target.arch.startswith("gfx12") else "lgkm"
        yield _Step(device.issue, "load", queue, round(device.near * device.clock), pipe="scalar")
    elif name.startswith("ds_"):
        yield _Step(device.issue, "load", "lgkm", _LOCAL_CYCLES, pipe="local")
    elif name.startswith("s_barrier"):
        yield _Step(_BARRIER_CYCLES)
    elif shape := re.match(r"v_(?:mfma|wmma)_(?:scale_)?\w*?_(\d+)x(\d+)x(\d+)_?(\w+)", name):
        bits = 8 if "8" in shape[4] else 32 if shape[4].endswith("f32") else 16
        operations = 2 * int(shape[1]) * int(shape[2]) * int(shape[3])
        yield _Step(_matrix_cycles(operations, bits, device), pipe="matrix")
    elif name.startswith("s_"):
        if name != "s_code_end":
            yield _Step(device.issue, pipe="scalar")
    else:
        yield _Step(device.issue * (4 if name.startswith(_SLOW) else 1))


_SASS = re.compile(r"^(?:(\.L\w+):|\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]\s+)?([A-Z][\w.]*)(.*?);)")


def _sass_steps(assembly: str, target: Target, device: Device) -> Iterator[_Step]:
    far, near = (round(seconds * device.clock) for seconds in (device.latency, device.near))
    for line in assembly.splitlines():
        found = _SASS.match(line)
        if found is None:
            continue
        label, name, rest = found.groups()
        if label:
            yield _Step(0, "label", label=label)
            continue
        registers = frozenset(int(number) for number in re.findall(r"\bR(\d+)", rest))
        size = re.search(r"\.(128|64|U8|S8|U16|S16)\b", name)
        width = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}[size[1]] if size else 4
        if name == "BRA":
            target_label = re.search(r"\.L\w+", rest)
            yield _Step(device.issue, "branch", label=target_label[0] if target_label else "", registers=registers)
        elif name.startswith("LDGSTS"):
            arrives = far if width >= 8 else near
            yield _Step(device.issue, "load", "group", arrives, bytes=width * target.warp_size)
        elif name == "LDGDEPBAR":
            yield _Step(device.issue, "commit")
        elif name.startswith("DEPBAR"):
            yield _Step(0, "wait", "group", left=int(rest.split(",")[1].split()[0], 0))
        elif name.startswith(("LDG", "LDS", "LDC", "ULDC")):
            is_global = name.startswith("LDG.")
            arrives = (far if width >= 8 else near) if is_global else _LOCAL_CYCLES // 3
            first = re.search(r"\bR(\d+)", rest)
            set_here = range(int(first[1]), int(first[1]) + max(width // 4, 1)) if first else range(0)
            loaded = width * target.warp_size if is_global else 0
            yield _Step(0, registers=registers - set(set_here))
            yield _Step(device.issue, "load", "", arrives, bytes=loaded, registers=frozenset(set_here))
        elif name.startswith("BAR"):
            yield _Step(_BARRIER_CYCLES)
        elif shape := re.match(r"HMMA\.(\d{2})(\d)(\d+)|QMMA\.(\d{2})(\d)(\d+)", name):
            rows, columns, depth = (int(number) for number in shape.groups() if number)
            bits = 8 if name.startswith("Q") else 32 if "TF32" in name else 16
            cycles = _matrix_cycles(2 * rows * columns * depth, bits, device)
            yield _Step(cycles, registers=registers, pipe="matrix")
        elif shape := re.match(r"[HQ]GMMA\.(\d+)x(\d+)x(\d+)", name):
            # Four warps share it, each on its own SIMD.
            operations = 2 * int(shape[1]) * int(shape[2]) * int(shape[3]) // SIMDS
            bits = 8 if name.startswith("Q") else 32 if "TF32" in name else 16
            yield _Step(_matrix_cycles(operations, bits, device), registers=registers, pipe="matrix")
        elif name.startswith(_FLOATS):
            yield _Step(1, registers=registers, pipe="floats")
        elif name.startswith(_PRODUCTS):
            yield _Step(device.issue, registers=registers, pipe="products")
        else:
            yield _Step(device.issue * (4 if name.startswith(_SLOW) else 1), registers=registers)


READERS = (
    read_timing, _hot_loop, _replay, _matrix_cycles, width_of_load, _amd_steps, _amd_instruction, _sass_steps
)  # fmt: skip
"""The functions that a `Timing` depends on."""
