"""The wall clock jumps, by libfaketime, as NTP, a suspended machine or an operator make it: no answer changes."""

import asyncio
import glob
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.conftest import StartServer
from tests.chaos.faults import ChaosServer
from tests.chaos.outcomes import Outcome
from tests.chaos.workload import WORKLOAD, perform_all

LIBRARIES = (os.environ.get("LIBFAKETIME", ""), *glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1"))
LIBRARY = next((each for each in LIBRARIES if each and Path(each).exists()), "")
JUMPS = ("+400d", "-400d", "+1h", "-1s", "+0")
"""Offsets from the true time, in the form of libfaketime; the last sets the clock right again."""
EACH_SECONDS = 0.3


@pytest.fixture
def set_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the wall clock of processes that start from now on, and of their children, while they run.

    The monotonic clock goes on, as the kernel's does.
    """
    if not LIBRARY:
        pytest.skip("libfaketime is not installed: apt install faketime, or name it by LIBFAKETIME")
    file = tmp_path / "clock"

    def set_to(offset: str) -> None:
        whole = file.with_suffix(".new")
        whole.write_text(offset + "\n")
        whole.rename(file)

    set_to("+0")
    monkeypatch.setenv("LD_PRELOAD", LIBRARY)
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(file))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    return set_to


def created(server: ChaosServer) -> int:
    """The server's clock, as an answer shows it."""
    answer = server.post("/v1/completions", {"model": "kaon-demo", "prompt": "Hi", "max_tokens": 1})
    assert answer.status_code == 200
    moment: int = answer.json()["created"]
    return moment


async def test_answers_counters_and_the_engine_survive_jumps_of_the_clock(
    set_clock: Callable[[str], None], start_server: StartServer, undisturbed: dict[str, Outcome]
) -> None:
    server = start_server("--stall-timeout", "60")
    before = created(server)
    set_clock("+400d")
    assert created(server) - before > 300 * 86400, "the clock of the server is not the one that the test sets"

    async def jump() -> None:
        while True:
            for offset in JUMPS:
                set_clock(offset)
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
    # Process start times are of the wall clock by their meaning.
    negative = {name: value for name, value in metrics.items() if value < 0}
    assert negative == {}
    assert metrics["kaon_core_restarts_total"] == 0
    assert server.is_ready()
    assert "Traceback" not in server.stderr
