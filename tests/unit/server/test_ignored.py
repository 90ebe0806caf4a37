"""Ignored fields of a request: the header of its answer, and one warning in the log."""

import asyncio
import logging

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from server.ignored import HEADER, collect, header_value, ignore
from server.metrics import Metrics
from server.middleware import RequestIdMiddleware


async def _route(http: Request) -> Response:
    for what in http.query_params.getlist("what"):
        await asyncio.to_thread(ignore, what)
    return Response("ok")


@pytest.fixture
def client() -> TestClient:
    app = Starlette(routes=[Route("/", _route)])
    return TestClient(RequestIdMiddleware(app, None, Metrics("1", 1)))


def test_the_header_names_what_a_route_ignored(client: TestClient) -> None:
    answer = client.get("/", params={"what": ["tools[3] (web_search)", "input[5] (image)", "input[5] (image)"]})
    assert answer.headers[HEADER] == "tools[3] (web_search), input[5] (image)"


def test_a_request_that_had_nothing_ignored_has_no_header(client: TestClient) -> None:
    client.get("/", params={"what": "tools[0] (mcp)"})
    assert HEADER not in client.get("/").headers


def test_the_same_combination_warns_once(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "server.ignored"):
        for what in ("a", "a", "b"):
            client.get("/", params={"what": what})
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["a", "b"]


def test_the_header_is_bounded_visible_ascii() -> None:
    hostile = "x\r\ny: \N{GREEK SMALL LETTER ALPHA},"
    with collect() as ignored:
        for number in range(500):
            ignore(f"{hostile}{number}")
    value = header_value(ignored)
    assert len(value) < 1100
    assert value.startswith(b"x??y: ??0, x??y: ??1, ")
    assert value.endswith(b" more")


def test_an_entry_is_not_compared_with_all_before_it() -> None:
    compared: list[str] = []

    class Entry(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(self)
            return super().__eq__(other)

    with collect() as ignored:
        for number in [*range(500), *range(500)]:
            ignore(Entry(number))
    assert ignored == [str(number) for number in range(500)]
    assert len(compared) <= 3 * 500


def test_outside_of_a_request_nothing_is_recorded() -> None:
    ignore("anything")
    with collect() as ignored:
        assert ignored == []
