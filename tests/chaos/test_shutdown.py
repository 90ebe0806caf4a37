"""The end of a server: after its streams, immediately after a second signal, and without remains if it is killed."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.chaos.conftest import StartServer
from tests.chaos.faults import ChaosServer
from tests.chaos.outcomes import Outcome
from tests.chaos.test_core_dies import ENDLESS
from tests.chaos.workload import WORKLOAD, perform_all
from tests.e2e.kaon_server import eventually

SEQUENCES = sum(ask.sequences for ask in WORKLOAD.values())


# If the core is alive: tests/e2e/test_http_lifecycle.py, test_data_parallel_serving.py.
@pytest.mark.parametrize("core", [pytest.param("lives", marks=pytest.mark.slow), "is killed"])
async def test_at_sigterm_every_stream_is_answered_to_its_end_and_nothing_new_is_taken(
    core: str, start_server: StartServer, undisturbed: dict[str, Outcome]
) -> None:
    server = start_server("--drain-timeout", "100")
    load = asyncio.create_task(perform_all(server.url, WORKLOAD))

    def refused() -> bool:
        response = server.post("/v1/completions", {**ENDLESS, "max_tokens": 1})
        if response.status_code == 200:  # The signal has not arrived yet.
            return False
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["message"]
        return True

    # While this client stays connected, there is a request to drain.
    with server.connect("/v1/completions", {**ENDLESS, "stream": True}):
        await asyncio.to_thread(server.until, lambda: server.metric("kaon_requests_received_total") == SEQUENCES + 1)
        server.process.send_signal(signal.SIGTERM)
        if core == "is killed":
            server.cores()[0].kill()
        await asyncio.to_thread(server.until, refused)
        assert not server.is_ready()
    assert await load == undisturbed
    assert await asyncio.to_thread(server.wait) == 0
    assert "Traceback" not in server.stderr


@pytest.mark.slow  # With one choice: tests/e2e/test_http_lifecycle.py.
def test_streams_that_outlast_the_drain_timeout_end_with_an_event_that_says_so(start_server: StartServer) -> None:
    server = start_server("--drain-timeout", "0.5")
    fields = {**ENDLESS, "stream": True, "n": 8, "logprobs": 5}
    with server.http() as http, http.stream("POST", "/v1/completions", json=fields) as response:
        chunks = response.iter_text()
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        events = "".join(chunks).strip().split("\n\n")
    assert "shutting down" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    assert server.wait() == 0


@pytest.mark.slow  # With one stream: tests/e2e/test_http_lifecycle.py.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_server_at_once(start_server: StartServer, number: signal.Signals) -> None:
    # Longer than any test may wait: only the second signal can end it in time.
    server = start_server("--drain-timeout", "3600")
    with (
        server.connect("/v1/completions", {**ENDLESS, "stream": True, "n": 32, "logprobs": 20}) as reader,
        server.connect("/v1/completions", {**ENDLESS, "n": 32}),
    ):
        assert reader.recv(1)
        server.process.send_signal(number)
        server.until(lambda: not server.is_ready())
        server.process.send_signal(number)
        assert server.wait() == 0
    assert "Traceback" not in server.stderr


def shared_memory(processes: list[psutil.Process]) -> set[str]:
    """The files of /dev/shm that these processes use: open, mapped, or named after one of them."""
    ids = {str(process.pid) for process in processes}
    held = "".join(maps_and_files(pid) for pid in ids)
    names = {str(path) for path in Path("/dev/shm").iterdir()}
    return {name for name in names if name in held or ids & set(name.replace("-", "_").split("_"))}


def maps_and_files(pid: str) -> str:
    """A process's mapped and open files, if it is alive; a core that starts opens and closes files meanwhile."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found.append(Path(f"/proc/{pid}/maps").read_text())
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return "\n".join(found)


# With a stub core, at other moments: tests/e2e/test_core_process.py.
@pytest.mark.parametrize(
    "moment", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("serving", "stopped")), "restarting"]
)
def test_a_killed_server_leaves_no_process_no_socket_and_no_shared_memory(
    moment: str, start_server: StartServer, temporary_directory: Path
) -> None:
    server = start_server()
    with server.connect("/v1/completions", {**ENDLESS, "stream": True, "n": 4}) as reader:
        assert reader.recv(1)
        with server.http() as http:  # This starts the process that checks grammars.
            form = {"structured_outputs": {"choice": ["a", "b"]}, "max_tokens": 2, "ignore_eos": False}
            assert http.post("/v1/completions", json={**ENDLESS, **form}).status_code == 200
        disturb(server, moment)
        children = server.process.children(recursive=True)
        assert children
        shared = shared_memory([server.process, *children])
        server.process.kill()
        server.process.wait()
        eventually(lambda: not any(child.is_running() for child in children))
    eventually(lambda: list(temporary_directory.iterdir()) == [])
    eventually(lambda: not any(Path(name).exists() for name in shared))


def disturb(server: ChaosServer, moment: str) -> None:
    (core,) = server.cores()
    if moment == "stopped":
        core.suspend()
    elif moment == "restarting":
        core.kill()
        server.until(lambda: [other.pid for other in server.cores()] not in ([], [core.pid]))
