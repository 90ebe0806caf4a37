"""HTTP apart from generation: methods, headers, connections, the list of models and the API's description."""

import contextlib
import http.client
import json
import re
import socket
from typing import Any

import httpx
import pytest

from tests.e2e.kaon_server import MODEL, START_SECONDS, KaonServer, eventually

PATHS = ("/", "/livez", "/readyz", "/health", "/ping", "/metrics", "/version", "/docs", "/v1/models")


@pytest.fixture
def http_client(server: KaonServer) -> Any:
    with server.http() as client:
        yield client


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", "max_tokens": 2, **fields})


@pytest.mark.parametrize("path", [*PATHS, f"/v1/models/{MODEL}"])
def test_head_is_get_without_the_body(http_client: httpx.Client, path: str) -> None:
    response = http_client.head(path)
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("OPTIONS", "/v1/models", "GET, HEAD"), ("GET", "/v1/completions", "POST")]
)
def test_a_wrong_method_says_which_is_right(http_client: httpx.Client, method: str, path: str, allowed: str) -> None:
    response = http_client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert allowed in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1", "/v1/completions/", "/v1/audio/speech", "/%00", "/v1/models/a/b"])
def test_an_unknown_path_is_an_error_object(http_client: httpx.Client, path: str) -> None:
    response = http_client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_listing_names_what_is_served(server: KaonServer) -> None:
    with server.client() as client:
        (model,) = client.models.list().data
        assert (model.id, model.object, model.owned_by) == (MODEL, "model", "kaon")
        assert client.models.retrieve(MODEL) == model


def test_the_version_is_the_packages(http_client: httpx.Client) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", http_client.get("/version").json()["version"])


def test_streams_are_neither_cached_nor_buffered(http_client: httpx.Client) -> None:
    response = post(http_client, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "server" not in response.headers


def test_one_connection_serves_answers_streams_and_errors_in_turn(server: KaonServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=START_SECONDS)
    connection.connect()
    first = connection.sock
    for fields in ({}, {"stream": True}, {"n": 0}, {"prompt": "x" * 11 * 2**20}, {}):
        connection.request("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": "Hi", **fields}))
        connection.getresponse().read()
    assert connection.sock is first
    connection.close()


def test_pipelined_requests_are_answered_in_order(server: KaonServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=START_SECONDS) as connection:
        request = b"GET %b HTTP/1.1\r\nHost: x\r\n%b\r\n"
        connection.sendall(request % (b"/version", b"") + request % (b"/livez", b"Connection: close\r\n"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.index(b"version") < answer.rindex(b"ok\n")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01 hello\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 10**6, 431),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"X-Many: a\r\n" * 10**5, 431),
        (b"GET /" + b"a" * 10**6, 431),
    ],
)
def test_what_is_no_http_or_has_endless_headers_gets_an_error_object_and_goodbye(
    server: KaonServer, sent: bytes, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=START_SECONDS) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        answer = http.client.HTTPResponse(connection)
        with contextlib.suppress(ConnectionError):
            answer.begin()
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            assert answer.headers["x-request-id"].startswith("req_")
            assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"
    assert server.get("/livez").status_code == 200


def test_an_upgrade_is_refused_without_advice_to_install_packages(server: KaonServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=START_SECONDS)
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "eA=="}
    connection.request("GET", "/v1/realtime", headers={**headers, "Sec-WebSocket-Version": "13"})
    answer = connection.getresponse()
    assert answer.status == 404
    assert "real-time sessions, which this server does not have" in answer.read().decode()
    connection.close()
    assert "pip install" not in server.stderr


def test_metrics_count_what_was_generated(server: KaonServer, http_client: httpx.Client) -> None:
    eventually(lambda: server.metric("kaon_requests_live") == server.metric("kaon_requests_running") == 0)
    before = server.metric("kaon_generation_tokens_total")
    finished = server.metric('kaon_requests_finished_total{reason="length"}')
    post(http_client, max_tokens=7, ignore_eos=True)
    assert server.metric("kaon_generation_tokens_total") == before + 7
    assert server.metric('kaon_requests_finished_total{reason="length"}') == finished + 1
    assert server.metric("kaon_time_to_first_token_seconds_count") > 0
