"""A slow reader delays only its own request, of which the server buffers a bounded amount."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.kaon_server import MODEL, KaonServer, eventually, free_port

TOKENS = 120
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "A story without end",
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 20,
    "n": 8,
    "stream": True,
}
"""About 800 KB of events; the connection and the server buffer 200."""


@pytest.fixture(scope="module", params=["pause", "end"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    """A server that buffers 64 KiB for a reader."""
    settings = {"slow_readers": request.param, "stream_buffer_bytes": 64 * 2**10}
    running = KaonServer(tmp_path_factory.mktemp("slow") / "log", free_port(), server_config=settings).ready()
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


def slows(server: KaonServer, action: str) -> float:
    return server.metric(f'kaon_slow_readers_total{{action="{action}"}}')


def choices(stream: bytes) -> list[dict[str, Any]]:
    events = re.findall(rb"^data: (\{.*\})$", stream, re.MULTILINE)
    return [choice for event in events for choice in json.loads(event).get("choices", ())]


def text_of(stream: bytes, index: int) -> str:
    return "".join(choice["text"] for choice in choices(stream) if choice["index"] == index)


def read_on(connection: Any, ending: bytes) -> bytes:
    received = b""
    while ending not in received[-4096:]:
        chunk = connection.recv(65536)
        assert chunk, f"the server closed after {received[-200:]!r}"
        received += chunk
    return received


def test_the_request_of_a_slow_reader_stops_and_goes_on_or_ends_as_the_flag_says(server: KaonServer) -> None:
    ends = slows(server, "pause") + slows(server, "end")
    aborted = server.metric('kaon_requests_finished_total{reason="abort"}')
    slow = server.connect("/v1/completions", BODY, holds_little=True)
    eventually(lambda: slows(server, "pause") + slows(server, "end") > ends)
    eventually(lambda: server.metric("kaon_requests_running") == 0)
    with server.http() as http:
        others = http.post("/v1/completions", json={**BODY, "n": 1, "logprobs": None, "stream": False}).json()[
            "choices"
        ][0]
    if slows(server, "end"):
        received = read_on(slow, b'"code":"slow_reader"')
        assert others["text"].startswith(text_of(received, 0))
        assert server.metric('kaon_requests_finished_total{reason="abort"}') == aborted + 8
    else:
        assert server.metric("kaon_requests_live") == 8
        received = read_on(slow, b"data: [DONE]\n\n")
        assert [text_of(received, index) for index in range(8)] == [others["text"]] * 8
        assert sum(len(choice["logprobs"]["tokens"]) for choice in choices(received)) == 8 * TOKENS
    slow.close()
    eventually(lambda: server.metric("kaon_requests_live") == 0)


def test_unread_chunks_are_dropped_when_the_client_disconnects(server: KaonServer) -> None:
    before = slows(server, "pause") + slows(server, "end")
    slow = server.connect("/v1/completions", BODY, holds_little=True)
    eventually(lambda: slows(server, "pause") + slows(server, "end") > before)
    eventually(lambda: server.metric("kaon_requests_running") == 0)
    slow.close()
    eventually(lambda: server.metric("kaon_requests_live") == 0)
    eventually(lambda: server.metric("kaon_kv_cache_usage_ratio") == 0)
