"""`BatchRunner`: validates batches and computes their lines by the server's own routes, at low priority.

A line is answered like a request with the same body, but at low priority and accounted to a separate party of low
weight. If the server is too busy or not ready, the line waits. After a restart of the server, an incomplete batch
continues with the lines that have no answer.
"""

import asyncio
import errno
import functools
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import msgspec
from starlette.types import ASGIApp, Message

from server.access_log import RequestFacts, new_request_id
from server.batches.lines import AROUND_BODY_BYTES, MAX_LINE_BYTES, Line, Pace, output_line, read_lines, request_body
from server.batches.store import Batch, BatchStore, FileNotFound
from server.errors import EngineError, InvalidApiKey, ShuttingDown
from server.limits.jobs import FairPool, Jobs
from server.limits.owners import Owner
from server.limits.turns import FairLock
from server.schemas.batches import BatchError, BatchObject, BatchStatus

_log = logging.getLogger(__name__)

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_WEIGHT = 0.1
"""Factor on the owner's weight for its batches."""

_FETCHED_LINES = 64
_BUSY_SHARE = 8
"""With live requests, at most 1 / 8 of the allowed lines run at a time."""
_RECHECK_SECONDS = 0.2
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_RETRY_SECONDS = (0.25, 8.0)
"""First and longest delay before a failed line or a failed write to disk is tried again."""
_EXPIRY_SECONDS = 600.0
"""Seconds between two deletions of expired files and batches."""
_ATTEMPTS = 3
"""Number of attempts for a line that the server fails on."""
_TRY_AGAIN = (429, 503)


class _Answer(NamedTuple):
    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class BatchRunner:
    """Runs the batches of one server. Used from its event loop only."""

    def __init__(
        self,
        store: BatchStore,
        answer: ASGIApp,
        num_live: Callable[[], int],
        max_lines: int,
        jobs: Jobs,
        holder: Callable[[str], Owner | None] = Owner.of_key,
        max_body_bytes: Callable[[], int] = lambda: MAX_LINE_BYTES - AROUND_BODY_BYTES,
    ) -> None:
        """`answer` is the application without authentication and access log.

        `num_live` returns the number of live sequences of the server. At most `max_lines` lines run at a time. `jobs`
        has the threads for the store. `holder` returns the owner of the key with a digest, or None if the key is no
        longer accepted. `max_body_bytes` returns the largest body of a request.
        """
        self.store = store
        self._answer = answer
        self._num_live = num_live
        self._max_lines = max_lines
        self._jobs = jobs
        self._holder = holder
        self._max_body_bytes = max_body_bytes
        self._running: Counter[str] = Counter()
        """Number of running lines by party."""
        self._unfinished = WeakValueDictionary[str, asyncio.Semaphore]()
        """By party, the room for lines that run or will be tried again, of all of its batches. Otherwise a hundred
        batches beyond a quota would try thousands of lines again every few seconds."""
        self._unwritten: Counter[str] = Counter()
        """Number of writes by batch that have failed and are tried again."""
        self._line_ended = asyncio.Event()
        self._begins = FairLock(self._running.__getitem__)
        """Held by the next line that begins, of the party with the fewest running lines."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_stopped = False
        self._expiry: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Continue the batches of an earlier server, and begin to delete expired files and batches regularly."""
        self._expiry = asyncio.create_task(self._expire())
        for batch in self.store.unfinished():
            _log.info("%s goes on: it is %s", batch.object.id, batch.object.status)
            self.run(batch)

    def run(self, batch: Batch) -> None:
        """Run a batch of the store in the background. After `stop`, no batch is started; the next server runs it."""
        if self._is_stopped:
            return
        id = batch.object.id
        self._tasks[id] = task = asyncio.create_task(self._run(batch), name=id)
        task.add_done_callback(lambda _: self._tasks.pop(id, None))

    async def cancel(self, batch: Batch) -> BatchObject:
        """Cancel a batch and write its completed answers. Returns the batch after that. Raises `TooManyJobs`."""
        id, owner, calls = batch.object.id, Owner(batch.party), self._jobs.store_calls
        task = self._tasks.get(id)
        if task is None:
            return await calls.run(owner, lambda: self.store.batch(id, batch.owner))
        cancelled = await calls.run(owner, lambda: self.store.update(id, "cancelling"), stays=True)
        # A second cancellation would interrupt the writing of the answers.
        if cancelled.status == "cancelling" != batch.object.status and not task.cancelling():
            task.cancel()
        return cancelled

    async def stop(self) -> None:
        """Stop all batches. The next server computes the interrupted lines again."""
        self._is_stopped = True
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop all batches, and close the store."""
        if self._expiry is not None:
            self._expiry.cancel()
        await self.stop()
        await asyncio.to_thread(self.store.close)

    async def _expire(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.store.delete_expired)
            except (OSError, sqlite3.OperationalError) as error:
                _log.error("expired files are not deleted yet: %s", error)
            except ShuttingDown:
                return
            await asyncio.sleep(_EXPIRY_SECONDS)

    # -- one batch ----------------------------------------------------------------------------------------------

    async def _run(self, batch: Batch) -> None:
        id, all_lines = batch.object.id, self._jobs.batches
        try:
            # Reading and writing are one job: read lines of many batches that wait to be written would fill the
            # memory. A batch that was cancelled before also has errors for all of its lines.
            is_read = batch.object.in_progress_at is not None
            if not is_read and not await self._write(all_lines, batch, self._validate, batch):
                return
            if batch.object.status == "cancelling":
                raise asyncio.CancelledError
            try:
                async with asyncio.timeout(batch.object.expires_at - time.time()):
                    await self._run_lines(batch)
                await self._write(self._jobs.lines, batch, self.store.update, id, "finalizing")
                status: BatchStatus = "completed"
            except TimeoutError:
                status = "expired"
            await self._write(all_lines, batch, self.store.finish, batch, status)
        except asyncio.CancelledError:
            if id not in self._tasks:
                raise  # The server ends.
            await self._write(all_lines, batch, self.store.finish, batch, "cancelled")
        except Exception as error:  # noqa: BLE001 - the client reads it in the batch
            _log.exception("%s failed", id)
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            why = BatchError("server_error", f"the server could not compute the batch: {cause}")
            await self._write(all_lines, batch, self.store.finish, batch, "failed", [why])

    async def _write(
        self,
        pool: FairPool,
        batch: Batch,
        write: Callable[_Parameters, _Result],
        *arguments: _Parameters.args,
        **keywords: _Parameters.kwargs,
    ) -> _Result:
        """Call a writing method of the store, again and again while it fails, for instance because the disk is full.

        `pool`: `Jobs.batches` for work on all lines of a batch, else `Jobs.lines`. All waiting writes of a batch have
        one line in the log.
        """
        owner, work, id = Owner(batch.party), functools.partial(write, *arguments, **keywords), batch.object.id
        wait, has_failed = _RETRY_SECONDS[0], False
        try:
            while True:
                try:
                    result = await pool.run(owner, work, stays=True)
                except (OSError, sqlite3.OperationalError) as error:
                    if not has_failed and not self._unwritten[id]:
                        _log.error("%s waits, because the store of batches cannot be written: %s", id, error)
                    self._unwritten[id] += not has_failed
                    has_failed = True
                else:
                    if has_failed and self._unwritten[id] == 1:
                        _log.info("%s no longer waits for the store of batches", id)
                    return result
                await asyncio.sleep(wait)
                wait = min(2 * wait, _RETRY_SECONDS[1])
        finally:
            self._unwritten[id] -= has_failed
            if not self._unwritten[id]:
                del self._unwritten[id]

    def _validate(self, batch: Batch) -> bool:
        """Read the lines of a new batch. Returns False if they are invalid, and the batch has failed."""
        store, id = self.store, batch.object.id
        try:
            path = store.path(batch.object.input_file_id, batch.owner)
        except FileNotFound as error:
            store.fail(id, [BatchError("file_not_found", str(error), param="input_file_id")])
            return False
        max_bytes = self._max_body_bytes() + AROUND_BODY_BYTES
        lines, errors = read_lines(path, batch.object.endpoint, Pace().rest, max_bytes)
        if errors:
            store.fail(id, errors)
            return False
        store.begin(id, lines)
        return True

    async def _run_lines(self, batch: Batch) -> None:
        """Compute every pending line."""
        id, owner, number = batch.object.id, Owner(batch.party), -1
        unfinished = self._unfinished.setdefault(batch.party, asyncio.Semaphore(self._max_lines))
        async with asyncio.TaskGroup() as running:
            while lines := await self._jobs.lines.run(
                owner, functools.partial(self.store.pending, id, number, _FETCHED_LINES)
            ):
                number = lines[-1].number
                for line in lines:
                    await unfinished.acquire()
                    try:
                        body = [await self._begin_line(batch, line)]
                    except BaseException:  # A cancellation, while the party's other batches go on.
                        unfinished.release()
                        raise
                    task = running.create_task(self._run_line(batch, line, body))
                    task.add_done_callback(lambda _: self._end_line(batch))
                    task.add_done_callback(lambda _: unfinished.release())

    async def _begin_line(self, batch: Batch, line: Line) -> bytes:
        """Wait until the line may run, and return the body of its request. One line begins in each round of the event
        loop, and fewer lines run while live requests do. The next line is one of the owner with the fewest running
        lines, however many batches other owners have, and an owner without any does not wait for theirs to end.

        A line costs the loop a third of a millisecond, and dozens begin when a batch does, or are tried again. It is
        read only now: the lines of all batches that wait would fill the memory.
        """
        owner, endpoint, party = Owner(batch.party), batch.object.endpoint, batch.party
        while True:
            async with self._begins.hold(party):
                await asyncio.sleep(0)
                while True:
                    if self._may_begin(party):
                        try:
                            # A long line takes milliseconds to decode, at each attempt.
                            body = await self._jobs.lines.run(
                                owner, lambda: request_body(self.store.content(batch, line), endpoint)
                            )
                        except OSError as error:
                            if error.errno not in _NO_DESCRIPTOR:
                                raise
                        else:
                            self._running[party] += 1
                            return body
                    self._line_ended.clear()
                    with suppress(TimeoutError):  # Live requests may have ended, or files been closed.
                        async with asyncio.timeout(_RECHECK_SECONDS):
                            await self._line_ended.wait()
                    if self._begins.has_lighter_waiting(party):
                        break

    def _may_begin(self, party: str) -> bool:
        """Whether a further line of `party` may run. Beyond the usual limit, up to `_max_lines` more lines may run of
        owners that have no running line, since a line may run for hours."""
        num_running = self._running.total()
        is_busy = self._num_live() > num_running
        most = max(1, self._max_lines // (_BUSY_SHARE if is_busy else 1))
        return num_running < most + (0 if self._running[party] else self._max_lines)

    def _end_line(self, batch: Batch) -> None:
        self._running[batch.party] -= 1
        if not self._running[batch.party]:
            del self._running[batch.party]
        self._line_ended.set()

    async def _begin_line_later(self, batch: Batch, line: Line, seconds: float) -> bytes:
        """As `_begin_line`, for a line that runs, after `seconds`. Other lines run meanwhile, which may have quota
        left."""
        self._end_line(batch)
        try:
            await asyncio.sleep(seconds)
            body = await self._begin_line(batch, line)
        except BaseException:
            self._running[batch.party] += 1  # The end of the task subtracts it again.
            raise
        return body

    async def _run_line(self, batch: Batch, line: Line, body: list[bytes]) -> None:
        """Compute a line. Its request's `body` is removed from the list."""

        async def read(seconds: float) -> bytes:
            return body.pop() if body else await self._begin_line_later(batch, line, seconds)

        def find_owner() -> Owner | None:
            holder = self._holder(batch.party) if batch.owner else Owner(batch.party)
            if holder is None or "inference" not in holder.scopes:
                return None
            # A separate party: the owner's live requests do not wait for its batches, and quotas are counted
            # separately.
            return holder._replace(party=f"{batch.party} (batches)", weight=_WEIGHT * holder.weight)

        output, succeeded = await self.compute(batch.object.endpoint, line.custom_id, read, find_owner)
        pool, id = self._jobs.lines, batch.object.id
        await self._write(pool, batch, self.store.record, id, line.number, output, succeeded=succeeded)

    async def compute(
        self,
        endpoint: str,
        custom_id: str,
        read: Callable[[float], Awaitable[bytes]],
        find_owner: Callable[[], Owner | None],
    ) -> tuple[bytes, bool]:
        """Compute an input line. Returns the output line, and whether the line succeeded.

        `read(seconds)` returns the body of its request after that time, and `find_owner` the owner, or None if its key
        is no longer accepted. They are called for each attempt: the first begins at once, and further ones follow
        while the server is too busy or not ready.
        """
        request_id = new_request_id()
        wait, failures = 0.0, 0
        while True:
            body = await read(wait)
            if (owner := find_owner()) is None:
                error = InvalidApiKey("the API key that made the batch was revoked, has expired or lost its scope")
                answer = _Answer(error.status, {}, error.body())
                break
            answer = await self._request(endpoint, body, owner, request_id)
            if answer.status not in _TRY_AGAIN:
                failures += answer.status >= 500
                if answer.status < 500 or failures == _ATTEMPTS or b"x-should-retry" in answer.headers:
                    break
            wait = min(2 * wait or _RETRY_SECONDS[0], _RETRY_SECONDS[1])
        response = {"status_code": answer.status, "request_id": request_id, "body": msgspec.Raw(answer.body)}
        return output_line(custom_id, response), 200 <= answer.status < 300

    async def _request(self, path: str, body: bytes, owner: Owner, request_id: str) -> _Answer:
        """Let the routes answer a request that has no connection."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "client": None,
            "server": None,
            "state": {"owner": owner, "request_id": request_id, "facts": RequestFacts()},
        }
        unread = [body]
        status, headers, pieces, is_complete = 500, dict[bytes, bytes](), list[bytes](), False

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status, headers, is_complete
            if message["type"] == "http.response.start":
                status, headers = message["status"], dict(message["headers"])
            elif message["type"] == "http.response.body":
                pieces.append(message.get("body", b""))
                is_complete = not message.get("more_body", False)

        try:
            await self._answer(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - one line must not end the batch
            # Starlette raises what a route raised, even after it has answered 500.
            _log.exception("a line of a batch could not be answered")
            if not is_complete:
                failure = EngineError(f"the server could not answer the line: {type(error).__name__}: {error}")
                status, pieces = failure.status, [failure.body()]
        return _Answer(status, headers, b"".join(pieces))
