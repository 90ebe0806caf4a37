"""A light key next to ten heavy ones, by what these send: its first tokens, and its share, in figures."""

import asyncio
import itertools
import math
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from benchmarks.checkpoints import write
from tests.chaos.heavy_loads import LOADS, FairShare, prompt, sent_to
from tests.chaos.test_fairness import SHAPE
from tests.chaos.test_owners import HEAVY, VICTIM, Owners, attack
from tests.chaos.victim import Streamed, read_stream
from tests.e2e.kaon_server import MODEL

# Its figures need a machine of its own; unit and end-to-end tests assert the same in `make test`.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[None, SHAPE], ids=["embedded", SHAPE.name])
def light_and_heavy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owners]:
    """The default dtype, bfloat16, whose steps the compiled operators compute."""
    folder = tmp_path_factory.mktemp("light-and-heavy")
    options = ("--served-model-name", MODEL)
    running = Owners(folder, *options, *(() if request.param is None else (str(write(request.param, folder)),)))
    try:
        yield running
        assert "Traceback" not in running.server.stderr
    finally:
        running.server.end()


REQUESTS, FURTHER_REQUESTS = 300, 100
"""Requests of the light key alone and next to each mix, and next to each further load. Three of the first, and one of
the second, are above the 99th percentile."""
PAUSE_SECONDS = 0.05
"""Seconds between two of its requests."""
PROMPT_WORDS = 20
STREAMS, STREAM_SECONDS = 8, 4

MIXES: dict[str, tuple[str, ...]] = {
    "long prompts": ("long_prompts",),
    "8 choices": ("choices",),
    "outputs": ("answers", "long_answers", "cancelled_answers", "short_requests"),
    "grammars": ("schemas",),
    "background": ("background_responses",),
    "slow readers": ("slow_readers",),
    "connections": ("connections",),
    "all ten": tuple(LOADS)[:10],
}
FURTHER = tuple(LOADS)[10:]


class Ttfts(list[float]):
    """TTFTs in seconds."""

    def quantile(self, part: float) -> float:
        """The least value that this part of all values does not exceed."""
        return sorted(self)[math.ceil(part * len(self)) - 1]

    def __str__(self) -> str:
        return (
            f"p50 {1e3 * self.quantile(0.5):5.1f} p99 {1e3 * self.quantile(0.99):5.1f} max {1e3 * max(self):5.1f} ms"
        )


def use_in_heavy_keys(before: dict[str, float], after: dict[str, float]) -> float:
    """Return the light key's prompt and output tokens in units of a heavy key's mean. Above 1 it is not light."""

    def tokens(key: str) -> float:
        names = [f'kaon_key_{kind}_tokens_total{{key="{key}"}}' for kind in ("prompt", "output")]
        return sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names)

    return tokens("light") * len(HEAVY) / max(1.0, sum(map(tokens, HEAVY)))


async def test_a_light_key_is_served_next_to_ten_heavy_ones(light_and_heavy: Owners) -> None:
    """All requests of the light key are admitted, whatever the heavy keys send."""
    owners, server = light_and_heavy, light_and_heavy.server
    numbers = itertools.count()

    async def ask() -> float:
        await asyncio.sleep(PAUSE_SECONDS)
        # Answers to such prompts begin with special tokens: without their text no event would have the first token.
        text = prompt(PROMPT_WORDS, next(numbers))
        return (
            await read_stream(light, {**VICTIM, "prompt": text, "max_tokens": 5, "skip_special_tokens": False})
        ).ttft

    async def share_of_long_streams(competitors: int) -> FairShare:
        body = {**VICTIM, "max_tokens": 3000}
        work = [read_stream(light, {**body, "prompt": prompt(PROMPT_WORDS, next(numbers))}) for _ in range(STREAMS)]
        async with attack(*(ended(each) for each in work)):
            await asyncio.sleep(1)
            before, begin = server.metrics(), time.monotonic()
            await asyncio.sleep(STREAM_SECONDS)
            after, seconds = server.metrics(), time.monotonic() - begin
        return FairShare.between(before, after, "light", streams=STREAMS, owners=1 + competitors, seconds=seconds)

    async def ended(work: Coroutine[Any, Any, Streamed]) -> None:
        await work

    async def next_to(name: str, loads: tuple[str, ...], requests: int) -> None:
        with sent_to(server, MODEL, loads, [owners.keys[each] for each in HEAVY]):
            await asyncio.sleep(2)
            before = server.metrics()
            loaded = Ttfts([await ask() for _ in range(requests)])
            use = use_in_heavy_keys(before, server.metrics())
            share = await share_of_long_streams(len(HEAVY)) if requests == REQUESTS else None
        times = loaded.quantile(0.99) / alone.quantile(0.99)
        print(
            f"light key next to {name:19s}: {loaded}, p99 {times:.2f} times, with {use:.2f} of the tokens of a heavy "
            f"key{f'; {share}' if share else ''}",
            flush=True,
        )
        assert share is None or share.tokens
        # Responses and batches in the background end after their clients.
        await asyncio.to_thread(server.until, lambda: server.metric("kaon_requests_live") == 0)

    async with owners.client("light") as light:
        for _ in range(20):
            await ask()
        alone = Ttfts([await ask() for _ in range(REQUESTS)])
        print(f"light key alone: {alone}")
        for name, loads in MIXES.items():
            await next_to(name, loads, REQUESTS)
        for load in FURTHER:
            await next_to(load, (load,), FURTHER_REQUESTS)
