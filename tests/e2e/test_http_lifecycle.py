"""A server's life: while it loads, when it ends, when its engine dies, and when it cannot start."""

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.kaon_server import MODEL, KaonServer, eventually

StartServer = Callable[..., KaonServer]
ENDLESS = {"model": MODEL, "prompt": "A story", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


def answers(server: KaonServer, path: str) -> int | None:
    """The status of a GET; None while nothing listens."""
    try:
        return httpx.get(server.url + path).status_code
    except httpx.TransportError:
        return None


def receive_all(server: KaonServer, path: str, meanwhile: Callable[[], object]) -> str:
    """What a stream held, from its first event to its end; `meanwhile` runs after the first event."""
    with server.http() as http, http.stream("POST", path, json={**ENDLESS, "stream": True}) as response:
        received = ""
        for text in response.iter_text():
            if not received:
                meanwhile()
            received += text
        return received


def test_the_start_line_says_what_is_served_where(start_server: StartServer) -> None:
    server = start_server(port=0).ready()
    assert server.start_line.startswith("Kaon ")
    assert f"serving {MODEL} on http://127.0.0.1:" in server.start_line
    url = server.start_line.split(" on ")[1].split()[0]
    assert httpx.get(f"{url}/readyz").status_code == 200


def test_while_the_model_loads_the_server_is_alive_and_not_ready(start_server: StartServer) -> None:
    server = start_server()
    eventually(lambda: len(server.process.children()) == 1)
    core = server.core
    core.suspend()
    try:
        eventually(lambda: answers(server, "/livez") == 200)
        for path in ("/readyz", "/health"):
            response = httpx.get(server.url + path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        refused = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "Hi"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "still loading" in refused.json()["error"]["message"]
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == MODEL
        assert httpx.get(f"{server.url}/metrics").status_code == 200
    finally:
        core.resume()
    server.ready()
    assert answers(server, "/readyz") == answers(server, "/health") == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_cleanly(start_server: StartServer, number: signal.Signals) -> None:
    server = start_server().ready()
    core = server.core
    events = receive_all(server, "/v1/completions", lambda: server.process.send_signal(number))
    last = json.loads(events.strip().split("\n\n")[-1].removeprefix("data: "))
    assert "shutting down" in last["error"]["message"]
    assert events.count('"error"') == 1
    assert server.wait() == 0
    assert not core.is_running()
    assert "Traceback" not in server.stderr


def test_clients_that_neither_send_nor_read_on_do_not_keep_the_server(start_server: StartServer) -> None:
    server = start_server().ready()
    fields = {"model": MODEL, "prompt": "Hi", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with server.connect("/v1/completions", {**fields, "n": 32, "logprobs": 20}), socket.socket() as sender:
        sender.connect(("127.0.0.1", server.port))
        sender.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        eventually(lambda: server.metric("kaon_generation_tokens_total") > 32 * 40)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
    assert "Traceback" not in server.stderr


def test_a_signal_while_the_model_loads_ends_the_server_cleanly(start_server: StartServer) -> None:
    server = start_server()
    eventually(lambda: len(server.process.children()) == 1)
    core = server.core
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not core.is_running()
    assert "Traceback" not in server.stderr


def test_a_taken_port_is_one_sentence_and_starts_nothing(server: KaonServer, start_server: StartServer) -> None:
    second = start_server(port=server.port)
    assert second.wait() == 1
    assert second.stderr.startswith("kaon: port ")
    assert f"{server.port} on 127.0.0.1 is taken" in second.stderr
    assert len(second.stderr.splitlines()) == 1


def test_a_missing_checkpoint_is_one_sentence(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(model=str(tmp_path / "none"))
    assert server.wait() == 1
    assert str(tmp_path / "none") in server.stderr
    assert "Traceback" not in server.stderr


def test_when_the_engine_dies_streams_are_told_and_the_server_ends(start_server: StartServer) -> None:
    server = start_server().ready()
    core = server.core
    events = receive_all(server, "/v1/completions", core.kill)
    last = json.loads(events.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_error"
    assert "SIGKILL" in last["error"]["message"]
    assert "[DONE]" not in events
    assert server.wait() == 1
    assert server.stderr.splitlines()[-1].startswith("kaon: the engine core was killed")


def test_the_api_process_is_small_and_free_of_torch(server: KaonServer) -> None:
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
