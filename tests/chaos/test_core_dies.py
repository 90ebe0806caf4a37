"""The engine core is killed, stopped, killed again while it starts: no stream notices, and a crash loop has an end."""

import asyncio
import functools
import random
import re
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.conftest import StartServer
from tests.chaos.faults import ChaosServer
from tests.chaos.injuries import injured
from tests.chaos.outcomes import Outcome
from tests.chaos.workload import WORKLOAD, Ask, perform_all
from tests.e2e.kaon_server import MODEL

WINDOW = 1.5
"""Seconds within which the fault happens; undisturbed, the load takes a little longer on two cores."""

ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "prompt": "A story without end",
    "max_tokens": 3900,
    "ignore_eos": True,
    "temperature": 0,
}


def kill_at_random(server: ChaosServer, count: int, moments: random.Random) -> None:
    """Kill the core so many times under one load: a stream that lasts goes through all of them."""
    time.sleep(moments.uniform(0, WINDOW))
    server.kill_core()
    for _ in range(count - 1):
        # A request on which two cores die without a token between them is not tried again; time for one is left.
        time.sleep(moments.uniform(0.4, 0.8))
        server.kill_core()


@pytest.mark.parametrize(
    "kills", [(2,), pytest.param((1, 2, 3) * 3 + (2,), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=sum
)
async def test_every_answer_is_the_same_when_the_core_is_killed_at_random_moments(
    kills: tuple[int, ...], start_server: StartServer, undisturbed: dict[str, Outcome], moments: random.Random
) -> None:
    server = start_server()
    for count in kills:
        outcomes = await injured(server, functools.partial(kill_at_random, server, count, moments))
        assert outcomes == undisturbed
    assert server.restarts() == sum(kills)
    assert server.metric("kaon_requests_resumed_total") > 0
    assert server.metric('kaon_requests_finished_total{reason="error"}') == 0


async def test_every_answer_is_the_same_when_the_core_is_killed_again_while_it_starts(
    start_server: StartServer, undisturbed: dict[str, Outcome], moments: random.Random
) -> None:
    server = start_server()
    assert await injured(server, lambda: server.kill_core_twice(moments)) == undisturbed
    assert server.metric('kaon_requests_finished_total{reason="error"}') == 0


def stop_at_random(server: ChaosServer, moments: random.Random) -> None:
    time.sleep(moments.uniform(0, WINDOW))
    server.stop_core()


async def test_every_answer_is_the_same_when_the_core_stops_without_dying(
    start_server: StartServer, undisturbed: dict[str, Outcome], moments: random.Random
) -> None:
    server = start_server("--stall-timeout", "2")
    outcomes = await injured(server, functools.partial(stop_at_random, server, moments))
    assert outcomes == undisturbed
    assert server.restarts() == 1


async def test_a_prompt_goes_on_when_the_core_is_killed_in_the_midst_of_its_chunks(start_server: StartServer) -> None:
    server = start_server("--max-num-batched-tokens", "16")
    prompts = {f"prompt {i}": f"{i}. " + "The river went on and on. " * (400 + i) for i in range(4)}
    fields = {**ENDLESS, "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    asks = {name: Ask("/v1/completions", {**fields, "prompt": prompt}) for name, prompt in prompts.items()}
    expected = await perform_all(server.url, asks)
    (core,) = server.cores()

    def steps() -> tuple[float, float]:
        metrics = server.metrics()
        return metrics['kaon_step_duration_seconds_count{kind="prefill"}'], metrics["kaon_generation_tokens_total"]

    # The same prompts again would be found in the prefix cache, which a new core has not.
    server.kill_core()
    assert core not in server.cores()
    before = steps()

    def kill_while_it_reads() -> None:
        server.until(lambda: steps()[0] >= before[0] + 20)
        chunks, generated = steps()
        server.kill_core()
        assert generated == before[1], f"the first token was there after {chunks - before[0]:.0f} chunks"

    happening = asyncio.create_task(asyncio.to_thread(kill_while_it_reads))
    assert await perform_all(server.url, asks) == expected
    await happening
    assert server.restarts() == 2


async def test_what_is_asked_while_the_core_starts_again_waits_for_it(start_server: StartServer) -> None:
    server = start_server()
    asks = {name: ask for name, ask in WORKLOAD.items() if "whole" in name}
    expected = await perform_all(server.url, asks)
    server.cores()[0].kill()
    server.until(lambda: not server.is_ready())
    asked = asyncio.create_task(perform_all(server.url, asks))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(perform_all(server.url, asks), 0.2)
    assert not server.is_ready()
    assert await asked == expected
    assert server.is_ready()
    await asyncio.to_thread(server.until, server.is_idle)
    assert server.metric('kaon_requests_finished_total{reason="abort"}') == sum(ask.sequences for ask in asks.values())


async def test_a_core_that_dies_again_and_again_ends_the_server_and_tells_every_waiter(
    start_server: StartServer,
) -> None:
    server = start_server()

    async def answer(http: httpx.AsyncClient, stream: bool) -> str:
        async with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": stream}) as response:
            assert response.status_code in ((200,) if stream else (500, 503))
            return "".join([text async for text in response.aiter_text()])

    def kill_every_core() -> None:
        while not server.has_ended():
            try:
                for core in server.cores():
                    core.kill()
            except psutil.NoSuchProcess:
                pass
            # Not a wait for something: each core gets a moment, so that deaths and starts alternate.
            time.sleep(0.05)

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        waiting = [asyncio.create_task(answer(http, stream)) for stream in (True, True, True, False, False)]
        await asyncio.to_thread(server.until, lambda: server.metric("kaon_requests_running") == len(waiting))
        killer = asyncio.create_task(asyncio.to_thread(kill_every_core))
        for text in await asyncio.gather(*waiting):
            assert len(re.findall(r'"error":\s*\{', text)) == 1
            assert "[DONE]" not in text
    await killer
    assert server.wait() == 1
    assert server.stderr.splitlines()[-1].startswith("kaon: ")
    assert "Traceback" not in server.stderr
