"""The engine core, and then the API process, are killed under each attack: another client's stream keeps every byte,
each request ends once, and nothing leaks."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from tests.chaos.edge_attacks import ATTACKS, HEAVY, KEYED_ATTACKS
from tests.chaos.faults import ChaosServer
from tests.chaos.heavy_loads import LOADS, sent_to
from tests.chaos.test_edge import attack
from tests.chaos.victim import read_stream
from tests.chaos.workload import client
from tests.e2e.kaon_server import MODEL, START_SECONDS, eventually

# Twenty seconds each, 40 minutes in all. The same without attacks: test_core_dies.py and test_shutdown.py.
pytestmark = [pytest.mark.slow, pytest.mark.kills, pytest.mark.timeout(300)]

VICTIM: dict[str, Any] = {
    "model": MODEL,
    "prompt": "A long story",
    "max_tokens": 800,
    "ignore_eos": True,
    "temperature": 1,
    "seed": 7,
    "stream": True,
}
_PARTS = 20
"""Parts of the victim's stream after which a process is killed."""
_PROBE_SECONDS = 0.05
_MORE_DESCRIPTORS = 16
"""Descriptors that an attack may leave open: of threads, of files that are read again, and of the next probes."""
_MORE_BYTES = 256 * 2**20
"""Bytes by which the API process may be larger after an attack."""
_NOT_OF_REQUESTS = ("connections", "stored_bytes", "stored_responses")
"""Resources that a key uses without a request in progress."""


class Kept(NamedTuple):
    """What an attack must leave as it was."""

    descriptors: int
    children: int
    memory: int

    @classmethod
    def of(cls, server: ChaosServer) -> "Kept":
        process = server.process
        return cls(process.num_fds(), len(process.children(recursive=True)), process.memory_info().rss)


def start(folder: Path, log: str, *, keys: bool) -> ChaosServer:
    """A server of few connections; servers of one folder share what they store."""
    options = ["--max-core-restarts", "1000", "--max-connections", "64", "--data-dir", str(folder / "data")]
    if keys:
        (folder / "keys").write_text("\n".join(["victim", *HEAVY]))
        options += ["--api-key-file", str(folder / "keys"), "--keyless-paths", "/livez,/readyz,/health,/metrics"]
        options += ["--trust-request-chat-template"]
    return ChaosServer(folder / log, *options)


@contextlib.contextmanager
def started(folder: Path, *, keys: bool) -> Iterator[ChaosServer]:
    server = start(folder, "log", keys=keys)
    try:
        yield server.ready()
        assert "Traceback" not in server.stderr
    finally:
        server.end()


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosServer]:
    with started(tmp_path_factory.mktemp("keyless"), keys=False) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosServer]:
    with started(tmp_path_factory.mktemp("keyed"), keys=True) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(keyed: ChaosServer) -> str:
    return asyncio.run(_alone(keyed))


async def _alone(server: ChaosServer) -> str:
    async with client(server.url) as http:
        http.headers["Authorization"] = "Bearer victim"
        return (await read_stream(http, VICTIM)).text


@contextlib.asynccontextmanager
async def attacked(name: str, server: ChaosServer) -> AsyncIterator[None]:
    if name in LOADS:
        context = sent_to(server, MODEL, [name], HEAVY)
        await asyncio.to_thread(context.__enter__)
        try:
            await asyncio.sleep(1)
            yield
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)
    else:
        async with attack(name, server):
            yield


async def answered(ask: Callable[[], Any]) -> Any:
    """The result of `ask`, which is tried again where the server closes its connection to make room."""
    while True:
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError):
            return await asyncio.to_thread(ask)
        await asyncio.sleep(_PROBE_SECONDS)


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + START_SECONDS
    while not await answered(holds):
        assert time.monotonic() < end, "it never came to hold"
        await asyncio.sleep(_PROBE_SECONDS)


class Probe(NamedTuple):
    """An answered probe."""

    path: str
    status: int
    sent: float
    answered: float


class Probes(list[Probe]):
    """Probes that were answered, of which some were sent while no engine core was ready."""

    @property
    def longest(self) -> float:
        return max(each.answered - each.sent for each in self)

    def statuses(self, path: str) -> list[int]:
        """The statuses of a path in order, without repetitions."""
        return [status for status, _ in itertools.groupby(each.status for each in self if each.path == path)]

    async def send(self, url: str) -> None:
        async with client(url) as http:
            while True:
                for path in ("/livez", "/readyz"):
                    sent = time.monotonic()
                    # Closed to make room for the attack's connections.
                    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                        status = (await http.get(path)).status_code
                        self.append(Probe(path, status, sent, time.monotonic()))
                    await asyncio.sleep(_PROBE_SECONDS)


@contextlib.asynccontextmanager
async def probed(server: ChaosServer) -> AsyncIterator[Probes]:
    """Probe the server during the block. Raises the error of a probe that had no answer."""
    probes = Probes()
    probing = asyncio.create_task(probes.send(server.url))
    try:
        yield probes
    finally:
        probing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await probing


async def stream_that_has_begun(server: ChaosServer) -> asyncio.Task[str]:
    """The text of a stream of the victim, of which some parts have arrived."""
    times: list[float] = []

    async def read() -> str:
        async with client(server.url) as http:
            http.headers["Authorization"] = "Bearer victim"
            return (await read_stream(http, VICTIM, retries=True, times=times)).text

    stream = asyncio.create_task(read())
    while len(times) < _PARTS:
        assert not stream.done(), "the stream was over before anything could be killed"
        await asyncio.sleep(0.001)
    return stream


def is_unused(server: ChaosServer) -> bool:
    """Whether keys use nothing but what they store, and no connection is open but the one that asks."""
    metrics = server.metrics()
    in_use = {
        name: value
        for name, value in metrics.items()
        if name.startswith("kaon_key_in_use{") and not any(f'resource="{each}"' in name for each in _NOT_OF_REQUESTS)
    }
    return not any(in_use.values()) and metrics["kaon_connections_open"] == 1


def cancel_batches(server: ChaosServer) -> None:
    """Cancel what would run for hours."""
    for key in HEAVY:
        with server.http() as http:
            http.headers["Authorization"] = f"Bearer {key}"
            while True:
                listed = http.get("/v1/batches?limit=100").json().get("data", [])
                running = [each["id"] for each in listed if each["status"] in ("validating", "in_progress")]
                if not running:
                    break
                for id in running:
                    http.post(f"/v1/batches/{id}/cancel")


@pytest.mark.parametrize("name", [*ATTACKS, *KEYED_ATTACKS, *LOADS])
async def test_a_stream_is_whole_and_nothing_leaks_when_the_core_dies_under_attack(
    name: str, undisturbed: str, request: pytest.FixtureRequest
) -> None:
    server: ChaosServer = request.getfixturevalue("keyless" if name in ATTACKS else "keyed")
    failed = 'kaon_requests_finished_total{reason="error"}'
    await until(server.is_ready)  # Also after a test that failed.
    before, errors, restarts = Kept.of(server), server.metric(failed), server.restarts()
    absent_until = 0.0

    def has_restarted() -> bool:
        nonlocal absent_until
        asked = time.monotonic()
        if server.restarts() == restarts + 1 and server.is_ready():
            return True
        absent_until = asked
        return False

    async with attacked(name, server), probed(server) as probes:
        (core,) = server.cores()
        stream = await stream_that_has_begun(server)
        core.kill()
        await asyncio.sleep(_PROBE_SECONDS)
        assert not stream.done(), "the stream was over before the core was killed"
        await until(has_restarted)
        text = await stream
    assert text == undisturbed
    assert probes.statuses("/livez") == [200]
    assert probes.statuses("/readyz") in ([200, 503, 200], [200, 503])  # The stream may end before the next probe.
    noticed = next(each.answered for each in probes if each.status == 503)
    readyz = [each for each in probes if each.path == "/readyz"]
    assert {each.status for each in readyz if noticed < each.sent < each.answered < absent_until} <= {503}
    await asyncio.to_thread(cancel_batches, server)
    await asyncio.to_thread(server.until, server.is_idle)
    received, ended = server.balance()
    assert received == ended
    # A request whose grammar became too costly to follow gets a 400.
    assert server.metric(failed) == errors or name == "lexers"
    await asyncio.to_thread(server.until, lambda: is_unused(server))
    await asyncio.to_thread(
        server.until, lambda: Kept.of(server).descriptors <= before.descriptors + _MORE_DESCRIPTORS
    )
    after = Kept.of(server)
    print(
        f"{name}: {len(probes)} probes, longest {1e3 * probes.longest:.0f} ms; {received:.0f} requests received; "
        f"descriptors {before.descriptors} to {after.descriptors}, children {before.children} to {after.children}, "
        f"{before.memory / 1e6:.0f} to {after.memory / 1e6:.0f} MB",
        flush=True,
    )
    assert after.children <= before.children + 3, "the processes that check grammars and render templates"
    assert after.memory <= before.memory + _MORE_BYTES


def _runs(process: psutil.Process) -> bool:
    return bool(process.is_running())


@pytest.mark.parametrize("name", [*ATTACKS, *KEYED_ATTACKS, *LOADS])
async def test_nothing_remains_when_the_api_process_dies_under_attack(
    name: str, undisturbed: str, tmp_path: Path, temporary_directory: Path
) -> None:
    """The next server answers as the first, also if it has the files of the dead one."""
    keys = name not in ATTACKS
    with started(tmp_path, keys=keys) as server:
        attack_of_it = attacked(name, server)
        await attack_of_it.__aenter__()
        try:
            stream = await stream_that_has_begun(server)
            children = server.process.children(recursive=True)
            server.process.kill()
            server.process.wait()
            with pytest.raises(httpx.HTTPError):
                await stream
        finally:
            with contextlib.suppress(AssertionError):  # The attack's clients end with the server.
                await attack_of_it.__aexit__(None, None, None)
        eventually(lambda: not any(_runs(child) for child in children))
        eventually(lambda: not any(temporary_directory.iterdir()))
    with started(tmp_path, keys=keys) as again:
        assert await (await stream_that_has_begun(again)) == undisturbed
        await asyncio.to_thread(cancel_batches, again)
        await asyncio.to_thread(again.until, again.is_idle)
