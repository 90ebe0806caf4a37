"""A rolling update as by a Deployment: no request fails, and no stream is cut.

The new server, once it is ready, joins the list of endpoints; the old one leaves the list, gets SIGTERM, completes its
streams and ends. A proxy of connections represents the Service, as kube-proxy does.
"""

import contextlib
import json
import random
import signal
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.kaon_server import LASTING, MODEL, KaonServer, eventually, free_port

StartServer = Callable[..., KaonServer]
PROMPTS = [f"The story of client {number}: once upon a time" for number in range(6)]
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": 48, "ignore_eos": True, "temperature": 0, "stream": True}
# Dozens of times as many tokens as the other requests complete until the old server is to end.
ENDLESS = {**FIELDS, "prompt": "A story", "max_tokens": 3900}


class Service(socketserver.ThreadingTCPServer):
    """Forwards each connection to one of `endpoints` while it is open."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        self.endpoints: tuple[int, ...] = ()
        """The ports of the ready servers; the list is replaced as a whole."""
        self.forwarded: Counter[int] = Counter()
        super().__init__(("127.0.0.1", free_port()), _Connection)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Connection(socketserver.BaseRequestHandler):
    server: Service

    def handle(self) -> None:
        port = random.choice(self.server.endpoints)
        self.server.forwarded[port] += 1
        with socket.create_connection(("127.0.0.1", port)) as server:
            threading.Thread(target=_forward, args=(self.request, server), daemon=True).start()
            _forward(server, self.request)


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The other side has closed.
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def streamed(url: str, prompt: str) -> str:
    """The text of a completion. Raises an error if its stream is not complete."""
    # Each request has a connection of its own, so that each goes to a current endpoint.
    fields, headers = {**FIELDS, "prompt": prompt}, {"Connection": "close"}
    with httpx.stream("POST", f"{url}/v1/completions", json=fields, headers=headers, timeout=100) as response:
        assert response.status_code == 200, response.read()
        events = response.read().decode().strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    [*choices] = (json.loads(event.removeprefix("data: "))["choices"][0] for event in events)
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


def test_an_update_fails_no_request_and_cuts_no_stream(start_server: StartServer, service: Service) -> None:
    old, new = (start_server(**LASTING, server_config={"drain_timeout": 100}) for _ in range(2))
    old.ready()
    new.ready()
    expected = {prompt: streamed(old.url, prompt) for prompt in PROMPTS}
    service.endpoints = (old.port,)
    ended = threading.Event()
    completed: Counter[str] = Counter()
    failures: list[Exception] = []

    def load(prompt: str) -> None:
        try:
            # The load is bounded, also if the test fails.
            for _ in range(2000):
                if ended.is_set():
                    return
                assert streamed(service.url, prompt) == expected[prompt]
                completed[prompt] += 1
        except (AssertionError, KeyError, httpx.HTTPError) as error:
            failures.append(error)

    def wait_for_answers() -> None:
        """Wait until each client has completed another request."""
        before = completed.copy()
        eventually(lambda: bool(failures) or all(completed[prompt] > before[prompt] for prompt in PROMPTS))

    clients = [threading.Thread(target=load, args=(prompt,)) for prompt in PROMPTS]
    for client in clients:
        client.start()
    try:
        with httpx.stream("POST", f"{service.url}/v1/completions", json=ENDLESS, timeout=100) as response:
            chunks = response.iter_bytes()
            assert next(chunks)
            service.endpoints = (old.port, new.port)
            eventually(lambda: service.forwarded[new.port] > 0)
            service.endpoints = (new.port,)
            # A pod's preStop hook waits for this time, after which no connection is on its way to it.
            wait_for_answers()
            old.process.send_signal(signal.SIGTERM)
            eventually(lambda: old.get("/readyz").status_code == 503)
            for _ in range(20):
                assert b"error" not in next(chunks)
            assert old.process.is_running()
        assert old.wait() == 0
        wait_for_answers()
    finally:
        ended.set()
        for client in clients:
            client.join()
    assert failures == []
    assert service.forwarded[old.port] + service.forwarded[new.port] == completed.total() + 1
    assert "Traceback" not in old.stderr + new.stderr
