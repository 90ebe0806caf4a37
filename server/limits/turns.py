"""Decides when tasks begin.

`begin_at_once` begins a task within the present callback of the event loop. `RequestTurns` and `FairLock` make tasks
wait for the turn of their owner, which is known by its party (`Owner.party`): `RequestTurns` bounds how many requests
begin in a round of the event loop, and `FairLock` lets one task into a block at a time. `HeadTurns` bounds how many
connections' heads are parsed in a round.
"""

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

_MOST_BEGUN, _LEAST_BEGUN = 8, 2
"""Most requests that begin per round of the event loop, and the number that may begin even after long rounds. With two
in every round, a quarter fewer of the shortest requests per second are answered."""

_MOST_PARSED = 32
"""Most connections whose new bytes are parsed per round, and most of those whose bytes wait. It exceeds the
number of requests that begin per round, so that the turns of parties do not depend on the order of heads."""

_LONG_ROUND_SECONDS, _LONG_FOR_LIGHT_SECONDS = 0.008, 0.002
"""Fewer requests begin after a round that took longer. The shorter time applies while there is a light party. A health
probe needs several rounds, and so does the first token of a light party."""

_LIGHT_SECONDS = 1.0
"""Time for which rounds are kept short after a request of a light party, and after which counts of requests are
halved."""


def begin_at_once(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `coroutine` until it first waits. Returns the task that continues it, or None if it has ended.

    A new task would begin in the next round of the event loop, after all callbacks that are ready. Unlike with Python
    3.12's eager tasks, there is no current task until `coroutine` first waits, so it must not begin with a timeout.
    Raises what `coroutine` raises before it first waits.
    """
    context = contextvars.copy_context()
    try:
        awaited = context.run(coroutine.send, None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_Begun(coroutine, awaited), context=context)


class _Begun(Coroutine[Any, Any, None]):
    """The rest of a coroutine that waits for `awaited`, to be continued by a task."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = [awaited]

    def send(self, value: Any) -> Any:
        return self._awaited.pop() if self._awaited else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        # A task cancels the future that it waits for, but before its first step it does not know `awaited`.
        if self._awaited and (awaited := self._awaited.pop()) is not None:
            awaited.cancel()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> NoReturn:
        raise TypeError("only a task continues it")


class _Waiting:
    """Tasks that wait for a turn, by party. Parties are in the order of their turns."""

    def __init__(self) -> None:
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._turns)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the parties."""
        return iter(self._turns)

    def add(self, party: str) -> asyncio.Future[None]:
        """Return a future that is done at the turn of the party's new task."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.setdefault(party, deque()).append(turn)
        return turn

    def begin(self, party: str) -> bool:
        """Give the party's first task its turn, and move the party to the end. Returns False if the task was
        cancelled."""
        turns = self._turns.pop(party)
        turn = turns.popleft()
        if turns:
            self._turns[party] = turns
        if turn.done():
            return False
        turn.set_result(None)
        return True


class HeadTurns:
    """Lets the heads of only a few connections be parsed per round of the event loop.

    A head, with the answer of a probe, costs up to half a millisecond. If those of a thousand connections ended at
    once, a round would take half a second. New bytes have turns of their own, so that they do not wait for old ones.
    """

    def __init__(self) -> None:
        self._left = _MOST_PARSED
        """Connections whose new bytes may still be parsed in this round."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_round_due = False
        self._context = contextvars.copy_context()
        """Context of no request, for the callbacks of all connections."""

    def may_parse(self) -> bool:
        """Whether new bytes of a connection may be parsed now. If not, use `parse_later`."""
        if not self._left:
            return False
        self._left -= 1
        self._expect_round()
        return True

    def parse_later(self, parse: Callable[[], None]) -> None:
        """Call `parse` in one of the next rounds, after all for which this was called before."""
        self._waiting.append(parse)
        self._expect_round()

    def _expect_round(self) -> None:
        if not self._is_round_due:
            self._is_round_due = True
            asyncio.get_running_loop().call_soon(self._begin_round, context=self._context)

    def _begin_round(self) -> None:
        self._is_round_due = False
        self._left = _MOST_PARSED
        try:
            for _ in range(min(len(self._waiting), _MOST_PARSED)):
                self._waiting.popleft()()
        finally:  # A connection that fails must not keep the others.
            if self._waiting:
                self._expect_round()


class RequestTurns:
    """Lets only a few requests begin per round of the event loop; parties (API keys, or else addresses) take turns.

    A request costs up to a millisecond in its first rounds. If thousands of connections or pipelines sent requests at
    once, a round would take seconds, and a health probe needs several rounds.

    A party is light if it recently sent less than half of the mean number of requests of all parties. Light parties
    precede the others, for which one request of each round is reserved. Rounds are kept short only while there is a
    light party, because fewer requests per round make smaller batches for the engine.

    While the waiting parties have several requests each, a request of a further party precedes them, too. Otherwise a
    party with steady requests would wait for all parties whose requests come in bursts, because these are light at the
    beginning of a burst.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._most = _MOST_BEGUN
        """Requests that may begin in a round: halved after a long round, one more after a short one."""
        self._expected_at = 0.0
        """Time, in the previous round, at which the next round was scheduled."""
        self._left = _MOST_BEGUN
        """Requests that may still begin in this round."""
        self._single = _Waiting()
        """Requests that came when their party had no waiting request and the waiting parties had several each."""
        self._light = _Waiting()
        """Requests that came when their party was light."""
        self._waiting = _Waiting()
        """All other requests."""
        self._numbers: dict[str, int] = {}
        """Number of waiting requests by party."""
        self._num_waiting = 0
        self._is_round_due = False
        self._counts: dict[str, float] = {}
        """Recent requests by party."""
        self._sum = 0.0
        self._halve_at = self._light_until = 0.0

    async def take(self, party: str) -> None:
        """Wait until a request of the party may begin."""
        is_light = self._count(party)
        if self._left and not self._num_waiting:
            self._left -= 1
            self._expect_round()
            return
        waiting = self._light if is_light else self._waiting
        if party not in self._numbers and self._num_waiting >= 2 * len(self._numbers) > 0:
            waiting = self._single
        turn = waiting.add(party)
        self._numbers[party] = self._numbers.get(party, 0) + 1
        self._num_waiting += 1
        self._expect_round()
        await turn

    def _count(self, party: str) -> bool:
        """Count a request. Returns whether its party is light."""
        if (now := self._clock()) >= self._halve_at:
            self._halve_at = now + _LIGHT_SECONDS
            self._counts = {each: count / 2 for each, count in self._counts.items() if count >= 1}
            self._sum = sum(self._counts.values())
        before = self._counts.get(party, 0.0)
        is_light = 2 * before * len(self._counts) < self._sum
        self._counts[party] = before + 1
        self._sum += 1
        if is_light:
            self._light_until = now + _LIGHT_SECONDS
        return is_light

    def _expect_round(self) -> None:
        if not self._is_round_due:
            self._is_round_due = True
            self._expected_at = self._clock()
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._is_round_due = False
        now = self._clock()
        most_seconds = _LONG_FOR_LIGHT_SECONDS if now < self._light_until else _LONG_ROUND_SECONDS
        is_long = now - self._expected_at > most_seconds
        self._most = max(self._most // 2, _LEAST_BEGUN) if is_long else min(self._most + 1, _MOST_BEGUN)
        self._left = self._most
        self._begin(self._single, 1 if self._light or self._waiting else 0)
        self._begin(self._light, 1 if self._waiting else 0)
        self._begin(self._waiting, 0)
        if self._left < self._most:
            self._expect_round()

    def _begin(self, waiting: _Waiting, num_kept: int) -> None:
        """Let waiting requests begin until only `num_kept` more may begin in this round."""
        while self._left > num_kept and waiting:
            party = next(iter(waiting))
            self._left -= waiting.begin(party)
            self._num_waiting -= 1
            self._numbers[party] -= 1
            if not self._numbers[party]:
                del self._numbers[party]


class FairLock:
    """A lock whose next holder is of the party with the least load. Parties with equal loads take turns."""

    def __init__(self, load: Callable[[str], float]) -> None:
        """`load(party)` is called when the lock is released."""
        self._load = load
        self._is_held = False
        self._waiting = _Waiting()

    @asynccontextmanager
    async def hold(self, party: str) -> AsyncIterator[None]:
        """Hold the lock within the context."""
        if self._is_held:
            turn = self._waiting.add(party)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # It got the lock before it was cancelled.
                    self._release()
                raise
        self._is_held = True
        try:
            yield
        finally:
            self._release()

    def has_lighter_waiting(self, party: str) -> bool:
        """Whether a party with less load than this one waits for the lock."""
        load = self._load(party)
        return any(self._load(each) < load for each in self._waiting)

    def _release(self) -> None:
        self._is_held = False
        while self._waiting and not self._is_held:
            self._is_held = self._waiting.begin(min(self._waiting, key=self._load))
