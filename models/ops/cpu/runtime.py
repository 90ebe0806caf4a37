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
"""The instruction sets with code paths of their own, by index, in order of speed within an architecture; see isa.c."""
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
        """The arguments of each operator."""
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
    """The functions of exchange.c. The first argument is the address of a `structures.Exchange`, for `tokens` that of
    a `ShareTokens`."""

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


_INSTALL = "install Kaon again: `make install` in a clone, `pip install .` otherwise"


class Library:
    """The compiled operators and their threads."""

    def __init__(self, path: Path) -> None:
        """Load the shared library `path`. Raises `OSError` if it is invalid, and `ValueError`, which a start reports
        without a traceback, if it was built from other sources."""
        self._library = ctypes.CDLL(str(path))
        size_of = getattr(self._library, "kaon_bytes_of_arguments", None)
        if size_of is None or any(size_of(each.kind) != ctypes.sizeof(each) for each in Arguments.__subclasses__()):
            raise ValueError(f"{path} was built from other sources than these; {_INSTALL}")
        self._library.kaon_sources.restype = ctypes.c_char_p
        built_of = self._library.kaon_sources().decode()
        present = sources_hash(path.parent)
        if built_of and present and built_of != present:
            raise ValueError(f"the sources in {path.parent} have changed since they were built; {_INSTALL}")
        self._library.kaon_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
        self._library.kaon_run.restype = ctypes.c_int64
        self.available = tuple(isa for isa in range(len(INSTRUCTION_SETS)) if self._library.kaon_runs(isa))
        """The instruction sets that this processor supports."""
        self.isa = self.available[-1]
        self.group_functions = GroupFunctions(self._library)
        """The functions of group.c."""
        self.exchange_functions = ExchangeFunctions(self._library)
        """The functions of exchange.c."""

    def start(self, threads: int, isa: int | None = None) -> None:
        """Start 1 to 1024 threads, including the caller's, with this instruction set, by default the fastest one.

        Raises `ValueError` if the processor does not support it, and `RuntimeError` if threads cannot be started.
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
        """The number of threads, including the caller's."""
        number: int = self._library.kaon_threads()
        return number

    def pin(self, cpus: Sequence[int]) -> bool:
        """Pin each thread except the caller's to one of `cpus`. Return whether the system accepted it."""
        return not self._library.kaon_pin((ctypes.c_int64 * len(cpus))(*cpus))

    def run(self, operations: Operations, step: Step, first: int = 0, *, may_pause: bool = False) -> int:
        """Run the operators from index `first` on, in order, each on all threads; return the number that ran.

        Only one thread may call this at a time. With `may_pause`, the run ends early between two operators if
        `interrupt` is called, or was called since the last pause.
        """
        start = ctypes.byref(operations.array, first * ctypes.sizeof(_Operation))
        count: int = self._library.kaon_run(start, len(operations) - first, ctypes.byref(step), may_pause)
        return count

    def activity(self) -> int:
        """Return a count that each run of operators raises by one when it begins and when it ends.

        It is odd while operators run. May be called in any thread.
        """
        count: int = self._library.kaon_activity()
        return count

    def interrupt(self) -> None:
        """Pause the current or next run with `may_pause`. May be called in any thread."""
        self._library.kaon_interrupt()

    def withdraw_interruption(self) -> None:
        """Let the next run that may pause go on, unless `interrupt` is called again."""
        self._library.kaon_withdraw_interruption()


def sources_hash(directory: Path) -> str:
    """Return the hash of the sources in a directory, as in setup.py; "" if there are none, as in a wheel."""
    sources = sorted((*directory.glob("*.c"), *directory.glob("*.h")))
    return sha256(b"".join(source.read_bytes() for source in sources)).hexdigest() if sources else ""


@cache
def load_library() -> Library | None:
    """Load the operators. If they were not built, log the reason and return None."""
    path = Path(__file__).with_name(f"_library{EXTENSION_SUFFIXES[0]}")
    if path.exists():
        return Library(path)
    _log.info("installed without a C compiler, so torch computes everything, slower: install one, then Kaon again")
    return None


# Runtimes execute or record calls of operators.


class Runtime(Protocol):
    """Executes or records calls of operators."""

    def rows(self, num_rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return memory for an operator's output with one or more rows per token."""

    def fixed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for an output whose size does not depend on the step. # [size]"""

    def per_token(self, num_rows: int) -> int:
        """Return the number of rows of a matrix per token of the step."""

    def run(self, arguments: Arguments, step: Step, kept: tuple[torch.Tensor | None, ...]) -> None:
        """Execute or record an operator. `kept`: the tensors to which its arguments point."""

    def on(self, step: Step, most_rows: int, num_sharers: int) -> AbstractContextManager[int]:
        """Within the context, operators run on another step, which earlier operators fill in.

        Yields the number of rows of that step, or `most_rows` if it is not known yet. `num_sharers` processes of this
        host have together at most `most_rows` such rows.
        """


class _Immediate:
    """The runtime that executes each operator when it is called."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def rows(self, num_rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(num_rows, columns, dtype=dtype)

    def fixed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def per_token(self, num_rows: int) -> int:
        del num_rows  # A single operator treats each row as a token.
        return 1

    def run(self, arguments: Arguments, step: Step, kept: tuple[torch.Tensor | None, ...]) -> None:
        del kept
        self._library.run(Operations((arguments,)), step)

    def on(self, step: Step, most_rows: int, num_sharers: int) -> AbstractContextManager[int]:
        del most_rows, num_sharers
        return nullcontext(step.num_tokens)


_runtime: Runtime | None = None


def start(threads: int, isa: int | None = None) -> Library | None:
    """Start the operators on `threads` threads; return None if they were not built.

    `isa`: an instruction set, by default the fastest one. Raises `ValueError` if the processor does not support it,
    and `RuntimeError` if the threads cannot be started.
    """
    global _runtime
    loaded = load_library()
    if loaded is not None:
        loaded.start(threads, isa)
        _runtime = _Immediate(loaded)
    return loaded


def stop() -> None:
    """Stop using the operators, so that torch computes everything."""
    global _runtime
    _runtime = None


def active() -> bool:
    """Whether the operators were started."""
    return _runtime is not None


def runs(*tensors: torch.Tensor) -> bool:
    """Whether the operators are active and support these tensors."""
    return _runtime is not None and all(
        tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu" and tensor.stride(-1) == 1 for tensor in tensors
    )


def redirect(runtime: Runtime) -> Runtime:
    """Use another runtime from now on; return the previous one."""
    global _runtime
    assert _runtime is not None, "operators are redirected after `start`"
    before, _runtime = _runtime, runtime
    return before


def current() -> Runtime:
    """Return the current runtime."""
    assert _runtime is not None, "an operator is called after `start`"
    return _runtime


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's data, or None."""
    return None if tensor is None else tensor.data_ptr()
