"""An endpoint family of another package: after one registration it is served, described, and counted by the
metrics."""

import logging
import threading

import httpx
import pytest
from fastapi import Request, Response

from engine.config.config import Config
from server import request_builder
from server.app import create_app
from server.endpoints import ENDPOINTS, EndpointFamily, all_endpoints
from server.request_builder import read_request
from server.schemas.body import RequestModel, as_json, parse_object
from server.schemas.models import Version


class EchoRequest(RequestModel):
    """Body of `POST /v1/echo`."""

    text: str
    """The text to answer."""


class LoadingCore:
    """A core that never becomes ready."""

    ready = None
    failure = None
    serving: tuple[int, ...] = ()


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> httpx.AsyncClient:
    all_endpoints()  # imports and registers every family
    monkeypatch.setattr(ENDPOINTS, "_registered", dict(ENDPOINTS._registered))
    endpoints = ENDPOINTS.register("echo")(EndpointFamily())

    @endpoints.post("/v1/echo", Version, request=EchoRequest, example={"text": "hi"})
    async def echo(http: Request) -> Response:
        """Answer with the text."""
        request = await read_request(http, EchoRequest, Config().server_config)
        return as_json(Version(request.text))

    @endpoints.get("/v1/echoes", "text/plain", is_probe=True)
    async def echoes() -> Response:
        """Nothing."""
        return Response()

    app = create_app(Config(), LoadingCore())  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kaon")


async def test_it_is_served_and_its_body_is_validated(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/echo", json={"text": "a"})).json() == {"version": "a"}
    refused = await http.post("/v1/echo", json={"text": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text")
    assert (await http.get("/v1/echo")).headers["allow"] == "POST"


async def test_a_large_body_is_parsed_in_a_thread_and_a_small_one_at_once(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that send large bodies take turns, and do not delay other clients' streams."""
    threads = []

    def parse(body: bytes, max_bytes: int) -> dict[str, object]:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse_object(body, max_bytes)

    monkeypatch.setattr(request_builder, "parse_object", parse)
    for length in (1000, 100_000):
        assert (await http.post("/v1/echo", json={"text": "a" * length})).json() == {"version": "a" * length}
    assert threads == [True, False]


async def test_a_body_over_what_a_full_context_needs_is_refused(http: httpx.AsyncClient) -> None:
    refused = await http.post("/v1/echo", json={"text": "a" * 2**22})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
    assert "at most 4194304 bytes" in refused.json()["error"]["message"]


async def test_it_is_described_to_programs_and_to_people(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert document["paths"]["/v1/echo"]["post"]["description"] == "Answer with the text."
    schema = document["components"]["schemas"]["EchoRequest"]
    assert (schema["examples"], schema["required"]) == ([{"text": "hi"}], ["text"])
    assert "/v1/echo" in (await http.get("/docs")).text


async def test_its_probes_are_answered_to_head_and_logged_at_debug(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server.access_log")
    assert (await http.head("/v1/echoes")).status_code == 200
    assert caplog.records == []
