"""Which operators Triton's kernels compute. Layers call `runs`, and import a kernel's file only where it is true.

Triton is imported by `start`, never before: a server on a CPU has none of it in memory. Where a layer calls a kernel,
`import file as kernels` costs the host a third of what `from file import function` does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from models.ops.triton.configs import Target

_device_type: str | None = None
_is_there: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")
"""Whether a tensor is on a device of that type; quicker to read than the type's name."""
_left: frozenset[str] = frozenset()
_is_idle = False
_is_invariant = False


def start(device: torch.device, absent: "Target | None" = None) -> str | None:
    """Start the kernels for tensors of a device; None, or why they cannot run, in words.

    A small kernel is compiled, run and checked first. A CPU takes Triton's interpreter, as the tests set it up.
    `absent`: a GPU that is not there, for which a CPU's kernels are compiled; none runs, and none is checked.
    """
    global _device_type, _is_there
    reason = None
    if absent is None:
        from models.ops.triton.probe import probe

        reason = probe(device)
    else:
        from models.ops.triton.absent import stand_in

        stand_in(absent)
    _device_type, _is_there = device.type if reason is None else None, attrgetter(f"is_{device.type}")
    return reason


def stop() -> None:
    """Stop the kernels: torch computes everything."""
    global _device_type, _left, _is_invariant
    _device_type, _left, _is_invariant = None, frozenset(), False


def leave_to_torch(operators: frozenset[str]) -> None:
    """Have torch compute these of `models.ops.registry.OPERATORS`, and the kernels the others."""
    global _left
    _left = operators


def left() -> frozenset[str]:
    """The operators that torch computes."""
    return _left


def keep_invariant() -> None:
    """Make the kernels compute each row in one order, independent of all other rows, also where it costs time."""
    global _is_invariant
    _is_invariant = True


def is_invariant() -> bool:
    """Whether a row's result must not depend on any other row."""
    return _is_invariant


@contextmanager
def idle() -> Iterator[None]:
    """Suspend the kernels, for a pass whose results are not used. Products that only they compute give zeros."""
    global _device_type, _is_idle
    before, _device_type, _is_idle = _device_type, None, True
    try:
        yield
    finally:
        _device_type, _is_idle = before, False


def is_idle() -> bool:
    """Whether the kernels are suspended."""
    return _is_idle


def version() -> str:
    """Triton's release."""
    from models.ops.triton import probe_kernel

    return probe_kernel.version()


def leaves(operator: str) -> bool:
    """Whether torch computes an operator even if the kernels could."""
    return operator in _left


def takes(operator: str) -> bool:
    """Whether the kernels were started for an operator."""
    return _device_type is not None and operator not in _left


def active() -> bool:
    """Whether the kernels were started."""
    return _device_type is not None


def runs(*tensors: torch.Tensor, operator: str = "") -> bool:
    """Whether the kernels compute an operator of tensors such as these: on their device, rows without gaps.

    Not inside what torch compiles: it fuses such operators with what is around them.
    """
    if _device_type is None or operator in _left or torch.compiler.is_compiling():
        return False
    # Called by every layer in every step: a loop, as a generator takes longer, and the quickest test first.
    for tensor in tensors:
        if not _is_there(tensor):
            return False
        if not tensor.is_contiguous() and tensor.stride(-1) != 1:
            return False
    return True
