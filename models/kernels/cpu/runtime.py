"""Where the operators go: run at once, or written down while `program.record` listens."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from models.kernels.cpu import library
from models.kernels.cpu.library import Library, Operations
from models.kernels.cpu.structures import Arguments, Step


class Runtime(Protocol):
    """Where operators go."""

    def rows(self, num_rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Memory for an operator's output: a row or several a token."""

    def fixed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for an output that is of one size whatever the step. # [size]"""

    def per_token(self, num_rows: int) -> int:
        """Rows of such a matrix to each row that the operator's step counts."""

    def run(self, arguments: Arguments, step: Step, kept: tuple[torch.Tensor | None, ...]) -> None:
        """Run an operator, or see that it is. `kept` is the memory that its arguments point to."""

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


def start(threads: int, isa: int = library.AMX) -> Library | None:
    """Have the operators run on `threads` threads from here on; None where they were not built.

    Raises `RuntimeError` where the threads cannot be made.
    """
    global _runtime
    loaded = library.load_library()
    if loaded is not None:
        loaded.start(threads, isa)
        _runtime = _Immediate(loaded)
    return loaded


def stop() -> None:
    """Have torch compute everything again."""
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
    """Send operators there from here on; where they went before."""
    global _runtime
    assert _runtime is not None, "operators are redirected after `start`"
    before, _runtime = _runtime, runtime
    return before


def current() -> Runtime:
    """Where operators go now."""
    assert _runtime is not None, "an operator is called after `start`"
    return _runtime


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The memory of an argument that may be left out."""
    return None if tensor is None else tensor.data_ptr()
