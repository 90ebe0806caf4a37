"""Several replicas behind one `CoreManager`: each request is answered once, also if cores die. Stub model."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.client import relocation
from engine.client.core_manager import CoreManager, EngineDeadError
from engine.client.supervisor import Supervisor
from engine.config.config import Config, ParallelConfig
from engine.messages import AddRequest, StepOutputs
from engine.sampling_params import SamplingParams
from tests.e2e.stub_core import DEADLY
from tests.e2e.test_core_restarts import PROMPT, WAIT_SECONDS, HeldStarts, Run

pytestmark = pytest.mark.usefixtures("stub_core")


@pytest.fixture(autouse=True)
def counting_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_CORE_COUNTS", "1")
    monkeypatch.setenv("STUB_CORE_STEP", "0.004")


def replicas(size: int = 2, placement: str = "prefix") -> ParallelConfig:
    return ParallelConfig.model_validate({"data_parallel_size": size, "data_parallel_placement": placement})


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run(parallel_config=replicas())
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        yield run


def homes(manager: CoreManager, *request_ids: int) -> list[int]:
    """The replicas of live requests."""
    return [
        next(replica.number for replica in manager._replicas if request_id in replica.live)
        for request_id in request_ids
    ]


def kill(manager: CoreManager, replica: int) -> None:
    os.kill(manager.pids[replica], signal.SIGKILL)


# -- as one engine ----------------------------------------------------------------------------------------------


def test_each_request_is_answered_once_by_one_of_several_cores(run: Run) -> None:
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in run.manager.pids]
    assert names == ["kaon-engine-0", "kaon-engine-1"]
    for request_id in range(40):
        run.add(request_id)
    places = homes(run.manager, *range(40))
    assert 15 <= places.count(0) <= 25
    run.until_ended(*range(40))
    run.assert_complete(*range(40))
    assert not run.manager.live


def test_steps_say_which_replica_they_are_of(run: Run) -> None:
    run.add(0)
    run.add(1)
    places = dict(zip(range(2), homes(run.manager, 0, 1), strict=True))
    assert set(places.values()) == {0, 1}
    while len(run.ends) < 2:
        step = run.manager.get_outputs(WAIT_SECONDS)
        assert step is not None
        run.take(step)
        assert {places[output.request_id] for output in step.outputs} <= {step.replica}


def test_round_robin_takes_each_in_turn() -> None:
    run = Run(parallel_config=replicas(3, "round_robin"))
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        for request_id in range(9):
            run.add(request_id)
        assert homes(run.manager, *range(9)) == [0, 1, 2] * 3
        run.until_ended(*range(9))


def test_requests_are_aborted_paused_and_resumed_wherever_they_are(run: Run) -> None:
    for request_id in range(8):
        run.add(request_id, max_tokens=8000 if request_id < 4 else 170 if request_id == 7 else 500)
    run.until_begun(*range(8))
    run.manager.abort([0, 1, 2, 3, 77])
    run.manager.pause([4, 5, 6])
    run.until_ended(0, 1, 2, 3, 7)
    assert {run.ends[request_id].finish_reason for request_id in range(4)} == {"abort"}
    assert set(run.manager.live) == {4, 5, 6}
    run.manager.resume([4, 5, 6])
    run.until_ended(4, 5, 6)
    run.assert_complete(4, 5, 6, max_tokens=500)
    run.assert_complete(7, max_tokens=170)


def test_an_id_in_use_is_refused_wherever_it_is(run: Run) -> None:
    run.add(0, max_tokens=340)
    run.add(1, max_tokens=340)
    for ids in ((0,), (1,), (5, 5), (6, 1)):
        with pytest.raises(ValueError, match="a request id is used twice"):
            run.add(*ids)
    assert set(run.manager.live) == {0, 1}


def test_on_an_event_loop_outputs_come_to_one_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relocation, "UNAVAILABLE_SECONDS", 2.0 * WAIT_SECONDS)
    run = Run(parallel_config=replicas())

    async def serve() -> list[tuple[int, int]]:
        restarts: list[tuple[int, int]] = []
        killed: list[int] = []

        def take(step: StepOutputs) -> None:
            run.take(step)
            if len(run.tokens) == 20 and not killed:
                killed.append(1)
                kill(run.manager, 1)

        run.manager.attach(asyncio.get_running_loop(), take, lambda *reported: restarts.append(reported))
        await run.manager.wait_ready_async(WAIT_SECONDS)
        for request_id in range(20):
            run.add(request_id, max_tokens=340)
        while len(run.ends) < 20:
            await asyncio.sleep(0.01)
        return restarts

    with run.manager:
        restarts = asyncio.run(asyncio.wait_for(serve(), WAIT_SECONDS))
    run.assert_complete(*range(20), max_tokens=340)
    ((resumed, replica),) = restarts
    assert replica == 1
    assert 0 < resumed < 20


# -- deaths -----------------------------------------------------------------------------------------------------


def test_when_a_core_dies_its_requests_go_on_and_the_others_are_not_disturbed(
    run: Run, held_starts: HeldStarts
) -> None:
    for request_id in range(20):
        run.add(request_id, max_tokens=270)
    places = dict(enumerate(homes(run.manager, *range(20))))
    run.until_begun(*range(20))
    pids = run.manager.pids
    with held_starts():
        kill(run.manager, 0)
        run.until(lambda: run.manager.serving == [1])
        undisturbed = [request_id for request_id, place in places.items() if place == 1]
        reported = {request_id: len(run.tokens[request_id]) for request_id in undisturbed}
        assert run.manager.is_serving
        run.until(lambda: all(len(run.tokens[id]) > reported[id] or id in run.ends for id in undisturbed))
        assert run.manager.serving == [1], "they went on while the other core was being started"
    run.until_ended(*range(20))
    run.assert_complete(*range(20), max_tokens=270)
    assert run.manager.pids[0] != pids[0]
    assert run.manager.pids[1] == pids[1]


def test_while_a_core_is_started_again_new_requests_go_to_the_others(run: Run, held_starts: HeldStarts) -> None:
    run.add(0, max_tokens=340)
    run.add(1, max_tokens=340)
    with held_starts():
        kill(run.manager, 0)
        run.until(lambda: run.manager.serving == [1])
        run.add(*range(10, 20), max_tokens=10)
        assert set(homes(run.manager, *range(10, 20))) == {1}
    run.until_ended(0, 1, *range(10, 20))
    run.assert_complete(*range(10, 20), max_tokens=10)
    run.until(lambda: run.manager.serving == [0, 1])
    for request_id in range(20, 24):
        run.add(request_id, max_tokens=340)
    assert set(homes(run.manager, *range(20, 24))) == {0, 1}


def test_requests_wait_where_no_core_is_left_for_the_moment(run: Run, held_starts: HeldStarts) -> None:
    with held_starts():
        for replica in range(2):
            kill(run.manager, replica)
        run.until(lambda: not run.manager.is_serving)
        assert run.manager.is_alive
        for request_id in range(6):
            run.add(request_id)
    run.until_ended(*range(6))
    run.assert_complete(*range(6))


def test_deaths_of_any_core_at_random_moments_lose_and_repeat_nothing() -> None:
    rng = random.Random(0)
    run = Run(parallel_config=replicas(3), max_core_restarts=100)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        for request_id in range(100):
            run.add(request_id, max_tokens=100)
            if request_id % 25 == 24 and run.manager.serving:
                kill(run.manager, rng.choice(run.manager.serving))
            step = run.manager.get_outputs(0.003)
            if step is not None:
                run.take(step)
        run.until_ended(*range(100))
        run.assert_complete(*range(100), max_tokens=100)
        assert not run.manager.live


@pytest.mark.slow  # With one core: test_core_restarts.py.
def test_a_stopped_core_is_replaced_and_the_others_go_on(run: Run) -> None:
    for request_id in range(10):
        run.add(request_id, max_tokens=500)
    run.until_begun(*range(10))
    pids = run.manager.pids
    os.kill(pids[1], signal.SIGSTOP)
    run.until_ended(*range(10))
    run.assert_complete(*range(10), max_tokens=500)
    assert run.manager.pids[0] == pids[0]
    assert run.manager.pids[1] != pids[1]


@pytest.mark.slow  # With one core: test_core_restarts.py.
def test_a_request_that_kills_its_core_ends_alone(run: Run) -> None:
    for request_id in range(6):
        run.add(request_id, max_tokens=340)
    run.until_begun(*range(6))
    run.add(10, prompt=[DEADLY])
    (home,) = homes(run.manager, 10)
    survivor = run.manager.pids[1 - home]
    run.until_ended(10, *range(6))
    assert run.ends[10].is_poison
    run.assert_complete(*range(6), max_tokens=340)
    assert run.manager.pids[1 - home] == survivor


def test_a_core_that_is_started_no_more_ends_all_and_says_which() -> None:
    run = Run(parallel_config=replicas(), max_core_restarts=0)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        for request_id in range(10):
            run.add(request_id, max_tokens=100_000)
        run.until_begun(*range(10))
        pids = run.manager.pids
        kill(run.manager, 1)
        run.until_ended(*range(10))
        for request_id in range(10):
            assert run.ends[request_id].error == "engine core 1 was killed by SIGKILL"
        assert not run.manager.is_alive
        assert run.manager.failure is not None
        with pytest.raises(EngineDeadError, match="engine core 1 was killed by SIGKILL"):
            run.add(11)
        with pytest.raises(EngineDeadError, match="engine core 1"):
            run.manager.get_outputs()
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_requests_go_on_in_another_replica_where_theirs_does_not_come_back(
    stub_core: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are queued again immediately; those that may have killed the core, if no start takes that long."""
    monkeypatch.setattr(relocation, "UNAVAILABLE_SECONDS", 0.2)

    async def serve() -> None:
        run.manager.attach(asyncio.get_running_loop(), run.take, on_move=lambda *reported: moves.append(reported))
        await run.manager.wait_ready_async(WAIT_SECONDS)
        for request_id in range(8):
            run.add(request_id, max_tokens=340)
        await until(lambda: sum(map(bool, run.tokens.values())) >= 4)
        stub_core("slow")
        kill(run.manager, 1)
        await until(lambda: len(run.ends) == 8)
        assert run.manager.serving == [0]

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.01)

    moves: list[tuple[int, int]] = []
    monkeypatch.setattr(Supervisor, "longest_start", 2.0)
    run = Run(parallel_config=replicas(), max_num_seqs=2)
    with run.manager:
        asyncio.run(asyncio.wait_for(serve(), WAIT_SECONDS))
    run.assert_complete(*range(8), max_tokens=340)
    assert {replica for _, replica in moves} == {0}
    assert sum(resumed for resumed, _ in moves) == 2, "two were running"


def test_a_core_that_takes_another_s_place_may_use_the_cpus_that_its_parent_keeps_off() -> None:
    everything = os.sched_getaffinity(0)
    run = Run(parallel_config=replicas())
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        os.sched_setaffinity(0, {min(everything)})
        try:
            pid = run.manager.pid
            kill(run.manager, 0)
            run.until_replaced(pid)
        finally:
            os.sched_setaffinity(0, everything)
        assert os.sched_getaffinity(run.manager.pids[0]) == everything


# -- start and end ----------------------------------------------------------------------------------------------


def test_shutdown_ends_every_core_and_every_request() -> None:
    run = Run(parallel_config=replicas(3))
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        for request_id in range(9):
            run.add(request_id, max_tokens=100_000)
        run.until_begun(*range(9))
        pids = run.manager.pids
        run.manager.shutdown(WAIT_SECONDS)
    while (step := _rest(run.manager)) is not None:
        run.take(step)
    assert {run.ends[request_id].finish_reason for request_id in range(9)} == {"abort"}
    assert not any(psutil.pid_exists(pid) for pid in pids)
    run.manager.shutdown()


def _rest(manager: CoreManager) -> StepOutputs | None:
    try:
        return manager.get_outputs(0)
    except EngineDeadError:
        return None


@pytest.mark.slow  # Killed replicas: the test after the next.
def test_cores_that_cannot_start_are_reported_in_one_sentence_and_leave_nothing(
    stub_core: Callable[[str], None],
) -> None:
    stub_core("bad checkpoint")
    with CoreManager(Config(parallel_config=replicas(3))) as manager:
        pids = manager.pids
        with pytest.raises(EngineDeadError, match=r"^model is /nowhere") as raised:
            manager.wait_ready(WAIT_SECONDS)
        assert raised.value.usage
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_nothing_serves_before_all_do(held_starts: HeldStarts) -> None:
    with held_starts():
        starting = CoreManager(Config(parallel_config=replicas()))
        os.kill(starting.pids[1], signal.SIGSTOP)
    with starting as manager:
        deadline = time.monotonic() + WAIT_SECONDS
        while manager.serving != [0]:
            assert time.monotonic() < deadline, "the core that was not stopped never served"
            with pytest.raises(TimeoutError):
                manager.wait_ready(0.1)
        assert not manager.is_serving
        with pytest.raises(EngineDeadError, match="not ready yet"):
            manager.add_requests([AddRequest(0, PROMPT, SamplingParams())])
        os.kill(manager.pids[1], signal.SIGCONT)
        assert manager.wait_ready(WAIT_SECONDS).model.num_kvcache_blocks == 1024


def test_a_core_killed_before_it_was_ready_ends_all_with_its_number(
    stub_core: Callable[[str], None],
) -> None:
    stub_core("slow")
    with CoreManager(Config(parallel_config=replicas())) as manager:
        pids = manager.pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="engine core 1 was killed by SIGKILL"):
            manager.wait_ready(WAIT_SECONDS)
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_replicas_have_a_number_within_reason() -> None:
    for size in (0, 65):
        with pytest.raises(ValueError, match="data_parallel_size"):
            replicas(size)
