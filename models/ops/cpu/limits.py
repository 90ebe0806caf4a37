"""What share of this machine's limits the products reach, measured in a second: for `kaon doctor` and benchmarks."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from models.ops.cpu import dense, structures
from models.ops.cpu.runtime import current
from models.ops.cpu.structures import Step

_INPUTS, _LARGE, _SMALL = 1024, 1 << 16, 4096
"""Inputs and outputs of the weights: 128 MiB, which no cache keeps, and 8 MiB."""
_ROWS = 384
_REPEATS = 9


class Limits(NamedTuple):
    """Speeds in units of 10^9 a second: of plain loops, and of products on the same threads."""

    read: float
    """Bytes that a loop reads from memory."""
    row: float
    """Bytes of a weight that a product of one row reads."""
    matrix: float
    """Operations of a loop of products in registers."""
    product: float
    """Operations of a product of many rows."""


def measure(threads: int) -> Limits:
    """Measure the operators that were started, on `threads` threads. Each figure is the best of nine."""
    large = dense.PackedWeight(_LARGE, _INPUTS)
    large.put(0, torch.randn(256, _INPUTS).bfloat16().repeat(_LARGE // 256, 1))
    small = dense.PackedWeight(_SMALL, _INPUTS)
    small.put(0, torch.randn(_SMALL, _INPUTS).bfloat16())
    x = torch.randn(_ROWS, _INPUTS).bfloat16()
    found = torch.zeros(threads, dtype=torch.int64)
    rounds = 1 << 16

    def read() -> None:
        arguments = structures.ReadLimit(large.memory.data_ptr(), large.memory.nbytes, found.data_ptr())
        current().run(arguments, Step(num_tokens=1), (large.memory, found))

    def multiply() -> None:
        arguments = structures.ProductLimit(rounds, found.data_ptr())
        current().run(arguments, Step(num_tokens=1), (found,))

    # In turn, so that what disturbs the machine for a while disturbs none of them alone.
    calls: tuple[Callable[[], object], ...] = (
        read,
        lambda: dense.linear(x[:1], large),
        multiply,
        lambda: dense.linear(x, small),
    )
    times = [[_seconds(call) for call in calls] for _ in range(_REPEATS)]
    read_time, row_time, matrix_time, product_time = (min(column) for column in zip(*times, strict=True))
    multiply()
    return Limits(
        large.memory.nbytes / read_time / 1e9,
        large.memory.nbytes / row_time / 1e9,
        int(found.sum()) / matrix_time / 1e9,
        2 * _ROWS * _INPUTS * _SMALL / product_time / 1e9,
    )


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
