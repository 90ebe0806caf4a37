"""`CoreManager` over cores that die: requests continue, and the request at fault is found. Stub model."""

import asyncio
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import psutil
import pytest

from engine.client.core_manager import CoreManager, EngineDeadError
from engine.config.config import Config
from engine.messages import AddRequest, RequestOutput, StepOutputs
from engine.sampling_params import SamplingParams
from tests.e2e.stub_core import DEADLY, ENDLESS, FIRST_TOKEN, OUTSIDE, RAISING

pytestmark = pytest.mark.usefixtures("stub_core")

WAIT_SECONDS = 120
PROMPT = [1, 2, 3]
HeldStarts: TypeAlias = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def counting_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_CORE_COUNTS", "1")


class Run:
    """A manager, and the tokens that it delivered by request."""

    def __init__(self, **settings: Any) -> None:
        self.manager = CoreManager(Config(**settings))
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, RequestOutput] = {}

    def add(self, *request_ids: int, max_tokens: int = 300, prompt: list[int] = PROMPT) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.manager.add_requests([AddRequest(request_id, prompt, params) for request_id in request_ids])

    def take(self, step: StepOutputs) -> None:
        for output in step.outputs:
            assert output.request_id not in self.ends, "a request had an output after its end"
            self.tokens[output.request_id] += output.output_tokens
            if output.finished:
                self.ends[output.request_id] = output

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not holds():
            assert time.monotonic() < deadline, "it never came to hold"
            step = self.manager.get_outputs(0.01)
            if step is not None:
                self.take(step)

    def until_ended(self, *request_ids: int) -> None:
        self.until(lambda: self.ends.keys() >= set(request_ids))

    def until_begun(self, *request_ids: int) -> None:
        self.until(lambda: all(self.tokens[request_id] for request_id in request_ids))

    def until_replaced(self, pid: int) -> None:
        """Wait until another core than that one is ready."""
        self.until(lambda: pid not in self.manager.pids and len(self.manager.serving) == len(self.manager.pids))

    def kill(self) -> None:
        os.kill(self.manager.pid, signal.SIGKILL)

    def assert_complete(self, *request_ids: int, max_tokens: int = 300) -> None:
        first = FIRST_TOKEN + len(PROMPT)
        for request_id in request_ids:
            assert self.ends[request_id].finish_reason == "max_tokens", self.ends[request_id]
            assert self.tokens[request_id] == list(range(first, first + max_tokens))


@pytest.fixture(params=["off", pytest.param("on", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Synchronous steps, and asynchronous ones."""
    run = Run(async_scheduling=request.param)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        yield run


def test_requests_go_on_where_they_were_when_the_core_is_killed(run: Run) -> None:
    run.add(*range(20))
    run.until_begun(*range(20))
    run.kill()
    run.until_ended(*range(20))
    run.assert_complete(*range(20))
    assert not run.manager.live


def test_requests_that_come_while_the_core_is_started_again_wait_for_it(run: Run, held_starts: HeldStarts) -> None:
    run.add(0)
    run.until_begun(0)
    pid = run.manager.pid
    with held_starts():
        run.kill()
        run.until(lambda: not run.manager.is_serving)
        run.add(1, 2)
    run.until_ended(0, 1, 2)
    run.assert_complete(0, 1, 2)
    assert run.manager.pid != pid
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("deaths", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_deaths_at_random_moments_lose_and_repeat_nothing(deaths: int) -> None:
    rng = random.Random(0)
    run = Run(max_core_restarts=100)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        added = 0
        for _ in range(deaths):
            run.add(*range(added, added + 8), max_tokens=100)
            added += 8
            # The requests of the fatal step are computed first: when a new one has begun, they have continued.
            run.until_begun(rng.randrange(added - 8, added))
            for _ in range(rng.randrange(40)):
                run.until(lambda: True)
                step = run.manager.get_outputs(0.002)
                if step is not None:
                    run.take(step)
            run.until(lambda: run.manager.is_serving)
            run.kill()
        run.until_ended(*range(added))
        run.assert_complete(*range(added), max_tokens=100)


async def test_an_event_loop_s_requests_go_on_too() -> None:
    run = Run()
    with run.manager as manager:
        ended = asyncio.Event()
        resumed: list[int] = []

        killed: list[int] = []

        def take(step: StepOutputs) -> None:
            run.take(step)
            if len(run.tokens) == 5 and not killed:
                killed.append(manager.pid)
                run.kill()
            if len(run.ends) == 5:
                ended.set()

        manager.attach(asyncio.get_running_loop(), take, lambda count, replica: resumed.append(count))
        await manager.wait_ready_async(WAIT_SECONDS)
        run.add(*range(5), max_tokens=1000)
        await asyncio.wait_for(ended.wait(), WAIT_SECONDS)
    run.assert_complete(*range(5), max_tokens=1000)
    assert resumed == [5]


def test_what_was_aborted_ends_with_the_core_and_does_not_go_on(run: Run) -> None:
    run.add(0, max_tokens=8000)
    run.add(1)
    run.until_begun(0, 1)
    os.kill(run.manager.pid, signal.SIGSTOP)
    run.manager.abort([0])
    run.kill()
    run.until_ended(0, 1)
    assert run.ends[0].finish_reason == "abort"
    run.assert_complete(1)


def test_what_is_aborted_while_there_is_no_core_ends_at_once(run: Run, held_starts: HeldStarts) -> None:
    run.add(0, max_tokens=8000)
    run.until_begun(0)
    with held_starts():
        run.kill()
        run.until(lambda: not run.manager.is_serving)
        run.add(1)
        run.manager.abort([0, 1])
        run.until_ended(0, 1)
        assert not run.manager.is_serving
    assert {id: output.finish_reason for id, output in run.ends.items()} == {0: "abort", 1: "abort"}
    run.add(2)
    run.until_ended(2)
    run.assert_complete(2)


def test_a_request_that_kills_the_core_twice_fails_and_others_continue(run: Run) -> None:
    run.add(*range(4))
    run.until_begun(*range(4))
    run.add(9, prompt=[DEADLY])
    run.add(*range(10, 14))
    run.until_ended(*range(4), 9, *range(10, 14))
    run.assert_complete(*range(4), *range(10, 14))
    assert run.ends[9].finish_reason == "error"
    assert run.ends[9].error is not None
    assert "the engine died 2 times in a row computing it" in run.ends[9].error
    assert run.ends[9].is_poison


def test_a_request_that_kills_the_core_before_its_step_is_given_up_too(run: Run) -> None:
    run.add(0)
    run.until_begun(0)
    run.add(9, prompt=[OUTSIDE])
    run.until_ended(0, 9)
    run.assert_complete(0)
    assert run.ends[9].finish_reason == "error"


def test_the_request_that_makes_a_step_raise_fails_alone_and_the_core_stays(run: Run) -> None:
    pid = run.manager.pid
    run.add(*range(4))
    run.until_begun(*range(4))
    run.add(9, prompt=[RAISING])
    run.add(*range(10, 14))
    run.until_ended(*range(4), 9, *range(10, 14))
    run.assert_complete(*range(4), *range(10, 14))
    assert run.ends[9].error == "the step that computed this request failed: division by cucumber"
    assert run.ends[9].is_poison
    assert run.manager.pid == pid


def test_a_core_that_completes_no_step_is_killed_after_its_threads_were_written_down(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = Run(stall_timeout=3.5)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        run.add(0)
        run.until_begun(0)
        run.add(9, prompt=[ENDLESS])
        run.add(1)
        run.until_ended(0, 1, 9)
        run.assert_complete(0, 1)
        assert run.ends[9].finish_reason == "error"
    stacks = capfd.readouterr().err
    assert "in forward" in stacks
    assert "most recent call first" in stacks


def test_a_stopped_core_is_noticed_before_the_longest_step_would_be_over(run: Run) -> None:
    run.add(0)
    run.until_begun(0)
    os.kill(run.manager.pid, signal.SIGSTOP)
    run.until_ended(0)
    run.assert_complete(0)


@pytest.mark.slow  # The short form: tests/unit/client/test_restarts.py.
def test_an_idle_core_does_not_count_as_stalled() -> None:
    run = Run(stall_timeout=3.5)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        pid = run.manager.pid
        assert run.manager.get_outputs(4.0) is None
        run.add(0, max_tokens=1)
        run.until_ended(0)
        assert run.manager.pid == pid


async def test_an_idle_core_that_is_stopped_is_replaced_before_anybody_comes() -> None:
    run = Run()
    with run.manager as manager:
        manager.attach(asyncio.get_running_loop(), run.take)
        await manager.wait_ready_async(WAIT_SECONDS)
        pid = manager.pid
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(WAIT_SECONDS):
            while manager.is_serving:
                await asyncio.sleep(0.01)
            while not manager.is_serving:
                await asyncio.sleep(0.01)
        assert manager.pid != pid


@pytest.mark.slow  # When and how often it restarts: tests/unit/client/test_restarts.py.
def test_cores_that_die_at_once_are_not_started_for_ever(stub_core: Callable[[str], None]) -> None:
    run = Run()
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        run.add(0, 1, max_tokens=8000)
        run.until_begun(0, 1)
        stub_core("exit")
        run.kill()
        run.until_ended(0, 1)
        assert {output.finish_reason for output in run.ends.values()} == {"error"}
        error = str(run.ends[0].error)
        assert "exited with code 3; its log says why; 5 engine cores in a row died before they served" in error
        with pytest.raises(EngineDeadError, match="in a row"):
            run.add(2)


def test_restarts_are_counted_over_a_window() -> None:
    run = Run(max_core_restarts=2)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        for round in range(3):
            run.add(round, max_tokens=8000)
            run.until_begun(round)
            pid = run.manager.pid
            run.kill()
            if round < 2:
                run.until_replaced(pid)
        run.until_ended(2)
        assert "started again 2 times within 600 s (max_core_restarts)" in str(run.ends[2].error)


def test_a_paused_request_is_silent_until_it_is_resumed_and_goes_on_where_it_was(run: Run) -> None:
    run.add(0, max_tokens=2000)
    run.add(1)
    run.until_begun(0, 1)
    run.manager.pause([0, 77])
    run.until_ended(1)
    reported = len(run.tokens[0])
    assert run.manager.get_outputs(0.1) is None
    assert len(run.tokens[0]) == reported < 2000
    run.manager.resume([0, 77])
    run.until_ended(0)
    run.assert_complete(0, max_tokens=2000)
    run.assert_complete(1)


def test_pausing_and_resuming_at_random_loses_nothing(run: Run) -> None:
    rng = random.Random(1)
    run.add(*range(10))
    paused: set[int] = set()
    while len(run.ends) < 10:
        for request_id in rng.sample(range(10), 3):
            if request_id in paused or rng.random() < 0.5:
                run.manager.resume([request_id])
                paused.discard(request_id)
            else:
                run.manager.pause([request_id])
                paused.add(request_id)
        step = run.manager.get_outputs(0.005)
        if step is not None:
            run.take(step)
    run.assert_complete(*range(10))
    assert not run.manager.live


def test_a_paused_request_outlives_the_core_and_can_be_aborted(run: Run) -> None:
    run.add(0, max_tokens=1000)
    run.add(1, max_tokens=8000)
    run.until_begun(0, 1)
    run.manager.pause([0, 1])
    pid = run.manager.pid
    run.kill()
    run.until_replaced(pid)
    run.manager.abort([1])
    run.manager.resume([0, 1])
    run.until_ended(0, 1)
    run.assert_complete(0, max_tokens=1000)
    assert run.ends[1].finish_reason == "abort"


def test_each_request_ends_once_whatever_happens_to_it() -> None:
    rng = random.Random(2)
    run = Run(max_core_restarts=100)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        for request_id in range(300):
            run.add(request_id, max_tokens=rng.choice([1, 5, 50]))
            chosen = rng.sample(range(request_id + 1), min(request_id + 1, 4))
            rng.choice([run.manager.pause, run.manager.resume, run.manager.abort, run.manager.resume])(chosen)
            if request_id % 60 == 59 and run.manager.is_serving:
                run.kill()
            step = run.manager.get_outputs(0.002)
            if step is not None:
                run.take(step)
        run.manager.resume(range(300))
        run.until_ended(*range(300))
        assert set(Counter(output.finish_reason for output in run.ends.values())) <= {"abort", "max_tokens"}
        assert not run.manager.live


@pytest.mark.parametrize("killers", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_several_requests_that_kill_the_core_fail_and_others_continue(run: Run, killers: int) -> None:
    run.add(*range(4), max_tokens=400)
    run.until_begun(*range(4))
    run.add(*range(10, 10 + killers), prompt=[DEADLY])
    run.until_ended(*range(4), *range(10, 10 + killers))
    run.assert_complete(*range(4), max_tokens=400)


def test_a_killer_that_is_faster_than_the_start_ends_nothing_by_itself(run: Run) -> None:
    run.add(0)
    run.until_begun(0)
    for _ in range(7):
        pid = run.manager.pid
        run.kill()
        run.until(lambda pid=pid: run.manager.pid != pid)  # type: ignore[misc]
    run.until_ended(0)
    run.assert_complete(0)


@pytest.mark.slow  # The parts of it: the other tests of stopped cores.
def test_a_core_that_is_stopped_while_it_takes_another_s_place_is_noticed(run: Run) -> None:
    run.add(0)
    run.until_begun(0)
    pid = run.manager.pid
    run.kill()
    run.until(lambda: run.manager.pid != pid)
    os.kill(run.manager.pid, signal.SIGSTOP)
    run.until_ended(0)
    run.assert_complete(0)


@pytest.mark.slow  # The parts of it: the other tests of stopped cores.
def test_a_stopped_core_is_noticed_where_it_only_owes_the_end_of_a_paused_request(run: Run) -> None:
    run.add(0)
    run.until_begun(0)
    os.kill(run.manager.pid, signal.SIGSTOP)
    run.manager.pause([0])
    run.manager.resume([0])
    run.until_ended(0)
    run.assert_complete(0)


@pytest.mark.slow  # The short form: tests/unit/core/test_isolation.py.
def test_a_long_prompt_that_is_computed_alone_does_not_count_as_a_stall() -> None:
    run = Run(stall_timeout=3.5, max_num_batched_tokens=2, max_num_seqs=2)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        run.add(0, max_tokens=20, prompt=[7] * 7600)
        begun = time.monotonic()
        run.until(lambda: time.monotonic() > begun + 0.2)
        assert not run.tokens[0]
        run.kill()
        run.until_ended(0)
        assert run.ends[0].finish_reason == "max_tokens", run.ends[0].error
