"""A server with few descriptors whose log is not read: idle connections, half-closed clients, large bodies.

It has 64 descriptors, of which the process itself uses about 30, and its standard error is a full pipe.
"""

import fcntl
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from engine.config.config import Config
from tests.e2e.kaon_server import MODEL, PLAIN_HTTP, SETTINGS, START_SECONDS, eventually, free_port
from tests.e2e.processes import END_SECONDS, run_config

FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); "
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
HELD = 14
"""More connections than this server accepts at a time."""


class Edge:
    """The server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_SECONDS, verify=PLAIN_HTTP)

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), START_SECONDS)
        connection.sendall(sent)
        return connection

    def metric(self, sample: str) -> float:
        lines = self.http.get("/metrics", headers={"Connection": "close"}).text.splitlines()
        (value,) = (line.split()[-1] for line in lines if line.startswith(sample + " "))
        return float(value)

    def half_closed(self, path: str, body: dict[str, Any]) -> bytes:
        """The answer to a client that shuts down its sending side after the request."""
        content = json.dumps(body).encode()
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(content))
        received = b""
        with self.connect(head + content) as connection:
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65536):
                received += more
        return received


@pytest.fixture(scope="module")
def edge() -> Iterator[Edge]:
    port = free_port()
    config = Config.model_validate({**SETTINGS, "server_config": {"port": port, "access_log": "json"}})
    reader, writer = os.pipe()
    # A page, which is the least. A line of the access log has more than 100 bytes.
    capacity = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = psutil.Popen(
        run_config(config, FEW_FILES),
        stdout=subprocess.PIPE,
        stderr=writer,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(writer)
    assert process.stdout.readline()
    running = Edge(port)
    for _ in range(capacity // 100 + 1):
        assert running.http.get("/version").status_code == 200
    yield running
    running.http.close()
    process.terminate()
    assert process.wait(END_SECONDS) == 0
    os.close(reader)


def test_probes_and_requests_are_answered_while_silent_connections_come_and_stay(edge: Edge) -> None:
    expected = edge.http.post("/v1/completions", json=COMPLETION).json()["choices"]
    silent = [edge.connect() for _ in range(120)]
    for path in ("/livez", "/readyz", "/metrics"):
        assert httpx.get(edge.http.base_url.join(path), verify=PLAIN_HTTP).status_code == 200
    assert edge.http.post("/v1/completions", json=COMPLETION).json()["choices"] == expected
    # A connection that makes room counts until it is closed.
    eventually(lambda: edge.metric("kaon_connections_open") <= HELD)
    assert edge.metric('kaon_connections_closed_total{reason="evicted"}') >= 120 - HELD
    assert edge.metric('kaon_connections_closed_total{reason="descriptors"}') == 0
    for each in silent:
        each.close()


def test_slow_uploads_leave_descriptors_for_connections(edge: Edge) -> None:
    """Each needs two: with 200 descriptors, one key's uploads delayed probes of others by 36 s."""
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    head += b"Content-Length: 100000000\r\n\r\n--x\r\n"

    def held() -> int:
        number: int = edge.http.get("/kaon/limits").json()["in_use"]["open_files"]
        return number

    with edge.connect(head):
        eventually(lambda: held() == 1)
        with edge.connect(head) as second:
            answer = b""
            while not answer.endswith(b"}"):
                answer += (part := second.recv(65536))
                assert part
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"1 uploads and downloads of this key or address are in progress" in answer
    eventually(lambda: held() == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_shuts_down_its_sending_side_is_answered(edge: Edge, path: str) -> None:
    body = {**COMPLETION, "messages": [{"role": "user", "content": "Hi"}]}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    expected = edge.http.post(path, json=body).json()["choices"]
    head, _, whole = edge.half_closed(path, body).rpartition(b"\r\n\r\n")
    assert b"HTTP/1.1 200 OK" in head
    assert json.loads(whole)["choices"] == expected
    streamed = edge.half_closed(path, {**body, "stream": True})
    assert streamed.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_whole_answer_for_a_client_that_has_gone_is_not_computed(edge: Edge) -> None:
    content = json.dumps({**COMPLETION, "max_tokens": 3000, "n": 4}).encode()
    gone = edge.metric('kaon_connections_closed_total{reason="gone"}')
    edge.connect(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    ).close()
    eventually(lambda: edge.metric('kaon_connections_closed_total{reason="gone"}') == gone + 1)
    eventually(lambda: edge.metric("kaon_requests_live") == 0)


@pytest.mark.parametrize("number", [b"1", b"2.2250738585072011e-308"])
def test_a_body_of_very_many_numbers_is_refused_in_words(edge: Edge, number: bytes) -> None:
    body = b'{"model": "%b", "prompt": [' % MODEL.encode() + b",".join([number] * (2**22 // (len(number) + 2))) + b"]}"
    refused = edge.http.post("/v1/completions", content=body)
    assert refused.status_code == 400
    assert "may hold at most" in refused.json()["error"]["message"] or "values" in refused.json()["error"]["message"]
