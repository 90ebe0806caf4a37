"""The wall clock jumps, by libfaketime, as after NTP, suspension or an operator's change: no answer changes."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.clock import JUMPS, LIBRARY, MISSING, WallClock
from tests.chaos.conftest import StartServer
from tests.chaos.faults import ChaosServer
from tests.chaos.outcomes import Outcome
from tests.chaos.workload import WORKLOAD, perform_all

EACH_SECONDS = 0.3


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WallClock:
    """Clock of the servers that the test starts."""
    if not LIBRARY:
        pytest.skip(MISSING)
    made = WallClock(tmp_path / "clock")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


def created(server: ChaosServer) -> int:
    """The server's clock, as an answer shows it."""
    answer = server.post("/v1/completions", {"model": "kaon-demo", "prompt": "Hi", "max_tokens": 1})
    assert answer.status_code == 200
    moment: int = answer.json()["created"]
    return moment


async def test_answers_counters_and_the_engine_survive_jumps_of_the_clock(
    clock: WallClock, start_server: StartServer, undisturbed: dict[str, Outcome]
) -> None:
    server = start_server("--stall-timeout", "60")
    before = created(server)
    clock.set("+400d")
    assert created(server) - before > 300 * 86400, "the clock of the server is not the one that the test sets"

    async def jump() -> None:
        while True:
            for offset in JUMPS:
                clock.set(offset)
                await asyncio.sleep(EACH_SECONDS)

    jumping = asyncio.create_task(jump())
    try:
        outcomes = [await perform_all(server.url, WORKLOAD) for _ in range(2)]
    finally:
        jumping.cancel()
    assert outcomes == [undisturbed, undisturbed]
    await asyncio.to_thread(server.until, server.is_idle)
    received, accounted = server.balance()
    assert received == accounted
    metrics = server.metrics()
    # Process start times are defined by the wall clock.
    negative = {name: value for name, value in metrics.items() if value < 0}
    assert negative == {}
    assert metrics["kaon_core_restarts_total"] == 0
    assert server.is_ready()
    assert "Traceback" not in server.stderr
