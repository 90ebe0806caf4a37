"""`/v1/files` and `/v1/batches`: upload requests, have them computed at low priority, download the answers."""

import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from fastapi import Request, Response
from fastapi.responses import FileResponse
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import Message, Receive, Scope, Send

from server.batches.runner import BatchRunner
from server.batches.store import Batch, Page, disk_errors, new_batch
from server.endpoints import ENDPOINTS, ORDER, EndpointFamily, is_newest_first, query_integer, query_parameter
from server.errors import BadRequest, BodyTooLarge, RangeNotSatisfiable, UnsupportedMediaType
from server.limits.admission import OpenFiles
from server.limits.turns import RequestTurns
from server.middleware import owner_of
from server.models import Models
from server.request_builder import read_request
from server.schemas.batches import (
    DAY,
    HOUR,
    MONTH,
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
)
from server.streaming.sse import as_json

endpoints = ENDPOINTS.register("batches")(EndpointFamily())

_CHUNK_BYTES = 2**20
_PARSED_BYTES = 2**13
"""Bytes of an upload that are parsed at a time if they may take long: 8 KiB like the form's boundary take 1.2 ms, and
blanks after a boundary 3 ms."""
_MAX_BOUNDARIES, _BLANKS = 8, b" " * 128
"""More beginnings of boundaries, or more blanks in a row, are parsed in Python, a byte at a time. Other bytes are
skipped in C: 64 KiB take 0.1 ms."""
_MAX_CONTENT_TYPE = 1024
"""Longest header `Content-Type` of an upload: the parser takes 97 ms for 60 KB of semicolons. A boundary has at most
70 characters (RFC 2046, section 5.1.1)."""
_MAX_FILENAME = 255
_FILES_PAGE, _BATCHES_PAGE = (10_000, 10_000), (20, 100)
"""Default and largest page size of each list."""


_AFTER = query_parameter("after", "Id of the object after which the list begins.", type="string")
_PURPOSE = query_parameter("purpose", "Only files of this purpose.", type="string")


def _limit(page: tuple[int, int]) -> dict[str, Any]:
    return query_parameter(
        "limit", "Most objects to list.", type="integer", minimum=1, maximum=page[1], default=page[0]
    )


# -- files ------------------------------------------------------------------------------------------------------


@endpoints.post("/v1/files", FileObject)
async def upload_file(http: Request) -> Response:
    """Upload the input of a batch: multipart form data with the fields `file` and `purpose`."""
    runner, limit = runner_of(http), Models.of(http.app).config.server_config.max_file_bytes
    if not http.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise UnsupportedMediaType("a file is uploaded as multipart/form-data (curl: -F purpose=batch -F file=@NAME)")
    declared = http.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit + 2**16:
        raise _too_large(limit)
    owner = owner_of(http.scope)
    with _hold_file(http), runner.store.upload(owner.namespace) as reserve:
        return as_json(await _upload(http, runner, limit, owner.namespace, reserve))


async def _upload(
    http: Request, runner: BatchRunner, limit: int, owner: str, reserve: Callable[[int], None]
) -> FileObject:
    """Receive and store a file. Raises `BadRequest`, `BodyTooLarge`, `NoRoom` and `DiskFull`."""
    turns: RequestTurns = http.app.state.upload_turns
    with disk_errors("the file cannot be kept while it arrives"):
        body = in_turns(turns, owner_of(http.scope).party, _counted(http, limit, reserve))
        form = await read_form(http.headers, body)
    try:
        _check_fields(form, allow_unknown=Models.of(http.app).config.server_config.allow_unknown_fields)
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise BadRequest("file is missing; send it as a file of the form (curl: -F file=@NAME)", param="file")
        if purpose is None:
            raise BadRequest("purpose is missing; it must be batch (curl: -F purpose=batch)", param="purpose")
        if purpose != "batch":
            raise BadRequest(
                f"purpose is {str(purpose)[:60]!r}; this server takes files for batch only", param="purpose"
            )
        seconds = _expiry(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
        with disk_errors("the file cannot be kept"):
            return await in_store(http, _store, runner, file, owner, seconds)
    finally:
        await form.close()


async def read_form(headers: Headers, body: AsyncGenerator[bytes, None]) -> FormData:
    """Parse the fields and the file of multipart form data. Raises `BadRequest`."""
    if (length := len(headers.get("content-type", ""))) > _MAX_CONTENT_TYPE:
        raise BadRequest(f"the header Content-Type has {length} characters; send at most {_MAX_CONTENT_TYPE}")
    try:
        form = await MultiPartParser(headers, body, max_files=1, max_fields=8).parse()
    except MultiPartException as error:
        raise BadRequest(f"the form cannot be read: {error.message}") from error
    except (LookupError, ValueError) as error:
        # The parser raises these for an unknown charset, and for text that is invalid in its charset.
        raise BadRequest(f"the form cannot be read: {error}") from error
    try:
        for name, value in form.multi_items():
            f"{name}{value.filename if isinstance(value, UploadFile) else value}".encode()
    except UnicodeEncodeError as error:  # Charsets such as UTF-7 can write it.
        await form.close()
        raise BadRequest("the form holds half a surrogate pair, which is not a character; send it in UTF-8") from error
    return form


def _check_fields(form: FormData, *, allow_unknown: bool) -> None:
    known = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
    for name in form:
        if name not in known and not allow_unknown:
            name = name[:60]
            raise BadRequest(
                f"{name} is not a field of this form, which has {', '.join(known)}; leave it out", param=name
            )


def _store(runner: BatchRunner, upload: UploadFile, owner: str, seconds: int | None) -> FileObject:
    store = runner.store
    with store.new_file() as file:
        while chunk := upload.file.read(_CHUNK_BYTES):
            file.write(chunk)
        return store.add_file(file, owner, (upload.filename or "file")[:_MAX_FILENAME], seconds=seconds)


async def in_turns(
    turns: RequestTurns, party: str, chunks: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks, those that take long to parse in small pieces, each at a turn of the party's, so that few are
    parsed in a round of the event loop."""
    async for chunk in chunks:
        takes_long = chunk.count(b"\r\n--") > _MAX_BOUNDARIES or _BLANKS in chunk.replace(b"\t", b" ")
        size = _PARSED_BYTES if takes_long else max(len(chunk), 1)
        for start in range(0, len(chunk), size):
            await turns.take(party)
            yield chunk[start : start + size]


async def _counted(http: Request, limit: int, reserve: Callable[[int], None]) -> AsyncGenerator[bytes, None]:
    """Yield the body, up to a file of `limit` bytes plus the form's own bytes. Raises `BodyTooLarge` and `NoRoom`.

    `reserve` is called with the number of bytes that may follow.
    """
    total = reserved = 0
    async for chunk in http.stream():
        total += len(chunk)
        if total > limit + 2**16:
            raise _too_large(limit)
        if total > reserved:
            declared = http.headers.get("content-length", "")
            most = min(int(declared), limit) if declared.isdecimal() else limit
            step = max(total - reserved, min(_CHUNK_BYTES, most - reserved))
            await in_store(http, reserve, step)
            reserved += step
        yield chunk


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the file is larger than {limit} bytes, the most that this server takes (max_file_bytes)")


def _expiry(anchor: object, seconds: object) -> int | None:
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise BadRequest(
            f"expires_after[anchor] is {str(anchor)[:60]!r}; it must be created_at", param="expires_after"
        )
    if not (isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 10 and HOUR <= int(seconds) <= MONTH):
        raise BadRequest(
            f"expires_after[seconds] is {str(seconds)[:60]!r}; it must be an integer between {HOUR} and {MONTH}",
            param="expires_after",
        )
    return int(seconds)


@endpoints.get("/v1/files", FileList, parameters=[_PURPOSE, _limit(_FILES_PAGE), ORDER, _AFTER])
async def list_files(http: Request) -> Response:
    """List the uploaded files and the output files of batches."""
    newest_first = is_newest_first(http)
    page: Page = await in_store(
        http,
        runner_of(http).store.files,
        owner_of(http.scope).namespace,
        http.query_params.get("purpose"),
        http.query_params.get("after"),
        _limit_of(http, _FILES_PAGE),
        newest_first=newest_first,
    )
    return as_json(FileList(data=page.data, has_more=page.has_more, first_id=_first(page), last_id=_last(page)))


@endpoints.get("/v1/files/{file_id}", FileObject)
async def retrieve_file(http: Request, file_id: str) -> Response:
    """Return the metadata of a file."""
    return as_json(await in_store(http, runner_of(http).store.file, file_id, owner_of(http.scope).namespace))


@endpoints.get("/v1/files/{file_id}/content", "application/octet-stream")
async def file_content(http: Request, file_id: str) -> Response:
    """Return the content of a file."""
    path = await in_store(http, runner_of(http).store.path, file_id, owner_of(http.scope).namespace)
    return FileAnswer(http, _Content(path, media_type="application/octet-stream"))


class _Content(FileResponse):
    """The content of a file, or a range of it. A bad range is answered with an error object; the framework's response
    answers it in plain text."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unless_refused(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                range = Headers(scope=scope).get("range", "")[:60]
                if message["status"] != RangeNotSatisfiable.status:
                    raise BadRequest(f"the header Range is {range!r}; send bytes=FIRST-LAST, or leave it out")
                raise RangeNotSatisfiable(
                    f"the header Range is {range!r}, which is not within the file", Headers(raw=message["headers"])
                )
            await send(message)

        await super().__call__(scope, receive, send_unless_refused)


@endpoints.delete("/v1/files/{file_id}", DeletedFile)
async def delete_file(http: Request, file_id: str) -> Response:
    """Delete a file, unless it is the input of a batch that has not ended."""
    with disk_errors("the file cannot be deleted"):
        await in_store(http, runner_of(http).store.delete_file, file_id, owner_of(http.scope).namespace)
    return as_json(DeletedFile(file_id))


# -- batches ----------------------------------------------------------------------------------------------------

_EXAMPLE = {"input_file_id": "file-0123456789abcdef", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


@endpoints.post("/v1/batches", BatchObject, request=BatchRequest, example=_EXAMPLE)
async def create_batch(http: Request) -> Response:
    """Compute the requests in a file, at low priority."""
    runner, owner = runner_of(http), owner_of(http.scope)
    request = await read_request(http, BatchRequest, Models.of(http.app).config.server_config)
    file = await in_store(http, runner.store.file, request.input_file_id, owner.namespace, "input_file_id")
    if file.purpose != "batch":
        raise BadRequest(f"input_file_id is {file.id}, which a batch wrote; upload the input", param="input_file_id")
    batch = new_batch(file.id, request.endpoint, DAY, request.metadata)
    seconds = None if request.output_expires_after is None else request.output_expires_after.seconds
    with disk_errors("the batch cannot be kept"):
        await in_store(http, runner.store.add_batch, batch, owner.namespace, owner.party, seconds)
    runner.run(Batch(batch, owner.namespace, owner.party))
    return as_json(batch)


@endpoints.get("/v1/batches", BatchList, parameters=[_limit(_BATCHES_PAGE), _AFTER])
async def list_batches(http: Request) -> Response:
    """List the batches, newest first."""
    after, limit = http.query_params.get("after"), _limit_of(http, _BATCHES_PAGE)
    page: Page = await in_store(
        http, runner_of(http).store.batches, owner_of(http.scope).namespace, "batch", after, limit
    )
    return as_json(BatchList(data=page.data, has_more=page.has_more, first_id=_first(page), last_id=_last(page)))


@endpoints.get("/v1/batches/{batch_id}", BatchObject)
async def retrieve_batch(http: Request, batch_id: str) -> Response:
    """Return a batch with its progress."""
    return as_json(await in_store(http, runner_of(http).store.batch, batch_id, owner_of(http.scope).namespace))


@endpoints.post("/v1/batches/{batch_id}/cancel", BatchObject)
async def cancel_batch(http: Request, batch_id: str) -> Response:
    """Cancel a batch; its output has the completed answers. A batch that has ended is returned unchanged."""
    runner, owner = runner_of(http), owner_of(http.scope)
    batch = await in_store(http, runner.store.batch, batch_id, owner.namespace)
    with disk_errors("the batch cannot be cancelled"):
        return as_json(await runner.cancel(Batch(batch, owner.namespace, owner.party)))


def runner_of(http: Request) -> BatchRunner:
    """Return the runner of the server. Raises `NotReady` unless requests can be served."""
    Models.of(http.app).check_open()
    runner: BatchRunner = http.app.state.batches
    return runner


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


async def in_store(
    http: Request,
    work: Callable[_Parameters, _Result],
    *arguments: _Parameters.args,
    **keywords: _Parameters.kwargs,
) -> _Result:
    """Run work on the store in a thread, shared fairly among owners. Raises `TooManyJobs`."""
    calls = Models.of(http.app).shared.jobs.store_calls
    return await calls.run(owner_of(http.scope), functools.partial(work, *arguments, **keywords), stays=True)


class FileAnswer(Response):
    """Sends another response, which reads a file, while the file counts as one of the owner's open files."""

    def __init__(self, http: Request, response: Response) -> None:
        super().__init__()
        self._response = response
        self._holding = _hold_file(http)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._holding:
            await self._response(scope, receive, send)


def _hold_file(http: Request) -> AbstractContextManager[None]:
    """Return a context within which the owner holds one more file open. It raises `Overloaded`."""
    files: OpenFiles = http.app.state.open_files
    return files.hold(owner_of(http.scope))


def _limit_of(http: Request, page: tuple[int, int]) -> int:
    return query_integer(http, "limit", page[0], low=1, high=page[1])


def _first(page: Page) -> str | None:
    return page.data[0].id if page.data else None


def _last(page: Page) -> str | None:
    return page.data[-1].id if page.data else None
