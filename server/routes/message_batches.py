"""`/v1/messages/batches`: Anthropic's batches, which are stored and run like those of `/v1/batches`."""

import functools
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from server.batches.store import Batch, BatchKind, BatchNotFound, BatchStore, FileNotFound, Page, disk_errors
from server.endpoints import ENDPOINTS, EndpointFamily, query_integer, query_parameter
from server.errors import AnthropicError, BadRequest
from server.middleware import owner_of
from server.models import Models
from server.request_builder import reading
from server.routes.batches import FileAnswer, in_store, runner_of
from server.schemas.batches import (
    BATCH_ENDED,
    DAY,
    BatchObject,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchCounts,
    MessageBatchList,
    MessageBatchRequest,
)
from server.streaming.sse import as_json

endpoints = ENDPOINTS.register("message_batches")(EndpointFamily(AnthropicError))

_ENDPOINT = "/v1/messages"
_KIND: BatchKind = "msgbatch"
_DEFAULT_PAGE, _MAX_PAGE = 20, 1000
_NUM_COUNTED = 4096
"""Error files whose lines are counted once, and not at each listing."""

_UNDONE = {"batch_cancelled": "canceled", "batch_expired": "expired"}
"""Anthropic's result type of a line without an answer, by the code of its error."""

_MESSAGE = {"model": "kaon-demo", "max_tokens": 32, "messages": [{"role": "user", "content": "Hello"}]}
_EXAMPLE = {"requests": [{"custom_id": "1", "params": _MESSAGE}]}


_LIST_PARAMETERS = [
    query_parameter(
        "limit", "Most batches to list.", type="integer", minimum=1, maximum=_MAX_PAGE, default=_DEFAULT_PAGE
    ),
    query_parameter("after_id", "Id of the batch after which the list begins.", type="string"),
]


@endpoints.post("/v1/messages/batches", MessageBatch, request=MessageBatchRequest, example=_EXAMPLE)
async def create_message_batch(http: Request) -> Response:
    """Answer many messages, at low priority."""
    runner, owner = runner_of(http), owner_of(http.scope)
    async with reading(http, MessageBatchRequest, Models.of(http.app).config.server_config) as request:
        seen: set[str] = set()
        for index, each in enumerate(request.requests):
            if each.custom_id in seen:
                raise BadRequest(f"requests[{index}].custom_id is {each.custom_id!r}, as in an earlier request")
            seen.add(each.custom_id)
        with disk_errors("the batch cannot be kept"):
            batch = await in_store(http, _add, runner.store, request, owner.namespace, owner.party)
    runner.run(Batch(batch, owner.namespace, owner.party))
    return as_json(_message_batch(batch, runner.store, owner.namespace, http))


def _add(store: BatchStore, request: MessageBatchRequest, owner: str, party: str) -> BatchObject:
    with store.new_file() as file:
        for each in request.requests:
            line = {"custom_id": each.custom_id, "method": "POST", "url": _ENDPOINT, "body": each.params}
            file.write(msgspec.json.encode(line) + b"\n")
        batch = store.add_batch_of(file, "message_batch.jsonl", owner, party, _ENDPOINT, DAY, _KIND)
    batch.request_counts.total = len(request.requests)
    return batch


@endpoints.get("/v1/messages/batches", MessageBatchList, parameters=_LIST_PARAMETERS)
async def list_message_batches(http: Request) -> Response:
    """List the batches, newest first."""
    limit = query_integer(http, "limit", _DEFAULT_PAGE, low=1, high=_MAX_PAGE)
    store, owner = runner_of(http).store, owner_of(http.scope).namespace

    def read() -> MessageBatchList:
        page: Page = store.batches(owner, _KIND, http.query_params.get("after_id"), limit)
        data = [_message_batch(each, store, owner, http) for each in page.data]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return MessageBatchList(data=data, first_id=ends[0], last_id=ends[1], has_more=page.has_more)

    return as_json(await in_store(http, read))


@endpoints.get("/v1/messages/batches/{batch_id}", MessageBatch)
async def retrieve_message_batch(http: Request, batch_id: str) -> Response:
    """Return a batch with its progress."""
    store, owner = runner_of(http).store, owner_of(http.scope).namespace
    return as_json(await in_store(http, lambda: _message_batch(_stored(store, batch_id, owner), store, owner, http)))


@endpoints.post("/v1/messages/batches/{batch_id}/cancel", MessageBatch)
async def cancel_message_batch(http: Request, batch_id: str) -> Response:
    """Cancel a batch; its results have the answered messages."""
    runner, owner = runner_of(http), owner_of(http.scope)
    batch = await in_store(http, _stored, runner.store, batch_id, owner.namespace)
    with disk_errors("the batch cannot be cancelled"):
        batch = await runner.cancel(Batch(batch, owner.namespace, owner.party))
    return as_json(await in_store(http, _message_batch, batch, runner.store, owner.namespace, http))


@endpoints.delete("/v1/messages/batches/{batch_id}", DeletedMessageBatch)
async def delete_message_batch(http: Request, batch_id: str) -> Response:
    """Delete a batch that has ended, with its results."""
    with disk_errors("the batch cannot be deleted"):
        store, owner = runner_of(http).store, owner_of(http.scope).namespace
        await in_store(http, _stored, store, batch_id, owner)
        await in_store(http, store.delete_batch, batch_id, owner)
    return as_json(DeletedMessageBatch(batch_id))


@endpoints.get("/v1/messages/batches/{batch_id}/results", "application/x-jsonl")
async def message_batch_results(http: Request, batch_id: str) -> Response:
    """Return the results of an ended batch, one per line."""
    store, owner = runner_of(http).store, owner_of(http.scope).namespace

    def outputs() -> list[Path]:
        batch = _stored(store, batch_id, owner)
        if batch.status not in BATCH_ENDED:
            raise BadRequest(f"{batch_id} has not ended; its results can be read when it has")
        return [store.path(id, owner) for id in (batch.output_file_id, batch.error_file_id) if id is not None]

    results = _results(await in_store(http, outputs))
    return FileAnswer(http, StreamingResponse(results, media_type="application/x-jsonl"))


def _results(outputs: list[Path]) -> Iterator[bytes]:
    for path in outputs:
        with path.open("rb") as file:
            for line in file:
                yield _result(msgspec.json.decode(line)) + b"\n"


def _result(line: dict[str, Any]) -> bytes:
    """Convert a line of the output to Anthropic's form."""
    if line["error"] is not None:
        result: dict[str, Any] = {"type": _UNDONE[line["error"]["code"]]}
    elif 200 <= line["response"]["status_code"] < 300:
        result = {"type": "succeeded", "message": line["response"]["body"]}
    else:
        result = {"type": "errored", "error": line["response"]["body"]}
    return msgspec.json.encode({"custom_id": line["custom_id"], "result": result})


def _stored(store: BatchStore, id: str, owner: str) -> BatchObject:
    """Return a batch of messages. Raises `BatchNotFound`, also for one of `/v1/batches`: converting its lines, which
    may be very large, would hold up other clients."""
    if not id.startswith(f"{_KIND}_"):
        raise BatchNotFound(f"there is no batch {id[:80]!r}")
    return store.batch(id, owner)


def _message_batch(batch: BatchObject, store: BatchStore, owner: str, http: Request) -> MessageBatch:
    """Convert a batch to Anthropic's form. If it has ended, its error file is read."""
    counts, has_ended = batch.request_counts, batch.status in BATCH_ENDED
    shown = MessageBatchCounts(counts.total - counts.completed - counts.failed, counts.completed, counts.failed)
    if has_ended and batch.error_file_id is not None:
        # Its owner may have deleted the file; then every unanswered message counts as an error.
        with suppress(FileNotFound, FileNotFoundError):
            shown.canceled, shown.expired = _num_undone(store.path(batch.error_file_id, owner))
        shown.errored -= shown.canceled + shown.expired
    return MessageBatch(
        id=batch.id,
        processing_status="ended" if has_ended else "canceling" if batch.status == "cancelling" else "in_progress",
        request_counts=shown,
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at),
        ended_at=_time_or_none(batch.completed_at or batch.cancelled_at or batch.expired_at or batch.failed_at),
        cancel_initiated_at=_time_or_none(batch.cancelling_at),
        results_url=f"{str(http.base_url).rstrip('/')}/v1/messages/batches/{batch.id}/results" if has_ended else None,
    )


@functools.lru_cache(_NUM_COUNTED)
def _num_undone(path: Path) -> tuple[int, int]:
    """Return the numbers of cancelled and of expired lines in an error file, which never changes. Pages of batches
    would otherwise read each file again."""
    canceled = expired = 0
    with path.open("rb") as file:
        for line in file:
            canceled += b'"error":{"code":"batch_cancelled"' in line
            expired += b'"error":{"code":"batch_expired"' in line
    return canceled, expired


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _time_or_none(seconds: int | None) -> str | None:
    return None if seconds is None else _time(seconds)
