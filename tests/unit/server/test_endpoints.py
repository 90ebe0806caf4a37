"""An endpoint family of another package: after one registration it is served, described, and counted by the
metrics."""

import asyncio
import contextlib
import json
import logging
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import Request, Response

from engine.config.config import Config
from server import request_builder
from server.app import create_app
from server.endpoints import ENDPOINTS, EndpointFamily, all_endpoints
from server.errors import RequestTimeout
from server.frontend import Frontend
from server.limits.jobs import MANY_OBJECTS
from server.limits.owners import Owner
from server.models import Models
from server.request_builder import accept, read_request, reading
from server.schemas.body import RequestModel, parse_object
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest
from server.schemas.messages import MessagesRequest
from server.schemas.models import Version
from server.schemas.responses import ResponsesRequest
from server.streaming.sse import as_json


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


async def test_the_objects_of_few_large_bodies_exist_at_a_time(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector visits the objects of every request that waits for its prompt. Brackets in a text, such as
    a program, are no objects."""
    app = http._transport.app  # type: ignore[attr-defined]
    parsed: list[str] = []
    monkeypatch.setattr(
        request_builder, "parse_object", lambda body, _: parsed.append(body.decode()[:9].strip(' "')) or {}
    )
    monkeypatch.setattr(request_builder, "validate", lambda data, model, allow_unknown: data)
    ends = {name: asyncio.Event() for name in ("one", "two", "three", "four", "other", "text1", "text2")}

    async def use(name: str, address: str, objects: int) -> None:
        brackets = b"[]" * objects
        body = f'"{name}"'.encode().ljust(9) + (b'"%b"' % brackets if "text" in name else brackets) + b" " * 40_000
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": [], "app": app}
        scope["state"] = {"owner": Owner.of_address(address)}

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": body}

        async with reading(Request(scope, receive), EchoRequest, Config().server_config):
            await ends[name].wait()

    async def until(names: list[str]) -> None:
        async with asyncio.timeout(60):
            while parsed != names:
                await asyncio.sleep(0.01)

    own = ["text1", "text2", "one", "two", "three", "four"]
    tasks = [asyncio.create_task(use(name, "10.0.0.1", MANY_OBJECTS + 1)) for name in own]
    await until(own[:5])
    tasks.append(asyncio.create_task(use("other", "10.0.0.2", MANY_OBJECTS + 1)))
    await until([*own[:5], "other"])
    ends["one"].set()
    await until([*own[:5], "other", "four"])
    for end in ends.values():
        end.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("model", "field", "fields"),
    [
        (ChatCompletionRequest, "messages", {}),
        (ResponsesRequest, "input", {}),
        (MessagesRequest, "messages", {"max_tokens": 1}),
    ],
)
async def test_messages_are_dropped_once_the_prompt_is_made(
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    model: type[ChatCompletionRequest | ResponsesRequest | MessagesRequest],
    field: str,
    fields: dict[str, Any],
) -> None:
    """Otherwise they exist, and the garbage collector visits them, as long as the answer is streamed."""
    frontend = SimpleNamespace(check_generates=lambda: None)
    monkeypatch.setattr(Models, "use", lambda *_: contextlib.nullcontext(frontend))
    body = json.dumps({"model": "m", field: [{"role": "user", "content": "hi"}], **fields}).encode()
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    scope |= {"app": http._transport.app, "state": {"owner": Owner.of_address(None)}}  # type: ignore[attr-defined]
    received = asyncio.Queue[dict[str, object]]()
    received.put_nowait({"type": "http.request", "body": body})
    async with accept(Request(scope, received.get), model) as (request, _, _):
        assert len(getattr(request, field)) == 1
    assert getattr(request, field) == []


async def test_work_for_a_request_ends_with_its_timeout(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a costly grammar is checked, and delays other clients' ones, after its time has passed."""
    monkeypatch.setattr(
        Models, "use", lambda *_: contextlib.nullcontext(SimpleNamespace(check_generates=lambda: None))
    )
    app = http._transport.app  # type: ignore[attr-defined]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": [], "app": app}
    received = asyncio.Queue[dict[str, object]]()
    received.put_nowait({"type": "http.request", "body": b'{"model": "m", "prompt": "hi", "timeout": 0.01}'})
    scope["state"] = {"owner": Owner.of_address(None)}
    rejected: list[tuple[str, int]] = []
    monkeypatch.setattr(Models.of(app).shared.metrics, "rejected", lambda *given: rejected.append(given))
    with pytest.raises(RequestTimeout, match=r"not done within 0\.01 s"):
        async with accept(Request(scope, received.get), CompletionRequest):
            await asyncio.Event().wait()
    assert rejected == [("timeout", 1)]


async def test_a_body_over_what_a_full_context_needs_is_refused(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"text": "a" * 2**22}
    assert (await http.post("/v1/echo", json=body)).status_code == 200  # While the model's context is not known.
    monkeypatch.setattr(Frontend, "max_model_len", 2048)
    refused = await http.post("/v1/echo", json=body)
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
