"""`Jobs`: runs the blocking work of requests in threads, shared fairly among owners.

Rendering, tokenising and checking grammars take up to seconds of CPU time for one request. Each kind of work has a
`FairPool`: the next thread goes to the owner whose work has taken the least time, and one owner never has all threads
of a pool. An owner that asks for much work therefore delays mainly itself.
"""

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

from engine.fair_shares import FairShares
from server.errors import Overloaded
from server.limits.accounts import Accounts, has_room
from server.limits.owners import Owner

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_LONGEST_RETRY_SECONDS = 60.0
_SOONEST_RETRY_SECONDS = 0.1

_MEAN_WEIGHT = 0.1
"""Weight of the latest job in the moving average of the duration."""

_LEAST_WAITING = 2
"""Number of waiting jobs that an owner may always have, even if other owners fill the queue."""

_CREDIT_SECONDS = 1.0
"""Most unused time of its share that an owner may use later, with precedence over others."""

_LONGEST_REST_SECONDS = 0.1

MANY_OBJECTS = 512
"""Lists and objects of a body, beyond which few such bodies are parsed and prepared at a time."""

NUM_GRAMMAR_CHECKS = 2
"""Grammars that are checked at a time: costly grammars of one owner leave a process free for the others."""

_LONGEST_SLOT_SECONDS = 5.0
"""Time after which a slot is freed although its request still waits, for a model to load or for costly grammars: other
requests with many objects must not wait for these."""


class TooManyJobs(Overloaded):
    """Too many jobs of a kind are waiting, and the owner has its share of them."""


async def until_done(work: asyncio.Future[Result]) -> Result:
    """Return the result of `work`, or raise its error. A cancelled caller still waits until the work is done.

    Otherwise the work would still run in its thread while the caller cleans up.
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


class _OwnerQueue:
    """The waiting and running jobs of one owner in a pool."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.running = 0


class FairPool:
    """Runs blocking work in a fixed number of threads. Used from the event loop's thread only."""

    def __init__(
        self, work: str, num_threads: int, max_waiting: float, accounts: Accounts, *, rest: float = 0.0
    ) -> None:
        """`work` names the jobs in errors, such as `grammar checks`. At most `max_waiting` wait, plus `has_room`'s
        reserve.

        With several threads, one owner uses at most all but one. After each job its thread is idle for `rest` times
        the duration of the job, at most `_LONGEST_REST_SECONDS`.
        """
        self._work = work
        self._rest = rest
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=work.replace(" ", "-"))
        self._num_threads = self._num_free = num_threads
        self._max_running = max(1, num_threads - 1)
        """Most threads of one owner."""
        self._max_waiting = max_waiting
        self._accounts = accounts
        self._queues: dict[str, _OwnerQueue] = {}
        """Queues by party, of the owners whose jobs wait or run."""
        self._shares = FairShares(_CREDIT_SECONDS)
        """The seconds that the jobs of each party have taken."""
        self._num_waiting = 0
        self._mean_seconds = 0.1

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait for a thread."""
        return self._num_waiting

    async def run(self, owner: Owner, work: Callable[[], Result], *, stays: bool = False) -> Result:
        """Run `work` in a thread, in a copy of the caller's context; return its result. Raises `TooManyJobs`.

        If the caller is cancelled while the work waits, the work never runs. Work that runs keeps its thread until its
        end; a cancelled caller waits for that if `stays`.
        """
        queue = await self._take_turn(owner)
        began = time.monotonic()
        running = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)
        running.add_done_callback(lambda done: self._end(owner, queue, time.monotonic() - began, done))
        return await (until_done(running) if stays else asyncio.shield(running))

    @asynccontextmanager
    async def slot(self, owner: Owner) -> AsyncIterator[Callable[[], None]]:
        """Hold the slot of a thread during the block, which runs in the caller's task, for at most
        `_LONGEST_SLOT_SECONDS`. Yields a function that frees it earlier. Raises `TooManyJobs`."""
        queue = await self._take_turn(owner)
        began, is_held = time.monotonic(), True

        def free() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                limit.cancel()
                self._end(owner, queue, time.monotonic() - began)

        limit = asyncio.get_running_loop().call_later(_LONGEST_SLOT_SECONDS, free)
        try:
            yield free
        finally:
            free()

    def close(self) -> None:
        """Let each thread end when its job is done."""
        self._threads.shutdown(wait=False)

    async def _take_turn(self, owner: Owner) -> _OwnerQueue:
        """Wait until the owner may use a thread, which `_end` frees. Returns the owner's queue."""
        queue = self._queue(owner.party)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.waiting.append(turn)
        self._num_waiting += 1
        self._accounts.change(owner.party, "jobs", 1)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                if turn in queue.waiting:
                    queue.waiting.remove(turn)
                    self._num_waiting -= 1
                self._leave(owner.party, queue)
            else:
                self._end(owner, queue, 0.0)
            raise
        return queue

    def _queue(self, party: str) -> _OwnerQueue:
        """Return the queue of an owner that submits a job. Raises `TooManyJobs` if no further job of it may wait."""
        queue = self._queues.get(party)
        own = 0 if queue is None else len(queue.waiting)
        num_owners = sum(bool(each.waiting) for each in self._queues.values()) + (not own)
        if not has_room(own, 1, self._num_waiting, self._max_waiting, num_owners, least=_LEAST_WAITING):
            seconds = (1.0 + self._rest) * self._mean_seconds * (own + 1) * num_owners / self._num_threads
            raise TooManyJobs(
                f"{self._num_waiting} {self._work} are waiting, {own} of them of this key or address, and this server "
                f"lets {self._max_waiting} wait, shared among {num_owners}",
                "requests",
                min(max(seconds, _SOONEST_RETRY_SECONDS), _LONGEST_RETRY_SECONDS),
            )
        if queue is None:
            self._shares.join(party)
            queue = self._queues[party] = _OwnerQueue()
        return queue

    def _start_next(self) -> None:
        """Start jobs in the free threads, of the owners whose jobs took the least time first."""
        self._shares.set_time(time.monotonic())
        while self._num_free:
            party = min(
                (each for each, of in self._queues.items() if of.waiting and of.running < self._max_running),
                key=self._shares.served,
                default=None,
            )
            if party is None:
                return
            queue = self._queues[party]
            turn = queue.waiting.popleft()
            self._num_waiting -= 1
            if turn.cancelled():
                continue  # Its caller was cancelled, and has not run yet.
            self._num_free -= 1
            queue.running += 1
            self._shares.serve(party, 0.0)
            turn.set_result(None)

    def _end(
        self,
        owner: Owner,
        queue: _OwnerQueue,
        seconds: float,
        done: asyncio.Future[Any] | None = None,
    ) -> None:
        """Note that a job that had a thread has ended."""
        if done is not None and not done.cancelled():
            done.exception()  # Mark the error as retrieved: a cancelled caller does not retrieve it.
            self._mean_seconds += _MEAN_WEIGHT * (seconds - self._mean_seconds)
        queue.running -= 1
        self._shares.charge(owner.party, seconds / owner.weight)
        if rest := min(self._rest * seconds, _LONGEST_REST_SECONDS):
            asyncio.get_running_loop().call_later(rest, self._free_thread)
        else:
            self._num_free += 1
        self._leave(owner.party, queue)
        self._start_next()

    def _free_thread(self) -> None:
        """Let a thread whose rest is over take the next job."""
        self._num_free += 1
        self._start_next()

    def _leave(self, party: str, queue: _OwnerQueue) -> None:
        """Remove one of this owner's jobs, which no longer waits or runs."""
        self._accounts.change(party, "jobs", -1)
        if queue.waiting or queue.running or self._queues.get(party) is not queue:
            return
        del self._queues[party]
        if self._shares.is_crowded:
            self._shares.forget_all_but(self._queues.keys())


class OwnerJobs(NamedTuple):
    """The pools, as used for one owner's requests."""

    owner: Owner
    pools: "Jobs"

    async def body(self, work: Callable[[], Result]) -> Result:
        """Parse and validate a large request body."""
        return await self.pools.bodies.run(self.owner, work)

    def objects(self, body: bytes) -> AbstractAsyncContextManager[Callable[[], None]]:
        """Return a context for the time in which the objects of a body exist. Few bodies of many objects may at a
        time. The context yields a function to call if there are few: brackets in strings are counted too."""
        many = body.count(b"{") + body.count(b"[") > MANY_OBJECTS
        return self.pools.objects.slot(self.owner) if many else nullcontext(lambda: None)

    async def text(self, work: Callable[[], Result], *, is_large: bool = False) -> Result:
        """Render, tokenise or write text. `is_large`: whether it computes in Python for long, as for very many
        messages."""
        return await (self.pools.large_texts if is_large else self.pools.texts).run(self.owner, work)

    async def template(self, work: Callable[[], Result]) -> Result:
        """Render a chat template that the request contains."""
        return await self.pools.templates.run(self.owner, work)

    async def grammar(self, work: Callable[[], Result]) -> Result:
        """Check a grammar."""
        return await self.pools.grammars.run(self.owner, work)


class Jobs:
    """The pools of one server."""

    def __init__(self, accounts: Accounts) -> None:
        # One thread: more are not faster, since parsing holds the interpreter lock, and each delays the event loop. It
        # rests because it holds the lock for up to 50 ms at a time, and a probe needs the lock several times.
        self.bodies = FairPool("request bodies", 1, 64, accounts, rest=1.0)
        # Only its slots are used. Full garbage collections hold the interpreter lock for 0.4 microseconds per object.
        self.objects = FairPool("request bodies of many objects", 4, 64, accounts)
        self.texts = FairPool("prompts", min(32, (os.cpu_count() or 1) + 2), 512, accounts)
        # Few threads, since Python in each delays the event loop; more on large machines, since tokenising does not.
        self.large_texts = FairPool("prompts of many messages", max(1, (os.cpu_count() or 1) // 8), 512, accounts)
        # One thread, for the same reason. Answers that are computed already are not refused.
        self.answers = FairPool("answers", 1, math.inf, accounts)
        self.templates = FairPool("templates of requests", 2, 64, accounts)
        self.grammars = FairPool("grammar checks", NUM_GRAMMAR_CHECKS, 64, accounts)
        # One thread: each further one that reads lines would hold the interpreter lock in turn with the event loop.
        # The number of batches is limited elsewhere, so an accepted batch is not refused here.
        self.batches = FairPool("files of batches", 1, math.inf, accounts)
        # These mostly wait for the disk, and for the lock of the database. The pool is not closed: an upload may need
        # it until the server's end.
        self.store_calls = FairPool("calls of files and batches", 4, 512, accounts)
        # The same for lines of running batches, which are not refused: `BatchRunner` bounds their number.
        self.lines = FairPool("lines of batches", 2, math.inf, accounts)

    def of(self, owner: Owner) -> OwnerJobs:
        """Return the pools for the work of one owner."""
        return OwnerJobs(owner, self)

    def close(self) -> None:
        """Let each thread end when its job is done."""
        texts = (self.texts, self.large_texts, self.answers, self.templates)
        for pool in (self.bodies, self.objects, *texts, self.grammars, self.batches):
            pool.close()
