"""Actors that run replicas, over a simulated cluster: each actor that ends is replaced, sooner or later."""

from collections.abc import Sequence
from threading import Event
from types import SimpleNamespace

import pytest

from engine.distributed import ray_cluster

JOINING = "tcp://10.0.0.1:29500"
HOUR = 3600.0


class Clock:
    """A clock that advances when it is waited for; after an hour the server closes."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return self.now >= HOUR

    def wait(self, seconds: float) -> bool:
        assert seconds > 0
        self.now += seconds
        return self.is_set()


class Cluster:
    """Its actors end after the given seconds; later ones run for long."""

    def __init__(self, clock: Clock, lives: Sequence[Sequence[float]]) -> None:
        self._clock = clock
        self._lives = [iter([*seconds, 2 * HOUR]) for seconds in lives]
        self._ends: dict[str, float] = {}
        self.starts: list[list[float]] = [[] for _ in lives]
        """Times at which actors of each replica were requested."""

    def serve(self, number: int, joining: str) -> str:
        assert joining == JOINING
        starts = self.starts[number - 1]
        starts.append(self._clock.now)
        served = f"{number}: {len(starts)}"
        self._ends[served] = self._clock.now + next(self._lives[number - 1])
        return served

    def wait(self, served: list[str], seconds: float) -> tuple[list[str], list[str]]:
        assert served, "Ray raises for nothing"
        first = min(served, key=lambda each: self._ends[each])
        self._clock.now = max(self._clock.now, min(self._ends[first], self._clock.now + seconds))
        ended = [first] if self._ends[first] <= self._clock.now else []
        return ended, [each for each in served if each not in ended]

    def failure(self, served: str) -> str:
        return f"actor {served} has died"

    def pauses(self, replica: int, lives: Sequence[float]) -> list[float]:
        """Seconds from the end of each of its actors to the next one's start."""
        starts = self.starts[replica - 1]
        ends = [start + life for start, life in zip(starts, lives, strict=False)]
        return [start - end for end, start in zip(ends, starts[1:], strict=True)]


class Router:
    def __init__(self) -> None:
        self.turned_away: list[tuple[int, str]] = []

    def turn_away(self, node: int, why: str) -> None:
        self.turned_away.append((node, why))


def keep(monkeypatch: pytest.MonkeyPatch, *lives: Sequence[float], restarts: bool = True) -> tuple[Cluster, Router]:
    """The state of the replicas from 1 on."""
    clock, router = Clock(), Router()
    cluster = Cluster(clock, lives)
    monkeypatch.setattr(ray_cluster, "time", clock)
    numbers = range(1, len(lives) + 1)
    ray_cluster.keep_actors(cluster, numbers, JOINING, router.turn_away, clock, restarts=restarts)  # type: ignore[arg-type]
    return cluster, router


def test_each_actor_that_ends_soon_is_followed_after_a_longer_while(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = [2.0] * 7
    cluster, router = keep(monkeypatch, lives, [])
    assert cluster.pauses(1, lives) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert cluster.starts[1] == [0.0]
    assert router.turned_away == [(1, f"actor 1: {number} has died") for number in range(1, 8)]


def test_one_that_served_for_a_while_is_followed_at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = [2.0, 2.0, 2.0, 2.0, 600.0, 2.0]
    cluster, _ = keep(monkeypatch, lives)
    assert cluster.pauses(1, lives) == [1.0, 2.0, 4.0, 8.0, 1.0, 2.0]


def test_what_one_replica_suffers_from_makes_another_wait_neither_longer_nor_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second replica's first actor ends while the first replica waits 16 s for its own; its second one ends soon
    after."""
    often, seldom = [2.0] * 7, [27.0, 3.0]
    cluster, _ = keep(monkeypatch, often, seldom)
    assert cluster.starts[0][4:6] == [23.0, 41.0]
    assert cluster.pauses(1, often) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert cluster.pauses(2, seldom) == [1.0, 2.0]


def test_those_that_end_at_the_same_time_are_followed_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No actor runs meanwhile."""
    cluster, _ = keep(monkeypatch, *[[0.0, 0.5]] * 3)
    assert cluster.starts == [[0.0, 1.0, 3.5]] * 3


def test_the_end_of_an_actor_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    keep(monkeypatch, [0.0])
    assert "the Ray actor of replica 1 ended (actor 1: 1 has died); another is started in 1 s" in caplog.text


def test_an_actor_of_ranks_is_not_replaced_but_its_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, router = keep(monkeypatch, [2.0], [5.0], restarts=False)
    assert cluster.starts == [[0.0], [0.0]]
    assert router.turned_away == [(1, "actor 1: 1 has died"), (2, "actor 2: 1 has died")]


def test_after_the_end_of_the_server_none_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _ = keep(monkeypatch, [HOUR - 0.5], [HOUR - 0.5])
    assert cluster.starts == [[0.0], [0.0]]


def test_an_actor_that_is_started_while_the_cluster_closes_is_killed_too() -> None:
    killed: list[str] = []
    util = SimpleNamespace(remove_placement_group=lambda group: None)
    cluster = object.__new__(ray_cluster.RayCluster)
    cluster._ray = SimpleNamespace(kill=killed.append, util=util, shutdown=lambda: killed.append("shutdown"))
    cluster._actors, cluster._closing, cluster._group = {1: "first"}, Event(), None
    cluster._keeper = SimpleNamespace(join=lambda: cluster._actors.update({1: "its successor"}))  # type: ignore
    cluster.close()
    assert killed == ["first", "its successor", "shutdown"]
