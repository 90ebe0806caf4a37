"""Full garbage collections of the API process and of the engine core."""

import gc

import pytest

from engine import full_collections
from engine.full_collections import FullCollections
from tests.unit.core_bench import Bench


def test_full_collections_happen_while_they_are_short_or_once_memory_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(gc.get_count()[2])

    thresholds, resident, now = gc.get_threshold(), [2**30], [0.0]
    gc.freeze()
    gc.callbacks.append(count)
    try:
        gc.set_threshold(50, 2, 2)
        collections = FullCollections(lambda: now[0], lambda: resident[0])
        monkeypatch.setattr(full_collections, "_MOST_OBJECTS", 20_000)
        held: list[list[int]] = []

        def hold(number: int) -> None:
            held.extend([each] for each in range(number))
            now[0] += 1000.0

        hold(10_000)
        assert not full, "the interpreter's own"
        collections.collect_if_due()
        assert len(full) == 1
        collections.collect_if_due()
        assert len(full) == 1, "none is due"
        hold(40_000)
        collections.collect_if_due()
        assert len(full) == 1, "it would be long"
        resident[0] += 2**28
        collections.collect_if_due()
        assert len(full) == 2, "the memory has grown"
        hold(1000)
        collections.collect_if_due()
        assert len(full) == 2, "it has not grown again"
        resident[0] *= 4
        collections.collect_if_due()
        assert len(full) == 3
        hold(1000)
        resident[0] += 2**28
        collections.collect_if_due()
        assert len(full) == 3, "a large memory may grow by more"
        resident[0] += resident[0] // 4
        collections.collect_if_due()
        assert len(full) == 4
        held.clear()
        hold(1000)
        collections.collect_if_due()
        assert len(full) == 5
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*thresholds)


def test_a_core_looks_after_each_step_whether_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds, looks = gc.get_threshold(), 0

    def collect_if_due(self: FullCollections) -> None:
        nonlocal looks
        looks += 1

    monkeypatch.setattr(FullCollections, "collect_if_due", collect_if_due)
    try:
        bench = Bench(collections=FullCollections())
        bench.add(1, max_tokens=6)
        bench.run_until_done(1)
    finally:
        gc.set_threshold(*thresholds)
    assert looks >= 6
