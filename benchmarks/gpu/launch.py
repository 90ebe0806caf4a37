"""What the host takes to call operators outside graphs, beyond the launches of Triton's that are in them."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values
from benchmarks.gpu.empty_kernel import empty_kernel
from benchmarks.gpu.launches import Launches
from benchmarks.gpu.operators import OPERATORS

_CALLS = 50
"""Fewer than the device queues, or the host would wait for it."""
_ROUNDS = 31


def cases(bench: Bench) -> Iterator[Case]:
    """Each operator of a decode step, and what is in all of them."""
    x = bench.random(4, 1024)
    yield Case("an empty kernel", lambda: _median_of(bench, lambda: empty_kernel[(1,)]()))
    yield Case("a tensor's allocation", lambda: _median_of(bench, lambda: x.new_empty(4, 1024)))
    for name, make in OPERATORS.items():
        yield Case(name, lambda make=make: measure(bench, make(bench)))  # type: ignore[misc]


def measure(bench: Bench, call: Callable[[], object]) -> Values:
    """An operator, and the same launches with the same arguments and nothing around them."""
    with torch.inference_mode():
        call()
        with Launches() as launches:
            call()
        made = launches.made

        def launch_again() -> None:
            for launch in made:
                launch()

        ours, tritons = _host_us(bench, call, launch_again)
    beyond = [one - other for one, other in zip(ours, tritons, strict=True)]
    return {
        "us": statistics.median(ours),
        "Triton's own, us": statistics.median(tritons),
        "kernels": str(len(made)),
        "beyond, us a kernel": statistics.median(beyond) / max(len(made), 1),
    }


def _median_of(bench: Bench, call: Callable[[], object]) -> Values:
    (took,) = _host_us(bench, call)
    return {"us": statistics.median(took)}


def _host_us(bench: Bench, *calls: Callable[[], object]) -> Sequence[list[float]]:
    """Of one call each, which nothing waits for, by round; they take turns, so that a round's are of one moment."""
    count, rounds = (1, 1) if bench.is_dry else (_CALLS, _ROUNDS)
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, took in zip(calls, found, strict=True):
            call()
            bench.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            took.append((time.perf_counter() - begin) / count * 1e6)
    bench.synchronize()
    return found
