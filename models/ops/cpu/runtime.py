"""Loads the compiled operators with ctypes and runs them, at once or as part of a recorded program.

`Library` binds the C functions and checks their structures' sizes. A `Runtime` receives each call of an operator: it
executes the call, or appends it to the program that `program.record` is building.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from models.ops.cpu.structures import Arguments, Step

_log = logging.getLogger(__name__)

INSTRUCTION_SETS = ("portable", "avx2", "avx_vnni", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16")
"""The instruction sets that have a path of their own, by number, of one architecture by speed: see isa.c."""
PORTABLE, AVX2, AVX_VNNI, AVX512, AVX512_BF16, AMX, NEON, NEON_BF16 = range(len(INSTRUCTION_SETS))


class _Operation(ctypes.Structure):
    _fields_: ClassVar = [("kind", ctypes.c_int64), ("arguments", ctypes.c_void_p)]


class Operations:
    """A list of operators with their arguments, which may run any number of times."""

    def __init__(self, arguments: Sequence[Arguments]) -> None:
        self._kept = tuple(arguments)
        self.array = (_Operation * len(self._kept))(
            *(_Operation(each.kind, ctypes.addressof(each)) for each in self._kept)
        )

    @property
    def arguments(self) -> tuple[Arguments, ...]:
        """Those of each operator."""
        return self._kept

    def __len__(self) -> int:
        return len(self._kept)


class GroupFunctions:
    """The functions of group.c. The first argument of all but `bytes` is the address of a `structures.Group`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        for name, result, *arguments in (
            ("bytes", integer, integer),
            ("begin", None, pointer, integer),
            ("leave", None, pointer),
            ("all_reduce", ctypes.c_int, pointer, pointer, integer, integer),
            ("gather", ctypes.c_int, pointer, pointer, integer, integer, pointer),
        ):
            function = getattr(library, f"kaon_group_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    bytes: Callable[[int], int]
    begin: Callable[[int, int], None]
    leave: Callable[[int], None]
    all_reduce: Callable[[int, int, int, bool], int]
    gather: Callable[[int, int, int, int, int | None], int]


class ExchangeFunctions:
    """The functions of exchange.c. The first argument is the address of a `structures.Exchange`.

    That of `tokens` is the address of a `ShareTokens`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        integer, pointer, failed = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
        for name, symbol, result, *arguments in (
            ("agree", "agree", failed, pointer, integer, pointer),
            ("leave", "leave", None, pointer),
            ("tokens", "tokens", failed, pointer, integer, integer),
            ("wait", "await", failed, pointer),
        ):
            function = getattr(library, f"kaon_exchange_{symbol}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    agree: Callable[[int, int, int], int]
    leave: Callable[[int], None]
    tokens: Callable[[int, int, bool], int]
    wait: Callable[[int], int]


class Library:
    """The operators on their own threads."""

    def __init__(self, path: Path) -> None:
        """Load the shared library `path`. Raises `OSError` where it is none, or was built for another release."""
        self._library = ctypes.CDLL(str(path))
        size_of = getattr(self._library, "kaon_bytes_of_arguments", None)
        if size_of is None or any(size_of(each.kind) != ctypes.sizeof(each) for each in Arguments.__subclasses__()):
            raise OSError(f"{path} was built from other sources than these; install Kaon again")
        self._library.kaon_sources.restype = ctypes.c_char_p
        built_of = self._library.kaon_sources().decode()
        present = sources_hash(path.parent)
        if built_of and present and built_of != present:
            raise OSError(f"the sources in {path.parent} have changed since they were built; install Kaon again")
        self._library.kaon_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
        self._library.kaon_run.restype = ctypes.c_int64
        self.available = tuple(isa for isa in range(len(INSTRUCTION_SETS)) if self._library.kaon_runs(isa))
        """The instruction sets that this processor runs."""
        self.isa = self.available[-1]
        self.group_functions = GroupFunctions(self._library)
        """The functions of group.c."""
        self.exchange_functions = ExchangeFunctions(self._library)
        """The functions of exchange.c."""

    def start(self, threads: int, isa: int | None = None) -> None:
        """Run on 1 to 1024 threads, including the caller's, with this instruction set, by default the fastest.

        Raises `ValueError` where the processor does not run that, `RuntimeError` where the system has no more threads
        or memory.
        """
        isa = self.available[-1] if isa is None else isa
        if isa not in self.available:
            runs = ", ".join(INSTRUCTION_SETS[each] for each in self.available)
            raise ValueError(
                f"cpu_isa is {INSTRUCTION_SETS[isa]}, which this processor does not run; set it to auto, or to "
                f"one of {runs}"
            )
        self.isa = isa
        if self._library.kaon_start(threads, isa):
            raise RuntimeError(f"{threads} threads for the CPU's operators could not be started")

    @property
    def threads(self) -> int:
        """The number of threads, the caller's included."""
        number: int = self._library.kaon_threads()
        return number

    def pin(self, cpus: Sequence[int]) -> bool:
        """Pin each thread except the caller's to one of `cpus`; whether the system did."""
        return not self._library.kaon_pin((ctypes.c_int64 * len(cpus))(*cpus))

    def run(self, operations: Operations, step: Step, first: int = 0, *, may_pause: bool = False) -> int:
        """Each operator from `first` on all threads, in order; how many ran. One caller at a time.

        All of them do, unless it `may_pause` and `interrupt` is called, or was since the last pause.
        """
        start = ctypes.byref(operations.array, first * ctypes.sizeof(_Operation))
        count: int = self._library.kaon_run(start, len(operations) - first, ctypes.byref(step), may_pause)
        return count

    def interrupt(self) -> None:
        """Pause the run that may, or the next one, between two operators. Called in any thread."""
        self._library.kaon_interrupt()

    def withdraw_interruption(self) -> None:
        """Let the next run that may pause go on, unless `interrupt` is called again."""
        self._library.kaon_withdraw_interruption()


def sources_hash(directory: Path) -> str:
    """As setup.py makes it of the sources in a directory; "" where there are none, as in a wheel."""
    sources = sorted((*directory.glob("*.c"), *directory.glob("*.h")))
    return sha256(b"".join(source.read_bytes() for source in sources)).hexdigest() if sources else ""


@cache
def load_library() -> Library | None:
    """The operators; None, and the reason in the log, where they were not built."""
    path = Path(__file__).with_name(f"_library{EXTENSION_SUFFIXES[0]}")
    if path.exists():
        return Library(path)
    _log.info("installed without a C compiler, so torch computes everything, slower: install one, then Kaon again")
    return None


# Runtimes: what happens with a call of an operator.


class Runtime(Protocol):
    """Executes or records calls of operators."""

    def rows(self, num_rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Memory for an operator's output: a row or several a token."""

    def fixed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for an output that is of one size whatever the step. # [size]"""

    def per_token(self, num_rows: int) -> int:
        """Rows of the matrix for each row that the operator's step counts."""

    def run(self, arguments: Arguments, step: Step, kept: tuple[torch.Tensor | None, ...]) -> None:
        """Execute or record an operator. `kept` is the memory that its arguments point to."""

    def on(self, step: Step, most_rows: int, num_sharers: int) -> AbstractContextManager[int]:
        """Inside, operators run on another step, which those before have filled in; gives its rows, or `most_rows`.

        Such rows are `most_rows` at most, in all of `num_sharers` processes of this host together.
        """


class _Immediate:
    """Runs each operator when it is called."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def rows(self, num_rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(num_rows, columns, dtype=dtype)

    def fixed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def per_token(self, num_rows: int) -> int:
        del num_rows  # An operator on its own runs as if each row were a token.
        return 1

    def run(self, arguments: Arguments, step: Step, kept: tuple[torch.Tensor | None, ...]) -> None:
        del kept
        self._library.run(Operations((arguments,)), step)

    def on(self, step: Step, most_rows: int, num_sharers: int) -> AbstractContextManager[int]:
        del most_rows, num_sharers
        return nullcontext(step.num_tokens)


_runtime: Runtime | None = None


def start(threads: int, isa: int | None = None) -> Library | None:
    """Have the operators run on `threads` threads from here on; None where they were not built.

    `isa` is an instruction set, by default the fastest. Raises `ValueError` where the processor does not run it,
    `RuntimeError` where the threads cannot be made.
    """
    global _runtime
    loaded = load_library()
    if loaded is not None:
        loaded.start(threads, isa)
        _runtime = _Immediate(loaded)
    return loaded


def stop() -> None:
    """Stop the operators: torch computes everything."""
    global _runtime
    _runtime = None


def active() -> bool:
    """Whether the operators were started."""
    return _runtime is not None


def runs(*tensors: torch.Tensor) -> bool:
    """Whether the operators compute tensors such as these."""
    return _runtime is not None and all(
        tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu" and tensor.stride(-1) == 1 for tensor in tensors
    )


def redirect(runtime: Runtime) -> Runtime:
    """Use another runtime from here on; returns the previous one."""
    global _runtime
    assert _runtime is not None, "operators are redirected after `start`"
    before, _runtime = _runtime, runtime
    return before


def current() -> Runtime:
    """The runtime in use."""
    assert _runtime is not None, "an operator is called after `start`"
    return _runtime


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The address of an optional argument."""
    return None if tensor is None else tensor.data_ptr()
