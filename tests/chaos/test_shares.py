"""A light key with ten heavy ones, each with another kind of load: its first tokens, and its share, in figures."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from benchmarks.checkpoints import write
from tests.chaos.heavy_loads import FairShare, prompt, sent_to
from tests.chaos.test_fairness import SHAPE
from tests.chaos.test_owners import HEAVY, VICTIM, Owners, Stream, attack, stream
from tests.e2e.kaon_server import MODEL

# Its figures need a machine of its own; unit and end-to-end tests assert the same in `make test`.
pytestmark = pytest.mark.slow


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


SECONDS = 20
REQUESTS = 60
"""The least number of requests next to the heavy keys: fewer have no 99th percentile."""
PAUSE_SECONDS = 0.2
"""Seconds between two requests: an owner that asks more often is not light."""
STREAMS = 8


async def test_a_light_key_is_served_next_to_ten_heavy_ones(light_and_heavy: Owners) -> None:
    """The heavy keys' loads are those of tests/chaos/heavy_loads.py."""
    owners, server = light_and_heavy, light_and_heavy.server

    async def ask(number: int) -> Stream:
        await asyncio.sleep(PAUSE_SECONDS)
        # Answers to such prompts begin with special tokens: without their text no event would have the first token.
        body = {**VICTIM, "prompt": prompt(60, number), "max_tokens": 5, "skip_special_tokens": False}
        return await stream(light, body)

    async def share_of_long_streams(competitors: int) -> FairShare:
        body = {**VICTIM, "max_tokens": 3000}
        work = [stream(light, {**body, "prompt": prompt(20, 5000 + number)}) for number in range(STREAMS)]
        async with attack(*(ended(each) for each in work)):
            await asyncio.sleep(2)
            before, begin = server.metrics(), time.monotonic()
            await asyncio.sleep(8)
            after, seconds = server.metrics(), time.monotonic() - begin
        return FairShare.between(before, after, "light", streams=STREAMS, owners=1 + competitors, seconds=seconds)

    async def ended(work: Coroutine[Any, Any, Stream]) -> None:
        await work

    async with owners.client("light") as light:
        for number in range(5):
            await ask(number)
        alone = sorted([(await ask(100 + number)).ttft for number in range(60)])
        share_alone = await share_of_long_streams(0)
        with sent_to(server, MODEL, [owners.keys[name] for name in HEAVY]):
            await asyncio.sleep(4)
            loaded: list[Stream] = []
            end = time.monotonic() + SECONDS
            while time.monotonic() < end or len(loaded) < REQUESTS:
                loaded.append(await ask(1000 + len(loaded)))
            share = await share_of_long_streams(len(HEAVY))
    ttfts = sorted(each.ttft for each in loaded)
    median, p99 = ttfts[len(ttfts) // 2], ttfts[int(0.99 * len(ttfts))]
    median_alone, p99_alone = alone[len(alone) // 2], alone[int(0.99 * len(alone))]
    rate = (share.tokens / share.seconds) / (share_alone.tokens / share_alone.seconds)
    print(
        f"fairness: all {len(loaded)} requests of the light key were admitted next to ten heavy ones; TTFT median "
        f"{median:.3f} s, p99 {p99:.3f} s ({median_alone:.3f}, {p99_alone:.3f} alone: {median / median_alone:.2f} and "
        f"{p99 / p99_alone:.2f} times); longest gap {max(each.longest_gap for each in loaded):.2f} s; {share}, "
        f"{rate:.1%} of what they get alone"
    )
    assert share.tokens
