"""The self-test of kernels at sizes of common models: on a device that computes correctly, it reports no error."""

import pytest

from models.ops.self_test import first_failure
from tests.gpu.places import ON_GPU, Place


@ON_GPU
@pytest.mark.parametrize("seed", range(3))
def test_sound_kernels_pass_at_common_sizes(place: Place, seed: int) -> None:
    place.backend()
    from models.ops.triton.cases import common_cases

    cases = common_cases(place.device)
    assert {name: first_failure(some, place.device, seed) for name, some in cases.items()} == dict.fromkeys(cases)
