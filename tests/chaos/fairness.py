"""`make fairness`: a light key's first tokens and its share of tokens next to ten heavy keys, by what these send.

Prints rows of docs/security.md as they are measured. Nothing else may run on the machine. Every request of the light
key must be admitted. `--throughput` measures what fairness costs instead.
"""

import argparse
import asyncio
import heapq
import itertools
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checkpoints import write
from tests.chaos.faults import ChaosServer
from tests.chaos.heavy_loads import LOADS, FairShare, prompt, sent_to
from tests.chaos.test_fairness import SHAPE
from tests.chaos.test_owners import HEAVY, VICTIM, Owners, attack
from tests.chaos.victim import Streamed, read_stream
from tests.e2e.kaon_server import MODEL

REQUESTS = 100
"""Requests of the light key next to each of the first mixes; half as many next to each further one. A quarter as many
are sent alone before each mix, and all of these are compared with those next to it."""
FIRST_ALONE = 40
LEAST_PAUSE_SECONDS, PAUSE_IN_MEDIANS = 0.05, 30
"""Between two of its requests the light key pauses for thirty times their median time alone. So it asks for a
thirtieth of the machine's time, however fast that is: a third of an equal part next to ten heavy keys."""
PROMPT_WORDS = 20
STREAMS, STREAM_SECONDS = 8, 3
WARM_SECONDS = 2
"""Seconds between the start of a load and the first measurement."""
THROUGHPUT_SECONDS, THROUGHPUT_ROUNDS = 6, 3
_TOKENS = ("kaon_prompt_tokens_total", "kaon_generation_tokens_total")

FIRST_MIXES: dict[str, tuple[str, ...]] = {
    "long prompts": ("long_prompts",),
    "8 choices": ("choices",),
    "answers of all lengths": ("answers", "long_answers", "cancelled_answers", "short_requests"),
    "grammars": ("schemas",),
    "background responses": ("background_responses",),
    "slow readers": ("slow_readers",),
    "connections": ("connections",),
    "all ten": tuple(LOADS)[:10],
}
MIXES = FIRST_MIXES | {name: (name,) for name in tuple(LOADS)[10:]}
THROUGHPUT_MIXES = ("long prompts", "answers of all lengths", "all ten")


class Ttfts(list[float]):
    """TTFTs in seconds."""

    def quantile(self, part: float) -> float:
        """The least value that this part of all values does not exceed."""
        return heapq.nlargest(len(self) - math.ceil(part * len(self)) + 1, self)[-1]

    def __str__(self) -> str:
        return ", ".join(f"{1e3 * each:.1f}" for each in (self.quantile(0.5), self.quantile(0.99), max(self)))


def p99_ratio(loaded: Ttfts, alone: Ttfts) -> str:
    """Return the ratio of the 99th percentiles with its interval of 95 %, by resampling."""
    drawn = random.Random(0)
    ratios = sorted(
        Ttfts(drawn.choices(loaded, k=len(loaded))).quantile(0.99)
        / Ttfts(drawn.choices(alone, k=len(alone))).quantile(0.99)
        for _ in range(500)
    )
    return f"{loaded.quantile(0.99) / alone.quantile(0.99):.2f} ({ratios[12]:.2f} to {ratios[-13]:.2f})"


def use_in_heavy_keys(before: dict[str, float], after: dict[str, float]) -> str:
    """Return the light key's prompt and output tokens in units of a heavy key's mean, above which it is not light.

    Empty if the heavy keys' load has no tokens.
    """

    def tokens(key: str) -> float:
        names = [f'kaon_key_{kind}_tokens_total{{key="{key}"}}' for kind in ("prompt", "output")]
        return sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names)

    heavy = sum(map(tokens, HEAVY))
    return f"{tokens('light') * len(HEAVY) / heavy:.2f}" if heavy else ""


class Light:
    """The light key's requests to a server."""

    def __init__(self, owners: Owners, http: httpx.AsyncClient) -> None:
        self.owners, self._http = owners, http
        self._numbers = itertools.count()
        self.alone = Ttfts()
        self._pause = LEAST_PAUSE_SECONDS

    async def begin(self) -> None:
        """Warm the server up, and determine the pauses between requests."""
        await self.first_tokens(20)
        self.alone += await self.first_tokens(FIRST_ALONE)
        self._pause = max(LEAST_PAUSE_SECONDS, PAUSE_IN_MEDIANS * self.alone.quantile(0.5))

    async def first_tokens(self, number: int) -> Ttfts:
        """Send requests one after the other."""
        # Answers to such prompts begin with special tokens: without their text no event would have the first token.
        ttfts = Ttfts()
        for _ in range(number):
            await asyncio.sleep(self._pause)
            body = {**VICTIM, "prompt": self._prompt(), "max_tokens": 5, "skip_special_tokens": False}
            ttfts.append((await read_stream(self._http, body)).ttft)
        return ttfts

    async def share_of_streams(self, competitors: int) -> FairShare:
        """Read long streams, and measure their share of all tokens."""
        server, body = self.owners.server, {**VICTIM, "max_tokens": 3000}
        work = [read_stream(self._http, {**body, "prompt": self._prompt()}) for _ in range(STREAMS)]
        async with attack(*(ended(each) for each in work)):
            await asyncio.sleep(1)
            before, begin = server.metrics(), time.monotonic()
            await asyncio.sleep(STREAM_SECONDS)
            after, seconds = server.metrics(), time.monotonic() - begin
        share = FairShare.between(before, after, "light", streams=STREAMS, owners=1 + competitors, seconds=seconds)
        assert share.tokens
        return share

    async def next_to(self, name: str, requests: int) -> str:
        """Measure a mix. Returns its row of the table."""
        owners, server = self.owners, self.owners.server
        if name not in FIRST_MIXES:
            requests //= 2
        self.alone += await self.first_tokens(requests // 4)
        with sent_to(server, MODEL, MIXES[name], [owners.keys[each] for each in HEAVY]):
            await asyncio.sleep(WARM_SECONDS)
            before = server.metrics()
            loaded = await self.first_tokens(requests)
            use = use_in_heavy_keys(before, server.metrics())
            share = await self.share_of_streams(len(HEAVY)) if name in FIRST_MIXES else None
        if share is not None:
            print(f"{name}: {share}", flush=True)
        # Responses and batches in the background end after their clients.
        await asyncio.to_thread(server.until, lambda: server.metric("kaon_requests_live") == 0)
        ratio, share_of_fair = p99_ratio(loaded, self.alone), f"{share.of_fair:.2f}" if share else ""
        return f"| {name.replace('_', ' ')} | {loaded} ms | {ratio} | {use} | {share_of_fair} |"

    def _prompt(self) -> str:
        return prompt(PROMPT_WORDS, next(self._numbers))


async def ended(work: Coroutine[Any, Any, Streamed]) -> None:
    await work


async def measure_shares(owners: Owners, names: Sequence[str], requests: int) -> None:
    """Measure a light key alone and next to each mix."""
    async with owners.client("light") as http:
        light = Light(owners, http)
        await light.begin()
        rows = list[str]()
        for name in names:
            rows.append(await light.next_to(name, requests))
            print(rows[-1], flush=True)
    print(
        f"\nFirst tokens of {requests} requests next to each of the first mixes, half as many next to the others, and "
        f"{len(light.alone)} alone.\n\n"
        "| What ten heavy keys send | light key's first token, median, p99, latest | p99 relative to alone (95 %) | "
        "its tokens / those of a heavy key | its streams' tokens / their fair share |\n"
        "| --- | --- | ---: | ---: | ---: |"
    )
    print(f"| nothing | {light.alone} ms | 1 | | |", *rows, sep="\n", flush=True)


async def measure_throughput(owners: Owners, names: Sequence[str]) -> None:
    """Compare equal loads of ten keys, which share by turns, and of one key, in turns of both.

    Prints the tokens per second, and per second of the server's processor time, which other processes hardly change.
    """
    print(
        "| Load, no light key | tokens a second of ten keys | of one | ratio | "
        "tokens per processor second of ten keys | of one | ratio |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    server = owners.server
    for name in names:
        windows: dict[int, list[tuple[float, float]]] = {1: [], len(HEAVY): []}
        for round_ in range(2 * THROUGHPUT_ROUNDS):
            # As A B B A A B, so that a steady drift of the machine's speed favours neither.
            num_keys = len(HEAVY) if (round_ + 1) // 2 % 2 == 0 else 1
            keys = [owners.keys[HEAVY[each % num_keys]] for each in range(len(HEAVY))]
            with sent_to(server, MODEL, MIXES[name], keys):
                await asyncio.sleep(WARM_SECONDS)
                before, cpu_before, begin = server.metrics(), processor_seconds(server), time.monotonic()
                await asyncio.sleep(THROUGHPUT_SECONDS)
                after, cpu_after, end = server.metrics(), processor_seconds(server), time.monotonic()
            tokens = sum(after[each] - before[each] for each in _TOKENS)
            windows[num_keys].append((tokens / (end - begin), tokens / (cpu_after - cpu_before)))
            await asyncio.to_thread(server.until, lambda: server.metric("kaon_requests_live") == 0)
        columns = [name]
        for ten, one in zip(zip(*windows[len(HEAVY)], strict=True), zip(*windows[1], strict=True), strict=True):
            columns += [
                f"{statistics.median(each):.0f} ({'; '.join(f'{rate:.0f}' for rate in each)})" for each in (ten, one)
            ]
            columns.append(f"{statistics.median(ten) / statistics.median(one):.3f}")
        print(f"| {' | '.join(columns)} |", flush=True)


def processor_seconds(server: ChaosServer) -> float:
    """Return the processor time that the server's API process and engine core have used."""
    times = [process.cpu_times() for process in (server.process, *server.cores())]
    return sum(each.user + each.system for each in times)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fairness ARGS=...", description=__doc__)
    parser.add_argument("--mixes", default="", help=f"names separated by commas: {', '.join(MIXES)} (all)")
    parser.add_argument(
        "--requests",
        type=int,
        default=REQUESTS,
        help=f"requests next to each of the first mixes ({REQUESTS}); half as many next to the others",
    )
    parser.add_argument("--large", action="store_true", help=f"serve {SHAPE.name} instead of the embedded model")
    parser.add_argument("--throughput", action="store_true", help="compare the tokens of ten keys and of one")
    arguments = parser.parse_args()
    # The server has to end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    names = [each for each in arguments.mixes.split(",") if each]
    if unknown := [each for each in names if each not in MIXES]:
        parser.error(f"{unknown[0]!r} is not a mix; there are {', '.join(MIXES)}")
    with tempfile.TemporaryDirectory(prefix="fairness") as directory:
        # The default dtype, bfloat16, whose steps the compiled operators compute.
        folder = Path(directory)
        owners = Owners(
            folder, "--served-model-name", MODEL, *((str(write(SHAPE, folder)),) if arguments.large else ())
        )
        try:
            if arguments.throughput:
                asyncio.run(measure_throughput(owners, names or THROUGHPUT_MIXES))
            else:
                asyncio.run(measure_shares(owners, names or list(MIXES), arguments.requests))
            assert "Traceback" not in owners.server.stderr
        finally:
            owners.server.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
