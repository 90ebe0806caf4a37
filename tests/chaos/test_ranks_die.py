"""A tensor-parallel rank is killed or stopped under load: no stream notices, and nothing of the old ranks is left."""

import functools
import random
import time
from collections.abc import Callable, Sequence

import psutil
import pytest

from tests.chaos.conftest import StartServer
from tests.chaos.faults import ChaosServer
from tests.chaos.injuries import injured
from tests.chaos.workload import WORKLOAD, perform_all

WINDOW = 1.5
RANKS = 2


def injure_at_random(injuries: Sequence[Callable[[], None]], moments: random.Random) -> None:
    for injury in injuries:
        time.sleep(moments.uniform(0.4, WINDOW))
        injury()


def family(server: ChaosServer) -> set[psutil.Process]:
    """The core that runs, with its ranks."""
    (core,) = server.cores()
    return {core, *core.children()}


KILL, STOP = ChaosServer.kill_rank, ChaosServer.stop_rank


@pytest.mark.parametrize(
    "loads",
    [
        pytest.param([(KILL, STOP)], id="one load"),
        pytest.param([(KILL, KILL), (STOP,)], id="two loads", marks=pytest.mark.slow),
    ],
)
async def test_every_answer_is_the_same_when_ranks_are_killed_or_stopped(
    loads: list[tuple[Callable[[ChaosServer], None], ...]], start_server: StartServer, moments: random.Random
) -> None:
    """By what happens during each load, the ones after the others."""
    server = start_server("--tensor-parallel-size", str(RANKS), "--stall-timeout", "30")
    undisturbed = await perform_all(server.url, WORKLOAD)
    before = family(server)
    assert len(before) == RANKS
    for injuries in loads:
        fault = functools.partial(injure_at_random, [functools.partial(each, server) for each in injuries], moments)
        assert await injured(server, fault) == undisturbed
    assert server.restarts() == sum(map(len, loads))
    assert server.metric('kaon_requests_finished_total{reason="error"}') == 0
    after = family(server)
    assert len(after) == RANKS
    assert not any(each.is_running() for each in before - after)
    assert server.stop() == 0
    assert not any(each.is_running() for each in after)
