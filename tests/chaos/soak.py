"""`make soak`: many kinds of clients and faults together for minutes; then all counters must agree.

Prints a report. Exit code 1 if an answer was wrong, a counter is wrong, or memory grew.
"""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest import mock

import httpx

from tests.chaos.clock import JUMPS, LIBRARY, MISSING, WallClock
from tests.chaos.faults import ChaosServer
from tests.chaos.outcomes import Outcome, merged, read_events
from tests.chaos.slow_readers import SlowReader
from tests.chaos.workload import WORKLOAD, Refused, client, perform, perform_all

OPTIONS = ("--max-num-seqs", "16", "--max-queued-requests", "40", "--stream-buffer-bytes", "262144")
SUPERVISION = ("--max-core-restarts", "100000", "--stall-timeout", "10")
SETTLE_SECONDS = 120

_STATES = ("live", "running", "waiting")

STEADY, LEAVING, SLOW = 6, 4, 2
"""Number of simultaneous clients of each kind."""

MOST_GROWTH = 48 * 2**20
"""Bytes by which the API process may grow from the run's second fifth to its last."""

SHORTEST_FOR_MEMORY = 10
"""Minutes below which a run shows nothing about memory."""


class Soak:
    """One run: its clients, its faults, and its observations."""

    def __init__(
        self,
        server: ChaosServer,
        expected: dict[str, Outcome],
        moments: random.Random,
        fault_rate: float = 1.0,
        clock: WallClock | None = None,
    ) -> None:
        """`fault_rate`: multiplier of the rate of faults; 1 is about two faults per minute. `clock`: the server's
        clock, if it may jump."""
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.resident: list[tuple[float, int, int]] = []
        """Seconds since the start, and bytes of the API process and of the core."""
        self._server = server
        self._expected = expected
        self._moments = moments
        self._fault_rate = fault_rate
        self._clock = clock
        self._names = list(WORKLOAD)

    async def run(self, seconds: float) -> None:
        """Run all roles for `seconds`; then wait until nothing is live."""
        roles: list[tuple[int, Callable[[httpx.AsyncClient], Awaitable[None]]]] = [
            (STEADY, self._steady),
            (LEAVING, self._leave),
            (SLOW, self._read_slowly),
            (1, self._burst),
            (1, self._injure),
            (0 if self._clock is None else 1, self._jump),
            (1, self._observe),
        ]
        ends = time.monotonic() + seconds
        async with client(self._server.url) as http, asyncio.TaskGroup() as group:
            for number, role in roles:
                for _ in range(number):
                    group.create_task(self._until(ends, role, http))
        deadline = time.monotonic() + SETTLE_SECONDS
        while not await asyncio.to_thread(self._server.is_idle):
            if time.monotonic() > deadline:
                self.problems.append(f"after {SETTLE_SECONDS} s without clients, requests are live or blocks are held")
                return
            await asyncio.sleep(0.1)

    async def _until(
        self, ends: float, role: Callable[[httpx.AsyncClient], Awaitable[None]], http: httpx.AsyncClient
    ) -> None:
        """Run a role repeatedly. Its failures are recorded, and the other roles continue."""
        while time.monotonic() < ends:
            try:
                await role(http)
            except Exception as error:  # noqa: BLE001 - whatever it is, it fails the run at its end
                self.counts["problems"] += 1
                self.problems.append(f"{role.__name__.strip('_')}: {type(error).__name__}: {str(error)[:500]}")
                await asyncio.sleep(1)

    async def _steady(self, http: httpx.AsyncClient) -> None:
        """Request an answer that must always be the same; wait and retry if the server asks for it."""
        name = self._moments.choice(self._names)
        while True:
            began, before = time.monotonic(), sum(self.counts.values())
            try:
                outcome = await perform(http, WORKLOAD[name])
            except Refused as refusal:
                await asyncio.sleep(self._retry_after(refusal.response))
            except httpx.TimeoutException as error:
                # Whether others were answered meanwhile shows whether the server was only slow. If nothing runs or
                # waits while requests are live, an output was lost.
                since = f"{time.monotonic() - began:.0f} s, {sum(self.counts.values()) - before} other events"
                metrics = await asyncio.to_thread(self._server.metrics)
                state = ", ".join(f"{metrics[f'kaon_requests_{each}']:.0f} {each}" for each in _STATES)
                raise AssertionError(f"{name!r} got {type(error).__name__} after {since}; {state}") from error
            else:
                assert outcome == self._expected[name], f"the answer to {name!r} is another one"
                self.counts["answers, each as it has to be"] += 1
                return

    async def _leave(self, http: httpx.AsyncClient) -> None:
        """A client that disconnects at a random time."""
        ask = WORKLOAD[self._moments.choice(self._names)]
        try:
            async with asyncio.timeout(2 * self._moments.random() ** 2):
                await perform(http, ask)
            self.counts["answers to clients that meant to leave"] += 1
        except TimeoutError:
            self.counts["clients that left"] += 1
        except Refused as refusal:
            await asyncio.sleep(self._retry_after(refusal.response))

    async def _read_slowly(self, http: httpx.AsyncClient) -> None:
        """A client that reads one byte per second, and then either disconnects or reads to the end."""
        seconds, reads_on = self._moments.randint(5, 25), self._moments.random() < 0.5
        answered = await asyncio.to_thread(self._one_slow_reader, seconds, reads_on)
        self.counts["slow readers" if answered else "slow readers refused"] += 1
        if not answered:
            await asyncio.sleep(5)

    def _one_slow_reader(self, seconds: int, reads_on: bool) -> bool:
        """Whether the request was answered, and not refused."""
        with contextlib.closing(SlowReader(self._server, max_tokens=1000)) as reader:
            for _ in range(seconds):
                if not reader.take_byte():
                    break
                time.sleep(1)
            if not reads_on and reader.status == 200:
                return True
            events = reader.read_all()
            if reader.status in (429, 503):
                return False
            merged("/v1/chat/completions", read_events(events))
            return True

    async def _burst(self, http: httpx.AsyncClient) -> None:
        """Many simultaneous clients that ignore Retry-After."""
        await asyncio.sleep(self._moments.uniform(5, 20))

        async def impatient() -> None:
            try:
                await perform(http, WORKLOAD["greedy, short"])
                self.counts["answers within a burst"] += 1
            except Refused as refusal:
                self._retry_after(refusal.response)

        await asyncio.gather(*(impatient() for _ in range(100)))

    async def _injure(self, http: httpx.AsyncClient) -> None:
        """Kill the core, sometimes a second time while it starts, or stop it."""
        await asyncio.sleep(self._moments.uniform(10, 40) / self._fault_rate)
        fault = self._moments.choices(
            (
                self._server.kill_core,
                self._server.stop_core,
                lambda: self._server.kill_core_twice(self._moments),
            ),
            (6, 1, 1),
        )[0]
        await asyncio.to_thread(fault)
        self.counts["faults injected"] += 1
        # A request that was in three crashes without a token between them fails, so the next fault waits.
        await asyncio.to_thread(self._server.until_all_go_on)

    async def _jump(self, http: httpx.AsyncClient) -> None:
        """Set the server's wall clock forward, back or right."""
        assert self._clock is not None
        await asyncio.sleep(self._moments.uniform(2, 20) / self._fault_rate)
        self._clock.set(self._moments.choice(JUMPS))
        self.counts["jumps of the wall clock"] += 1

    async def _observe(self, http: httpx.AsyncClient) -> None:
        await asyncio.sleep(2)
        with contextlib.suppress(ValueError):  # For a short time there is no core.
            self.resident.append((time.monotonic(), *self._server.resident()))

    def _retry_after(self, response: httpx.Response) -> float:
        """Seconds that a refusal asks to wait. Raises `AssertionError` for a refusal with another reason than the
        load."""
        assert response.status_code in (429, 503), f"{response.status_code}: {response.text[:300]}"
        self.counts[f"asked to retry ({response.status_code})"] += 1
        return float(response.headers["retry-after"])


def report(soak: Soak, server: ChaosServer, minutes: float) -> list[str]:
    """The report's lines. Wrong counters are added to the run's problems first."""
    metrics = server.metrics()
    received, ended = server.balance()
    if received != ended:
        soak.problems.append(f"{received:.0f} requests were received, and {ended:.0f} finished or rejected")
    for gauge in ("kaon_requests_live", "kaon_kv_cache_usage_ratio"):
        if metrics[gauge]:
            soak.problems.append(f"{gauge} is {metrics[gauge]:g} at rest")
    if failed := metrics['kaon_requests_finished_total{reason="error"}']:
        soak.problems.append(f"{failed:.0f} requests ended with an error")
    lines = [f"{text}: {count}" for text, count in sorted(soak.counts.items())]
    lines += [
        f"{name}: {value:.0f}"
        for name, value in sorted(metrics.items())
        if name.startswith(("kaon_requests_", "kaon_core_", "kaon_kv_cache_usage", "kaon_generation_tokens"))
        and "_bucket" not in name
        and "_sum" not in name
    ]
    return lines + memory(soak, minutes)


def memory(soak: Soak, minutes: float) -> list[str]:
    """Change of memory: the medians of the second and the last fifth of the run, and the slope of its second half."""
    fifth = len(soak.resident) // 5
    if fifth < 2:
        return ["memory: too short a run to tell"]
    lines = []
    for column, process in ((1, "API"), (2, "core")):
        early = statistics.median(sample[column] for sample in soak.resident[fifth : 2 * fifth])
        late = statistics.median(sample[column] for sample in soak.resident[-fifth:])
        half = soak.resident[len(soak.resident) // 2 :]
        slope = statistics.linear_regression([at for at, *_ in half], [sample[column] for sample in half]).slope
        lines.append(
            f"memory of the {process} process: {early / 1e6:.1f} MB early, {late / 1e6:.1f} MB at the end, "
            f"slope of the second half {slope * 60 / 1e6:+.2f} MB a minute"
        )
        if process == "API" and minutes >= SHORTEST_FOR_MEMORY and late - early > MOST_GROWTH:
            soak.problems.append(f"the API process grew by {(late - early) / 1e6:.0f} MB")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak ARGS=...", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long clients and faults go on (20)")
    parser.add_argument(
        "--fault-rate",
        type=float,
        default=1.0,
        help="times the usual rate, two a minute (1), as far as restarts take less time",
    )
    parser.add_argument("--seed", type=int, default=None, help="seed of all that is random here")
    arguments = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    sys.stdout.write(f"soaking for {arguments.minutes:g} minutes, seed {seed}\n")
    with tempfile.TemporaryDirectory(prefix="soak") as directory:
        clock = WallClock(Path(directory) / "time") if LIBRARY else None
        if clock is None:
            sys.stdout.write(f"the wall clock does not jump: {MISSING}\n")
        with mock.patch.dict(os.environ, {} if clock is None else clock.environment):
            server = ChaosServer(Path(directory) / "log", *OPTIONS, *SUPERVISION)
        try:
            server.ready()
            expected = {}
            for name, ask in WORKLOAD.items():
                expected.update(asyncio.run(perform_all(server.url, {name: ask})))
            soak = Soak(server, expected, random.Random(seed), arguments.fault_rate, clock)
            asyncio.run(soak.run(arguments.minutes * 60))
            lines = report(soak, server, arguments.minutes)
            if code := server.stop():
                soak.problems.append(f"the server ended with {code}")
            if "Traceback" in server.stderr:
                soak.problems.append(f"there is a traceback in the log: ...{server.stderr[-3000:]}")
        finally:
            server.end()
    sys.stdout.write("\n".join(lines) + "\n")
    for problem in soak.problems[:20]:
        sys.stdout.write(f"OFF: {problem}\n")
    sys.stdout.write(f"{len(soak.problems)} things are off\n" if soak.problems else "all counters agree\n")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
