"""A tensor-parallel rank is killed or stopped under load: no stream notices, and nothing of the old ranks is left."""

import functools
import random
import time
from collections.abc import Callable

import psutil

from tests.chaos.conftest import StartServer
from tests.chaos.faults import ChaosServer
from tests.chaos.injuries import injured
from tests.chaos.workload import WORKLOAD, perform_all

WINDOW = 1.5
RANKS = 2


def injure_at_random(injury: Callable[[], None], count: int, moments: random.Random) -> None:
    for _ in range(count):
        time.sleep(moments.uniform(0.4, WINDOW))
        injury()


def family(server: ChaosServer) -> set[psutil.Process]:
    """The core that runs, with its ranks."""
    (core,) = server.cores()
    return {core, *core.children()}


async def test_every_answer_is_the_same_when_ranks_are_killed_or_stopped(
    start_server: StartServer, moments: random.Random
) -> None:
    server = start_server("--tensor-parallel-size", str(RANKS), "--stall-timeout", "30")
    undisturbed = await perform_all(server.url, WORKLOAD)
    before = family(server)
    assert len(before) == RANKS
    for injury, count in ((server.kill_rank, 2), (server.stop_rank, 1)):
        fault = functools.partial(injure_at_random, injury, count, moments)
        assert await injured(server, fault) == undisturbed
    assert server.restarts() == 3
    assert server.metric('kaon_requests_finished_total{reason="error"}') == 0
    after = family(server)
    assert len(after) == RANKS
    assert not any(each.is_running() for each in before - after)
    assert server.stop() == 0
    assert not any(each.is_running() for each in after)
