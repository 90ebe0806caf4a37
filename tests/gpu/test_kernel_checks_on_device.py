"""What is asked of the kernels at each start: on a device that computes rightly, nothing is found wrong."""

import pytest

from engine.runner.kernel_cases import VOCABULARY, usual_checks
from engine.sampling.kernel_check import SamplingForm
from models.ops.self_test import wrong
from tests.gpu.places import ON_GPU, Place


@ON_GPU
@pytest.mark.parametrize("seed", range(3))
def test_sound_kernels_of_usual_sizes_are_found_right(place: Place, seed: int) -> None:
    place.backend()
    checks = usual_checks(place.device) | {"sampling": [SamplingForm(VOCABULARY).check]}
    assert {operator: wrong(some, place.device, seed) for operator, some in checks.items()} == dict.fromkeys(checks)
