"""Hostile requests are refused immediately, in words, and another client's stream does not change by a byte."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

import httpx
import pytest

from tests.e2e.kaon_server import MODEL, KaonServer
from tests.fuzz.hostile import CHAT, HARMLESS, PATHS, Hostile, hostile, hostile_at_first

PROMISED_SECONDS, ALLOWED_SECONDS = 1.0, 60.0
"""Promised time of a refusal, and a tolerance for a busy machine, with which endless work is still detected."""

NEIGHBOUR: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "max_tokens": 50,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
COSTLY_TOKENS = 50
"""Tokens of an answer in a form that looks expensive: a cost that grows with the answer is then visible."""

HI = [{"role": "user", "content": "Hi"}]


async def neighbour(http: httpx.AsyncClient) -> str:
    """The text of another client's stream."""
    text = ""
    async with http.stream("POST", "/v1/completions", json=NEIGHBOUR) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


class Attack:
    """Sends requests in turn, while another client's stream runs, which is restarted whenever it has ended."""

    def __init__(self, *, may_be_answered: bool = False) -> None:
        self._may_be_answered = may_be_answered
        self.wrong: list[str] = []
        self.times: list[tuple[float, str]] = []

    async def run(self, server: KaonServer, requests: Iterable[Hostile]) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            alone = await neighbour(http)
            is_over = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._stream_until(is_over, http, alone))
                for request in requests:
                    await self._send(http, request)
                is_over.set()
        assert not self.wrong, "\n".join(self.wrong)

    async def _stream_until(self, is_over: asyncio.Event, http: httpx.AsyncClient, alone: str) -> None:
        while not is_over.is_set():
            self._compare(await neighbour(http), alone)

    async def _send(self, http: httpx.AsyncClient, request: Hostile) -> None:
        began = time.perf_counter()
        response = await http.post(request.path, content=request.body, headers={"content-type": "application/json"})
        seconds = time.perf_counter() - began
        name = f"{request.path}: {request.name}"
        self.times.append((seconds, name))
        if response.status_code == 200 and self._may_be_answered:
            right = True
        else:
            right = 400 <= response.status_code < 500 and bool(response.json()["error"]["message"])
        if not right or seconds > ALLOWED_SECONDS:
            self.wrong.append(f"{name} got {response.status_code} in {seconds:.2f} s: {response.text[:300]}")

    def _compare(self, text: str, alone: str) -> None:
        if text != alone:
            last = self.times[-1][1] if self.times else "the first request"
            self.wrong.append(f"by {last} or the next the neighbour's stream said {text!r}, alone {alone!r}")

    @property
    def measured(self) -> str:
        seconds, name = max(self.times)
        slow = [f"{name} ({seconds:.1f} s)" for seconds, name in self.times if seconds > PROMISED_SECONDS]
        return f"{len(self.times)} requests, the slowest {seconds:.2f} s ({name}); over a second: {slow}"


@pytest.mark.parametrize("of", [hostile_at_first, pytest.param(hostile, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", PATHS)
async def test_hostile_requests_are_refused_and_disturb_no_other(
    server: KaonServer, path: str, of: Callable[[str], Iterable[Hostile]], record_property: Any
) -> None:
    attack = Attack()
    if requests := list(of(path)):
        await attack.run(server, requests)
        record_property("measured", attack.measured)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_looks_costly_is_answered_or_refused_at_once(
    server: KaonServer, path: str, record_property: Any
) -> None:
    right = {"prompt": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"} if path == "/v1/completions" else {"messages": HI}
    sampled = {"model": MODEL, **right, "max_tokens": COSTLY_TOKENS, "temperature": 1, "seed": 1}
    bodies = {name: {**sampled, "structured_outputs": value} for name, value in HARMLESS.items()}
    attack = Attack(may_be_answered=True)
    await attack.run(server, [Hostile(name, path, json.dumps(body).encode()) for name, body in bodies.items()])
    record_property("measured", attack.measured)


def test_no_request_makes_the_server_fetch_or_open_anything(server: KaonServer) -> None:
    callers: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as trap:
        threading.Thread(target=lambda: callers.append(_accept(trap)), daemon=True).start()
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/schema.json"
        schemas = [{"$ref": url}, {"$schema": url, "type": "object"}, {"$id": url, "$ref": "other.json"}]
        with server.http() as http:
            for schema in schemas:
                for fields in (
                    {"structured_outputs": {"json": schema}},
                    {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
                ):
                    http.post("/v1/chat/completions", json={**_chat(), "tool_choice": "auto", **fields})
            for kind in ("image_url", "input_audio", "file", "video_url"):
                part = {"type": kind, kind: {"url": url, "file_data": url, "data": url}}
                refused = http.post(
                    "/v1/chat/completions", json={**_chat(), "messages": [{"role": "user", "content": [part]}]}
                )
                assert refused.status_code == 400
            template = '{% include "' + url + '" %}{{ open("/etc/hostname").read() }}'
            http.post("/v1/chat/completions", json={**_chat(), "chat_template": template})
            http.post("/v1/chat/completions", json={**_chat(), "chat_template": url})
        time.sleep(0.2)
    assert callers in ([], [None])


def _chat() -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, "max_tokens": 4}


def _accept(trap: socket.socket) -> Any:
    try:
        return trap.accept()
    except OSError:
        return None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
async def test_hostile_fields_in_any_combination(server: KaonServer, seed: int) -> None:
    rng = Random(seed)
    bodies = {path: [fields for each in hostile(path) if (fields := _fields(each))] for path in PATHS}

    def combined() -> Iterator[Hostile]:
        for number in range(300):
            path = rng.choice(PATHS)
            fields = {**rng.choice(bodies[path]), **rng.choice(bodies[path])}
            yield Hostile(f"combination {number} of seed {seed}", path, json.dumps(fields).encode())

    # A wrong field may be replaced by a correct one.
    await Attack(may_be_answered=True).run(server, combined())


def _fields(request: Hostile) -> dict[str, Any] | None:
    try:
        fields = json.loads(request.body)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and len(request.body) < 100_000 else None


def test_the_catalogue_is_what_it_says() -> None:
    assert all(CHAT.values()), "an empty change of a right request is no hostile one"
