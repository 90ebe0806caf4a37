"""The whole load on a server that something happens to."""

import asyncio
from collections.abc import Callable

from tests.chaos.faults import ChaosServer
from tests.chaos.outcomes import Outcome
from tests.chaos.workload import WORKLOAD, perform_all


async def injured(server: ChaosServer, fault: Callable[[], object]) -> dict[str, Outcome]:
    """The outcomes of the whole load, during which the fault happens; and nothing is left behind."""
    happening = asyncio.create_task(asyncio.to_thread(fault))
    outcomes = await perform_all(server.url, WORKLOAD)
    await happening
    await asyncio.to_thread(server.until, server.is_idle)
    received, ended = server.balance()
    assert received == ended
    return outcomes
