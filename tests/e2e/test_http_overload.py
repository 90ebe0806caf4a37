"""A server with more load than its capacity: which requests are refused, which are admitted later, and which are
late."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.kaon_server import LASTING, MODEL, KaonServer, eventually, free_port

ENDLESS: dict[str, Any] = {"model": MODEL, "prompt": "A story", "max_tokens": 3900, "ignore_eos": True}
SHORT: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
REQUESTS = {
    "/v1/completions": SHORT,
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    """A server that runs one request at a time, and lets two wait."""
    server = KaonServer(
        tmp_path_factory.mktemp("narrow") / "log",
        free_port(),
        max_num_seqs=1,
        **LASTING,
        server_config={"max_queued_requests": 2},
    ).ready()
    yield server
    eventually(lambda: server.metric("kaon_requests_live") == 0)
    reported = server.metric("kaon_requests_received_total")
    text = server.get("/metrics").text
    ended = [line for line in text.splitlines() if line.startswith(("kaon_requests_finished_", "kaon_requests_rej"))]
    assert sum(float(line.split()[-1]) for line in ended) == reported
    assert server.stop() == 0
    assert "Traceback" not in server.stderr


def waiting(server: KaonServer) -> float:
    """Requests that were admitted and are not running."""
    return server.metric("kaon_requests_live") - server.metric("kaon_requests_running")


def busy(server: KaonServer, queued: int = 2) -> list[socket.socket]:
    """Connections of one running request and of some that wait for it."""
    # The engine reports the end of earlier requests after the front end: they must not be counted as these.
    eventually(lambda: server.metric("kaon_requests_live") == server.metric("kaon_requests_running") == 0)
    running = server.connect("/v1/completions", {**ENDLESS, "stream": True})
    eventually(lambda: server.metric("kaon_requests_running") == 1)
    behind = []
    for count in range(1, queued + 1):
        behind.append(server.connect("/v1/completions", {**SHORT, "stream": True}))
        eventually(lambda count=count: waiting(server) == count)  # type: ignore[misc]
    return [running, *behind]


def close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", REQUESTS)
def test_over_the_queues_bound_the_answer_is_a_429_also_for_streams(
    narrow: KaonServer, path: str, stream: bool
) -> None:
    connections = busy(narrow)
    rejected = narrow.metric('kaon_requests_rejected_total{reason="queue_requests"}')
    with narrow.http() as http:
        answer = http.post(path, json={**REQUESTS[path], "stream": stream})
    close(connections)
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
    assert "2 requests are waiting" in error["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert 0 < int(answer.headers["retry-after-ms"]) <= 60_000
    assert narrow.metric('kaon_requests_rejected_total{reason="queue_requests"}') == rejected + 1


def test_a_background_response_over_the_bound_is_a_429_and_not_kept(narrow: KaonServer) -> None:
    connections = busy(narrow)
    with narrow.http() as http:
        answer = http.post("/v1/responses", json={**REQUESTS["/v1/responses"], "background": True})
    close(connections)
    assert answer.status_code == 429


def test_a_client_that_obeys_gets_in(narrow: KaonServer) -> None:
    """The official client, which retries as it is asked, when the queue moves."""
    connections = busy(narrow)
    rejected = narrow.metric('kaon_requests_rejected_total{reason="queue_requests"}')

    def let_go() -> None:
        eventually(lambda: narrow.metric('kaon_requests_rejected_total{reason="queue_requests"}') > rejected)
        close(connections)

    meanwhile = threading.Thread(target=let_go)
    meanwhile.start()
    with narrow.client().with_options(max_retries=50) as client:
        answer = client.completions.create(**SHORT)
    meanwhile.join()
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert narrow.metric('kaon_requests_rejected_total{reason="queue_requests"}') > rejected


def test_a_request_whose_client_left_while_it_waited_is_never_scheduled(narrow: KaonServer) -> None:
    (running,) = busy(narrow, queued=0)
    looked_up = narrow.metric("kaon_prefix_cache_queried_tokens_total")
    behind = [narrow.connect("/v1/completions", {**SHORT, "stream": stream}) for stream in (True, False)]
    eventually(lambda: waiting(narrow) == 2)
    close(behind)
    eventually(lambda: narrow.metric("kaon_requests_live") == 1)
    running.close()
    eventually(lambda: narrow.metric("kaon_requests_live") == 0)
    with narrow.http() as http:
        http.post("/v1/completions", json={**SHORT, "prompt": [5, 6, 7]})
    assert narrow.metric("kaon_prefix_cache_queried_tokens_total") == looked_up + 3


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("path", REQUESTS)
def test_a_late_answer_is_a_408_that_clients_do_not_repeat(narrow: KaonServer, path: str, queued: bool) -> None:
    connections = busy(narrow, queued=0) if queued else []
    received = narrow.metric("kaon_requests_received_total")
    timeouts = narrow.metric('kaon_requests_finished_total{reason="timeout"}')
    length = {"max_output_tokens": 3000} if path == "/v1/responses" else {"max_tokens": 3000}
    with narrow.client().with_options(max_retries=3) as client, pytest.raises(openai.APIStatusError) as caught:
        client.post(
            path.removeprefix("/v1"),
            body={**REQUESTS[path], **length, "ignore_eos": True, "timeout": 0.2},
            cast_to=httpx.Response,
        )
    close(connections)
    assert (caught.value.status_code, caught.value.code) == (408, "request_timeout")
    assert "not done within 0.2 s" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert narrow.metric("kaon_requests_received_total") == received + 1
    assert narrow.metric('kaon_requests_finished_total{reason="timeout"}') == timeouts + 1
    eventually(lambda: narrow.metric("kaon_requests_live") == 0)


def test_a_late_stream_ends_with_an_error_event(narrow: KaonServer) -> None:
    eventually(lambda: narrow.metric("kaon_requests_live") == 0)
    with narrow.http() as http:
        # Long enough for some tokens on any machine, and too short for all of them.
        for seconds in (0.3, 1.0, 3.0):
            answer = http.post("/v1/completions", json={**ENDLESS, "stream": True, "timeout": seconds})
            *chunks, last, rest = answer.text.split("\n\n")
            if len(chunks) > 1:
                break
    assert answer.status_code == 200
    assert rest == ""
    assert len(chunks) > 1
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("value", [0, -1, 86401, "1", True])
def test_a_timeout_that_cannot_be_is_a_400(narrow: KaonServer, value: object) -> None:
    with narrow.http() as http:
        answer = http.post("/v1/completions", json={**SHORT, "timeout": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")


def test_a_request_that_cannot_be_served_counts_as_rejected(narrow: KaonServer) -> None:
    rejected = narrow.metric('kaon_requests_rejected_total{reason="invalid"}')
    with narrow.http() as http:
        for path in REQUESTS:
            assert http.post(path, json={"model": "none"}).status_code in (400, 404)
    assert narrow.metric('kaon_requests_rejected_total{reason="invalid"}') == rejected + 3


def test_a_background_response_keeps_its_place_and_its_timeout(narrow: KaonServer) -> None:
    body = {"model": MODEL, "input": "Hi", "background": True, "ignore_eos": True, "max_output_tokens": 3000}
    with narrow.http() as http:
        id = http.post("/v1/responses", json={**body, "timeout": 0.3}).json()["id"]
        eventually(lambda: http.get(f"/v1/responses/{id}").json()["status"] == "failed")
        assert "not done within 0.3 s" in http.get(f"/v1/responses/{id}").json()["error"]["message"]
        cancelled = http.post("/v1/responses", json=body).json()["id"]
        assert http.post(f"/v1/responses/{cancelled}/cancel").json()["status"] == "cancelled"
    eventually(lambda: narrow.metric("kaon_requests_live") == 0)


def test_a_key_has_so_many_requests_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    keys_file = tmp_path_factory.mktemp("keys") / "keys"
    keys_file.write_text("sk-one\nsk-two\n")
    settings = {"api_key_file": str(keys_file), "keyless_paths": ["/metrics"], "max_requests_per_key": 1}
    server = KaonServer(keys_file.parent / "log", free_port(), **LASTING, server_config=settings).ready()
    try:
        one, two = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
        body = {**ENDLESS, "n": 32}
        with server.http() as http:
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=one) as stream:
                assert stream.status_code == 200
                pieces = stream.iter_raw()
                next(pieces)
                refused = server.post("/v1/completions", SHORT, **one)
                assert (refused.status_code, refused.json()["error"]["type"]) == (429, "requests")
                assert "1 requests of this key or address are running" in refused.json()["error"]["message"]
                assert server.post("/v1/completions", SHORT, **two).status_code == 200
            eventually(lambda: server.metric("kaon_requests_live") == 0)
            assert server.post("/v1/completions", SHORT, **one).status_code == 200
        assert server.metric('kaon_requests_rejected_total{reason="key"}') == 1
    finally:
        server.stop()
