"""Norms, activations, and torch's products as the linear layers call them."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values
from models.kernels.cpu.structures import SILU
from models.kernels.triton.gated import gated
from models.kernels.triton.reference import gated as gated_reference
from models.kernels.triton.reference import rms_norm as norm_reference
from models.kernels.triton.rms_norm import ADD_NORM, rms_norm

_EPS = 1e-6


def cases(bench: Bench) -> Iterator[Case]:
    """Of a decode's batch and of a prompt's tokens."""
    for rows in bench.size((64, 8192) if bench.is_quick else (1, 64, 256, 8192), (3,)):
        yield Case(f"norm with residual, {rows} rows", lambda rows=rows: _norm(bench, rows))  # type: ignore[misc]
        yield Case(f"SwiGLU, {rows} rows", lambda rows=rows: _gated(bench, rows))  # type: ignore[misc]
    features = bench.size(((4096, 24576), (12288, 4096), (4096, 151936)), ((32, 48),))
    for inputs, outputs in features:
        for rows in bench.size((1, 64) if bench.is_quick else (1, 16, 64, 256), (3,)):
            name = f"F.linear, {rows} x {inputs} -> {outputs}"
            yield Case(name, lambda r=rows, i=inputs, o=outputs: _linear(bench, r, i, o))  # type: ignore[misc]


def _norm(bench: Bench, rows: int) -> Values:
    size = bench.size(4096, 96)
    x, residual, weight = bench.random(rows, size), bench.random(rows, size), bench.random(size)

    def both(by: object) -> torch.Tensor:
        summed = residual.clone()
        normed = by(x, weight, _EPS, residual=summed, mode=ADD_NORM)  # type: ignore[operator]
        return torch.cat((normed, summed))

    checked = bench.checked(both(rms_norm), both(norm_reference.rms_norm))
    beside = {"torch": lambda: F.rms_norm(x + residual, (size,), weight, _EPS)}
    values = bench.kernel(
        lambda: rms_norm(x, weight, _EPS, residual=residual, mode=ADD_NORM),
        None,
        num_bytes=4 * x.nbytes,
        beside=beside,
    )
    return {**values, **checked}


def _gated(bench: Bench, rows: int) -> Values:
    size = bench.size(12288, 96)
    x = bench.random(rows, 2 * size)

    def by_torch() -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return bench.kernel(
        lambda: gated(x, SILU),
        lambda: gated_reference.gated(x, SILU),
        num_bytes=1.5 * x.nbytes,
        beside={"torch": by_torch},
    )


def _linear(bench: Bench, rows: int, inputs: int, outputs: int) -> Values:
    x, weight = bench.random(rows, inputs), bench.random(outputs, inputs)
    return bench.kernel(
        lambda: F.linear(x, weight),
        None,
        num_bytes=weight.nbytes + x.nbytes + rows * outputs * x.element_size(),
        operations=2.0 * rows * inputs * outputs,
    )
