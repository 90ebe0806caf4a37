"""A tensor-parallel rank is killed or stopped under load: streams continue, and no state of the old ranks remains."""

import functools
import random
from collections.abc import Callable, Sequence

import psutil
import pytest

from tests.chaos.conftest import StartServer
from tests.chaos.faults import ChaosServer
from tests.chaos.injuries import at_random_moments, injured
from tests.chaos.workload import SOME, WORKLOAD, Ask, perform_all
from tests.e2e.processes import wait_gone

RANKS = 2


def family(server: ChaosServer) -> set[psutil.Process]:
    """The running core with its ranks."""
    (core,) = server.cores()
    return {core, *core.children()}


KILL, STOP = ChaosServer.kill_rank, ChaosServer.stop_rank


@pytest.mark.slow  # One kind of request: tests/e2e/test_tensor_parallel.py.
@pytest.mark.parametrize(
    ("asks", "loads"),
    [
        # Stopped ones: tests/e2e/test_tensor_parallel.py.
        pytest.param(SOME, [(KILL,)], id="one load"),
        pytest.param(WORKLOAD, [(KILL, KILL), (STOP,), (KILL, STOP)], id="three loads", marks=pytest.mark.slow),
    ],
)
async def test_every_answer_is_the_same_when_ranks_are_killed_or_stopped(
    asks: dict[str, Ask],
    loads: list[Sequence[Callable[[ChaosServer], None]]],
    start_server: StartServer,
    moments: random.Random,
) -> None:
    """Faults during each load, in turn."""
    server = start_server("--tensor-parallel-size", str(RANKS))
    undisturbed = await perform_all(server.url, asks)
    before = family(server)
    assert len(before) == RANKS
    for injuries in loads:
        faults = [functools.partial(each, server) for each in injuries]
        fault = functools.partial(at_random_moments, server, undisturbed, faults, moments)
        assert await injured(server, fault, asks) == undisturbed
    assert server.restarts() == sum(map(len, loads))
    assert server.metric('kaon_requests_finished_total{reason="error"}') == 0
    after = family(server)
    assert len(after) == RANKS
    wait_gone(each.pid for each in before - after)
    assert server.stop() == 0
    wait_gone(each.pid for each in after)
