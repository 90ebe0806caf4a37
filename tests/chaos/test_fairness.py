"""Clients that exceed their share: others' streams continue unchanged, and their prompts start soon.

A random model is used whose steps are long enough to be noticed. The test asserts answers and orders of events, and
prints the figures.
"""

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from benchmarks.checkpoints import Checkpoint, write
from tests.chaos.faults import ChaosServer
from tests.chaos.heavy_loads import prompt
from tests.chaos.workload import client

# Its figures need a machine of its own; unit and end-to-end tests assert the same in `make test`.
pytestmark = pytest.mark.slow

SHAPE = Checkpoint(
    "qwen3-170m",
    {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 64,
        "vocab_size": 32768,
    },
)
POLICIES = ["prefill_first", "mixed"]
KEYS = [f"key-of-party-{number}" for number in range(6)]
STEP_SECONDS = 0.5
PAUSE_SECONDS = 1.5
"""Seconds between two requests of the light client."""


class Streamed(NamedTuple):
    """One streamed answer."""

    text: str
    sent: float
    times: list[float]
    """Time of each chunk."""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def longest_gap(self) -> float:
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)), default=0.0)


def body(prompts: str | list[str], max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": SHAPE.name,
        "prompt": prompts,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


async def stream(http: httpx.AsyncClient, num_tokens: int, max_tokens: int, salt: int, key: str = KEYS[0]) -> Streamed:
    """Read one streamed completion, and assert that it is complete."""
    sent, times, text = time.monotonic(), list[float](), ""
    fields = body(prompt(num_tokens, salt), max_tokens, stream=True)
    async with http.stream("POST", "/v1/completions", json=fields, headers=_auth(key)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                times.append(time.monotonic())
    assert times, "the stream was empty"
    return Streamed(text, sent, times)


def _auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def many_prompts(http: httpx.AsyncClient, count: int, num_tokens: int, key: str, max_tokens: int = 1) -> None:
    """One request of many long prompts."""
    prompts = [prompt(num_tokens, 1000 + number) for number in range(count)]
    answer = await http.post("/v1/completions", json=body(prompts, max_tokens), headers=_auth(key))
    assert answer.status_code == 200, answer.text


@contextlib.asynccontextmanager
async def looping(
    http: httpx.AsyncClient, clients: int, num_tokens: int, max_tokens: int, keys: list[str]
) -> AsyncIterator[None]:
    """Clients that send long prompts in turn during the block."""

    async def loop(number: int) -> None:
        for turn in range(10_000):
            salt = 10_000 * (number + 1) + turn
            fields = body(prompt(num_tokens, salt), max_tokens)
            answer = await http.post("/v1/completions", json=fields, headers=_auth(keys[number % len(keys)]))
            assert answer.status_code == 200, answer.text

    tasks = [asyncio.create_task(loop(number)) for number in range(clients)]
    try:
        yield
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def warm_up(url: str) -> None:
    """Let the server measure its steps."""
    async with client(url) as http:
        for turn in range(3):
            await stream(http, 2500, 4, salt=90_000 + turn)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(SHAPE, tmp_path_factory.mktemp("fairness"))


@pytest.fixture(scope="module", params=POLICIES)
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[ChaosServer]:
    options = (
        str(model),
        "--served-model-name",
        SHAPE.name,
        "--cpu-kvcache-gib",
        "2",
        "--api-key",
        ",".join(KEYS),
        "--scheduling-policy",
        request.param,
        "--max-step-seconds",
        str(STEP_SECONDS),
        "--keyless-paths",
        "/livez,/readyz,/metrics",
    )
    started = ChaosServer(model.parent / f"log-{request.param}", *options)
    try:
        asyncio.run(warm_up(started.ready().url))
        yield started
        assert started.stop() == 0
    finally:
        started.end()


async def test_a_stream_goes_on_beside_one_request_of_many_long_prompts(server: ChaosServer) -> None:
    async with client(server.url) as http:
        alone = await stream(http, 40, 60, salt=1)
        victim = asyncio.create_task(stream(http, 40, 60, salt=1))
        attack = asyncio.create_task(many_prompts(http, 6, 3000, KEYS[1]))
        ended: list[float] = []
        attack.add_done_callback(lambda _: ended.append(time.monotonic()))
        loaded, _ = await asyncio.gather(victim, attack)
        assert loaded.times[1] < ended[0], "the stream waited for all the prompts"
    assert loaded.text == alone.text
    print(f"one request of 6 x 3000 tokens: longest gap {loaded.longest_gap:.2f} s ({alone.longest_gap:.2f} s alone)")


async def test_a_stream_goes_on_beside_clients_that_loop_long_prompts(server: ChaosServer) -> None:
    async with client(server.url) as http:
        alone = await stream(http, 40, 60, salt=1)
        async with looping(http, 3, 3900, 1, KEYS[1:]):
            loaded = await stream(http, 40, 60, salt=1)
    assert loaded.text == alone.text
    print(f"three clients of 3900 tokens: longest gap {loaded.longest_gap:.2f} s ({alone.longest_gap:.2f} s alone)")


async def test_a_light_owner_starts_soon_beside_heavy_ones(server: ChaosServer) -> None:
    async with client(server.url) as http:
        alone = [await stream(http, 500, 8, salt=salt) for salt in range(2, 5)]
        async with looping(http, 10, 2000, 30, KEYS[1:]):
            loaded = []
            for salt in range(12, 20):
                # Less than its share: this makes the owner a light one.
                await asyncio.sleep(PAUSE_SECONDS)
                loaded.append(await stream(http, 500, 8, salt=salt))
    worst, usual = max(each.ttft for each in loaded), statistics.median(each.ttft for each in alone)
    print(f"500 tokens next to 10 clients of 5 keys: TTFT at most {worst:.2f} s, {worst / usual:.1f} times that alone")
    assert all(each.text for each in loaded)


async def test_a_long_prompt_among_streams(server: ChaosServer) -> None:
    async with client(server.url) as http:
        alone = await stream(http, 3900, 1, salt=31)
        streams = [asyncio.create_task(stream(http, 40, 100, salt=40 + number)) for number in range(8)]
        await asyncio.to_thread(server.until, lambda: server.metric("kaon_requests_running") == 8)
        long = await stream(http, 3900, 1, salt=32)
        gaps = [each.longest_gap for each in await asyncio.gather(*streams)]
    print(f"3900 tokens among 8 streams: longest gap {max(gaps):.2f} s, TTFT {long.ttft / alone.ttft:.2f} times alone")
