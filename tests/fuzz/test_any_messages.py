"""Any body of `/v1/messages` is answered or refused in Anthropic's form, and another client's stream does not
change."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.e2e.kaon_server import PLAIN_HTTP, START_SECONDS, KaonServer
from tests.fuzz.test_hostile_requests import neighbour
from tests.unit.anthropic_bodies import BODIES

_AT_A_TIME = 16


def drawn(count: int) -> list[bytes]:
    """Generate `count` bodies."""
    bodies: list[bytes] = []

    @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(BODIES)
    def draw(body: dict[str, Any]) -> None:
        bodies.append(json.dumps(body).encode())

    draw()
    return bodies


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
async def test_any_body_is_answered_or_refused_and_disturbs_no_other(server: KaonServer, count: int) -> None:
    bodies = await asyncio.to_thread(drawn, count)
    async with httpx.AsyncClient(base_url=server.url, timeout=START_SECONDS, verify=PLAIN_HTTP) as http:
        alone = await neighbour(http)
        is_over = asyncio.Event()
        reported: list[str] = []

        async def neighbours() -> None:
            while not is_over.is_set():
                reported.append(await neighbour(http))

        streams = asyncio.create_task(neighbours())
        statuses: list[int] = []
        for first in range(0, len(bodies), _AT_A_TIME):
            sent = bodies[first : first + _AT_A_TIME]
            for body, answer in zip(
                sent, await asyncio.gather(*(http.post("/v1/messages", content=body) for body in sent)), strict=True
            ):
                statuses.append(answer.status_code)
                _check(body, answer)
        is_over.set()
        await streams
    assert len(statuses) >= count * 0.9
    assert set(reported) == {alone}
    assert 200 in statuses
    assert 400 in statuses


def _check(body: bytes, answer: httpx.Response) -> None:
    what = f"{body[:500]!r} got {answer.status_code} {answer.text[:300]}"
    if answer.status_code == 200:
        is_stream = answer.headers["content-type"].startswith("text/event-stream")
        assert is_stream == (json.loads(body).get("stream") is True), what
        assert ("event: message_stop" in answer.text) if is_stream else answer.json()["type"] == "message", what
        return
    assert 400 <= answer.status_code < 500, what
    error = answer.json()
    assert error["type"] == "error", what
    assert error["error"]["type"] in ("invalid_request_error", "not_found_error", "timeout_error"), what
    assert error["error"]["message"], what
    assert error["request_id"] == answer.headers["request-id"], what
