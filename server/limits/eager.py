"""`begin_at_once`: runs a coroutine until it first waits, within the present callback of the event loop.

A new task would begin in the next round of the loop, after all callbacks that are ready.
"""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, NoReturn


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
    return asyncio.get_running_loop().create_task(_Begun(coroutine, awaited), context=context)


class _Begun(Coroutine[Any, Any, None]):
    """The rest of a coroutine that waits for `awaited`, for a task."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = [awaited]

    def send(self, value: Any) -> Any:
        return self._awaited.pop() if self._awaited else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        # A task cancels what it waits for, but before its first step it has not learned of `awaited`.
        if self._awaited and (awaited := self._awaited.pop()) is not None:
            awaited.cancel()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> NoReturn:
        raise TypeError("only a task continues it")
