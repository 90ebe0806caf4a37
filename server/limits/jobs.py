"""`Jobs`: the work of requests that blocks, in threads, shared fairly among owners.

Rendering, tokenising and checking grammars take up to seconds of CPU time for one request. Each kind of work has a
`FairPool`. Whoever asks for much waits for itself: the owner whose work has taken the least time is next, and one
owner never has all threads of a pool.
"""

import asyncio
import logging
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

from server.errors import Overloaded
from server.limits.accounts import Accounts, has_room
from server.limits.owners import Owner

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_LONGEST_RETRY_SECONDS = 60.0
_SOONEST_RETRY_SECONDS = 0.1

_MEAN_WEIGHT = 0.1
"""Weight of the latest job in the mean duration."""

_LEAST_WAITING = 2
"""Jobs that an owner may have waiting, however many others fill the queue."""

_MAX_DEBTS = 4096


class TooManyJobs(Overloaded):
    """Too much work of a kind waits, and its owner has its share of it."""


async def until_done(work: asyncio.Future[Result]) -> Result:
    """The result of `work`, or its error. If the waiting task is cancelled, it ends only when the work is done.

    Otherwise work in a thread would still run while the task continues with its cleanup.
    """
    is_cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        if (error := work.exception()) is not None:
            _log.warning("work failed while the task that waited for it was cancelled: %r", error)
        raise asyncio.CancelledError
    return work.result()


class _Line:
    """One owner in a pool."""

    __slots__ = ("running", "seconds", "waiting")

    def __init__(self, seconds: float) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.running = 0
        self.seconds = seconds
        """Time that its work has taken, divided by its weight, counted from what the owner had that was served last
        when this one came: to have been idle earns nothing."""


class FairPool:
    """Runs blocking work in a fixed number of threads. Used from the event loop's thread only."""

    def __init__(self, work: str, num_threads: int, max_waiting: float, accounts: Accounts) -> None:
        """`work` names the jobs in errors, such as `grammar checks`. More than `max_waiting` wait only in the reserve.

        With several threads, one owner has at most all but one.
        """
        self._work = work
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=work.replace(" ", "-"))
        self._num_threads = self._num_free = num_threads
        self._max_running_per_owner = max(1, num_threads - 1)
        self._max_waiting = max_waiting
        self._accounts = accounts
        self._lines: dict[str, _Line] = {}
        """Of owners whose work waits or runs."""
        self._debts: OrderedDict[str, float] = OrderedDict()
        """`_Line.seconds` of owners that left with more than others have had."""
        self._num_waiting = 0
        self._seconds = 0.0
        """Of the owner that was served last, when it was."""
        self._mean_seconds = 0.1

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for a thread."""
        return self._num_waiting

    async def run(self, owner: Owner, work: Callable[[], Result], *, stays: bool = False) -> Result:
        """What `work` returns or raises, in a copy of the caller's context. Raises `TooManyJobs`.

        If the caller is cancelled while the work waits, it never runs; if it runs, it keeps its thread until its end,
        which the caller awaits if `stays`.
        """
        line = self._line(owner.party)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append(turn)
        self._num_waiting += 1
        self._accounts.change(owner.party, "jobs", 1)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                if turn in line.waiting:
                    line.waiting.remove(turn)
                    self._num_waiting -= 1
                self._leave(owner.party, line)
            else:
                self._end(owner, line, 0.0)
            raise
        began = time.monotonic()
        running = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)
        running.add_done_callback(lambda done: self._end(owner, line, time.monotonic() - began, done))
        return await (until_done(running) if stays else asyncio.shield(running))

    def close(self) -> None:
        """Let the threads end once they have nothing to do."""
        self._threads.shutdown(wait=False)

    def _line(self, party: str) -> _Line:
        """The line of an owner that asks for a job. Raises `TooManyJobs` if that may not wait."""
        line = self._lines.get(party)
        own = 0 if line is None else len(line.waiting)
        num_owners = sum(bool(each.waiting) for each in self._lines.values()) + (not own)
        if not has_room(own, 1, self._num_waiting, self._max_waiting, num_owners, least=_LEAST_WAITING):
            seconds = self._mean_seconds * (own + 1) * num_owners / self._num_threads
            raise TooManyJobs(
                f"{self._num_waiting} {self._work} are waiting, {own} of them of this key or address, and this server "
                f"lets {self._max_waiting} wait, shared among {num_owners}",
                "requests",
                min(max(seconds, _SOONEST_RETRY_SECONDS), _LONGEST_RETRY_SECONDS),
            )
        if line is None:
            line = self._lines[party] = _Line(max(self._debts.pop(party, 0.0), self._seconds))
        return line

    def _start_next(self) -> None:
        """Give free threads to the owners that have had the least."""
        while self._num_free:
            line = min(
                (each for each in self._lines.values() if each.waiting and each.running < self._max_running_per_owner),
                key=lambda each: each.seconds,
                default=None,
            )
            if line is None:
                return
            turn = line.waiting.popleft()
            self._num_waiting -= 1
            if turn.cancelled():
                continue  # Its caller leaves, and has not run yet.
            self._num_free -= 1
            line.running += 1
            self._seconds = max(self._seconds, line.seconds)
            turn.set_result(None)

    def _end(self, owner: Owner, line: _Line, seconds: float, done: asyncio.Future[Any] | None = None) -> None:
        """A job that had a thread has ended."""
        if done is not None and not done.cancelled():
            done.exception()  # The caller may be gone: then nobody else asks for it.
            self._mean_seconds += _MEAN_WEIGHT * (seconds - self._mean_seconds)
        line.running -= 1
        line.seconds += seconds / owner.weight
        self._num_free += 1
        self._leave(owner.party, line)
        self._start_next()

    def _leave(self, party: str, line: _Line) -> None:
        """A job of this owner no longer waits or runs."""
        self._accounts.change(party, "jobs", -1)
        if line.waiting or line.running or self._lines.get(party) is not line:
            return
        del self._lines[party]
        if line.seconds > self._seconds:
            self._debts[party] = line.seconds
            if len(self._debts) > _MAX_DEBTS:
                self._debts.popitem(last=False)


class OwnerJobs(NamedTuple):
    """The pools, for the work of one owner."""

    owner: Owner
    pools: "Jobs"

    async def body(self, work: Callable[[], Result]) -> Result:
        """Parse and validate a large request body."""
        return await self.pools.bodies.run(self.owner, work)

    async def text(self, work: Callable[[], Result]) -> Result:
        """Render, tokenise or write text."""
        return await self.pools.texts.run(self.owner, work)

    async def template(self, work: Callable[[], Result]) -> Result:
        """Render with a template that the request brings."""
        return await self.pools.templates.run(self.owner, work)

    async def grammar(self, work: Callable[[], Result]) -> Result:
        """Check a grammar."""
        return await self.pools.grammars.run(self.owner, work)


class Jobs:
    """The pools of one server."""

    def __init__(self, accounts: Accounts) -> None:
        # One thread: more would not be faster, and would each delay the event loop by the time of a switch.
        self.bodies = FairPool("request bodies", 1, 64, accounts)
        self.texts = FairPool("prompts", min(32, (os.cpu_count() or 1) + 2), 512, accounts)
        self.templates = FairPool("templates of requests", 2, 64, accounts)
        self.grammars = FairPool("grammar checks", NUM_GRAMMAR_CHECKS, 64, accounts)
        # One thread: each further one that reads lines would take a turn of the interpreter before the event loop. The
        # number of batches is limited elsewhere, and those that were accepted are not refused here.
        self.batches = FairPool("files of batches", 1, math.inf, accounts)

    def of(self, owner: Owner) -> OwnerJobs:
        """For the work of one owner."""
        return OwnerJobs(owner, self)

    def close(self) -> None:
        """Let the threads end once they have nothing to do."""
        for pool in (self.bodies, self.texts, self.templates, self.grammars, self.batches):
            pool.close()


NUM_GRAMMAR_CHECKS = 2
"""Grammars that are checked at a time: one owner's costly ones leave a process to the others."""
