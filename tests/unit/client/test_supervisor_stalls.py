"""Which core is killed if several in lockstep make no progress, and which requests a death makes suspects."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from engine.client import supervisor as watchdog
from engine.client.supervisor import Supervisor
from engine.config.config import Config
from engine.messages import Failed
from tests.unit.client.test_restarts import Clock


class Link:
    """A core that is ready and sends nothing."""

    pid = 1
    is_connected = True
    is_gone = False
    waits_for_host = False
    reported_failure = None
    failure = Failed("it died")
    descriptors = (-1, -1)

    def __init__(self) -> None:
        self.kills = 0
        self.closed_for: str | None = None

    def receive(self) -> None:
        return None

    def stopped_process(self) -> int | None:
        return None

    def dump_stacks(self) -> None:
        pass

    def kill(self) -> None:
        self.kills += 1

    def close(self, why: str = "") -> None:
        self.closed_for = why

    completed_steps = 3

    def wait_end(self) -> int:
        return 1

    def awaits_message(self, exit_code: int) -> bool:
        return False

    def why_ended(self, exit_code: int) -> Failed:
        return self.failure

    def running_step(self) -> list[int]:
        return [7]


class Keeper:
    live = ()
    has_work = True

    def __init__(self) -> None:
        self.link = Link()
        self.waits_for_peers = self.awaits_peer_host = False
        self.starts = 0

    def new_core(self, config: Config, context: object) -> Link:
        self.starts += 1
        return self.link

    def on_unavailable(self) -> None:
        pass

    def on_end(self, failure: Failed) -> None:
        pass

    def on_core_death(self, in_step: list[int] | None, *, killed: bool) -> bool:
        self.blamed = in_step
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr("engine.client.supervisor._STACKS_SECONDS", 0.0)
    return clock


def kills_within(keeper: Keeper, clock: Clock, seconds: int) -> int:
    """The reaction to a ready core without progress for `seconds`."""
    supervisor = Supervisor(Config(stall_timeout=10.0), keeper)  # type: ignore[arg-type]
    supervisor.is_serving = True
    for _ in range(seconds):
        clock.now += 1
        supervisor.poll()
    supervisor.end(Failed("the test is over"))
    return keeper.link.kills


@pytest.mark.parametrize(("waits_for_peers", "seconds", "kills"), [(False, 10, 0), (False, 11, 1), (True, 20, 0)])
def test_a_core_that_waits_for_another_is_not_the_one_that_is_killed(
    clock: Clock, waits_for_peers: bool, seconds: int, kills: int
) -> None:
    keeper = Keeper()
    keeper.waits_for_peers = waits_for_peers
    assert kills_within(keeper, clock, seconds) == kills


def test_one_that_waits_for_ever_is_killed_in_the_end(clock: Clock) -> None:
    keeper = Keeper()
    keeper.waits_for_peers = True
    assert kills_within(keeper, clock, 21) == 1


@pytest.mark.parametrize(("collateral", "blamed"), [(False, [7]), (True, None)])
def test_who_was_in_the_step_is_not_blamed_where_a_core_followed_another_into_its_end(
    collateral: bool, blamed: list[int] | None
) -> None:
    keeper = Keeper()
    keeper.link.failure = Failed("it died", collateral=collateral)
    supervisor = Supervisor(Config(), keeper)  # type: ignore[arg-type]
    supervisor._on_gone()
    assert keeper.blamed == blamed


def test_a_core_whose_peer_is_lost_with_its_host_is_ended_and_no_request_is_blamed() -> None:
    """The connections between them may stay open, so that it would wait for the lost one until it stalls."""
    keeper = Keeper()
    supervisor = Supervisor(Config(), keeper)  # type: ignore[arg-type]
    supervisor.is_serving = True
    supervisor.end_with_peer("engine core 1")
    assert keeper.link.kills == 1
    assert not supervisor.is_serving
    supervisor._on_gone()
    assert keeper.blamed is None


class Loop:
    """An event loop whose time is a clock's, and which reads nothing."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.due: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self.clock.now

    def call_at(self, when: float, call: Callable[[], object]) -> None:
        self.due.append((when, call))

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        self.call_at(self.clock.now + seconds, call)

    def run(self) -> None:
        due, self.due = self.due, []
        for when, call in due:
            if when <= self.clock.now:
                call()
            else:
                self.due.append((when, call))

    def ignore(self, *_: object) -> None:
        pass

    add_reader = remove_reader = call_soon = ignore


@pytest.mark.parametrize("has_loop", [False, True])
def test_no_core_is_started_while_the_host_of_its_peer_is_awaited(has_loop: bool, clock: Clock) -> None:
    """It could not meet its peer, and would end after rank_start_timeout, again and again."""
    keeper, loop = Keeper(), Loop(clock)
    supervisor = Supervisor(Config(), keeper)  # type: ignore[arg-type]
    if has_loop:
        supervisor._loop = loop  # type: ignore[assignment]

    def pass_a_second() -> None:
        clock.now += 1
        loop.run() if has_loop else supervisor.poll()

    supervisor._served = keeper.awaits_peer_host = True
    supervisor._on_gone()
    for _ in range(1000):
        pass_a_second()
    assert keeper.starts == 1
    keeper.awaits_peer_host = False
    pass_a_second()
    assert keeper.starts == 2


def test_a_watch_without_a_free_descriptor_sees_nothing_and_raises_nothing() -> None:
    """It is called every second, also while clients use all descriptors."""
    program = """
import os, resource, signal, subprocess, sys, time
from engine.distributed.processes import family, stopped_process
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
child.send_signal(signal.SIGSTOP)
while stopped_process(os.getpid()) != child.pid:
    time.sleep(0.01)
held = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    assert (stopped_process(os.getpid()), family(os.getpid())) == (None, [os.getpid()])
os.close(held.pop())
os.close(held.pop())
assert stopped_process(os.getpid()) == child.pid
child.kill()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
