"""`BatchStore`: stores files and batches on disk: contents as files, all other data in a SQLite database.

    FOLDER/lock            held by the server that uses the folder
    FOLDER/batches.sqlite  files, batches, and a row for each line of a batch that is not deleted
    FOLDER/files/ID        contents

A line's answer and its state are written in one transaction, before the line counts as done. Lines that a killed
server was computing are still pending, and are computed again. The output has each line exactly once, because it is
written from the rows. All methods block, and are thread-safe.
"""

import errno
import fcntl
import itertools
import logging
import os
import secrets
import sqlite3
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias

import msgspec

from engine.config.server import ServerConfig
from server.batches.lines import AnswerTotals, Line, output_line
from server.errors import ApiError, BadRequest, ShuttingDown
from server.schemas.batches import (
    BATCH_ENDED,
    DAY,
    BatchError,
    BatchErrors,
    BatchObject,
    BatchStatus,
    FileObject,
    FilePurpose,
    RequestCounts,
)

_log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER, bytes INTEGER NOT NULL,
    filename TEXT NOT NULL, purpose TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, created_at);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, party TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL,
    output_seconds INTEGER, object TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, created_at);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
    custom_id TEXT NOT NULL, state INTEGER NOT NULL DEFAULT 0, answer BLOB, PRIMARY KEY (batch, number))
    WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pending_lines ON lines (batch, state, number);
"""

_USED = "SELECT COALESCE(SUM(bytes), 0), COUNT(*) FROM files WHERE owner = ?"
_ALL_BYTES = "SELECT COALESCE(SUM(bytes), 0) FROM files"
_ENDED = f"status IN ({', '.join(map(repr, BATCH_ENDED))})"
_UNFINISHED = f"NOT {_ENDED}"
"""SQL conditions of batches."""
_LIVE = "(expires_at IS NULL OR expires_at > ?)"
"""SQL condition of files that have not expired. The parameter is the present time in seconds."""
_PENDING_LINES = (
    "SELECT number, custom_id, start, length FROM lines WHERE batch = ? AND state = 0 AND number > ? "
    "ORDER BY number LIMIT ?"
)

_SUCCEEDED, _FAILED = 1, 2
"""State of a line that was computed; 0 while it is pending."""

MAX_FILES = 20_000
"""Most files of an owner. Each file takes a block and an inode, however small it is, and the queries that sum bytes
read every row."""

MAX_UNFINISHED = 100
"""Most unfinished batches of an owner: each has a row per line of its input."""

MAX_ENDED = 10_000
"""Most stored ended batches of an owner; a new batch replaces the oldest."""

_LINES_AT_ONCE = 512
"""Most lines that one transaction adds, changes or deletes: calls of other keys would wait 0.9 s for 50,000."""

_MOST_PAUSE_SECONDS = 0.05

_EXPIRED = {"code": "batch_expired", "message": "the batch's completion window ended before this line was computed"}
_CANCELLED = {"code": "batch_cancelled", "message": "the batch was cancelled before this line was computed"}


BatchKind: TypeAlias = Literal["batch", "msgbatch"]
"""Prefix of the ids of OpenAI's batches, and of Anthropic's."""


class FileNotFound(BadRequest):
    """The client has no such file."""

    status = 404


class BatchNotFound(BadRequest):
    """The client has no such batch."""

    status = 404


class NoRoom(ApiError):
    """The files of the owner, or of all owners, reach their bound, or the owner has too many unfinished batches."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class DiskFull(ApiError):
    """The disk has no room for the files or the database: 507."""

    status = 507
    code = "insufficient_storage"


class StoreUnusable(ApiError):
    """The files or the database cannot be used for another reason, which the log has: 500."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_DATABASE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG)


@contextmanager
def disk_errors(sentence: str) -> Iterator[None]:
    """Raise `DiskFull` if a write in this context finds no room, and `StoreUnusable` if the disk or the database
    refuses it for another reason. The error begins with `sentence`, and the log has its cause."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        _log.error("%s: %s (data_dir)", sentence, error)
        if isinstance(error, OSError):
            # Errors of our own have no `strerror`, and name paths that no client should see.
            why, is_full = error.strerror or "the data_dir cannot be used", error.errno in _FULL
        else:
            why, is_full = str(error), getattr(error, "sqlite_errorcode", None) in _FULL_DATABASE
        if is_full:
            raise DiskFull(f"{sentence}: {why}; try again later") from error
        raise StoreUnusable(f"{sentence}: {why}; the operator of this server finds the cause in its log") from error


class Batch(NamedTuple):
    """A batch, with data that clients do not see."""

    object: BatchObject
    owner: str
    """Digest of the API key that created it; empty without keys."""
    party: str
    """The party that its work is accounted to."""


def _make_private(file: Path, *, create: bool) -> None:
    """Let only this user read and write a file: the database has prompts and answers. SQLite's further files get the
    database's mode when they are created. Raises `OSError` if it cannot be opened."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return
    try:
        with suppress(PermissionError):  # Of another user, who lets this one use it.
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


class BatchStore:
    """The files and batches of one server. Only one server may use a folder at a time."""

    def __init__(
        self, folder: Path | None, max_bytes_per_owner: int, max_bytes: int = 2**62, seconds_kept: int = 0
    ) -> None:
        """`folder` is created by `open` or with the first file; None means a temporary folder, deleted by `close`.

        `max_bytes` bounds the files of all owners together. After `seconds_kept`, files without an expiry and ended
        batches are deleted; 0 means never.

        Raises `OSError` for a folder that another server uses, or that cannot be read.
        """
        self._folder = folder
        self._is_temporary = folder is None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._max_bytes_per_owner, self._max_bytes = max_bytes_per_owner, max_bytes
        self._seconds_kept = seconds_kept
        self._arriving_lock = threading.Lock()
        """Guards `_arriving`. It is never held for long, unlike `_lock`, because the event loop acquires it."""
        self._arriving: Counter[str] = Counter()
        """Bytes of incomplete uploads, by owner."""
        self._lock = threading.RLock()
        self._counts: dict[str, tuple[int, int, int]] = {}
        """Lines of unfinished batches: all, succeeded and failed. Counting 50,000 rows takes 10 ms, with the lock."""
        self._database: sqlite3.Connection | None = None
        self._lock_file: IO[bytes] | None = None
        self._is_closed = False
        if folder is not None and (folder / "batches.sqlite").exists():
            self.open()

    def open(self) -> None:
        """Create and lock the folder now instead of with the first file. Raises `OSError` as the constructor."""
        try:
            self._open()
        except sqlite3.Error as error:
            is_full = getattr(error, "sqlite_errorcode", None) in _FULL_DATABASE
            remedy = "free some of its disk" if is_full else "restore it, or move it and the folder files away"
            raise OSError(
                f"data_dir is {self._folder}, whose batches.sqlite cannot be opened: {error}; {remedy}"
            ) from error

    def close(self) -> None:
        """Release the folder. All other methods raise `ShuttingDown` from now on."""
        with self._lock:
            self._is_closed = True
            if self._database is not None:
                self._database.close()
                self._database = None
            if self._lock_file is not None:
                self._lock_file.close()
            if self._temporary is not None:
                self._temporary.cleanup()

    # -- files --------------------------------------------------------------------------------------------------

    @contextmanager
    def new_file(self) -> Iterator[IO[bytes]]:
        """Yield a file to write contents to, for `add_file`. If it is not added, it is deleted at the end."""
        self._open()
        with tempfile.NamedTemporaryFile(dir=self._files, prefix="part-", delete=False) as file:
            try:
                yield file
            finally:
                Path(file.name).unlink(missing_ok=True)

    def add_file(
        self, file: IO[bytes], owner: str, filename: str, purpose: FilePurpose = "batch", seconds: int | None = None
    ) -> FileObject:
        """Store a written `new_file` for `seconds`, or until it is deleted. Raises `NoRoom`."""
        with self._adding(file, owner, filename, purpose, seconds) as (_, added):
            return added

    def add_batch_of(
        self, file: IO[bytes], filename: str, owner: str, party: str, endpoint: str, seconds: int, kind: BatchKind
    ) -> BatchObject:
        """Store a new batch with a written `new_file` as its input: both, or neither. Raises `NoRoom`."""
        with self._adding(file, owner, filename, "batch", None) as (database, input):
            batch = new_batch(input.id, endpoint, seconds, kind=kind)
            self._insert_batch(database, batch, owner, party, None)
        return batch

    @contextmanager
    def _adding(
        self, file: IO[bytes], owner: str, filename: str, purpose: FilePurpose, seconds: int | None
    ) -> Iterator[tuple[sqlite3.Connection, FileObject]]:
        """Store a written `new_file` in a transaction, which ends with the context. Raises `NoRoom`."""
        file.flush()
        os.fsync(file.fileno())
        size, now = os.fstat(file.fileno()).st_size, int(time.time())
        seconds = seconds or self._seconds_kept or None
        added = FileObject(
            id=_new_id("file"),
            bytes=size,
            created_at=now,
            filename=filename,
            purpose=purpose,
            expires_at=None if seconds is None else now + seconds,
        )
        path: Path | None = None
        try:
            with self._transaction() as database:
                # Output files of batches are never refused, since their work is done. The next batch is.
                if purpose == "batch":
                    self._check_room(owner, size)
                database.execute(
                    "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (added.id, owner, now, added.expires_at, size, filename, added.purpose),
                )
                yield database, added
                # The last step before the commit: if an earlier one fails, `new_file` deletes the file.
                path = Path(file.name).rename(self._files / added.id)
        except BaseException:
            if path is not None:
                path.unlink(missing_ok=True)
            raise

    @contextmanager
    def upload(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves room for the given number of further bytes of an upload. It raises `NoRoom`.

        Within the context, reserved bytes count among the owner's and among all bytes. Only the function's call
        blocks.
        """
        reserved = 0

        def reserve(num_bytes: int) -> None:
            nonlocal reserved
            with self._arriving_lock:
                self._arriving[owner] += num_bytes
                reserved += num_bytes
                own, total = self._arriving[owner], self._arriving.total()
            self._check_room(owner, num_bytes, own - num_bytes, total - num_bytes)

        try:
            yield reserve
        finally:
            with self._arriving_lock:
                self._arriving[owner] -= reserved
                if not self._arriving[owner]:
                    del self._arriving[owner]

    def _check_room(self, owner: str, size: int, arriving: int = 0, all_arriving: int = 0) -> None:
        """Raise `NoRoom` unless there is room for `size` more bytes, in addition to stored files and the bytes of
        running uploads: `arriving` of the owner, `all_arriving` of all."""
        self._open()
        [(own, count)], [(total,)] = self._query(_USED, owner), self._query(_ALL_BYTES)
        if count >= MAX_FILES:
            raise NoRoom(
                f"this key has {count} files, and {MAX_FILES} are the most that a key may have; delete files that are "
                "not needed"
            )
        used = own + arriving
        if used + size > self._max_bytes_per_owner:
            raise NoRoom(
                f"the files of this key would have {used + size} bytes, and {self._max_bytes_per_owner} are the most "
                "that this server keeps for one (max_file_bytes_per_key); delete files that are not needed"
            )
        if total + all_arriving + size > self._max_bytes:
            raise NoRoom(
                f"the files of all keys would have more than {self._max_bytes} bytes, the most that this server keeps "
                "(max_file_bytes_total); delete files that are not needed, or try again later"
            )

    def file(self, id: str, owner: str, param: str = "id") -> FileObject:
        """Return the metadata of a file. Raises `FileNotFound`, also for a file of another owner; `param` is the name
        of the field that holds `id`."""
        rows = self._query(f"SELECT * FROM files WHERE id = ? AND owner = ? AND {_LIVE}", id, owner, int(time.time()))
        if not rows:
            raise FileNotFound(
                f"there is no file {id[:80]!r}: it never existed, or it was deleted or has expired", param=param
            )
        return _file(rows[0])

    def files(self, owner: str, purpose: str | None, after: str | None, limit: int, *, newest_first: bool) -> "Page":
        """Return a page of an owner's files. Raises `FileNotFound` if `after` does not exist."""
        if after is not None:
            self.file(after, owner, "after")
        condition = f"owner = ? AND {_LIVE}"
        values: tuple[str | int, ...] = (owner, int(time.time()))
        if purpose is not None:
            condition, values = f"{condition} AND purpose = ?", (*values, purpose)
        rows = self._page("files", condition, values, after, limit, newest_first)
        return Page([_file(row) for row in rows[:limit]], len(rows) > limit)

    def path(self, id: str, owner: str) -> Path:
        """Return the path of a file's content. Raises `FileNotFound`, also if a link or a pipe has replaced it."""
        self.file(id, owner)
        path = self._files / id
        if not stat.S_ISREG(path.lstat().st_mode):
            raise FileNotFound(f"file {id} is not a regular file: something replaced it in the server's data_dir")
        return path

    def delete_file(self, id: str, owner: str) -> None:
        """Delete a file. Raises `FileNotFound`, and `BadRequest` for the input of an unfinished batch."""
        self.file(id, owner)
        self._delete_file(id, owner)

    def _delete_file(self, id: str, owner: str) -> None:
        """Delete a file if it exists. Raises `BadRequest` as `delete_file` does."""
        with self._transaction() as database:
            rows = database.execute(
                f"SELECT object FROM batches WHERE owner = ? AND {_UNFINISHED}", (owner,)
            ).fetchall()
            for batch in (_decode_batch(row["object"]) for row in rows):
                if batch.input_file_id == id:
                    raise BadRequest(f"file {id} is the input of {batch.id}, which is {batch.status}; cancel it first")
            database.execute("DELETE FROM files WHERE id = ?", (id,))
        (self._files / id).unlink(missing_ok=True)

    def delete_expired(self) -> None:
        """Delete the expired files and ended batches."""
        now = int(time.time())
        # Files without an expiry were created before `seconds_kept` was set; they expire by their age.
        oldest = now - self._seconds_kept if self._seconds_kept else -1
        for row in self._query("SELECT * FROM files WHERE COALESCE(expires_at <= ?, created_at <= ?)", now, oldest):
            try:
                self._delete_file(row["id"], row["owner"])
            except BadRequest:
                continue  # An unfinished batch still reads it.
        if self._query(f"SELECT 1 FROM batches WHERE created_at <= ? AND {_ENDED} LIMIT 1", oldest):
            with self._transaction() as database:
                database.execute(f"DELETE FROM batches WHERE created_at <= ? AND {_ENDED}", (oldest,))

    # -- batches ------------------------------------------------------------------------------------------------

    def add_batch(self, batch: BatchObject, owner: str, party: str, output_seconds: int | None) -> None:
        """Store a new batch. Raises `NoRoom`."""
        with self._transaction() as database:
            self._check_room(owner, 0)
            self._insert_batch(database, batch, owner, party, output_seconds)

    def _insert_batch(
        self, database: sqlite3.Connection, batch: BatchObject, owner: str, party: str, output_seconds: int | None
    ) -> None:
        counting = f"SELECT COUNT(*) FROM batches WHERE owner = ? AND {_UNFINISHED}"
        [count] = database.execute(counting, (owner,)).fetchone()
        if count >= MAX_UNFINISHED:
            raise NoRoom(
                f"{count} batches of this key have not ended, the most that a key may have; "
                "wait for one, or cancel one"
            )
        database.execute(
            "DELETE FROM batches WHERE rowid IN (SELECT rowid FROM batches "
            f"WHERE owner = ? AND {_ENDED} ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
            (owner, MAX_ENDED - 1),
        )
        database.execute(
            "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?)",
            (batch.id, owner, party, batch.status, batch.created_at, output_seconds, _encode_batch(batch)),
        )

    def batch(self, id: str, owner: str) -> BatchObject:
        """Return a batch. Raises `BatchNotFound`, also for a batch of another owner."""
        rows = self._query("SELECT object FROM batches WHERE id = ? AND owner = ?", id, owner)
        if not rows:
            raise BatchNotFound(f"there is no batch {id[:80]!r}")
        return self._with_counts(_decode_batch(rows[0]["object"]))

    def batches(self, owner: str, kind: BatchKind, after: str | None, limit: int) -> "Page":
        """Return a page of an owner's batches of a kind, newest first. Raises `BatchNotFound` if `after` does not
        exist."""
        if after is not None:
            self.batch(after, owner)
        condition = "owner = ? AND id GLOB ?"
        rows = self._page("batches", condition, (owner, f"{kind}_*"), after, limit, newest_first=True)
        return Page([self._with_counts(_decode_batch(row["object"])) for row in rows[:limit]], len(rows) > limit)

    def delete_batch(self, id: str, owner: str) -> None:
        """Delete an ended batch with its files. Raises `BatchNotFound`, and `BadRequest` if the batch has not
        ended."""
        batch = self.batch(id, owner)
        if batch.status not in BATCH_ENDED:
            raise BadRequest(f"{id} is {batch.status}; cancel it first")
        for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            if file is not None:
                self._delete_file(file, owner)
        with self._transaction() as database:
            database.execute("DELETE FROM batches WHERE id = ?", (id,))

    def unfinished(self) -> list[Batch]:
        """Return the unfinished batches of all owners, oldest first."""
        rows = self._query(f"SELECT * FROM batches WHERE {_UNFINISHED} ORDER BY created_at")
        return [Batch(_decode_batch(row["object"]), row["owner"], row["party"]) for row in rows]

    def update(self, id: str, status: BatchStatus, **fields: Any) -> BatchObject:
        """Set a batch's status, the time of that status, and further fields, unless it has ended. Returns the batch.

        A batch that is being cancelled keeps that status until it ends. With another status, a server that is started
        later would compute it.
        """
        with self._transaction() as database:
            row = database.execute("SELECT object FROM batches WHERE id = ?", (id,)).fetchone()
            batch = _decode_batch(row["object"])
            if batch.status not in BATCH_ENDED:
                times = {} if status == "validating" else {f"{status}_at": int(time.time())}
                shown = "cancelling" if batch.status == "cancelling" and status not in BATCH_ENDED else status
                batch = msgspec.structs.replace(batch, status=shown, **times, **fields)
                database.execute(
                    "UPDATE batches SET status = ?, object = ? WHERE id = ?", (shown, _encode_batch(batch), id)
                )
                if status in BATCH_ENDED or status == "in_progress":
                    self._counts.pop(id, None)
        return self._with_counts(batch)

    def begin(self, id: str, lines: list[Line]) -> None:
        """Add the lines of a validated batch, and set its status to `in_progress`."""
        self._delete_lines(id)  # A killed server may have added some.
        rows = ((id, *line) for line in lines)

        def add(database: sqlite3.Connection) -> int:
            return database.executemany(
                "INSERT INTO lines (batch, number, custom_id, start, length) VALUES (?, ?, ?, ?, ?)",
                itertools.islice(rows, _LINES_AT_ONCE),
            ).rowcount

        self._in_portions(add)
        self.update(id, "in_progress")

    def fail(self, id: str, errors: list[BatchError]) -> None:
        """End a batch with invalid input."""
        self.update(id, "failed", errors=BatchErrors(errors))
        self._delete_lines(id)

    def pending(self, id: str, after: int, limit: int) -> list[Line]:
        """Return the next pending lines of a batch, with numbers greater than `after`."""
        return [Line(*row) for row in self._query(_PENDING_LINES, id, after, limit)]

    def content(self, batch: Batch, line: Line) -> bytes:
        """Return the bytes of a line: a JSON object."""
        self._check_open()
        # `path` would fail if the input has expired, but an unfinished batch continues to use it.
        with (self._files / batch.object.input_file_id).open("rb") as file:
            file.seek(line.start)
            return file.read(line.length)

    def record(self, id: str, number: int, answer: bytes, *, succeeded: bool) -> None:
        """Store the output line of a line. A second one for the same line is dropped."""
        with self._lock:
            with self._transaction() as database:
                changed = database.execute(
                    "UPDATE lines SET state = ?, answer = ? WHERE batch = ? AND number = ? AND state = 0",
                    (_SUCCEEDED if succeeded else _FAILED, answer, id, number),
                ).rowcount
            if changed and (counts := self._counts.get(id)) is not None:
                total, completed, failed = counts
                self._counts[id] = total, completed + succeeded, failed + (not succeeded)

    def finish(self, batch: Batch, status: BatchStatus, errors: list[BatchError] | None = None) -> None:
        """Write the output and error files of a batch, end it with `status`, unless it has ended, and delete its
        lines.

        If it has expired or was cancelled, the error file contains the lines without an answer.
        """
        id = batch.object.id
        for row in self._query(f"SELECT output_seconds FROM batches WHERE id = ? AND {_UNFINISHED}", id):
            self._write_end(batch, status, errors, row["output_seconds"])
        # A batch that has ended may still have lines, which were not deleted if the disk had no room.
        self._delete_lines(id)

    def _write_end(
        self, batch: Batch, status: BatchStatus, errors: list[BatchError] | None, output_seconds: int | None
    ) -> None:
        id = batch.object.id
        why = {"expired": _EXPIRED, "cancelled": _CANCELLED}.get(status)
        if why is not None:
            last = -1

            def mark(database: sqlite3.Connection) -> int:
                nonlocal last
                self._counts.pop(id, None)
                undone = database.execute(_PENDING_LINES, (id, last, _LINES_AT_ONCE)).fetchall()
                last = undone[-1]["number"] if undone else last
                database.executemany(
                    "UPDATE lines SET state = ?, answer = ? WHERE batch = ? AND number = ?",
                    [(_FAILED, output_line(each["custom_id"], error=why), id, each["number"]) for each in undone],
                )
                return len(undone)

            self._in_portions(mark)
        totals = AnswerTotals()
        fields: dict[str, Any] = {"request_counts": self._count(id)}
        if errors is not None:
            fields["errors"] = BatchErrors(errors)
        for name, state, count in (("output", _SUCCEEDED, totals.add), ("error", _FAILED, lambda _: None)):
            fields[f"{name}_file_id"] = self._write_output(batch, name, state, output_seconds, count)
        self.update(id, status, **fields, model=totals.model, usage=totals.usage)

    def _write_output(
        self, batch: Batch, name: str, state: int, seconds: int | None, count: Callable[[bytes], None]
    ) -> str | None:
        """Write the answers of the lines in `state`, and pass each to `count`. Returns the file; None if there are
        none. One answer is in memory at a time: it may have tens of megabytes."""
        filename = f"{batch.object.id}_{name}.jsonl"
        # A killed server may have written the file without ending the batch.
        mine = "SELECT id FROM files WHERE owner = ? AND filename = ? AND purpose = 'batch_output'"
        for row in self._query(mine, batch.owner, filename):
            self._delete_file(row["id"], batch.owner)
        with self.new_file() as file:
            number = -1
            while rows := self._query(
                "SELECT number, answer FROM lines WHERE batch = ? AND state = ? AND number > ? "
                "ORDER BY number LIMIT 1",
                batch.object.id,
                state,
                number,
            ):
                [(number, answer)] = rows
                file.writelines((answer, b"\n"))
                count(answer)
            if number < 0:
                return None
            return self.add_file(file, batch.owner, filename, "batch_output", seconds).id

    def _with_counts(self, batch: BatchObject) -> BatchObject:
        """Return `batch` with the present counts of its lines. While they are added they are not counted; if it has
        ended, the counts are stored with it."""
        if batch.status not in BATCH_ENDED and batch.in_progress_at is not None:
            batch.request_counts = self._count(batch.id)
        return batch

    def _count(self, id: str) -> RequestCounts:
        """Count the lines of an unfinished batch."""
        with self._lock:
            counts = self._counts.get(id)
            if counts is None:
                query = "SELECT state, COUNT(*) AS n FROM lines WHERE batch = ? GROUP BY state"
                by_state = {row["state"]: row["n"] for row in self._query(query, id)}
                counts = sum(by_state.values()), by_state.get(_SUCCEEDED, 0), by_state.get(_FAILED, 0)
                if by_state:
                    self._counts[id] = counts
        return RequestCounts(*counts)

    # -- the folder ---------------------------------------------------------------------------------------------

    @property
    def _files(self) -> Path:
        assert self._folder is not None
        return self._folder / "files"

    def _open(self) -> sqlite3.Connection:
        """Lock the folder and open the database, if that is not done. Raises `OSError`."""
        with self._lock:
            self._check_open()
            if self._database is not None:
                return self._database
            if self._is_temporary:
                self._temporary = tempfile.TemporaryDirectory(prefix="kaon-batches-")
                self._folder = Path(self._temporary.name)
            assert self._folder is not None
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_own()
            for name in ("lock", "batches.sqlite", "batches.sqlite-wal", "batches.sqlite-shm"):
                _make_private(self._folder / name, create="-" not in name)
            self._lock_file = (self._folder / "lock").open("wb")
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._lock_file.close()
                raise OSError(f"data_dir is {self._folder}, which another server uses; give each its own") from error
            database = sqlite3.connect(self._folder / "batches.sqlite", check_same_thread=False, isolation_level=None)
            database.row_factory = sqlite3.Row
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(_SCHEMA)
            self._database = database
            try:
                self._delete_left_lines(database)
            except sqlite3.OperationalError as error:
                # Deleting needs room in the database's log. The start goes on without it: the lines only take room.
                _log.error("lines of ended batches stay in %s until the next start: %s", self._folder, error)
            # Delete contents without a row: a killed server renamed the file or deleted the row just before.
            entered = {row["id"] for row in database.execute("SELECT id FROM files")}
            for content in self._files.iterdir():
                if content.name not in entered:
                    content.unlink()
            return database

    def _check_own(self) -> None:
        """Raise `OSError` if another user may write to the folder with the contents of files."""
        found = self._files.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
            raise OSError(
                f"data_dir is {self._folder}, whose folder files is a link, of another user, or may be changed by "
                "every user; remove it, or give another directory"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ShuttingDown("the server is shutting down; try again in a moment")

    def _in_portions(self, work: Callable[[sqlite3.Connection], int]) -> None:
        """Call `work` in one transaction after the other until it changes fewer than `_LINES_AT_ONCE` lines.

        Between them the lock is free for as long as it was held: without a pause, this thread would mostly be the next
        to acquire it.
        """
        while True:
            began = time.monotonic()
            with self._transaction() as database:
                num_changed = work(database)
            if num_changed < _LINES_AT_ONCE:
                return
            time.sleep(min(time.monotonic() - began, _MOST_PAUSE_SECONDS))

    def _delete_lines(self, id: str) -> None:
        """Delete the lines of a batch."""
        some = "SELECT number FROM lines WHERE batch = ? ORDER BY number LIMIT ?"
        delete = f"DELETE FROM lines WHERE batch = ? AND number IN ({some})"
        self._in_portions(lambda database: database.execute(delete, (id, id, _LINES_AT_ONCE)).rowcount)

    def _delete_left_lines(self, database: sqlite3.Connection) -> None:
        """Delete lines that a killed server left when their batch had ended."""
        # Each step skips the lines of one batch: a query for distinct batches would read all lines.
        with_lines = """
            WITH RECURSIVE found(batch) AS (
                SELECT MIN(batch) FROM lines
                UNION ALL
                SELECT (SELECT MIN(batch) FROM lines WHERE batch > found.batch) FROM found WHERE batch NOTNULL)
            SELECT batch FROM found WHERE batch NOTNULL"""
        unfinished = f"SELECT id FROM batches WHERE {_UNFINISHED}"
        left = database.execute(f"{with_lines} AND batch NOT IN ({unfinished})").fetchall()
        for row in left:
            self._delete_lines(row["batch"])

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            database = self._open()
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                # After some errors, such as a full disk, SQLite has already rolled back.
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise

    def _query(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            self._check_open()
            # Without a folder nothing was ever written, and a query must not create the folder.
            return [] if self._database is None else self._database.execute(statement, values).fetchall()

    def _page(
        self, table: str, condition: str, values: tuple[Any, ...], after: str | None, limit: int, newest_first: bool
    ) -> list[sqlite3.Row]:
        """Return up to `limit` + 1 rows in the order of creation, starting after the row `after`."""
        order = "DESC" if newest_first else "ASC"
        if after is not None:
            sign = "<" if newest_first else ">"
            condition += f" AND rowid {sign} (SELECT rowid FROM {table} WHERE id = ?)"
            values = (*values, after)
        statement = f"SELECT * FROM {table} WHERE {condition} ORDER BY rowid {order} LIMIT ?"
        return self._query(statement, *values, limit + 1)


def open_store(config: ServerConfig) -> BatchStore:
    """Open the store of a server. Raises `OSError` with a sentence if `data_dir` cannot be used.

    Without `data_dir`, a folder named after the port preserves batches over restarts. Without a fixed port, or if that
    folder cannot be written, the store is temporary.
    """
    if config.data_dir is not None:
        folder = Path(config.data_dir).expanduser()
        try:
            store = _store_in(folder, config)
            store.open()
            return store
        except OSError as error:
            if error.strerror is None:
                raise  # A sentence of the store's.
            raise OSError(
                f"data_dir is {folder}, which cannot be used: {error.strerror}; let this user write to it, or give "
                "another directory"
            ) from error
    default = _folder_of_port(config.port) if config.port else None
    if default is not None:
        try:
            return _store_in(default, config)
        except OSError as error:
            _log.warning("batches do not survive a restart, because %s", error)
    return _store_in(None, config)


def _folder_of_port(port: int) -> Path | None:
    """Return the folder of a server without `data_dir`; None if this user has no home or cannot write there."""
    states = os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    if not os.path.isabs(states):
        return None
    folder = Path(states, "kaon", f"port-{port}")
    # `Path.exists` would raise for a folder that this user may not search, such as another user's home.
    existing = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    return folder if os.access(existing, os.W_OK) else None


def _store_in(folder: Path | None, config: ServerConfig) -> BatchStore:
    return BatchStore(
        folder,
        config.max_file_bytes_per_key,
        config.max_file_bytes_total,
        config.file_retention_days * DAY,
    )


class Page(NamedTuple):
    """A page of a list, and whether more objects follow."""

    data: list[Any]
    has_more: bool


def new_batch(
    input_file_id: str,
    endpoint: str,
    seconds: int,
    metadata: dict[str, str] | None = None,
    kind: BatchKind = "batch",
) -> BatchObject:
    """Create a batch that is to be validated, and that expires in `seconds`."""
    now = int(time.time())
    return BatchObject(
        id=_new_id(kind),
        endpoint=endpoint,
        input_file_id=input_file_id,
        status="validating",
        created_at=now,
        expires_at=now + seconds,
        metadata=metadata,
    )


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}" if prefix != "file" else f"file-{secrets.token_hex(16)}"


def _file(row: sqlite3.Row) -> FileObject:
    return FileObject(
        **{name: row[name] for name in ("id", "bytes", "created_at", "filename", "purpose", "expires_at")}
    )


def _encode_batch(batch: BatchObject) -> str:
    return msgspec.json.encode(batch).decode()


def _decode_batch(text: str) -> BatchObject:
    return msgspec.json.decode(text, type=BatchObject)
