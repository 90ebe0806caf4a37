"""What waits for a request's sequences: `DeltaStream` for a stream, `Results` for an answer at once.

Made by `server.generation`, filled by the hub.
"""

import asyncio
import math
import sys
from collections.abc import Callable, Sequence

from engine.request_state import RequestDelta
from server.errors import ApiError

_DELTA_BYTES = 256
"""Of a delta's objects without its text: the delta, its list and its token."""

_LOGPROB_BYTES = 256
"""Of one token's log probability."""

_ALTERNATIVE_BYTES = 80
"""Of each alternative beside it."""

_FEWEST_STEPS = 8
"""A client that is so few steps behind is not slow, however much a step brings."""


class DeltaStream:
    """Deltas on the way to a streaming client, at most one a sequence: while the client lags, they merge.

    What it leaves lying is counted. Past a bound `on_full` is called, and `on_room` once all of it was taken and has
    gone out; in between, whoever fills the stream should stop.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        on_full: Callable[["DeltaStream"], object] | None = None,
        on_room: Callable[[], object] | None = None,
    ) -> None:
        """`max_bytes`: about so many may lie here besides the first delta of each sequence."""
        self._pending: dict[int, RequestDelta] = {}
        self._behind: dict[int, list[RequestDelta]] = {}
        """What came behind a pending delta; merged only when it is taken, as each merging copies all."""
        self._silent: dict[int, list[RequestDelta]] = {}
        """Deltas without text: they go with the sequence's next one."""
        self._error: ApiError | None = None
        self._arrived = asyncio.Event()
        self._num_bytes = 0
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._on_full = on_full
        self._on_room = on_room
        self._is_full = False

    def put(self, index: int, delta: RequestDelta) -> None:
        """Add a delta; one that has nothing to tell wakes nobody."""
        if index in self._pending:
            self._put_behind(index, delta)
        elif delta.text or delta.finished or delta.logprobs or delta.prompt_logprobs is not None:
            if self._silent and (silent := self._silent.pop(index, None)) is not None:
                delta = _merged([*silent, delta])
            self._pending[index] = delta
            self._arrived.set()
        elif delta.token_ids:
            self._silent.setdefault(index, []).append(delta)

    def _put_behind(self, index: int, delta: RequestDelta) -> None:
        behind = self._behind.setdefault(index, [])
        behind.append(delta)
        self._num_bytes += _size(delta)
        if self._num_bytes > self._max_bytes and len(behind) >= _FEWEST_STEPS and not self._is_full:
            self._is_full = True
            if self._on_full is not None:
                self._on_full(self)

    def fail(self, error: ApiError) -> None:
        """Have `take` raise `error` once what came before it is taken."""
        self._error = error
        self._arrived.set()

    async def take(self) -> dict[int, RequestDelta]:
        """What arrived since the last call, by sequence; waits for something. Raises what `fail` was given.

        The call says that what was taken before has gone out.
        """
        if self._is_full and not self._pending and self._error is None:
            self._is_full = False
            if self._on_room is not None:
                self._on_room()
        await self._arrived.wait()
        self._arrived.clear()
        taken, self._pending = self._pending, {}
        if self._behind:
            for index, behind in self._behind.items():
                taken[index] = _merged([taken[index], *behind])
            self._behind = {}
            self._num_bytes = 0
        if self._error is not None:
            self._arrived.set()
            if not taken:
                raise self._error
        return taken


def _size(delta: RequestDelta) -> int:
    """Bytes that a delta takes, about. Those of a prompt's log probabilities, which come once, do not count."""
    size = _DELTA_BYTES + sys.getsizeof(delta.text)
    if delta.logprobs:
        size += len(delta.logprobs) * (_LOGPROB_BYTES + _ALTERNATIVE_BYTES * len(delta.logprobs[0].top_ids))
    return size


def _merged(deltas: Sequence[RequestDelta]) -> RequestDelta:
    last = deltas[-1]
    return RequestDelta(
        "".join([delta.text for delta in deltas]),
        [token_id for delta in deltas for token_id in delta.token_ids],
        [logprob for delta in deltas for logprob in delta.logprobs or ()] or None,
        last.finished,
        last.finish_reason,
        last.stop_reason,
        last.error,
        next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        [step for delta in deltas for step in delta.steps],
    )


class Results:
    """Waits until all of a request's sequences have ended; their states then hold the answer."""

    def __init__(self, count: int) -> None:
        self._remaining = count
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, index: int, delta: RequestDelta) -> None:
        """Count the sequence's end."""
        self._remaining -= delta.finished
        if not self._remaining and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: ApiError) -> None:
        """Have `wait` raise `error`."""
        if not self._done.done():
            self._done.set_exception(error)

    async def wait(self) -> None:
        """Until the last sequence ended. Raises what `fail` was given."""
        await self._done
