"""After each test, its operators are removed; KAON_TEST_OPERATORS limits the instructions that tests use."""

import importlib.util
import os
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from models.ops import triton
from models.ops.cpu import runtime
from models.ops.cpu import runtime as library

_HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if _HAS_TRITON else ["test_triton_*.py"]


def _limit_operators(name: str) -> None:
    """Let tests use the best instruction set up to `name` only, or none at all; called before they are imported."""
    if name == "none":
        library.load_library = cache(lambda: None)
        return
    limit, loaded = library.INSTRUCTION_SETS.index(name), library.load_library()
    if loaded is not None:
        loaded.isa = max(isa for isa in loaded.available if isa <= limit)
        loaded.available = (loaded.isa,)


if "KAON_TEST_OPERATORS" in os.environ:
    _limit_operators(os.environ["KAON_TEST_OPERATORS"])


def pytest_report_header() -> str | None:
    """The reason for skipping them."""
    return None if _HAS_TRITON else "Triton is not installed: the tests of its kernels are left out"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """If kernels are not interpreted, their tests are tests of the GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if item.path.name.startswith("test_triton_") and item.path.name != "test_triton_compiles.py":
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Independent of the tests that ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _operators_end_with_their_test() -> Iterator[None]:
    yield
    runtime.stop()
    triton.stop()
