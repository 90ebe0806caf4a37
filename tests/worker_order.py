"""The order of the tests for pytest-xdist's `--dist worksteal`.

Each worker begins with an equal stretch of the list; one that has ended its own takes half of what is left at the end
of the longest. A stretch of the order of collection is of one folder, so that two workers would wait for servers while
the others compete for the processors, and the run would end with tests that wait.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

_WAITING, _COMPUTING, _SHORT = range(3)
_KINDS = {"chaos": _WAITING, "e2e": _WAITING, "fuzz": _WAITING, "parity": _COMPUTING}
"""What the tests of a folder of tests/ do most of their time; those of the others are short."""
_SHARING = ("chaos", "fuzz")
"""Folders whose modules share a server, which is started once in each worker that runs one of them."""


class _Test(Protocol):
    @property
    def path(self) -> Path: ...


Test = TypeVar("Test", bound=_Test)


def worker_order(tests: Sequence[Test], num_workers: int) -> list[Test]:
    """Give each worker modules of each kind: half of the workers begin with those that wait, the others with those
    that compute, and all end with short tests. A module stays whole, since its tests share fixtures.
    """
    stretches: list[tuple[list[Test], ...]] = [([], [], []) for _ in range(num_workers)]
    num_dealt = [0, 0, 0]
    for (kind, _), group in groupby(sorted(tests, key=_group_of), key=_group_of):
        turn = num_dealt[kind] % num_workers
        num_dealt[kind] += 1
        fewest = min(range(num_workers), key=lambda number: sum(map(len, stretches[number])))
        stretches[fewest if kind == _SHORT else turn][kind].extend(group)
    return [
        test
        for number, (waiting, computing, short) in enumerate(stretches)
        for kind in ((waiting, computing, short) if number % 2 == 0 else (computing, waiting, short))
        for test in kind
    ]


def _group_of(test: _Test) -> tuple[int, str]:
    path = test.path.relative_to(Path(__file__).parent)
    folder = path.parts[0]
    return _KINDS.get(folder, _SHORT), folder if folder in _SHARING else str(path)
