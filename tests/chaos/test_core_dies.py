"""The engine core is killed, stopped, or killed again while it starts: streams continue, and a crash loop ends."""

import asyncio
import functools
import json
import random
import re
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.conftest import StartServer
from tests.chaos.faults import ChaosServer
from tests.chaos.injuries import at_random_moments, injured
from tests.chaos.outcomes import Outcome
from tests.chaos.workload import SOME, WORKLOAD, Ask, client, perform_all
from tests.e2e.held_checkpoint import HeldCheckpoint
from tests.e2e.kaon_server import MODEL
from tests.e2e.test_http_lifecycle import answers, receive_all

ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "prompt": "A story without end",
    "max_tokens": 3900,
    "ignore_eos": True,
    "temperature": 0,
}


RESTARTS, RESUMED = "kaon_core_restarts_total", "kaon_requests_resumed_total"
ABORTED, FAILED = (f'kaon_requests_finished_total{{reason="{reason}"}}' for reason in ("abort", "error"))


@pytest.mark.parametrize(
    "kills", [(2,), pytest.param((1, 2, 3) * 3 + (2,), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=sum
)
async def test_every_answer_is_the_same_when_the_core_is_killed_at_random_moments(
    kills: tuple[int, ...], mortal: ChaosServer, undisturbed: dict[str, Outcome], moments: random.Random
) -> None:
    before = mortal.metrics()
    for count in kills:
        # Under one load: a long stream survives all faults.
        faults = [mortal.kill_core] * count
        fault = functools.partial(at_random_moments, mortal, undisturbed, faults, moments)
        assert await injured(mortal, fault) == undisturbed
    after = mortal.metrics()
    assert after[RESTARTS] == before[RESTARTS] + sum(kills)
    assert after[RESUMED] > before[RESUMED]
    assert after[FAILED] == before[FAILED]


def text_of(events: str) -> str:
    """The text of a stream of one completion."""
    data = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(each) for each in data]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def fingerprints_of(events: str) -> set[str]:
    """The `system_fingerprint`s of a stream's chunks."""
    return {json.loads(line[6:])["system_fingerprint"] for line in events.splitlines() if line.startswith("data: {")}


def test_a_stream_goes_on_with_its_fingerprint_and_the_server_is_not_ready_meanwhile(
    mortal: ChaosServer, checkpoint: HeldCheckpoint
) -> None:
    before = mortal.metrics()
    undisturbed = receive_all(mortal, "/v1/completions", max_tokens=100)
    core = mortal.core
    states: list[int | None] = []

    def kill() -> None:
        with checkpoint.held():
            core.kill()
            mortal.until(lambda: answers(mortal, "/readyz") == 503)
            states.append(answers(mortal, "/livez"))

    # Longer, so that it has not ended by then, even if this process is late.
    events = receive_all(mortal, "/v1/completions", kill, max_tokens=2000)
    assert text_of(events).startswith(text_of(undisturbed))
    assert events.endswith("data: [DONE]\n\n")
    assert states == [200]
    assert answers(mortal, "/readyz") == 200
    after = mortal.metrics()
    assert after[RESTARTS] == before[RESTARTS] + 1
    assert after[RESUMED] == before[RESUMED] + 1
    assert mortal.core.pid != core.pid
    last = receive_all(mortal, "/v1/completions", max_tokens=1)
    assert len(fingerprints_of(undisturbed) | fingerprints_of(events) | fingerprints_of(last)) == 1


@pytest.mark.slow  # With a stub core: tests/e2e/test_core_restarts.py.
async def test_every_answer_is_the_same_when_the_core_is_killed_again_while_it_starts(
    mortal: ChaosServer, undisturbed: dict[str, Outcome], moments: random.Random
) -> None:
    failed = mortal.metric(FAILED)
    expected = {name: undisturbed[name] for name in SOME}
    assert await injured(mortal, lambda: mortal.kill_core_twice(moments), SOME) == expected
    assert mortal.metric(FAILED) == failed


@pytest.mark.slow  # With a stub core: tests/e2e/test_core_restarts.py.
async def test_every_answer_is_the_same_when_the_core_stops_without_dying(
    mortal: ChaosServer, undisturbed: dict[str, Outcome], moments: random.Random
) -> None:
    restarts = mortal.restarts()
    expected = {name: undisturbed[name] for name in SOME}
    fault = functools.partial(at_random_moments, mortal, expected, [mortal.stop_core], moments)
    assert await injured(mortal, fault, SOME) == expected
    assert mortal.restarts() == restarts + 1


@pytest.mark.slow  # With a stub core: tests/e2e/test_core_restarts.py.
async def test_a_prompt_goes_on_when_the_core_is_killed_in_the_midst_of_its_chunks(start_server: StartServer) -> None:
    server = start_server("--max-num-batched-tokens", "16")
    fields = {**ENDLESS, "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}

    def asks(salt: str) -> dict[str, Ask]:
        """The same prompts with another salt, with which the prefix cache does not find them."""
        prompts = {f"prompt {i}": f"{i}. " + "The river went on and on. " * (250 + i) for i in range(2)}
        bodies = {name: {**fields, "prompt": prompt, "cache_salt": salt} for name, prompt in prompts.items()}
        return {name: Ask("/v1/completions", body) for name, body in bodies.items()}

    expected = await perform_all(server.url, asks("undisturbed"))

    def steps() -> tuple[float, float]:
        metrics = server.metrics()
        return metrics['kaon_step_duration_seconds_count{kind="prefill"}'], metrics["kaon_generation_tokens_total"]

    def kill_while_it_reads(before: tuple[float, float]) -> bool:
        """Whether no token had arrived yet."""
        server.until(lambda: steps()[0] >= before[0] + 5)
        # It continues to read in the next core only.
        server.cores()[0].suspend()
        generated = steps()[1]
        server.kill_core()
        return generated == before[1]

    for attempt in range(10):  # This process may be delayed until the first token has arrived.
        happening = asyncio.create_task(asyncio.to_thread(kill_while_it_reads, steps()))
        assert await perform_all(server.url, asks(f"killed {attempt}")) == expected
        if await happening:
            break
    else:
        pytest.fail("no core was killed before its first token")
    assert server.restarts() >= attempt + 1


@pytest.mark.slow  # With a stub core: tests/e2e/test_core_restarts.py.
async def test_what_is_asked_while_the_core_starts_again_waits_for_it(
    mortal: ChaosServer, checkpoint: HeldCheckpoint
) -> None:
    asks = {name: ask for name, ask in WORKLOAD.items() if "whole" in name}
    sequences = sum(ask.sequences for ask in asks.values())
    expected = await perform_all(mortal.url, asks)
    aborted = mortal.metric(ABORTED)

    async def until_live(count: int) -> None:
        await asyncio.to_thread(mortal.until, lambda: mortal.metric("kaon_requests_live") == count)

    with checkpoint.held():
        mortal.cores()[0].kill()
        await asyncio.to_thread(mortal.until, lambda: not mortal.is_ready())
        stays, leaves = (asyncio.create_task(perform_all(mortal.url, asks)) for _ in range(2))
        await until_live(2 * sequences)
        leaves.cancel()
        await asyncio.wait([leaves])
        await until_live(sequences)
        assert not mortal.is_ready()
        assert not stays.done()
    assert await stays == expected
    assert mortal.is_ready()
    await asyncio.to_thread(mortal.until, mortal.is_idle)
    assert mortal.metric(ABORTED) == aborted + sequences


@pytest.mark.slow  # Dead once: tests/e2e/test_http_lifecycle.py.
async def test_a_core_that_dies_again_and_again_ends_the_server_and_every_waiting_request(
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
            # Not a wait for an event: each core runs for a moment, so that deaths and starts alternate.
            time.sleep(0.05)

    async with client(server.url) as http:
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
