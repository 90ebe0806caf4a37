"""What the host takes to call operators outside graphs, beyond the launches of Triton's that are in them."""

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.attention import Problem
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values
from benchmarks.gpu.empty_kernel import empty_kernel
from benchmarks.gpu.launches import Launches
from models.kernels.cpu.structures import SILU
from models.kernels.triton.fp8 import FP8Weight
from models.kernels.triton.fp8_gemm import fp8_linear
from models.kernels.triton.gated import gated
from models.kernels.triton.grouped import block_of
from models.kernels.triton.moe_gemm import moe_gemm
from models.kernels.triton.moe_sort import moe_sort
from models.kernels.triton.rms_norm import ADD_NORM, rms_norm
from models.kernels.triton.sampling import argmax

_CALLS = 100
"""Fewer than the device queues, or the host would wait for it."""
_ROUNDS = 5


def cases(bench: Bench) -> Iterator[Case]:
    """One operator of each room."""
    yield Case("an empty kernel", lambda: {"us": _host_seconds(bench, lambda: empty_kernel[(1,)]()) * 1e6})
    made: dict[str, Callable[[], Callable[[], object]]] = {
        "norm with residual": lambda: _norm(bench),
        "SwiGLU": lambda: _gated(bench),
        "attention decode and merge": lambda: _decode(bench),
        "experts' sort": lambda: _sort(bench),
        "experts' product": lambda: _experts(bench),
        "FP8 product": lambda: _fp8(bench),
        "likeliest tokens": lambda: _argmax(bench),
    }
    for name, make in made.items():
        yield Case(name, lambda make=make: _measure(bench, make()))  # type: ignore[misc]


def _measure(bench: Bench, call: Callable[[], object]) -> Values:
    with torch.inference_mode():
        call()
        with Launches() as launches:
            call()
        made = launches.made
        ours = _host_seconds(bench, call)
        tritons = _host_seconds(bench, lambda: [launch() for launch in made])
    return {
        "us": ours * 1e6,
        "Triton's own, us": tritons * 1e6,
        "kernels": str(len(made)),
        "beyond, us a kernel": (ours - tritons) / max(len(made), 1) * 1e6,
    }


def _host_seconds(bench: Bench, call: Callable[[], object]) -> float:
    """Of one call, which nothing waits for; the median of some rounds."""
    calls = 1 if bench.is_dry else _CALLS
    call()
    found = []
    for _ in range(1 if bench.is_dry else _ROUNDS):
        bench.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - begin) / calls)
    bench.synchronize()
    return statistics.median(found)


def _norm(bench: Bench) -> Callable[[], object]:
    x, residual, weight = bench.random(4, 1024), bench.random(4, 1024), bench.random(1024)
    return lambda: rms_norm(x, weight, 1e-6, residual=residual, mode=ADD_NORM)


def _gated(bench: Bench) -> Callable[[], object]:
    x = bench.random(4, 2048)
    return lambda: gated(x, SILU)


def _decode(bench: Bench) -> Callable[[], object]:
    return Problem(bench, [1] * 4, [40] * 4).decode


def _sort(bench: Bench) -> Callable[[], object]:
    ids = torch.randint(0, 8, (4, 2), device=bench.device)
    return lambda: moe_sort(ids, 8, 16)


def _experts(bench: Bench) -> Callable[[], object]:
    ids, rows, weight = torch.randint(0, 8, (4, 2), device=bench.device), bench.random(4, 64), bench.random(8, 64, 64)
    pairs = moe_sort(ids, 8, block_of(8, 8))
    return lambda: moe_gemm(rows, weight, None, pairs, 8)


def _fp8(bench: Bench) -> Callable[[], object]:
    x, codes = bench.random(4, 256), bench.random(256, 256).to(torch.float8_e4m3fn)
    weight = FP8Weight(codes, torch.ones(256, 2, device=bench.device))
    return lambda: fp8_linear(x, weight)


def _argmax(bench: Bench) -> Callable[[], object]:
    logits = bench.random(4, 1024, dtype=torch.float32)
    return lambda: argmax(logits)
