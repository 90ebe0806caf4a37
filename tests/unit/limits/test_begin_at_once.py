"""A coroutine that begins at once runs as its task would: in one context, and with cancellations and errors."""

import asyncio
import contextvars

import pytest

from server.limits.turns import begin_at_once

_VALUE = contextvars.ContextVar("_VALUE", default="outside")


async def test_it_runs_until_it_first_waits_and_ends_in_the_same_context() -> None:
    steps, gate = list[str](), asyncio.Event()

    async def work() -> None:
        token = _VALUE.set("inside")
        steps.append("begun")
        await gate.wait()
        await asyncio.sleep(0)
        steps.append(_VALUE.get())
        _VALUE.reset(token)  # An error in another context.

    task = begin_at_once(work())
    assert steps == ["begun"]
    assert _VALUE.get() == "outside"
    assert task is not None
    gate.set()
    await task
    assert steps == ["begun", "inside"]


async def test_one_that_waits_for_nothing_needs_no_task() -> None:
    async def work() -> None:
        pass

    assert begin_at_once(work()) is None


async def test_an_error_before_it_waits_is_the_caller_s_and_a_later_one_the_task_s() -> None:
    async def work(rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.sleep(0)
        raise ValueError("too bad")

    with pytest.raises(ValueError, match="too bad"):
        begin_at_once(work(0))
    task = begin_at_once(work(2))
    assert task is not None
    with pytest.raises(ValueError, match="too bad"):
        await task


async def test_it_is_cancelled_while_it_waits_and_may_wait_again_before_it_ends() -> None:
    steps = list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    task = begin_at_once(work())
    assert task is not None
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["cleaned up"]


async def test_a_task_cancelled_before_its_first_step_leaves_no_coroutine_that_waits() -> None:
    ended = list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    task = begin_at_once(work())
    assert task is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    assert ended == ["ended"]


async def test_a_task_cancelled_before_its_first_step_cancels_what_the_coroutine_waits_for() -> None:
    inner = asyncio.create_task(asyncio.Event().wait())

    async def work() -> None:
        await inner

    task = begin_at_once(work())
    assert task is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait([inner], timeout=10)
    assert inner.cancelled()
