"""Each kernel against its reference at real sizes: the cases that the benchmark checks before it times them.

Small and odd sizes are those of `tests/parity/test_triton_*`, which run on the GPU of a machine that has one.
"""

import pytest

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.part_process import run_part
from benchmarks.gpu.parts import BY_NAME, Finding
from tests.gpu.places import ON_GPU, Place

KERNELS = ("attention", "dense", "experts", "quantized", "sampling", "latents", "launch")


@ON_GPU
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_real_sizes_are_right(name: str, place: Place) -> None:
    found: list[Finding] = []
    assert run_part(BY_NAME[name], Bench(place.device, is_quick=True), lambda case: None, found.append)
    assert [f"{finding.case}: {finding.error}" for finding in found if finding.error is not None] == []
