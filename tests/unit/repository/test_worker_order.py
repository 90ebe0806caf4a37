"""The order of tests gives each worker of xdist some of each kind, and keeps modules whole."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from tests import worker_order as module
from tests.worker_order import worker_order

TESTS = Path(module.__file__).parent
SIZES = {"chaos": (2, 3), "e2e": (9, 1, 30, 4, 7, 8), "fuzz": (5,), "parity": (80, 3, 20, 6), "unit": (2,) * 160}
"""Tests of each module of each folder."""


@dataclass(frozen=True)
class Item:
    path: Path
    number: int


ITEMS = [
    Item(TESTS / folder / f"test_{module}.py", number)
    for folder, sizes in SIZES.items()
    for module, size in enumerate(sizes)
    for number in range(size)
]


def folders(items: list[Item]) -> list[str]:
    """As they follow each other."""
    return [folder for folder, _ in groupby(item.path.parent.name for item in items)]


@pytest.mark.parametrize("num_workers", [2, 4, 7])
def test_every_test_is_run_once_and_modules_stay_whole(num_workers: int) -> None:
    found = worker_order(ITEMS, num_workers)
    assert sorted(found, key=ITEMS.index) == ITEMS
    modules = [(path, list(items)) for path, items in groupby(found, key=lambda item: item.path)]
    assert len(modules) == len({path for path, _ in modules})
    assert all([item.number for item in items] == list(range(len(items))) for _, items in modules)


def test_half_of_the_workers_begin_with_tests_that_wait_and_all_end_with_short_ones() -> None:
    found = worker_order(ITEMS, 2)
    first, second = found[: len(found) // 2], found[len(found) // 2 :]
    assert folders(first)[0] == "chaos"
    assert folders(first)[-2:] == ["parity", "unit"]
    assert folders([item for item in second if item.path.parent.name != "unit"])[0] == "parity"
    assert folders(second)[-1] == "unit"


def test_modules_that_share_a_server_are_run_by_one_worker() -> None:
    assert folders(worker_order(ITEMS, 4)).count("chaos") == 1
