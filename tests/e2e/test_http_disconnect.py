"""A client that disconnects costs nothing more: its request is aborted and its blocks are freed."""

import json
import re
import socket
from http.client import HTTPResponse
from typing import Any

import pytest

from tests.e2e.kaon_server import MODEL, KaonServer, eventually

TOKENS = 3000
LONG = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
COMPLETION: dict[str, Any] = {**LONG, "prompt": "A story without end"}
CHAT: dict[str, Any] = {**LONG, "messages": [{"role": "user", "content": "A story without end"}]}


def is_idle(server: KaonServer) -> bool:
    gauges = ("kaon_requests_running", "kaon_requests_waiting", "kaon_kv_cache_usage_ratio")
    return all(server.metric(gauge) == 0 for gauge in gauges)


def receive_until(connection: socket.socket, ending: bytes) -> bytes:
    received = b""
    while ending not in received:
        chunk = connection.recv(65536)
        assert chunk, f"the server closed after {received!r}"
        received += chunk
    return received


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_a_closed_connection_aborts_its_request(
    server: KaonServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    eventually(lambda: is_idle(server))
    generated = server.metric("kaon_generation_tokens_total")
    aborted = server.metric('kaon_requests_finished_total{reason="abort"}')
    connection = server.connect(path, {**body, "stream": stream, "n": 2})
    eventually(lambda: server.metric("kaon_requests_running") == 2)
    if stream:
        receive_until(connection, b"data: ")
    connection.close()
    eventually(lambda: is_idle(server))
    eventually(lambda: server.metric('kaon_requests_finished_total{reason="abort"}') == aborted + 2)
    assert server.metric("kaon_generation_tokens_total") < generated + 2 * TOKENS


def test_a_reset_connection_aborts_its_request(server: KaonServer) -> None:
    connection = server.connect("/v1/completions", {**COMPLETION, "stream": True})
    receive_until(connection, b"data: ")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
    eventually(lambda: is_idle(server))


def test_a_client_that_leaves_while_it_sends_its_body_leaves_nothing(server: KaonServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    with server.http() as http:
        assert http.get("/health").status_code == 200
    assert "Traceback" not in server.stderr


def test_a_slow_client_gets_merged_chunks_and_delays_no_other(server: KaonServer) -> None:
    """Many times the capacity of the sockets between."""
    body = {**COMPLETION, "max_tokens": 60, "n": 32, "logprobs": 20}
    slow = server.connect("/v1/completions", {**body, "stream": True}, holds_little=True)
    answer = HTTPResponse(slow)
    answer.begin()
    received = answer.read(1)
    with server.http() as http:
        whole = http.post("/v1/completions", json={**body, "n": 1}).json()["choices"][0]
    eventually(lambda: is_idle(server))
    received += answer.read()
    slow.close()
    events = re.findall(rb"^data: (\{.*\})$", received, re.MULTILINE)
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    first = [choice for choice in choices if choice["index"] == 0]
    assert len(choices) < 32 * 60
    assert "".join(choice["text"] for choice in first) == whole["text"]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 32 * 60
