"""After each test, its kernels and its memory are released."""

import gc
from collections.abc import Iterator

import pytest
import torch

from models.ops import triton
from tests.gpu.places import HAS_GPU


@pytest.fixture(autouse=True)
def _kernels_and_memory_end_with_their_test() -> Iterator[None]:
    yield
    triton.stop()
    if HAS_GPU:
        gc.collect()
        torch.cuda.empty_cache()
