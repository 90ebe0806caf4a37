"""More load than the server's capacity: accepted requests are answered; refused ones retry later and succeed."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.chaos.conftest import StartServer
from tests.chaos.faults import ChaosServer
from tests.chaos.workload import client
from tests.e2e.kaon_server import MODEL

RUNNING, QUEUED = 4, 8
OPTIONS = ("--max-num-seqs", str(RUNNING), "--max-queued-requests", str(QUEUED))
REQUEST: dict[str, Any] = {
    "model": MODEL,
    "prompt": "A story",
    "max_tokens": 300,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
ENDLESS = {**REQUEST, "max_tokens": 3900}

TIMES_THE_CAPACITY = 10


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosServer]:
    """Server of the test of clients that retry, which runs first: after an overload, reservations remain for a
    while."""
    server = ChaosServer(tmp_path_factory.mktemp("narrow") / "log", *OPTIONS)
    try:
        yield server.ready()
    finally:
        server.end()


class Answer(NamedTuple):
    """The result of one request of the overload."""

    status: int
    ttft: float = 0.0
    retry_after: float = 0.0


async def ask(http: httpx.AsyncClient) -> Answer:
    """Send the request; a 200 must be complete, a 429 must have Retry-After."""
    began = time.monotonic()
    async with http.stream("POST", "/v1/completions", json=REQUEST) as response:
        if response.status_code == 200:
            text, ttft = "", 0.0
            async for part in response.aiter_text():
                ttft = ttft or time.monotonic() - began
                text += part
            assert text.endswith("data: [DONE]\n\n"), text[-300:]
            return Answer(200, ttft)
        await response.aread()
    assert response.status_code == 429, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert str(QUEUED) in error["message"]
    seconds = int(response.headers["retry-after"])
    assert 1 <= seconds <= 60
    assert 0 < float(response.headers["retry-after-ms"]) <= seconds * 1000
    return Answer(429, 0.0, seconds)


async def measured_rate(http: httpx.AsyncClient) -> float:
    """Requests per second that the server completes while its queue is never empty."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(RUNNING + QUEUED):
            group.create_task(ask(http))
    return (RUNNING + QUEUED) / (time.monotonic() - began)


async def test_clients_that_retry_when_asked_to_are_all_admitted(narrow: ChaosServer) -> None:
    server, before = narrow, narrow.metrics()
    clients = 3 * (RUNNING + QUEUED)
    async with server.async_client().with_options(max_retries=100) as sdk:

        async def answered() -> str:
            fields: dict[str, Any] = {name: value for name, value in REQUEST.items() if name != "ignore_eos"}
            fields["stream"] = False
            answer = await sdk.completions.create(**fields, extra_body={"ignore_eos": True})
            text: str = answer.choices[0].text
            return text

        texts = await asyncio.gather(*(answered() for _ in range(clients)))
    assert len(set(texts)) == 1
    after = server.metrics()
    refused, answers = (
        'kaon_requests_rejected_total{reason="queue_requests"}',
        'kaon_requests_finished_total{reason="length"}',
    )
    assert after[refused] > before[refused]
    assert after[answers] == before[answers] + clients


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
async def test_in_a_tenfold_overload_refused_requests_only_get_a_retry_time(
    seconds: int, narrow: ChaosServer, record_property: Any
) -> None:
    server = narrow
    async with client(server.url) as http:
        await measured_rate(http)
        rate = TIMES_THE_CAPACITY * await measured_rate(http)
        before = server.metrics()
        longest_queue = 0.0
        tasks: list[asyncio.Task[Answer]] = []
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < seconds:
            # At any speed of the machine, there are more requests than the queue has room for.
            while len(tasks) < rate * elapsed or unfinished(tasks) < 2 * (RUNNING + QUEUED):
                tasks.append(asyncio.create_task(ask(http)))
            sample = await http.get("/metrics")
            longest_queue = max(longest_queue, sample_of(sample.text, "kaon_requests_waiting"))
        answers = await asyncio.gather(*tasks)
    counts = Counter(answer.status for answer in answers)
    assert counts[200] >= RUNNING
    assert counts[429] >= RUNNING + QUEUED, "the load was no overload"
    assert longest_queue <= QUEUED
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after if name in before}
    assert grown["kaon_requests_received_total"] == len(answers)
    assert grown['kaon_requests_rejected_total{reason="queue_requests"}'] == counts[429]
    assert grown['kaon_requests_finished_total{reason="length"}'] == counts[200]
    await asyncio.to_thread(server.until, server.is_idle)
    ttfts = sorted(answer.ttft for answer in answers if answer.status == 200)
    p99 = ttfts[int(0.99 * (len(ttfts) - 1))]
    record_property("ttft_p99_seconds", p99)
    longest = max(answer.retry_after for answer in answers)
    print(
        f"{rate:.0f} requests/s for {seconds} s: {counts[200]} answered, TTFT median {ttfts[len(ttfts) // 2]:.2f} s, "
        f"p99 {p99:.2f} s; {counts[429]} asked to retry, in {longest:.0f} s at most"
    )


def unfinished(tasks: Iterable[asyncio.Task[Answer]]) -> int:
    return sum(not task.done() for task in tasks)


def sample_of(text: str, name: str) -> float:
    """One sample of /metrics."""
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


@pytest.mark.slow  # On a server with earlier requests: tests/e2e/test_http_overload.py.
@pytest.mark.parametrize("leaves", [True, False])
def test_a_request_whose_client_left_while_it_waited_is_never_scheduled(
    leaves: bool, start_server: StartServer
) -> None:
    server = start_server("--max-num-seqs", "1")
    with server.connect("/v1/completions", ENDLESS):
        server.until(lambda: server.metric("kaon_generation_tokens_total") > 0)
        waiting = server.connect("/v1/completions", {**ENDLESS, "prompt": "word " * 500, "max_tokens": 5})
        server.until(lambda: server.metric("kaon_requests_waiting") == 1)
        read_before = looked_up(server)
        if leaves:
            waiting.close()
            server.until(lambda: server.metric('kaon_requests_finished_total{reason="abort"}') == 1)
    server.until(server.is_idle)
    waiting.close()
    # Scheduled prompts are looked up in the prefix cache first.
    assert (looked_up(server) > read_before) == (not leaves)


def looked_up(server: ChaosServer) -> float:
    return server.metric("kaon_prefix_cache_queried_tokens_total")
