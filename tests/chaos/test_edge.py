"""Attacks on the HTTP edge: another client's stream keeps every byte, and probes are always answered.

For each attack, the test prints the longest gap of the other stream and the longest answers of probes, with and
without the attack. The server keeps at most 16 connections, as with few descriptors, and its log is not read.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.chaos.edge_attacks import ATTACKS, HEAVY, KEYED_ATTACKS
from tests.chaos.faults import ChaosServer
from tests.chaos.victim import AttackTable, Seen, watch
from tests.e2e.kaon_server import MODEL, START_SECONDS

# Its figures need a machine of its own; unit and end-to-end tests assert the same in `make test`.
pytestmark = pytest.mark.slow

VICTIM: dict[str, Any] = {
    "model": MODEL,
    "prompt": "A long story",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
_WARM_UP_SECONDS = 1.0
_OBSERVED_SECONDS = 4.0
"""At least, so that there are some dozens of probes."""
_NUMBERS = {"log_lines": 2, "json_bodies": 8, "odd_json": 8, "half_closed": 14}
"""Rows of the table that are not about connections and requests in general, which is row 1."""
_IN_TABLE = {"silent", "heads", "bodies", "log_lines", "json_bodies", "odd_json", "half_closed"}
"""Attacks that `-m attack_table` selects."""


def _rows(attacks: Iterable[str]) -> list[ParameterSet]:
    marks = {name: [pytest.mark.attack_table] if name in _IN_TABLE else [] for name in attacks}
    return [pytest.param(name, _NUMBERS.get(name, 1), marks=marks[name], id=name) for name in attacks]


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
    seen = asyncio.run(watch(unread, VICTIM, seconds=_OBSERVED_SECONDS))
    print(f"undisturbed: {seen}")
    return seen


def num_closed(server: ChaosServer) -> Counter[str]:
    """Connections that were closed so far, by reason."""
    name = "kaon_connections_closed_total{"
    return Counter({each.split('"')[1]: int(n) for each, n in server.metrics().items() if each.startswith(name)})


async def is_served_under(
    name: str, number: int, server: ChaosServer, key: str, alone: Seen, table: AttackTable
) -> None:
    """Assert that the victim's streams are equal under an attack, and that its probes are answered."""
    before = num_closed(server)
    async with attack(name, server):
        seen = await watch(server, VICTIM, key, _OBSERVED_SECONDS)
    closed = num_closed(server) - before
    dropped = server.metric("kaon_log_lines_dropped_total")
    print(f"undisturbed: {alone}\n{name}: {seen}; {dropped:.0f} log lines dropped so far")
    reasons = ", ".join(f"{number} {reason}" for reason, number in closed.items())
    figure = f"{seen.closed} probes closed, {server.resident()[0] / 1e6:.0f} MB; connections closed: {reasons or 0}"
    table.add(number, name, figure, alone, seen)
    assert len(seen.probes) >= 3
    assert seen.closed <= len(seen.probes) / 10


@pytest.mark.parametrize(("name", "number"), _rows(ATTACKS))
async def test_others_are_served_under_attack(
    name: str, number: int, unread: ChaosServer, undisturbed: Seen, attack_table: AttackTable
) -> None:
    await is_served_under(name, number, unread, "none", undisturbed, attack_table)
    unread.until(unread.is_idle)


@pytest.fixture(scope="module")
def undisturbed_keyed(keyed: ChaosServer) -> Seen:
    seen = asyncio.run(watch(keyed, VICTIM, "victim", _OBSERVED_SECONDS))
    print(f"undisturbed: {seen}")
    return seen


@pytest.mark.parametrize(("name", "number"), _rows(KEYED_ATTACKS))
async def test_a_key_is_served_under_attacks_of_others(
    name: str, number: int, keyed: ChaosServer, undisturbed_keyed: Seen, attack_table: AttackTable
) -> None:
    await is_served_under(name, number, keyed, "victim", undisturbed_keyed, attack_table)
