"""Sleep and wake-up of a front end, whose state follows its core's also if callers leave or the server ends."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.config.config import Config
from server.errors import ShuttingDown
from server.frontend import Frontend
from tests.unit.server.test_face import LoadingCore


class SlowCore(LoadingCore):
    """A core that is ready, and completes each call at `done`."""

    is_serving = True

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.calls: list[str] = []
        self.running = 0

    async def sleep(self, level: int) -> None:
        await self._call(f"sleep {level}")

    async def wake_up(self) -> None:
        await self._call("wake up")

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        self.running += 1
        assert self.running == 1, "two calls at a time"
        await self.done.wait()
        self.done.clear()
        self.running -= 1


def serving() -> tuple[Frontend, SlowCore]:
    core = SlowCore()
    frontend = Frontend(Config(model="/m"), core)  # type: ignore[arg-type]
    frontend._loaded = SimpleNamespace(grammars=SimpleNamespace(close=lambda: None))  # type: ignore[assignment]
    return frontend, core


async def turns() -> None:
    """Let all tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_call_waits_for_the_one_before_whose_caller_is_gone() -> None:
    frontend, core = serving()
    for call, other in ((frontend.sleep(2), frontend.wake_up()), (frontend.sleep(1), frontend.wake_up())):
        first = asyncio.ensure_future(call)
        await turns()
        first.cancel()
        second = asyncio.ensure_future(other)
        await turns()
        assert (core.running, len(core.calls), frontend.is_asleep) == (1, 1, True)
        core.done.set()
        await turns()
        assert (core.running, len(core.calls), frontend.is_asleep) == (1, 2, False)
        second.cancel()
        core.done.set()
        await turns()
        assert (core.running, frontend.is_asleep) == (0, False)
        core.calls.clear()


async def test_a_call_whose_caller_is_gone_before_its_turn_is_carried_out() -> None:
    frontend, core = serving()
    first = asyncio.ensure_future(frontend.sleep(1))
    await turns()
    second = asyncio.ensure_future(frontend.wake_up())
    await turns()
    second.cancel()
    core.done.set()
    await first
    await turns()
    assert core.calls == ["sleep 1", "wake up"]
    core.done.set()
    await turns()
    assert not frontend.is_asleep


async def test_a_server_that_drains_wakes_up_for_its_paused_requests() -> None:
    frontend, core = serving()
    core.done.set()
    await frontend.sleep(1)
    frontend.drain()
    core.done.set()
    await frontend.wake_up()
    assert core.calls == ["sleep 1", "wake up"]
    with pytest.raises(ShuttingDown):
        await frontend.sleep(1)


async def test_a_server_that_has_ended_its_requests_starts_no_core() -> None:
    frontend, core = serving()
    core.done.set()
    await frontend.sleep(2)
    frontend.close()
    core.done.set()
    with pytest.raises(ShuttingDown):
        await frontend.wake_up()
    assert core.calls == ["sleep 2"]
    assert frontend.is_asleep
