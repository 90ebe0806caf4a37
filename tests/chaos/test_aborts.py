"""Clients disconnect at random times, in every state of a request: no state of them remains."""

import asyncio
import random
from typing import Any

import pytest

from tests.chaos.conftest import StartServer
from tests.chaos.faults import ChaosServer
from tests.chaos.workload import WORKLOAD, Ask, client, perform, perform_all
from tests.e2e.kaon_server import MODEL

# Few sequences run, in small chunks: so clients disconnect while they wait, and in the middle of their prompts.
OPTIONS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--num-kvcache-blocks", "1200")
TOGETHER = 24
LONGEST = 1.0
GROWTH = 24 * 2**20
"""Bytes by which either process may grow: less than 2.5 kB for each of 10,000 requests."""

LONG_PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "word " * 2500, "max_tokens": 50}
ASKS = [*WORKLOAD.values(), *[Ask("/v1/completions", {**LONG_PROMPT, "priority": i}) for i in range(8)]]


async def leave_at_random(server: ChaosServer, count: int, moments: random.Random) -> int:
    """Send `count` requests, some at a time, and disconnect each at a random time. Returns how many were answered
    before."""
    answered = 0
    left = iter(range(count))
    async with client(server.url) as http:

        async def clients() -> None:
            nonlocal answered
            for _ in left:
                # Most disconnect early: in the queue, and between the first steps.
                patience = LONGEST * moments.random() ** 3
                try:
                    async with asyncio.timeout(patience):
                        await perform(http, moments.choice(ASKS))
                    answered += 1
                except TimeoutError:
                    pass

        async with asyncio.TaskGroup() as group:
            for _ in range(TOGETHER):
                group.create_task(clients())
    return answered


@pytest.mark.parametrize("count", [48, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_nothing_is_left_of_requests_whose_clients_leave(
    count: int, start_server: StartServer, moments: random.Random
) -> None:
    # The queue has room for all sequences: another test covers refusals.
    server = start_server(*OPTIONS, "--max-queued-requests", "1000", "--max-queued-tokens", "1000000")
    # Every kind of request was served once: memory that the first use allocates does not count.
    await perform_all(server.url, {str(number): ask for number, ask in enumerate(ASKS)})
    await leave_at_random(server, min(count // 2, 200), moments)
    await asyncio.to_thread(server.until, server.is_idle)
    resident = server.resident()
    answered = await leave_at_random(server, count, moments)
    assert answered < count, "every client was answered before it left"
    await asyncio.to_thread(server.until, server.is_idle)
    received, ended = server.balance()
    assert received == ended
    assert server.metric('kaon_requests_finished_total{reason="abort"}') > 0
    assert server.metric('kaon_requests_finished_total{reason="error"}') == 0
    grown = [now - before for now, before in zip(server.resident(), resident, strict=True)]
    print(f"grown by {grown[0] / 1e6:.1f} MB (API) and {grown[1] / 1e6:.1f} MB (core)")
    assert max(grown) <= GROWTH
    async with client(server.url) as http:
        await perform(http, WORKLOAD["greedy, short"])
