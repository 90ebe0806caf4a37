"""`CoreManager` and the core's process: start, service, death and shutdown. The model is a stub."""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.client.core_manager import CoreManager, EngineDeadError
from engine.config.config import Config
from engine.distributed.core_process import CoreProcess
from engine.messages import AddRequest, RequestOutput, StepOutputs
from engine.sampling_params import SamplingParams
from tests.e2e.kaon_server import eventually
from tests.e2e.processes import until_idle, wait_gone

pytestmark = pytest.mark.usefixtures("stub_core")

WAIT_SECONDS = 60
FOREVER = SamplingParams(max_tokens=8000, ignore_eos=True)


@pytest.fixture
def manager() -> Iterator[CoreManager]:
    with CoreManager(Config()) as manager:
        manager.wait_ready(WAIT_SECONDS)
        yield manager


def requests(*request_ids: int, params: SamplingParams = FOREVER) -> list[AddRequest]:
    return [AddRequest(request_id, [1, 2, 3], params) for request_id in request_ids]


def drain(manager: CoreManager, *request_ids: int) -> list[RequestOutput]:
    """Outputs until all these requests have ended."""
    outputs: list[RequestOutput] = []
    while not set(request_ids) <= {output.request_id for output in outputs if output.finished}:
        step = manager.get_outputs(WAIT_SECONDS)
        assert step is not None, "no output came"
        outputs += step.outputs
    return outputs


def tokens_of(outputs: list[RequestOutput], request_id: int) -> list[int]:
    return [token for output in outputs if output.request_id == request_id for token in output.output_tokens]


def ends(outputs: list[RequestOutput]) -> dict[int, str | None]:
    finished = [output for output in outputs if output.finished]
    assert all(count == 1 for count in Counter(output.request_id for output in finished).values())
    return {output.request_id: output.finish_reason for output in finished}


def first_tokens(manager: CoreManager) -> None:
    """Wait until the core is in the middle of its work."""
    step = manager.get_outputs(WAIT_SECONDS)
    assert step is not None


def test_a_core_starts_although_the_working_directory_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that torch loads end a process whose working directory does not exist."""
    (tmp_path / "release").mkdir()
    monkeypatch.chdir(tmp_path / "release")
    (tmp_path / "release").rmdir()
    with CoreManager(Config()) as manager:
        manager.wait_ready(WAIT_SECONDS)
        assert psutil.Process(manager.pid).cwd() == "/"


# -- serving ----------------------------------------------------------------------------------------------------


def test_requests_are_answered_in_full(manager: CoreManager) -> None:
    manager.add_requests(requests(1, 2, params=SamplingParams(max_tokens=5)))
    outputs = drain(manager, 1, 2)
    assert ends(outputs) == {1: "max_tokens", 2: "max_tokens"}
    assert tokens_of(outputs, 1) == [5] * 5


def test_aborted_request_ends_once_and_its_blocks_are_free(manager: CoreManager) -> None:
    manager.add_requests(requests(1))
    first_tokens(manager)
    manager.abort([1, 77])
    outputs: list[RequestOutput] = []
    while not ends(outputs):
        step = manager.get_outputs(WAIT_SECONDS)
        assert step is not None
        outputs += step.outputs
    assert ends(outputs) == {1: "abort"}
    assert step.stats is not None
    assert (step.stats.kv_blocks_used, step.stats.num_running) == (0, 0)
    assert manager.live == set()


def test_abort_of_what_is_not_live_sends_nothing(manager: CoreManager) -> None:
    manager.abort([4, 5])
    assert manager.get_outputs(0.05) is None


def test_an_id_in_use_is_refused(manager: CoreManager) -> None:
    manager.add_requests(requests(1))
    with pytest.raises(ValueError, match="used twice"):
        manager.add_requests(requests(2, 1))
    with pytest.raises(ValueError, match="used twice"):
        manager.add_requests(requests(3, 3))
    assert manager.live == {1}


async def test_an_event_loop_hears_of_every_output_without_polling() -> None:
    with CoreManager(Config()) as manager:
        outputs: list[RequestOutput] = []
        done = asyncio.Event()

        def take(step: StepOutputs) -> None:
            outputs.extend(step.outputs)
            if not manager.live:
                done.set()

        manager.attach(asyncio.get_running_loop(), take)
        await manager.wait_ready_async(WAIT_SECONDS)
        for round_ in range(20):
            done.clear()
            manager.add_requests(requests(2 * round_, 2 * round_ + 1, params=SamplingParams(max_tokens=7)))
            await asyncio.wait_for(done.wait(), WAIT_SECONDS)
    assert ends(outputs) == dict.fromkeys(range(40), "max_tokens")
    assert sum(len(output.output_tokens) for output in outputs) == 40 * 7


async def test_callback_that_raises_does_not_stop_what_comes_after() -> None:
    with CoreManager(Config()) as manager:
        done = asyncio.Event()
        steps = 0

        def fail_at_first(step: StepOutputs) -> None:
            nonlocal steps
            steps += 1
            if not manager.live:
                done.set()
            if steps < 5:
                raise RuntimeError("the callback's fault")

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        manager.attach(loop, fail_at_first)
        await manager.wait_ready_async(WAIT_SECONDS)
        manager.add_requests(requests(1, params=SamplingParams(max_tokens=20)))
        await asyncio.wait_for(done.wait(), WAIT_SECONDS)
    assert steps >= 20


def test_ten_thousand_requests_added_and_aborted_at_random_leave_nothing(manager: CoreManager) -> None:
    rng = random.Random(0)
    core = psutil.Process(manager.pid)
    added, outputs, sizes = 0, list[RequestOutput](), list[int]()
    for total in (5_000, 10_000):
        while len(outputs) < total:
            # The number of live requests is bounded at any speed of the core: memory for more would not be a leak.
            if added < total and len(manager.live) < 500:
                ids = range(added, added + 20)
                manager.add_requests(
                    [
                        AddRequest(i, rng.choices(range(4), k=1 + i % 60), SamplingParams(max_tokens=1 + i % 20))
                        for i in ids
                    ]
                )
                added += len(ids)
                manager.abort(rng.sample(sorted(manager.live), rng.randint(0, 15)))
            step = manager.get_outputs(WAIT_SECONDS)
            assert step is not None
            outputs += [output for output in step.outputs if output.finished]
        sizes.append(core.memory_info().rss)
    assert ends(outputs).keys() == set(range(total))
    assert manager.live == set()
    assert step.stats is not None
    assert (step.stats.num_running, step.stats.num_waiting, step.stats.kv_blocks_used) == (0, 0, 0)
    assert sizes[1] - sizes[0] < 4 * 2**20


def test_idle_core_uses_no_processor(manager: CoreManager) -> None:
    manager.add_requests(requests(1, params=SamplingParams(max_tokens=5)))
    drain(manager, 1)
    until_idle([psutil.Process(manager.pid)])


def test_two_engines_do_not_meet(manager: CoreManager) -> None:
    with CoreManager(Config()) as other:
        other.wait_ready(WAIT_SECONDS)
        for each in (manager, other):
            each.add_requests(requests(1, params=SamplingParams(max_tokens=3)))
        assert ends(drain(manager, 1)) == ends(drain(other, 1)) == {1: "max_tokens"}
    manager.add_requests(requests(2, params=SamplingParams(max_tokens=3)))
    assert ends(drain(manager, 2)) == {2: "max_tokens"}


def test_process_names_itself(manager: CoreManager) -> None:
    core = psutil.Process(manager.pid)
    assert Path(f"/proc/{manager.pid}/comm").read_text().strip() == "kaon-engine-0"
    assert core.cmdline()[-1] == "kaon-engine-0"


# -- the end ----------------------------------------------------------------------------------------------------


def test_shutdown_aborts_what_runs_and_leaves_nothing(manager: CoreManager) -> None:
    manager.add_requests(requests(1, 2))
    first_tokens(manager)
    manager.shutdown(WAIT_SECONDS)
    assert ends(drain(manager, 1, 2)) == {1: "abort", 2: "abort"}
    assert not psutil.pid_exists(manager.pid)
    with pytest.raises(EngineDeadError, match="has stopped"):
        manager.add_requests(requests(3))
    manager.shutdown()


def test_core_that_is_stuck_is_ended_by_force(manager: CoreManager) -> None:
    os.kill(manager.pid, signal.SIGSTOP)
    manager.add_requests(requests(1))
    manager.shutdown(timeout=0.1)
    assert not psutil.pid_exists(manager.pid)
    assert ends(drain(manager, 1)) == {1: "error"}


def test_manager_that_is_dropped_ends_its_core() -> None:
    manager = CoreManager(Config())
    manager.wait_ready(WAIT_SECONDS)
    pid = manager.pid
    del manager
    gc.collect()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_core_leaves_signals_to_its_parent(manager: CoreManager, number: signal.Signals) -> None:
    os.kill(manager.pid, number)
    manager.add_requests(requests(1, params=SamplingParams(max_tokens=5)))
    assert ends(drain(manager, 1)) == {1: "max_tokens"}
    assert os.getpgid(manager.pid) != os.getpgid(0)


def test_killed_core_that_may_not_be_started_again_ends_each_live_request_once_with_an_error() -> None:
    with CoreManager(Config(max_core_restarts=0)) as manager:
        manager.wait_ready(WAIT_SECONDS)
        _killed_core_ends_each_live_request_once(manager)


def _killed_core_ends_each_live_request_once(manager: CoreManager) -> None:
    manager.add_requests(requests(*range(20)))
    manager.add_requests(requests(100, params=SamplingParams(max_tokens=1)))
    outputs = drain(manager, 100)
    os.kill(manager.pid, signal.SIGKILL)
    outputs += drain(manager, *range(20))
    assert ends(outputs) == {100: "max_tokens"} | dict.fromkeys(range(20), "error")
    errors = {output.error for output in outputs if output.finish_reason == "error"}
    assert errors == {"the engine core was killed by SIGKILL"}
    assert not manager.is_alive
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        manager.get_outputs(WAIT_SECONDS)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        manager.add_requests(requests(200))
    manager.abort([1])


async def test_an_event_loop_hears_of_the_core_s_death() -> None:
    with CoreManager(Config(max_core_restarts=0)) as manager:
        outputs: list[RequestOutput] = []
        dead = asyncio.Event()

        def take(step: StepOutputs) -> None:
            outputs.extend(step.outputs)
            if manager.failure is not None:
                dead.set()

        manager.attach(asyncio.get_running_loop(), take)
        await manager.wait_ready_async(WAIT_SECONDS)
        manager.add_requests(requests(1, 2))
        os.kill(manager.pid, signal.SIGKILL)
        await asyncio.wait_for(dead.wait(), WAIT_SECONDS)
    assert ends(outputs) == {1: "error", 2: "error"}


PARENT = """
import sys
import zmq
from engine.distributed import core_process
core_process.CORE_MODULE = "stub_core"
from engine.config.config import Config
from engine.client.core_manager import CoreManager
manager = CoreManager(Config())
if sys.argv[1] == "ready":
    manager.wait_ready()
if sys.argv[1] == "ready, but not heard":
    poller = zmq.Poller()
    manager._replicas[0].supervisor.link.register(poller)
    poller.poll(60_000)
print(manager.pid, manager._replicas[0].supervisor.link._core.launch.directory, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("stage", ["ready", "ready, but not heard", "starting"])
def test_core_and_its_sockets_are_gone_when_the_parent_is_killed(stage: str, stub_core: Callable[[str], None]) -> None:
    stub_core("slow" if stage == "starting" else "")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, stage], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        parent.kill()
    wait_gone([int(pid)])
    eventually(lambda: not Path(directory).exists())


# -- failing to start -------------------------------------------------------------------------------------------


def test_user_s_mistake_is_one_sentence_without_a_traceback(
    stub_core: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    stub_core("bad checkpoint")
    with CoreManager(Config()) as manager:
        with pytest.raises(EngineDeadError, match="there is no such directory; check the path") as raised:
            manager.wait_ready(WAIT_SECONDS)
        assert raised.value.usage
    assert capfd.readouterr().err == ""


async def test_event_loop_hears_why_the_core_cannot_start(stub_core: Callable[[str], None]) -> None:
    stub_core("bad checkpoint")
    with CoreManager(Config()) as manager:
        manager.attach(asyncio.get_running_loop(), lambda step: None)
        with pytest.raises(EngineDeadError, match="there is no such directory"):
            await manager.wait_ready_async(WAIT_SECONDS)


def test_bug_at_start_is_a_sentence_and_a_logged_traceback(
    stub_core: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    stub_core("bug")
    with CoreManager(Config()) as manager:
        with pytest.raises(EngineDeadError, match="could not start: KeyError: 'weight'") as raised:
            manager.wait_ready(WAIT_SECONDS)
        assert not raised.value.usage
    assert "Traceback" in capfd.readouterr().err


def test_core_that_vanishes_at_start_is_noticed(stub_core: Callable[[str], None]) -> None:
    stub_core("exit")
    with CoreManager(Config()) as manager, pytest.raises(EngineDeadError, match="exited with code 3"):
        manager.wait_ready(WAIT_SECONDS)


def test_core_that_is_slow_to_start_can_be_given_up(stub_core: Callable[[str], None]) -> None:
    stub_core("slow")
    with CoreManager(Config()) as manager:
        with pytest.raises(TimeoutError, match="not ready within 0"):
            manager.wait_ready(0.01)
        with pytest.raises(EngineDeadError, match="not ready yet"):
            manager.add_requests(requests(1))
        link = manager._replicas[0].supervisor.link
        assert link is not None
        assert isinstance(link._core, CoreProcess)
        directory = Path(link._core.launch.directory)
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()
    assert not psutil.pid_exists(manager.pid)


def test_temporary_directory_with_too_long_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ValueError, match="set a shorter TMPDIR"):
        CoreManager(Config())
    assert list(deep.iterdir()) == []
