"""The device's copy bandwidth and matrix rate, by size."""

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values


def cases(bench: Bench) -> Iterator[Case]:
    """The figures of the other parts are held against 4 GiB and 8192."""
    for gib in bench.size((1, 4, 8), (1,)):
        yield Case(f"copy of {gib} GiB", partial(_copy, bench, gib))
    for size in bench.size((4096, 8192), (64,)):
        yield Case(f"product of {size} x {size}", partial(_product, bench, size))


def _copy(bench: Bench, gib: int) -> Values:
    return {"GB/s": bench.copied_bytes_per_second(gib) / 1e9}


def _product(bench: Bench, size: int) -> Values:
    return {"TFLOP/s": bench.product_rate(size) / 1e12}
