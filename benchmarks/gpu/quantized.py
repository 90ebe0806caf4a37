"""Products with weights that stay quantised."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values
from models.kernels.triton.configs import target_of
from models.kernels.triton.four_bit import FourBitWeight
from models.kernels.triton.four_bit_gemm import four_bit_linear
from models.kernels.triton.fp8 import FP8Weight
from models.kernels.triton.fp8_gemm import fp8_linear
from models.kernels.triton.reference import quantized as reference
from models.kernels.types import FP8_GROUP


def cases(bench: Bench) -> Iterator[Case]:
    """By rows and how the weight is stored."""
    makes = {"FP8 by blocks": _fp8, "MXFP4": _mxfp4, "int4, groups of 128": _int4}
    for rows in bench.size((16, 4096) if bench.is_quick else (1, 16, 64, 256, 4096), (3,)):
        for name, measure in makes.items():
            yield Case(f"{name}, {rows} rows", lambda m=measure, r=rows: m(bench, r))  # type: ignore[misc]


def random_mxfp4(bench: Bench, *shape: int) -> FourBitWeight:
    """Codes of any kind, and scales about 1 / 32. # shape: [.., out, in]"""
    *rows, inputs = shape
    packed = torch.randint(0, 256, (*rows, inputs // 2), dtype=torch.uint8, device=bench.device)
    scales = torch.randint(120, 125, (*rows, inputs // 32), dtype=torch.uint8, device=bench.device)
    return FourBitWeight(packed, scales)


def _sizes(bench: Bench) -> tuple[int, int]:
    """Outputs and inputs."""
    return bench.size((12288, 4096), (48, 256))


def _fp8(bench: Bench, rows: int) -> Values:
    flavour = target_of(bench.device).fp8 or "e4m3fn"
    outputs, inputs = _sizes(bench)
    codes = bench.random(outputs, inputs).to(getattr(torch, f"float8_{flavour}"))
    scales = torch.rand(-(-outputs // FP8_GROUP), inputs // FP8_GROUP, device=bench.device) / 64
    # As the loader keeps them: a scale an output and group.
    weight = FP8Weight(codes, scales.repeat_interleave(FP8_GROUP, 0)[:outputs].contiguous())
    return _measure(
        bench, rows, lambda x: fp8_linear(x, weight), lambda x: reference.fp8_linear(x, weight), codes, 2.0
    )


def _mxfp4(bench: Bench, rows: int) -> Values:
    weight = random_mxfp4(bench, *_sizes(bench))
    return _measure(
        bench,
        rows,
        lambda x: four_bit_linear(x, weight),
        lambda x: reference.four_bit_linear(x, weight),
        weight.packed,
    )


def _int4(bench: Bench, rows: int) -> Values:
    outputs, inputs = _sizes(bench)
    packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=bench.device)
    scales = (torch.rand(outputs, inputs // FP8_GROUP, device=bench.device) / 64).to(bench.dtype)
    zeros = torch.randint(6, 10, (outputs, inputs // FP8_GROUP), dtype=torch.uint8, device=bench.device)
    weight = FourBitWeight(packed, scales, zeros)
    return _measure(
        bench, rows, lambda x: four_bit_linear(x, weight), lambda x: reference.four_bit_linear(x, weight), packed
    )


def _measure(
    bench: Bench,
    rows: int,
    run: Callable[[torch.Tensor], torch.Tensor],
    expected: Callable[[torch.Tensor], torch.Tensor],
    stored: torch.Tensor,
    rate: float = 1.0,
) -> Values:
    """`stored`: the weight's codes, beside which its scales are little."""
    outputs, inputs = _sizes(bench)
    x, dense = bench.random(rows, inputs), bench.random(outputs, inputs)
    return bench.kernel(
        lambda: run(x),
        lambda: expected(x),
        num_bytes=stored.nbytes + x.nbytes + rows * outputs * x.element_size(),
        operations=2.0 * rows * inputs * outputs,
        rate=rate,
        # Sums in another order may round an activation to the next code.
        tolerance=2e-2,
        beside={"bfloat16 F.linear": lambda: F.linear(x, dense)},
    )
