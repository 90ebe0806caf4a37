"""Fixtures of the tests that injure a running server."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.faults import ChaosServer
from tests.chaos.outcomes import Outcome
from tests.chaos.workload import WORKLOAD, perform_all

StartServer = Callable[..., ChaosServer]


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
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The outcomes of `WORKLOAD` on a server that nothing happens to."""
    server = ChaosServer(tmp_path_factory.mktemp("undisturbed") / "log")
    try:
        server.ready()
        outcomes = asyncio.run(perform_all(server.url, WORKLOAD))
        assert server.stop() == 0
        return outcomes
    finally:
        server.end()


@pytest.fixture
def moments() -> random.Random:
    """When faults happen: other moments in every run. The seed is shown with a failure."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"moments are drawn with the seed {seed}")
    return random.Random(seed)
