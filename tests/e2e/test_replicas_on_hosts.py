"""Replicas on two hosts, which share only TCP: each request is answered once, also if either host fails."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client import relocation
from engine.client.core_manager import EngineDeadError
from engine.config.config import Config, ParallelConfig
from tests.e2e.core_host import CoreHost, replica_fields
from tests.e2e.processes import wait_gone
from tests.e2e.stub_core import DEADLY
from tests.e2e.test_core_restarts import WAIT_SECONDS, Run
from tests.e2e.test_data_parallel import homes

pytestmark = pytest.mark.usefixtures("stub_core")


@pytest.fixture(autouse=True)
def _setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_CORE_COUNTS", "1")


@pytest.fixture
def host_kind() -> type[CoreHost]:
    return CoreHost


def first_host(port: int, *, parallel: dict[str, Any] | None = None, **fields: Any) -> Run:
    return Run(parallel_config=ParallelConfig.model_validate(replica_fields(port, **(parallel or {}))), **fields)


def test_each_request_is_answered_once_by_one_of_two_hosts_which_end_together(
    port: int, start_host: Callable[..., CoreHost]
) -> None:
    host = start_host(port)
    run = first_host(port)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        [core] = host.cores()
        assert run.manager.pids[1] == core.pid
        assert psutil.Process(run.manager.pids[0]).ppid() == os.getpid()
        for request_id in range(40):
            run.add(request_id)
        assert 15 <= homes(run.manager, *range(40)).count(1) <= 25
        run.manager.abort([0, 1])
        run.until_ended(*range(40))
        run.assert_complete(*range(2, 40))
    assert host.wait() == 0
    wait_gone([core.pid])
    assert "Traceback" not in host.stderr


@pytest.mark.parametrize(
    ("why", "code"), [pytest.param("", 0, marks=pytest.mark.slow), ("the tokenizer cannot be read", 1)]
)
def test_a_host_ends_with_a_server_that_is_asked_to_end_or_fails_while_its_cores_load(
    why: str, code: int, port: int, start_host: Callable[..., CoreHost], stub_core: Callable[[str], None]
) -> None:
    stub_core("slow")
    host = start_host(port)
    run = first_host(port)
    with run.manager:
        run.until(lambda: bool(host.cores()))
        [core] = host.cores()
        if why:
            run.manager.fail(why)
    assert host.wait() == code
    assert [line for line in host.stderr.splitlines() if line.startswith("kaon: ")] == [f"kaon: {why}"] * code
    wait_gone([core.pid])


@pytest.fixture
def two(port: int, start_host: Callable[..., CoreHost]) -> Iterator[tuple[Run, CoreHost]]:
    """A ready manager, and the host that has its replica 1."""
    host = start_host(port)
    run = first_host(port)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        yield run, host


# -- deaths -----------------------------------------------------------------------------------------------------


def test_requests_go_on_when_a_core_on_another_host_is_killed(
    two: tuple[Run, CoreHost], caplog: pytest.LogCaptureFixture
) -> None:
    run, host = two
    pids = run.manager.pids
    for request_id in range(20):
        run.add(request_id, max_tokens=600)
    run.until_begun(*range(20))
    os.kill(pids[1], signal.SIGKILL)
    run.until_ended(*range(20))
    run.assert_complete(*range(20), max_tokens=600)
    run.until_replaced(pids[1])
    assert run.manager.pids[0] == pids[0]
    assert [core.pid for core in host.cores()] == [run.manager.pids[1]] != [pids[1]]
    assert "engine core 1 was killed by SIGKILL; another is started" in caplog.text


def begin_on_both(run: Run) -> list[int]:
    """Start eight long requests. Returns those of the other host."""
    for request_id in range(8):
        run.add(request_id, max_tokens=800)
    there = [request_id for request_id in range(8) if homes(run.manager, request_id) == [1]]
    assert 0 < len(there) < 8
    run.until_begun(*range(8))
    return there


def test_requests_of_a_host_that_is_lost_go_on_in_the_others_which_serve_meanwhile(
    two: tuple[Run, CoreHost], caplog: pytest.LogCaptureFixture
) -> None:
    run, host = two
    away = begin_on_both(run)
    [core] = host.cores()
    host.process.kill()
    wait_gone([core.pid])
    run.until(lambda: run.manager.serving == [0])
    run.manager.abort(away[:1])
    run.add(8, 9)
    run.until_ended(*range(10))
    assert run.ends[away[0]].finish_reason == "abort"
    run.assert_complete(*(set(range(8)) - {away[0]}), max_tokens=800)
    run.assert_complete(8, 9)
    assert run.manager.serving == [0]
    # It is away for longer than a stall: a core that waits for a host does not stall.
    supervisor = run.manager._replicas[1].supervisor
    supervisor._first_start_seconds, supervisor._watchdog._timeout = 0.0, 0.5
    deadline = time.monotonic() + 1.0
    run.until(lambda: time.monotonic() > deadline)
    log = caplog.text
    assert "stalls" not in log
    assert "engine core 1 on node 1 (" in log
    assert "is gone: the connection to its host has ended; another is started" in log
    assert "of node 1 start again once it has joined again" in log
    assert f"engine core 1 is unavailable: {len(away) - 1} of its requests continue in engine core 0" in log


@pytest.mark.slow
def test_a_host_that_joins_again_at_once_goes_on_with_its_own_requests(
    two: tuple[Run, CoreHost], port: int, start_host: Callable[..., CoreHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relocation, "UNAVAILABLE_SECONDS", 2.0 * WAIT_SECONDS)
    run, host = two
    away = begin_on_both(run)
    host.process.kill()
    run.until(lambda: run.manager.serving == [0])
    again = start_host(port)
    run.until(lambda: run.manager.serving == [0, 1])
    assert homes(run.manager, *away) == [1] * len(away)
    run.until_ended(*range(8))
    run.assert_complete(*range(8), max_tokens=800)
    assert [each.pid for each in again.cores()] == run.manager.pids[1:]
    run.manager.shutdown()
    assert again.wait() == 0


@pytest.mark.slow  # Which requests move: tests/unit/client/test_relocation.py.
def test_a_host_that_joins_again_later_is_given_new_requests_only(
    two: tuple[Run, CoreHost], port: int, start_host: Callable[..., CoreHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relocation, "UNAVAILABLE_SECONDS", 0.0)
    run, host = two
    begin_on_both(run)
    host.process.kill()
    run.until(lambda: run.manager.serving == [0])
    run.until(lambda: not run.manager._replicas[1].live)
    start_host(port)
    run.until(lambda: run.manager.serving == [0, 1])
    assert not run.manager._replicas[1].live
    run.until_ended(*range(8))
    run.assert_complete(*range(8), max_tokens=800)
    run.add(8, max_tokens=800)
    run.add(9, max_tokens=800)
    assert sorted(homes(run.manager, 8, 9)) == [0, 1]
    run.until_ended(8, 9)
    run.assert_complete(8, 9, max_tokens=800)


@pytest.mark.slow  # On this host: test_core_restarts.py.
def test_a_core_on_another_host_that_hangs_writes_its_stacks_and_another_goes_on(two: tuple[Run, CoreHost]) -> None:
    run, host = two
    [core] = host.cores()
    run.add(0, max_tokens=2000)
    run.add(1, max_tokens=2000)
    run.until_begun(0, 1)
    core.suspend()
    # A process on another host that a signal has stopped is detected by its silence.
    run.manager._replicas[1].supervisor._watchdog._timeout = 2.0
    run.until_ended(0, 1)
    run.assert_complete(0, 1, max_tokens=2000)
    wait_gone([core.pid])
    assert "Thread 0x" in host.stderr


@pytest.mark.slow
def test_a_request_that_kills_cores_on_another_host_is_found_out(two: tuple[Run, CoreHost]) -> None:
    run, _ = two
    run.add(0, max_tokens=4000)
    run.until_begun(0)
    home = homes(run.manager, 0)[0]
    run.add(1, max_tokens=4000)
    run.until_begun(1)
    # It goes to the less busy host, whichever that is; the next one goes to the other.
    run.add(2, prompt=[DEADLY])
    run.add(3, prompt=[DEADLY])
    run.until_ended(0, 1, 2, 3)
    assert home in (0, 1)
    assert [run.ends[request_id].is_poison for request_id in range(4)] == [False, False, True, True]
    run.assert_complete(0, 1, max_tokens=4000)


def test_cores_end_with_a_server_that_is_killed_and_the_host_waits_for_another(
    port: int, start_host: Callable[..., CoreHost], tmp_path: Path
) -> None:
    host = start_host(port)
    script = (
        "import sys; from engine.distributed import core_process; core_process.CORE_MODULE = 'stub_core'\n"
        "from engine.config.config import Config\nfrom engine.client.core_manager import CoreManager\n"
        "manager = CoreManager(Config.model_validate_json(sys.argv[1]))\nmanager.wait_ready()\n"
        "print(*manager.pids, flush=True)\ninput()"
    )
    config = Config.model_validate({"parallel_config": replica_fields(port)})
    server = subprocess.Popen(
        [sys.executable, "-c", script, config.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert server.stdout is not None
    pids = [int(word) for word in server.stdout.readline().split()]
    server.kill()
    server.communicate()
    wait_gone(pids)
    run = first_host(port)
    with run.manager:
        run.manager.wait_ready(WAIT_SECONDS)
        run.add(0, 1)
        run.until_ended(0, 1)
    assert host.wait() == 0


def test_on_an_event_loop_nothing_that_came_before_something_was_sent_is_missed(
    port: int, start_host: Callable[..., CoreHost]
) -> None:
    """Both use one socket, whose descriptor reports changes only; a send consumes the notification."""

    async def serve() -> None:
        # There is no periodic poll.
        for replica in run.manager._replicas:
            replica.supervisor._watchdog.interval = 2.0 * WAIT_SECONDS
        run.manager.attach(asyncio.get_running_loop(), run.take)
        await run.manager.wait_ready_async(WAIT_SECONDS)
        for request_id in range(20):
            run.add(request_id, max_tokens=1)
            # The loop reads nothing until the core has answered and forgotten the request.
            time.sleep(0.02)
            run.manager.abort([request_id])
        deadline = time.monotonic() + WAIT_SECONDS
        while len(run.ends) < 20:
            assert time.monotonic() < deadline, f"{20 - len(run.ends)} answers were missed"
            await asyncio.sleep(0.001)

    start_host(port)
    run = first_host(port)
    with run.manager:
        asyncio.run(serve())


# -- what cannot be ---------------------------------------------------------------------------------------------


def test_a_host_that_never_joins_ends_the_start_in_a_sentence(port: int) -> None:
    run = first_host(port, parallel={"rank_start_timeout": 1.0})
    with run.manager, pytest.raises(EngineDeadError) as raised:
        run.manager.wait_ready(WAIT_SECONDS)
    sentence = f"engine core 1 on node 1 did not join at tcp://127.0.0.2:{port} within rank_start_timeout 1 s"
    assert str(raised.value) == sentence
    assert raised.value.usage


@pytest.mark.slow  # Ranks: test_several_hosts.py.
def test_a_host_that_differs_gets_the_difference_and_so_does_the_server(
    port: int, start_host: Callable[..., CoreHost]
) -> None:
    host = start_host(port, parallel={"data_parallel_size": 4})
    run = first_host(port)
    sentence = "has data_parallel_size 4, and the first host 2"
    with run.manager, pytest.raises(EngineDeadError, match=rf"engine core 1 on node 1 \(.+\): its host {sentence}"):
        run.manager.wait_ready(WAIT_SECONDS)
    assert host.wait() == 1
    assert f"kaon: this host {sentence}" in host.stderr


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_named(offset: int, port: int) -> None:
    with (
        socket.create_server(("127.0.0.2", port + offset)),
        pytest.raises(ValueError, match=f"port {port + offset} on 127.0.0.2 is taken"),
    ):
        first_host(port)


def test_what_a_core_on_another_host_cannot_load_ends_all(
    port: int, start_host: Callable[..., CoreHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_CORE", "bad checkpoint")
    host = start_host(port)
    monkeypatch.delenv("STUB_CORE")
    run = first_host(port)
    with run.manager, pytest.raises(EngineDeadError, match="model is /nowhere"):
        run.manager.wait_ready(WAIT_SECONDS)
    assert host.wait() == 1
    assert "kaon: model is /nowhere" in host.stderr
