"""The compiled operators of this directory by ctypes: their arguments, field by field as in operators.h, and `run`."""

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import ClassVar

_log = logging.getLogger(__name__)
_POINTER, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double

PORTABLE, AVX512_BF16, AMX = range(3)
"""Instruction sets, each containing those before it."""
INSTRUCTION_SETS = ("portable", "AVX-512 bfloat16", "AMX")
"""Their names."""
SILU, GELU_TANH = range(2)
"""Activations of `Gated`."""
MAX_HEAD_DIM = 256
MAX_IN_FEATURES = 1 << 16
"""Of a row: a thread's scratch holds sixteen."""


class Step(ctypes.Structure):
    """`struct step`: what a program runs on."""

    _fields_: ClassVar = [
        ("num_tokens", _INTEGER),
        ("num_rows", _INTEGER),
        ("input_ids", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("query_starts", _POINTER),
        ("seq_lens", _POINTER),
        ("block_tables", _POINTER),
        ("max_blocks", _INTEGER),
    ]
    kept: tuple[object, ...] = ()
    """What the pointers point to."""


class Arguments(ctypes.Structure):
    """What one operator is called with."""

    kind: ClassVar[int]


class Linear(Arguments):
    """`struct linear`."""

    kind = 0
    _fields_: ClassVar = [
        ("x", _POINTER),
        ("x_stride", _INTEGER),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("in_features", _INTEGER),
        ("out_features", _INTEGER),
        ("is_float", _INTEGER),
    ]


class Pack(Arguments):
    """`struct pack`."""

    kind = 1
    _fields_: ClassVar = [
        ("rows", _POINTER),
        ("row_stride", _INTEGER),
        ("first", _INTEGER),
        ("count", _INTEGER),
        ("in_features", _INTEGER),
        ("weight", _POINTER),
    ]


class Embed(Arguments):
    """`struct embed`."""

    kind = 2
    _fields_: ClassVar = [
        ("weight", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("in_features", _INTEGER),
    ]


class RMSNorm(Arguments):
    """`struct rms_norm`."""

    kind = 3
    _fields_: ClassVar = [
        ("x", _POINTER),
        ("x_stride", _INTEGER),
        ("residual", _POINTER),
        ("residual_stride", _INTEGER),
        ("weight", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("size", _INTEGER),
        ("offset", _REAL),
        ("eps", _REAL),
    ]


class RopeTable(Arguments):
    """`struct rope_table`."""

    kind = 4
    _fields_: ClassVar = [
        ("frequencies", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("pairs", _INTEGER),
        ("factor", _REAL),
    ]


class RopeStore(Arguments):
    """`struct rope_store`."""

    kind = 5
    _fields_: ClassVar = [
        ("q", _POINTER),
        ("k", _POINTER),
        ("v", _POINTER),
        ("q_stride", _INTEGER),
        ("k_stride", _INTEGER),
        ("v_stride", _INTEGER),
        ("heads", _INTEGER),
        ("kv_heads", _INTEGER),
        ("dim", _INTEGER),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("offset", _REAL),
        ("eps", _REAL),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("rotary_dim", _INTEGER),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("block_size", _INTEGER),
    ]


class Attention(Arguments):
    """`struct attention`."""

    kind = 6
    _fields_: ClassVar = [
        ("q", _POINTER),
        ("q_stride", _INTEGER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("heads", _INTEGER),
        ("kv_heads", _INTEGER),
        ("dim", _INTEGER),
        ("block_size", _INTEGER),
        ("scale", _REAL),
        ("window", _INTEGER),
        ("soft_cap", _REAL),
        ("sinks", _POINTER),
    ]


class Gated(Arguments):
    """`struct gated`."""

    kind = 7
    _fields_: ClassVar = [
        ("gate_up", _POINTER),
        ("stride", _INTEGER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("size", _INTEGER),
        ("activation", _INTEGER),
    ]


class GroupedLinear(Arguments):
    """`struct grouped_linear`."""

    kind = 8
    _fields_: ClassVar = [
        ("x", _POINTER),
        ("x_stride", _INTEGER),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("counts", _POINTER),
        ("groups", _INTEGER),
        ("in_features", _INTEGER),
        ("out_features", _INTEGER),
    ]


class _Operation(ctypes.Structure):
    _fields_: ClassVar = [("kind", _INTEGER), ("arguments", _POINTER)]


class Operations:
    """Operators with their arguments, to run one after the other, as often as wanted."""

    def __init__(self, arguments: Sequence[Arguments]) -> None:
        self._kept = tuple(arguments)
        self.array = (_Operation * len(self._kept))(
            *(_Operation(each.kind, ctypes.addressof(each)) for each in self._kept)
        )

    def __len__(self) -> int:
        return len(self._kept)


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
        beside = sources_hash(path.parent)
        if built_of and beside and built_of != beside:
            raise OSError(f"the sources in {path.parent} have changed since they were built; install Kaon again")
        self._library.kaon_run.argtypes = [_POINTER, _INTEGER, _POINTER]
        self._library.kaon_run.restype = None
        self.isa: int = self._library.kaon_isa()

    def start(self, threads: int, isa: int = AMX) -> None:
        """Run on so many threads, 1 to 1024, the caller's among them, with at most this instruction set.

        Raises `RuntimeError` where the system has no more threads or memory.
        """
        self.isa = min(self._library.kaon_isa(), isa)
        if self._library.kaon_start(threads, self.isa):
            raise RuntimeError(f"{threads} threads for the CPU's operators could not be started")

    def pin(self, cpus: Sequence[int]) -> bool:
        """Keep each thread but the caller's on a CPU of its own, one of `cpus` a thread; whether the system did."""
        return not self._library.kaon_pin((_INTEGER * len(cpus))(*cpus))

    def run(self, operations: Operations, step: Step) -> None:
        """Each operator on all threads, in order. One caller at a time."""
        self._library.kaon_run(operations.array, len(operations), ctypes.byref(step))


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
