"""A load on a server, with faults injected at times that the load's progress determines."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

from tests.chaos.faults import ChaosServer
from tests.chaos.outcomes import Outcome
from tests.chaos.workload import WORKLOAD, Ask, perform_all


async def injured(
    server: ChaosServer, fault: Callable[[], object], load: Mapping[str, Ask] = WORKLOAD
) -> dict[str, Outcome]:
    """The outcomes of a load during which the fault happens; afterwards, no state may remain."""
    happening = asyncio.create_task(asyncio.to_thread(fault))
    outcomes = await perform_all(server.url, load)
    await happening
    await asyncio.to_thread(server.until, server.is_idle)
    received, ended = server.balance()
    assert received == ended
    return outcomes


def at_random_moments(
    server: ChaosServer, answers: Mapping[str, Outcome], faults: Sequence[Callable[[], object]], moments: random.Random
) -> None:
    """Inject faults in turn while the server answers the load."""
    before, tokens = server.generated(), sum(map(_tokens, answers.values()))
    # A part of the load always remains, so that there is something to interrupt.
    parts = sorted(moments.uniform(0.02, 0.6) for _ in faults)
    for fault, part in zip(faults, parts, strict=True):
        server.until_generated(before + part * tokens)
        fault()
        # A request is not retried after several cores have died in it without a token between.
        server.until_all_go_on()


def _tokens(outcome: Outcome) -> int:
    usage = outcome["usage"]
    tokens: int = usage["output_tokens"] if "output_tokens" in usage else usage["completion_tokens"]
    return tokens
