"""Measures this machine's memory and matrix limits, and how near the products come to them, in about a second.

Used by `kaon doctor` and the benchmarks.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from models.ops.cpu import dense, structures
from models.ops.cpu.packed_weight import PackedWeight
from models.ops.cpu.runtime import current
from models.ops.cpu.structures import Step

_INPUTS, _LARGE, _SMALL = 1024, 1 << 16, 4096
"""Inputs of the measured weights, and outputs of the large one (128 MiB, more than caches hold) and the small one
(8 MiB)."""
_ROWS = 384
_REPEATS = 9


class Limits(NamedTuple):
    """Speeds of simple loops (the limits) and of products on the same threads, in 10^9 per second."""

    read: float
    """Limit: bytes read from memory by a loop of loads."""
    row: float
    """Bytes of the weight read by a product of one row."""
    matrix: float
    """Limit: operations of a loop of multiplications in registers."""
    product: float
    """Operations of a product of many rows."""


def measure(threads: int) -> Limits:
    """Measure the started operators on `threads` threads. Each figure is the best of nine runs."""
    large = PackedWeight(_LARGE, _INPUTS)
    large.put(0, torch.randn(256, _INPUTS).bfloat16().repeat(_LARGE // 256, 1))
    small = PackedWeight(_SMALL, _INPUTS)
    small.put(0, torch.randn(_SMALL, _INPUTS).bfloat16())
    x = torch.randn(_ROWS, _INPUTS).bfloat16()
    found = torch.zeros(threads, dtype=torch.int64)
    rounds = 1 << 18

    def read() -> None:
        arguments = structures.ReadLimit(large.memory.data_ptr(), large.memory.nbytes, found.data_ptr())
        current().run(arguments, Step(num_tokens=1), (large.memory, found))

    def multiply() -> None:
        arguments = structures.ProductLimit(rounds, found.data_ptr())
        current().run(arguments, Step(num_tokens=1), (found,))

    # The measurements alternate, so that a temporary disturbance of the machine affects all of them.
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
