"""`Assembly`: what the compiler made of a kernel, read from its output; and what of it is wrong."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import KIB, Target

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
