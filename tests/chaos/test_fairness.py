"""Clients that exceed their share: others' streams continue unchanged, and their prompts start soon.

A random model is used whose steps are long enough to be noticed. The test asserts answers and orders of events, and
prints the figures.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.checkpoints import Checkpoint, write
from tests.chaos.faults import ChaosServer
from tests.chaos.heavy_loads import prompt
from tests.chaos.victim import AttackTable, Streamed, read_stream, watch, watching
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
LOOPED_SECONDS = 4.0


def body(prompts: str | list[str], max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": SHAPE.name,
        "prompt": prompts,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def stream_body(num_tokens: int, max_tokens: int, salt: int) -> dict[str, Any]:
    return body(prompt(num_tokens, salt), max_tokens, stream=True)


VICTIM = stream_body(40, 60, salt=1)


async def stream(http: httpx.AsyncClient, num_tokens: int, max_tokens: int, salt: int) -> Streamed:
    """Read one stream of the first key."""
    http.headers.update(_auth(KEYS[0]))
    return await read_stream(http, stream_body(num_tokens, max_tokens, salt))


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
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(policy: str, model: Path) -> Iterator[ChaosServer]:
    options = (
        str(model),
        "--served-model-name",
        SHAPE.name,
        "--cpu-kvcache-gib",
        "2",
        "--api-key",
        ",".join(KEYS),
        "--scheduling-policy",
        policy,
        "--max-step-seconds",
        str(STEP_SECONDS),
        "--keyless-paths",
        "/livez,/readyz,/metrics",
    )
    started = ChaosServer(model.parent / f"log-{policy}", *options)
    try:
        asyncio.run(warm_up(started.ready().url))
        yield started
        assert started.stop() == 0
    finally:
        started.end()


@pytest.mark.attack_table
async def test_a_stream_goes_on_beside_one_request_of_many_long_prompts(
    server: ChaosServer, policy: str, attack_table: AttackTable
) -> None:
    alone = await watch(server, VICTIM, KEYS[0])
    async with client(server.url) as http, watching(server, VICTIM, KEYS[0]) as seen:
        began = time.monotonic()
        await many_prompts(http, 4, 3000, KEYS[1])
        ended = time.monotonic()
    assert seen.streams[0].times[1] < ended, "the stream waited for all the prompts"
    attack_table.add(3, f"one request of 4 x 3000 tokens, {policy}", f"answered in {ended - began:.1f} s", alone, seen)


@pytest.mark.attack_table
async def test_a_stream_goes_on_beside_clients_that_loop_long_prompts(
    server: ChaosServer, policy: str, attack_table: AttackTable
) -> None:
    alone = await watch(server, VICTIM, KEYS[0])
    async with client(server.url) as http, looping(http, 3, 3900, 1, KEYS[1:]):
        seen = await watch(server, VICTIM, KEYS[0], LOOPED_SECONDS)
    attack_table.add(3, f"three clients that loop 3900 tokens, {policy}", "", alone, seen)


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
