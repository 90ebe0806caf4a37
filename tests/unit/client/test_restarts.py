"""When an engine core is restarted, and when no longer."""

import pytest

from engine.client import supervisor as restarts
from engine.client import supervisor as watchdog
from engine.client.supervisor import RestartPolicy, Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Time passes only when a test moves it."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(restarts, "time", clock)
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def test_restarts_beyond_the_window_are_forgotten(clock: Clock) -> None:
    policy = RestartPolicy(max_restarts=2, window=60)
    for _ in range(5):
        assert policy.next_start(futile=False) == clock.now
        assert policy.next_start(futile=False) == clock.now
        clock.now += 60.1
    policy.next_start(futile=False)
    policy.next_start(futile=False)
    clock.now += 59.9
    assert policy.next_start(futile=False) is None
    assert (
        policy.why_not == "; it was started again 2 times within 60 s (max_core_restarts), so it is not started again"
    )


def test_futile_starts_are_repeated_later_and_later_and_then_no_more(clock: Clock) -> None:
    policy = RestartPolicy(max_restarts=100, window=600)
    delays = []
    while (start := policy.next_start(futile=True)) is not None:
        delays.append(start - clock.now)
    assert delays == [0.0, 0.25, 0.5, 1.0]
    assert "5 engine cores in a row died before they served" in policy.why_not


def test_a_core_that_served_makes_up_for_futile_ones(clock: Clock) -> None:
    policy = RestartPolicy(max_restarts=100, window=600)
    for _ in range(4):
        policy.next_start(futile=True)
    assert policy.next_start(futile=False) == clock.now
    assert policy.next_start(futile=True) == clock.now


def test_no_restarts_means_none(clock: Clock) -> None:
    policy = RestartPolicy(max_restarts=0, window=600)
    assert policy.next_start(futile=False) is None
    assert policy.why_not == ""


def look(dog: Watchdog, clock: Clock, seconds: float, stopped: int | None = None) -> list[str]:
    """The watchdog's reports over `seconds`, polled as often as it asks for."""
    said = []
    for _ in range(round(seconds / dog.interval)):
        clock.now += dog.interval
        why = dog.why_stalled(lambda: stopped)
        if why is not None:
            said.append(why)
    return said


def test_a_core_without_progress_is_stalled_once_the_time_is_over(clock: Clock) -> None:
    dog = Watchdog(stall_timeout=10)
    assert look(dog, clock, 10) == []
    assert look(dog, clock, 1) == ["no step was completed for 11 s (stall_timeout is 10)"]
    dog.note_progress()
    assert look(dog, clock, 10) == []


def test_a_stopped_process_is_stalled_sooner(clock: Clock) -> None:
    dog = Watchdog(stall_timeout=100)
    assert look(dog, clock, 50) == []
    dog.note_progress()
    assert look(dog, clock, 3, stopped=77) == ["its process 77 was stopped by a signal"]


def test_a_delayed_watchdog_kills_no_core(clock: Clock) -> None:
    dog = Watchdog(stall_timeout=10)
    clock.now += 3600
    assert dog.why_stalled(lambda: None) is None
    clock.now += dog.interval
    assert dog.why_stalled(lambda: None) is not None
