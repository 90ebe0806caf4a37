"""`EmulatedLibrary`: the CPU operators compiled for Arm, run by an emulator behind the interface of `Library`.

`python -m tests.parity.emulated_operators DRIVER ROUNDS [ISA]` runs cpu_fuzz.py over it: the process that cpu_driver.c
is compiled to receives each operator's arguments with the memory to which they point, and returns the memory.
"""

import ctypes
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import torch

from models.ops.cpu import runtime
from models.ops.cpu.runtime import Operations
from models.ops.cpu.structures import Arguments, Step
from tests.parity import cpu_fuzz

EMULATOR = "qemu-aarch64"
_RUNS, _START, _RUN = range(3)
_LINE = 64


class EmulatedLibrary:
    """One emulated process, with the part of `Library` that single operators need."""

    def __init__(self, driver: Path, cpu: str = "max") -> None:
        """`driver`: cpu_driver.c with the operators; `cpu`: a processor of the emulator."""
        self._process = subprocess.Popen(
            [EMULATOR, "-cpu", cpu, str(driver)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        (self._base,) = struct.unpack("q", self._read(8))
        self.available = tuple(isa for isa in range(len(runtime.INSTRUCTION_SETS)) if self._ask(_RUNS, 0, isa))
        self.isa = self.available[-1]
        self.threads = 1

    def start(self, threads: int, isa: int | None = None) -> None:
        """As `Library.start`."""
        self.isa, self.threads = self.available[-1] if isa is None else isa, threads
        assert self._ask(_START, threads, self.isa) == 0

    def run(self, operations: Operations, step: Step) -> None:
        """As `Library.run`, on copies of the memory that the callers' variables are of."""
        self.run_on(operations._kept, step, _memory_of_callers())

    def run_on(self, operations: Sequence[Arguments], step: Step, memory: dict[int, int]) -> None:
        """Run operators on copies of the memory, whose sizes by address are in `memory`, and copy the results back."""
        structures = {ctypes.addressof(each): each for each in operations}
        memory = {**memory, **{address: ctypes.sizeof(each) for address, each in structures.items()}}
        offsets: dict[int, int] = {}
        end = 0

        def there(pointer: int) -> int:
            """The address in the emulated process. Memory is laid out in order of first use."""
            nonlocal end
            for begin, size in memory.items():
                if begin <= pointer < begin + max(1, size):
                    if begin not in offsets:
                        offsets[begin] = end
                        end += -(-size // _LINE) * _LINE + _LINE
                    return self._base + offsets[begin] + pointer - begin
            raise AssertionError(f"an argument of {operations} points to memory that no caller has")

        moved_step = _moved(step, there)
        places = [there(address) - self._base for address in structures]
        moved = {address: _moved(each, there) for address, each in structures.items()}
        arena = bytearray(end)
        for begin, offset in offsets.items():
            content = moved.get(begin) or ctypes.string_at(begin, memory[begin])
            arena[offset : offset + len(content)] = content
        kinds = [each.kind for each in operations]
        listed = [number for pair in zip(kinds, places, strict=True) for number in pair]
        head = struct.pack("3q", _RUN, len(operations), end)
        self._write(head + moved_step + bytes(arena) + struct.pack(f"{len(listed)}q", *listed))
        found = self._read(end)
        for begin, offset in offsets.items():
            if begin not in moved:
                ctypes.memmove(begin, found[offset : offset + memory[begin]], memory[begin])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0

    def _ask(self, *numbers: int) -> int:
        self._write(struct.pack("3q", *numbers))
        (answer,) = struct.unpack("q", self._read(8))
        return int(answer)

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.read(size)
        assert len(found) == size, "the emulated process has ended"
        return found


def _moved(structure: ctypes.Structure, there: Callable[[int], int]) -> bytes:
    """A structure with its pointers translated to another process."""
    copy = type(structure).from_buffer_copy(structure)
    for name, kind, *_ in structure._fields_:
        pointer = getattr(copy, name)
        if kind is ctypes.c_void_p and pointer:
            setattr(copy, name, there(pointer))
    return bytes(copy)


def _memory_of(found: object, depth: int = 0) -> dict[int, int]:
    """Address and bytes of the arrays that an object is, or has."""
    if isinstance(found, torch.Tensor):
        storage = found.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()} if storage.nbytes() else {}
    if isinstance(found, np.ndarray):
        while isinstance(found.base, np.ndarray):
            found = found.base
        return {found.ctypes.data: found.nbytes}
    if depth > 2 or isinstance(found, str | bytes | int | float | type | ModuleType | FunctionType):
        return {}
    held: list[object] = list(found) if isinstance(found, list | tuple) else []
    if isinstance(found, dict):
        held = list(found.values())
    held += list(getattr(found, "__dict__", {}).values())
    held += [getattr(found, name, None) for name in getattr(type(found), "__slots__", ())]
    memory: dict[int, int] = {}
    for each in held:
        memory |= _memory_of(each, depth + 1)
    return memory


def _memory_of_callers() -> dict[int, int]:
    """The arrays in the variables of the functions that called the library."""
    memory: dict[int, int] = {}
    frame = sys._getframe(2)
    for _ in range(4):
        memory |= _memory_of(list(frame.f_locals.values()))
        if frame.f_back is None:
            break
        frame = frame.f_back
    return memory


def use(library: EmulatedLibrary) -> None:
    """Run the operators of this process there."""

    def run(self: object, arguments: Arguments, step: Step, kept: tuple[torch.Tensor | None, ...]) -> None:
        memory = _memory_of(list(kept)) | _memory_of(list(step.kept)) | _memory_of_callers()
        library.run_on((arguments,), step, memory)

    runtime._Immediate.run = run  # type: ignore[assignment, method-assign]
    runtime.load_library = lambda: library  # type: ignore[assignment, return-value]


if __name__ == "__main__":
    emulated = EmulatedLibrary(Path(sys.argv[1]))
    use(emulated)
    names = sys.argv[3:] or [runtime.INSTRUCTION_SETS[isa] for isa in emulated.available]
    for path in names:
        cpu_fuzz.fuzz(int(sys.argv[2]), [runtime.INSTRUCTION_SETS.index(path)])
    emulated.close()
    sys.stdout.write(" ".join(("ran", *names)) + "\n")
