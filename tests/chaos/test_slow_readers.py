"""Clients that read one byte per second delay only themselves, lose nothing, and do not increase the server's
memory."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.conftest import StartServer
from tests.chaos.faults import ChaosServer
from tests.chaos.outcomes import merged, read_events
from tests.chaos.slow_readers import REQUEST, SlowReader
from tests.chaos.workload import client
from tests.e2e.kaon_server import MODEL

BUFFER = 256 * 2**10
OTHERS = 4
OTHER: dict[str, Any] = {
    "model": MODEL,
    "prompt": "A story",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


async def tpots(server: ChaosServer) -> list[float]:
    """Seconds between chunks of other clients' streams, sorted. All of them are answered completely."""
    gaps: list[float] = []

    async def one(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json=OTHER) as response:
            text, before = "", None
            async for part in response.aiter_text():
                now = time.monotonic()
                if before is not None:
                    gaps.append(now - before)
                text, before = text + part, now
            assert text.endswith("data: [DONE]\n\n"), text[-300:]

    async with client(server.url) as http:
        await asyncio.gather(*(one(http) for _ in range(OTHERS)))
    return sorted(gaps)


@contextlib.contextmanager
def slow_readers(server: ChaosServer, count: int) -> Iterator[list[SlowReader]]:
    with contextlib.ExitStack() as stack:
        readers = []
        for _ in range(count):
            readers.append(SlowReader(server))
            stack.callback(readers[-1].close)
        yield readers


def read_a_byte_a_second(readers: list[SlowReader], enough: threading.Event) -> None:
    while not enough.wait(1):
        for reader in readers:
            reader.take_byte()


@pytest.mark.parametrize("count", [4, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_slow_readers_wait_for_themselves_and_lose_nothing(count: int, start_server: StartServer) -> None:
    server = start_server("--stream-buffer-bytes", str(BUFFER), "--max-num-seqs", "256")
    await tpots(server)
    before = await tpots(server)
    live = count * REQUEST["n"]
    with slow_readers(server, count) as readers:
        enough = threading.Event()
        reading = asyncio.create_task(asyncio.to_thread(read_a_byte_a_second, readers, enough))

        def all_are_paused() -> bool:
            metrics = server.metrics()
            are_held = metrics['kaon_slow_readers_total{action="pause"}'] >= count
            return are_held and metrics["kaon_requests_live"] == live and metrics["kaon_requests_running"] == 0

        await asyncio.to_thread(server.until, all_are_paused)
        generated = server.generated()
        assert generated < live * REQUEST["max_tokens"], "nobody was held up"
        meanwhile = await tpots(server)
        await asyncio.to_thread(server.until, all_are_paused)
        others = OTHERS * OTHER["max_tokens"]
        assert server.generated() == generated + others, "a slow reader's request went on without its reader"
        enough.set()
        await reading
        events = await asyncio.to_thread(readers[0].read_all)
        assert server.metric("kaon_requests_live") == live - REQUEST["n"]
    await asyncio.to_thread(server.until, server.is_idle)
    answers = merged("/v1/chat/completions", read_events(events))
    async with client(server.url) as http:
        fast = (await http.post("/v1/chat/completions", json=REQUEST)).text
    assert answers == merged("/v1/chat/completions", read_events(fast))
    figures = (
        f"median {gaps[len(gaps) // 2] * 1e3:.2f} ms, p99 {p99(gaps) * 1e3:.2f} ms" for gaps in (before, meanwhile)
    )
    print(f"others' TPOT before: {next(figures)}; with {count} slow readers: {next(figures)}")


def p99(ordered: list[float]) -> float:
    return ordered[int(0.99 * (len(ordered) - 1))]


@pytest.mark.slow  # With one of them: tests/e2e/test_http_slow_readers.py.
async def test_slow_readers_can_be_ended_with_an_error_that_says_why(start_server: StartServer) -> None:
    server = start_server("--stream-buffer-bytes", str(BUFFER), "--slow-readers", "end")
    with slow_readers(server, 2) as readers:
        await asyncio.to_thread(server.until, lambda: server.generated() > 0)
        await asyncio.to_thread(server.until, server.is_idle)
        for reader in readers:
            events = read_events(await asyncio.to_thread(reader.read_all))
            assert str(BUFFER) in events[-1]["error"]["message"]
            assert sum("error" in event for event in events) == 1
    assert server.balance() == (2 * REQUEST["n"],) * 2
