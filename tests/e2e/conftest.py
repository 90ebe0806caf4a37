"""Fixtures of the tests over real processes."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.config.config import CLUSTER_KEY_ENV
from engine.distributed import core_process
from tests.e2e.core_host import CoreHost
from tests.e2e.kaon_host import KEY, KaonHost, free_ports
from tests.e2e.kaon_server import KaonServer, free_port
from tests.e2e.warm_starts import WARM_CHILDREN


@pytest.fixture(scope="session", autouse=True)
def _warm_starts(warm_starts: None) -> None:
    """For all tests here."""


def run_stub_cores(patch: pytest.MonkeyPatch) -> None:
    """Let engine cores run `stub_core`."""
    patch.setattr(core_process, "CORE_MODULE", "stub_core")
    patch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def stub_core(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let engine cores run `stub_core`, whose model always samples the same token; call it to choose a fault."""
    run_stub_cores(monkeypatch)
    return lambda fault: monkeypatch.setenv("STUB_CORE", fault)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes ranks fail; call it with `RANK:FAULT` of `faulty_ranks`, or several."""

    def make(faults: str) -> None:
        monkeypatch.setattr(core_process, "CORE_MODULE", "faulty_ranks")
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.setenv("FAULTY_RANK", faults)

    return make


@pytest.fixture
def held_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], AbstractContextManager[None]]:
    """`with held_starts():` stub cores that start within the block become ready only after it."""
    path = tmp_path / "gate"
    path.touch()
    monkeypatch.setenv("STUB_CORE_GATE", str(path))

    @contextlib.contextmanager
    def hold() -> Iterator[None]:
        with path.open() as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield

    return hold


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    """The embedded model, served. It has no template, whichever module has it started: tests count its children."""
    log, environment = tmp_path_factory.mktemp("server") / "log", dict.fromkeys(WARM_CHILDREN, "")
    running = KaonServer(log, free_port(), environment=environment).ready()
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr
    assert "Fatal" not in running.stderr


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., KaonServer]]:
    """Starts servers with settings of their own, for which the caller may wait; they end with the test."""
    started: list[KaonServer] = []

    def start(port: int | None = None, **settings: Any) -> KaonServer:
        started.append(KaonServer(tmp_path / f"log{len(started)}", free_port() if port is None else port, **settings))
        return started[-1]

    yield start
    for running in started:
        running.stop()


@pytest.fixture
def client(server: KaonServer) -> Iterator[openai.OpenAI]:
    """The official client of the shared server."""
    with server.client() as client:
        yield client


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The rendezvous of several hosts, whose key this process has too."""
    monkeypatch.setenv(CLUSTER_KEY_ENV, KEY)
    return free_ports()


@pytest.fixture
def host_kind() -> Callable[..., KaonHost | CoreHost]:
    """The class that `start_host` creates; modules may override it."""
    return KaonHost


@pytest.fixture
def start_host(
    tmp_path: Path, host_kind: Callable[..., KaonHost | CoreHost]
) -> Iterator[Callable[..., KaonHost | CoreHost]]:
    """Starts further hosts of a server with settings of their own; they end with the test."""
    started: list[KaonHost | CoreHost] = []

    def start(port: int, **settings: Any) -> KaonHost | CoreHost:
        started.append(host_kind(tmp_path / f"host{len(started)}", port, **settings))
        return started[-1]

    yield start
    for host in started:
        host.stop()
