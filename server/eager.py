"""`begin_at_once`: runs a coroutine until it first waits, within the present callback of the event loop.

A new task would begin in the next round of the loop, after all callbacks that are ready.
"""

import asyncio
import contextvars
import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any


def begin_at_once(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `coroutine` until it first waits. Returns the task that continues it, or None if it has ended.

    As one of Python 3.12's eager tasks, except that there is no current task until it first waits, so that it must not
    begin with a timeout. Raises what it raises until then.
    """
    context = contextvars.copy_context()
    try:
        awaited = context.run(coroutine.send, None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_await(_rest(coroutine, awaited)), context=context)


async def _await(rest: Awaitable[None]) -> None:
    await rest


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Wait for `awaited`, which `coroutine` waits for, and then for the rest of it."""
    try:
        while True:
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - such as a cancellation, which is the coroutine's
                awaited = None  # A failed future, its error and this frame would be a cycle.
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(None)
    except StopIteration:
        return
