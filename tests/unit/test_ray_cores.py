"""Actors that run replicas, over a cluster that is none: another follows each that ends, sooner or later."""

from collections.abc import Sequence

import pytest

from engine import ray_cores

JOINING = "tcp://10.0.0.1:29500"


class Clock:
    """Moves as it is waited for; in the end it says that the server closes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.is_over = False

    def monotonic(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return self.is_over

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return self.is_over


class Cluster:
    """Its actors end one by one, after as many seconds as were said: `lives` has replicas and those."""

    def __init__(self, clock: Clock, lives: Sequence[tuple[int, float]]) -> None:
        self._clock, self._lives = clock, list(lives)
        self.started: list[tuple[int, float]] = []

    def serve(self, number: int, joining: str) -> str:
        assert joining == JOINING
        self.started.append((number, self._clock.now))
        return f"{number}: {len(self.started)}"

    def wait(self, served: list[str], timeout: float) -> tuple[list[str], list[str]]:
        if not self._lives:
            self._clock.is_over = True
            return [], served
        replica, seconds = self._lives.pop(0)
        [ended] = [each for each in served if each.startswith(f"{replica}:")]
        self._clock.now += seconds
        return [ended], [each for each in served if each != ended]

    def failure(self, served: str) -> str:
        return f"actor {served} has died"


class Router:
    def __init__(self) -> None:
        self.turned_away: list[tuple[int, str]] = []

    def turn_away(self, node: int, why: str) -> None:
        self.turned_away.append((node, why))


def keep(monkeypatch: pytest.MonkeyPatch, lives: Sequence[tuple[int, float]]) -> tuple[Clock, Cluster, Router]:
    """What becomes of replicas 1 and 2."""
    clock, router = Clock(), Router()
    cluster = Cluster(clock, lives)
    monkeypatch.setattr(ray_cores, "time", clock)
    ray_cores._keep(cluster, range(1, 3), JOINING, router, clock)  # type: ignore[arg-type]
    return clock, cluster, router


def test_each_actor_that_ends_soon_is_followed_after_a_longer_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cluster, router = keep(monkeypatch, [(1, 2.0)] * 7)
    assert clock.waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert [replica for replica, _ in cluster.started] == [1, 2] + 7 * [1]
    assert router.turned_away[0] == (1, "actor 1: 1 has died")
    assert len(router.turned_away) == 7


def test_one_that_served_for_a_while_is_followed_at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, _, _ = keep(monkeypatch, [(1, 2.0)] * 4 + [(1, 3600.0), (1, 2.0)])
    assert clock.waits == [1.0, 2.0, 4.0, 8.0, 1.0, 2.0]


def test_what_one_replica_suffers_from_does_not_make_another_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, _, _ = keep(monkeypatch, [(1, 2.0)] * 3 + [(2, 2.0), (1, 2.0)])
    assert clock.waits == [1.0, 2.0, 4.0, 1.0, 8.0]
