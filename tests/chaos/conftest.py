"""Fixtures of the tests that inject faults into a running server."""

import asyncio
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.chaos.faults import ChaosServer
from tests.chaos.outcomes import Outcome
from tests.chaos.victim import AttackTable
from tests.chaos.workload import WORKLOAD, perform_all
from tests.e2e.held_checkpoint import HeldCheckpoint
from tests.e2e.kaon_server import MODEL

StartServer = Callable[..., ChaosServer]

_TABLE = pytest.StashKey[AttackTable]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TABLE] = AttackTable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[_TABLE]:
        terminalreporter.section("attacks, as in docs/security.md")
        terminalreporter.write_line(str(config.stash[_TABLE]))


@pytest.fixture(scope="session")
def attack_table(pytestconfig: pytest.Config) -> AttackTable:
    """The table that is printed at the end of the run."""
    return pytestconfig.stash[_TABLE]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers by their options, and waits until each serves; they end with the test."""
    started: list[ChaosServer] = []

    def start(*options: str) -> ChaosServer:
        started.append(ChaosServer(tmp_path / f"log{len(started)}", *options))
        server = started[-1]
        return server.ready()

    yield start
    for running in started:
        running.end()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> HeldCheckpoint:
    """The server of `mortal`."""
    return HeldCheckpoint(tmp_path_factory.mktemp("mortal") / "model")


@pytest.fixture(scope="session")
def mortal(checkpoint: HeldCheckpoint) -> Iterator[ChaosServer]:
    """A server whose core tests may kill; each test must end with another core ready and nothing live."""
    options = (str(checkpoint.path), "--served-model-name", MODEL, "--max-core-restarts", "1000")
    with ChaosServer(checkpoint.path.with_name("log"), *options).serving() as server:
        yield server


@pytest.fixture(scope="session")
def undisturbed(mortal: ChaosServer) -> dict[str, Outcome]:
    """The outcomes of `WORKLOAD` without faults."""
    return asyncio.run(perform_all(mortal.url, WORKLOAD))


@pytest.fixture
def moments() -> random.Random:
    """Random times of faults: the same in every `make test`; `make test-long` and `make chaos` print their seed."""
    seed = 0 if settings.default.derandomize else random.SystemRandom().getrandbits(32)
    print(f"moments are drawn with the seed {seed}")
    return random.Random(seed)


@pytest.fixture
def temporary_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of servers' temporary files; a short path, as sockets need."""
    directory = Path(tempfile.mkdtemp(prefix="kc"))
    monkeypatch.setenv("TMPDIR", str(directory))
    yield directory
    shutil.rmtree(directory)
