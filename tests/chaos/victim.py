"""A client that attacks must not affect: it reads streams and sends probes meanwhile, and has figures of both.

`attack_table` collects the rows of docs/security.md that a run measured; `make chaos ARGS="-m attack_table"` prints
them.
"""

import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx

from tests.chaos.faults import ChaosServer
from tests.chaos.workload import client
from tests.e2e.kaon_server import START_SECONDS

_RETRY_SECONDS = 0.05


class Streamed(NamedTuple):
    """One streamed answer."""

    text: str
    sent: float
    times: list[float]
    """Time of each part that was received."""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def longest_gap(self) -> float:
        return max((later - earlier for earlier, later in itertools.pairwise(self.times)), default=0.0)


async def read_stream(
    http: httpx.AsyncClient, body: dict[str, Any], *, retries: bool = False, times: list[float] | None = None
) -> Streamed:
    """Read one streamed completion, and assert that it is complete.

    `retries`: whether to send it again, as real clients do, if its connection was closed before its head was read, or
    after a 503. A connection that is closed later raises httpx's error. `times`: a list to which the time of each part
    is added as it arrives.
    """
    sent, parts, times = time.monotonic(), list[bytes](), [] if times is None else times
    unavailable = (httpx.RemoteProtocolError, httpx.ReadError) if retries else ()
    while not parts:
        assert time.monotonic() - sent < START_SECONDS
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if not (retries and response.status_code == 503):
                    assert response.status_code == 200, await response.aread()
                    async for part in response.aiter_raw():
                        parts.append(part)
                        times.append(time.monotonic())
        except unavailable:
            if parts:
                raise
        if not parts:
            await asyncio.sleep(_RETRY_SECONDS)
    *events, done, _ = b"".join(parts).split(b"\n\n")
    assert done == b"data: [DONE]", b"".join(parts)[-300:]
    # Chunks are merged if the client or the server is late.
    text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events if event.startswith(b"data: "))
    return Streamed(text, sent, times)


class Seen:
    """What a victim saw during a block of `watching`."""

    def __init__(self) -> None:
        self.streams: list[Streamed] = []
        self.probes: list[float] = []
        """Seconds until each probe was answered."""
        self.closed = 0
        """Probes whose connections were closed, to make room, before their heads had been read."""

    @property
    def texts(self) -> set[str]:
        return {each.text for each in self.streams}

    @property
    def gap(self) -> float:
        """Longest time between two parts of a stream."""
        return max(each.longest_gap for each in self.streams)

    @property
    def longest_probe(self) -> float:
        return max(self.probes)

    def __str__(self) -> str:
        ordered = sorted(self.probes)
        return (
            f"gap {1e3 * self.gap:.0f} ms, first chunk {1e3 * max(each.ttft for each in self.streams):.0f} ms; "
            f"{len(ordered)} probes, median {1e3 * statistics.median(ordered):.0f} ms, "
            f"p99 {1e3 * ordered[int(len(ordered) * 0.99)]:.0f} ms, longest {1e3 * ordered[-1]:.0f} ms, "
            f"{self.closed} closed"
        )


@contextlib.asynccontextmanager
async def watching(server: ChaosServer, body: dict[str, Any], key: str = "none") -> AsyncIterator[Seen]:
    """During the block and until the last stream ends, read streams one after the other, and probe the server by
    `tests.chaos.prober`. The probes are known after the block."""
    seen, is_over = Seen(), asyncio.Event()

    async def read_streams() -> None:
        while not (seen.streams and is_over.is_set()):
            seen.streams.append(await read_stream(http, body, retries=True))

    prober = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.prober", str(server.port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    async with client(server.url) as http:
        http.headers["Authorization"] = f"Bearer {key}"
        streams = asyncio.create_task(read_streams())
        try:
            yield seen
            is_over.set()
            await streams
            output, _ = await prober.communicate(b"")
            probed = json.loads(output)
            seen.probes, seen.closed = probed["seconds"], probed["closed"]
        finally:
            streams.cancel()
            await asyncio.gather(streams, return_exceptions=True)
            if prober.returncode is None:
                prober.kill()
                await prober.wait()


async def watch(server: ChaosServer, body: dict[str, Any], key: str = "none", seconds: float = 0.0) -> Seen:
    """Watch for at least `seconds` and one stream."""
    async with watching(server, body, key) as seen:
        await asyncio.sleep(seconds)
    return seen


class AttackTable:
    """Rows of the table of attacks."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, str]] = []

    def add(self, number: int, attack: str, figure: str, alone: Seen, seen: Seen) -> None:
        """Add a row, and assert that the victim's texts are equal with and without the attack."""
        is_equal = seen.texts == alone.texts and len(seen.texts) == 1
        cells = (
            str(number),
            attack,
            figure,
            f"{1e3 * seen.gap:.0f} ({1e3 * alone.gap:.0f})",
            f"{len(seen.streams)} {'equal' if is_equal else 'DIFFERENT'}",
            f"{1e3 * statistics.median(seen.probes):.0f}, {1e3 * seen.longest_probe:.0f} "
            f"({1e3 * alone.longest_probe:.0f}), {len(seen.probes)}",
        )
        self._rows.append((number, f"| {' | '.join(cells)} |"))
        print(self._rows[-1][1])
        assert is_equal

    def __str__(self) -> str:
        head = (
            "| # | Attack | Figure | Victim's longest gap (alone), ms | Its streams | Probe: median, longest (alone), "
            "ms, number |\n| --- | --- | --- | --- | --- | --- |"
        )
        return "\n".join([head, *(row for _, row in sorted(self._rows, key=lambda each: each[0]))])

    def __bool__(self) -> bool:
        return bool(self._rows)
