"""Waits for the requests and cores of an `LLMEngine` between `add_request` and `collect`."""

import time
from collections.abc import Callable

from engine.client.llm_engine import LLMEngine
from tests.e2e.kaon_server import START_SECONDS


def until_begun(engine: LLMEngine) -> None:
    """Return once each live request has a token; received outputs remain to be collected."""
    replicas = engine._core._replicas
    _until(engine, lambda: all(entry.token_ids for replica in replicas for entry in replica.journal))


def until_replaced(engine: LLMEngine, pid: int) -> None:
    """Return once another core is ready in place of that one; its requests may have ended before it did."""
    core = engine._core
    _until(engine, lambda: pid not in core.pids and len(core.serving) == len(core.pids))


def until_lost(engine: LLMEngine) -> None:
    """Return once no core serves."""
    _until(engine, lambda: not engine._core.serving)


def _until(engine: LLMEngine, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        engine._core._wait(time.monotonic() + 0.1)
