"""A server's life: while it loads, when it ends, when its engine dies, and when it cannot start."""

import json
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.kaon_server import LASTING, MODEL, KaonServer, eventually
from tests.e2e.processes import STUB_CORES
from tests.e2e.warm_starts import COLD_START

StartServer = Callable[..., KaonServer]
HeldStarts = Callable[[], AbstractContextManager[None]]
ENDLESS = {"model": MODEL, "prompt": "A story", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


def answers(server: KaonServer, path: str) -> int | None:
    """The status of a GET; None while there is no listener."""
    try:
        return server.get(path).status_code
    except httpx.TransportError:
        return None


def receive_all(
    server: KaonServer, path: str, meanwhile: Callable[[], object] = lambda: None, max_tokens: int = 3000
) -> str:
    """The content of a stream, from its first event to its end; `meanwhile` runs after the first event."""
    body = {**ENDLESS, "max_tokens": max_tokens, "stream": True}
    with server.http() as http, http.stream("POST", path, json=body) as response:
        received = ""
        for text in response.iter_text():
            if not received:
                meanwhile()
            received += text
        return received


def test_the_start_line_says_what_is_served_where(server: KaonServer) -> None:
    assert server.start_line.startswith("Kaon ")
    assert f"serving {MODEL} on {server.url} (ready in " in server.start_line
    assert answers(server, "/readyz") == 200


@pytest.mark.usefixtures("stub_core")
def test_while_the_model_loads_the_server_is_alive_and_not_ready(
    start_server: StartServer, held_starts: HeldStarts
) -> None:
    with held_starts():
        server = start_server(before=STUB_CORES)
        eventually(lambda: bool(server.cores()))
        eventually(lambda: answers(server, "/livez") == 200)
        for path in ("/readyz", "/health"):
            response = server.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        refused = server.post("/v1/completions", {"model": MODEL, "prompt": "Hi"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "still loading" in refused.json()["error"]["message"]
        assert server.get("/v1/models").json()["data"][0]["id"] == MODEL
        assert server.get("/metrics").status_code == 200
    server.ready()
    assert answers(server, "/readyz") == answers(server, "/health") == 200


@pytest.mark.slow  # The short form: tests/chaos/test_shutdown.py.
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_lets_streams_end_and_takes_no_more(start_server: StartServer, number: signal.Signals) -> None:
    server = start_server(**LASTING).ready()
    core = server.core
    meanwhile: list[httpx.Response] = []

    def end() -> None:
        # While this client stays connected, there is a request to drain.
        with server.connect("/v1/completions", {**ENDLESS, "max_tokens": 3900, "stream": True}):
            eventually(lambda: server.metric("kaon_requests_received_total") == 2)
            server.process.send_signal(number)
            eventually(lambda: answers(server, "/readyz") == 503)
            meanwhile.append(server.post("/v1/completions", {"model": MODEL, "prompt": "Hi"}))

    events = receive_all(server, "/v1/completions", end, max_tokens=500)
    assert events.endswith("data: [DONE]\n\n")
    assert '"error"' not in events
    (refused,) = meanwhile
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "shutting down" in refused.json()["error"]["message"]
    assert server.wait() == 0
    assert not core.is_running()
    assert "Traceback" not in server.stderr


def test_a_second_signal_ends_the_server_now(start_server: StartServer) -> None:
    server = start_server(**LASTING, server_config={"drain_timeout": 600}).ready()

    def end() -> None:
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: answers(server, "/readyz") == 503)
        server.process.send_signal(signal.SIGINT)

    events = receive_all(server, "/v1/completions", end)
    assert "shutting down" in events.strip().split("\n\n")[-1]
    assert server.wait() == 0
    assert "Traceback" not in server.stderr


def test_what_has_not_ended_in_time_ends_with_an_error_also_beside_clients_that_neither_send_nor_read_on(
    start_server: StartServer,
) -> None:
    server = start_server(**LASTING, server_config={"drain_timeout": 0.5}).ready()
    fields = {**ENDLESS, "stream": True, "n": 8, "logprobs": 20}
    with server.connect("/v1/completions", fields, holds_little=True), socket.socket() as sender:
        sender.connect(("127.0.0.1", server.port))
        sender.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        eventually(lambda: server.metric("kaon_generation_tokens_total") > 8 * 60)
        events = receive_all(server, "/v1/completions", lambda: server.process.send_signal(signal.SIGTERM))
        assert server.wait() == 0
    last = json.loads(events.strip().split("\n\n")[-1].removeprefix("data: "))
    assert "shutting down" in last["error"]["message"]
    assert events.count('"error"') == 1
    assert "Traceback" not in server.stderr


@pytest.mark.usefixtures("stub_core")
def test_a_signal_while_the_model_loads_ends_the_server_cleanly(
    start_server: StartServer, held_starts: HeldStarts
) -> None:
    with held_starts():
        server = start_server(before=STUB_CORES)
        eventually(lambda: bool(server.cores()))
        (core,) = server.cores()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not core.is_running()
    assert "Traceback" not in server.stderr


@pytest.mark.slow  # The short form: test_cli_serve.py.
def test_a_taken_port_is_one_sentence_and_starts_nothing(server: KaonServer, start_server: StartServer) -> None:
    second = start_server(port=server.port)
    assert second.wait() == 1
    assert second.stderr.startswith("kaon: port ")
    assert f"{server.port} on 127.0.0.1 is taken" in second.stderr
    assert len(second.stderr.splitlines()) == 1


@pytest.mark.slow  # The short form: test_cli_serve.py.
def test_a_missing_checkpoint_is_one_sentence(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(model=str(tmp_path / "none"))
    assert server.wait() == 1
    assert str(tmp_path / "none") in server.stderr
    assert "Traceback" not in server.stderr


def test_when_an_engine_that_may_not_restart_dies_streams_get_an_error_and_the_server_ends(
    start_server: StartServer,
) -> None:
    server = start_server(max_core_restarts=0).ready()
    core = server.core
    events = receive_all(server, "/v1/completions", core.kill)
    last = json.loads(events.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_error"
    assert "SIGKILL" in last["error"]["message"]
    assert "[DONE]" not in events
    assert server.wait() == 1
    assert server.stderr.splitlines()[-1].startswith("kaon: the engine core was killed")


def test_the_api_process_is_small_and_free_of_torch(start_server: StartServer) -> None:
    server = start_server(environment=COLD_START).ready()
    with server.http() as http:
        for _ in range(20):
            http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", "max_tokens": 4})
    assert server.process.memory_info().rss <= 150 * 2**20
    mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "torch" not in mapped
    assert "torch" in Path(f"/proc/{server.core.pid}/maps").read_text()


def test_processes_name_themselves(server: KaonServer) -> None:
    assert psutil.Process(server.process.pid).name() == "kaon-api"
    assert server.core.name() == "kaon-engine-0"
