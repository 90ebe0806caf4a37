"""Nothing of one test's operators is left for the next."""

from collections.abc import Iterator

import pytest

from models.kernels.cpu import runtime


@pytest.fixture(autouse=True)
def _operators_end_with_their_test() -> Iterator[None]:
    yield
    runtime.stop()
