"""The server of the semantic fuzz."""

from collections.abc import Iterator

import pytest

from tests.e2e.kaon_server import KaonServer, free_port


@pytest.fixture(scope="session", autouse=True)
def _warm_starts(warm_starts: None) -> None:
    """For all tests here."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    """The embedded model, served to hostile requests; its processes have to be the same ones at the end."""
    running = KaonServer(tmp_path_factory.mktemp("server") / "log", free_port()).ready()
    core = running.core.pid
    yield running
    assert running.core.pid == core
    assert running.stop() == 0
    assert "Traceback" not in running.stderr
