"""Attacks on the HTTP edge: another client's stream keeps every byte, and probes are always answered.

For each attack, the test prints the longest gap of the other stream and the longest answers of probes, with and
without the attack. The server keeps at most 16 connections, as with few descriptors, and its log is not read.
"""

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.chaos.edge_attacks import ATTACKS, HEAVY, KEYED_ATTACKS
from tests.chaos.faults import ChaosServer
from tests.chaos.workload import client
from tests.e2e.kaon_server import MODEL, START_SECONDS

# Its figures need a machine of its own; unit and end-to-end tests assert the same in `make test`.
pytestmark = pytest.mark.slow

VICTIM: dict[str, Any] = {
    "model": MODEL,
    "prompt": "A long story",
    "max_tokens": 1500,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
_PROBE_SECONDS = 0.05
_WARM_UP_SECONDS = 1.0
_OBSERVED_SECONDS = 4.0
"""At least, so that there are some dozens of probes."""


class Seen(NamedTuple):
    """Observations of other clients during a period."""

    text: str
    gap: float
    """Longest time between two chunks of a stream."""
    first: float
    """Longest time to the first chunk of a stream."""
    probes: list[float]
    """Times of `/livez`, `/readyz` and `/metrics`, sorted."""
    closed: int
    """Probes whose connections were closed, to make room, before their heads had been read."""

    def __str__(self) -> str:
        late = self.probes[int(len(self.probes) * 0.99)]
        return (
            f"gap {1e3 * self.gap:.0f} ms, first chunk {1e3 * self.first:.0f} ms; {len(self.probes)} probes, "
            f"median {1e3 * statistics.median(self.probes):.0f} ms, "
            f"p99 {1e3 * late:.0f} ms, longest {1e3 * self.probes[-1]:.0f} ms, {self.closed} closed"
        )


@pytest.fixture(scope="module")
def unread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosServer]:
    """A server of few connections whose log is a pipe without a reader."""
    fifo = tmp_path_factory.mktemp("edge") / "log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    server = ChaosServer(Path(fifo), "--log-level", "info", "--max-connections", "16")
    try:
        yield server.ready()
        assert server.stop() == 0
    finally:
        server.end()
        os.close(reader)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosServer]:
    """A server of few connections with a key for the victim and keys for attackers."""
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text("\n".join(["victim", *HEAVY]))
    server = ChaosServer(
        folder / "log",
        *("--api-key-file", str(folder / "keys"), "--keyless-paths", "/livez,/readyz,/health,/metrics"),
        *("--max-connections", "64", "--dtype", "float32", "--data-dir", str(folder / "data")),
    )
    try:
        yield server.ready()
        assert server.stop() == 0
    finally:
        server.end()


async def observe(server: ChaosServer, key: str = "none", **fields: Any) -> Seen:
    """Read streams for a time, and probe the server, each time on a connection of its own, until the last one ends."""
    async with client(server.url) as http:
        http.headers["Authorization"] = f"Bearer {key}"

        async def read_streams() -> tuple[str, float, float]:
            end = time.monotonic() + _OBSERVED_SECONDS
            seen = [await read_stream(http, {**VICTIM, **fields})]
            while time.monotonic() < end:
                seen.append(await read_stream(http, {**VICTIM, **fields}))
            texts, gaps, firsts = zip(*seen, strict=True)
            assert len(set(texts)) == 1
            return texts[0], max(gaps), max(firsts)

        stream = asyncio.create_task(read_streams())
        probes, closed = [], 0
        for path in itertools.cycle(("/livez", "/readyz", "/metrics")):
            if stream.done():
                break
            began = time.monotonic()
            try:
                assert (await http.get(path)).status_code == 200
                probes.append(time.monotonic() - began)
            except (httpx.RemoteProtocolError, httpx.ReadError):
                closed += 1
            await asyncio.sleep(_PROBE_SECONDS)
        return Seen(*await stream, sorted(probes), closed)


async def read_stream(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, float, float]:
    """The text of the victim's stream, its longest gap and the time to its first chunk.

    Like real clients, it retries if its connection was closed before its head was read, or after a 503.
    """
    began = time.monotonic()
    parts: list[bytes] = []
    times: list[float] = []
    while not parts:
        assert time.monotonic() - began < START_SECONDS
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            async with http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code in (200, 503)
                if response.status_code == 200:
                    async for part in response.aiter_raw():
                        parts.append(part)
                        times.append(time.monotonic())
        if not parts:
            await asyncio.sleep(_PROBE_SECONDS)
    *events, done, _ = b"".join(parts).split(b"\n\n")
    assert done == b"data: [DONE]"
    # Chunks are merged if the client or the server is late.
    text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events if event.startswith(b"data: "))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return text, max(gaps), times[0] - began


@contextlib.asynccontextmanager
async def attack(name: str, server: ChaosServer) -> AsyncIterator[None]:
    command = [sys.executable, "-m", "tests.chaos.edge_attacks", name, str(server.port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        await asyncio.sleep(_WARM_UP_SECONDS)
        assert process.poll() is None
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(START_SECONDS)


@pytest.fixture(scope="module")
def undisturbed(unread: ChaosServer) -> Seen:
    seen = asyncio.run(observe(unread))
    print(f"undisturbed: {seen}")
    return seen


@pytest.mark.parametrize("name", ATTACKS)
async def test_others_are_served_under_attack(name: str, unread: ChaosServer, undisturbed: Seen) -> None:
    async with attack(name, unread):
        seen = await observe(unread)
    closed = {key: value for key, value in unread.metrics().items() if "connections_closed" in key and value}
    dropped = unread.metric("kaon_log_lines_dropped_total")
    print(f"undisturbed: {undisturbed}")
    print(f"{name}: {seen}; {closed}; {dropped:.0f} log lines dropped so far")
    assert seen.text == undisturbed.text
    assert len(seen.probes) >= 3
    assert seen.closed <= len(seen.probes) / 10
    unread.until(unread.is_idle)


@pytest.fixture(scope="module")
def undisturbed_keyed(keyed: ChaosServer) -> Seen:
    seen = asyncio.run(observe(keyed, "victim", max_tokens=400))
    print(f"undisturbed: {seen}")
    return seen


@pytest.mark.parametrize("name", KEYED_ATTACKS)
async def test_a_key_is_served_under_attacks_of_others(name: str, keyed: ChaosServer, undisturbed_keyed: Seen) -> None:
    async with attack(name, keyed):
        seen = await observe(keyed, "victim", max_tokens=400)
    print(f"undisturbed: {undisturbed_keyed}")
    print(f"{name}: {seen}; {keyed.resident()[0] / 1e6:.0f} MB")
    assert seen.text == undisturbed_keyed.text
    assert len(seen.probes) >= 3
    assert seen.closed <= len(seen.probes) / 10
