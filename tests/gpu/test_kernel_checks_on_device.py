"""What is asked of the kernels at each start: on a device that computes rightly, nothing is found wrong."""

import pytest

from engine.worker.sampling_check import SamplingForm
from models.kernels.triton.checks.findings import wrong
from models.kernels.triton.checks.usual import VOCABULARY, usual_checks
from tests.gpu.places import ON_GPU, Place


@ON_GPU
@pytest.mark.parametrize("seed", range(3))
def test_sound_kernels_of_usual_sizes_are_found_right(place: Place, seed: int) -> None:
    place.backend()
    checks = usual_checks(place.device) | {"sampling": [SamplingForm(VOCABULARY).check]}
    assert {operator: wrong(some, place.device, seed) for operator, some in checks.items()} == dict.fromkeys(checks)
