"""`/v1/files` and `/v1/batches`: the request bodies, and the objects in answers."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import Field

from server.schemas.body import Between, Metadata, RequestModel
from server.schemas.generation import PlainName

HOUR, DAY, MONTH = 3600, 86400, 30 * 86400

BatchEndpoint: TypeAlias = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"
]
"""The endpoints that the lines of a batch may use."""

BatchStatus: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class OutputExpiry(RequestModel):
    """The expiry of the files that a batch writes."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Between(HOUR, MONTH)]


class BatchRequest(RequestModel):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    """An uploaded file of purpose batch: a JSON object a line."""

    endpoint: BatchEndpoint
    """The endpoint of all its lines."""

    completion_window: Literal["24h"]
    """After this time, lines that are not done expire."""

    metadata: Metadata | None = None
    """Returned with the batch."""

    output_expires_after: OutputExpiry | None = None
    """By default, the files stay until they are deleted."""


FilePurpose: TypeAlias = Literal["batch", "batch_output"]


class FileObject(msgspec.Struct, kw_only=True):
    """An uploaded file, or one that a batch wrote."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: FilePurpose
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(msgspec.Struct, kw_only=True):
    """Answer to `GET /v1/files`: a page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct):
    """Answer to `DELETE /v1/files/{id}`."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchError(msgspec.Struct):
    """An error in a line of the input, or in the whole input."""

    code: str
    message: str
    line: int | None = None
    """Number of the line, from 1; null for an error of the whole input."""
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """Numbers of lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens of all lines that have succeeded."""

    input_tokens: int = 0
    input_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = msgspec.field(default_factory=ReasoningTokens)
    total_tokens: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are seconds since the epoch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: BatchStatus
    output_file_id: str | None = None
    """File with one answer per line; present when the batch has ended and any line has succeeded."""
    error_file_id: str | None = None
    """File with the lines that failed or expired."""
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    model: str | None = None
    """Model of the first answer; present, as `usage`, when the batch has ended and its lines were run."""
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, kw_only=True):
    """Answer to `GET /v1/batches`: a page of batches, newest first."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


BATCH_ENDED = ("failed", "completed", "expired", "cancelled")
"""Final states of a batch."""


# Anthropic's form of batches.

_MAX_REQUESTS = 50_000


class MessageOfBatch(RequestModel):
    """One request of a message batch."""

    custom_id: PlainName
    params: dict[str, Any]
    """Body of a request to `/v1/messages`; it is validated when it is computed."""


class MessageBatchRequest(RequestModel):
    """Body of `POST /v1/messages/batches`."""

    requests: Annotated[list[MessageOfBatch], Field(min_length=1, max_length=_MAX_REQUESTS, fail_fast=True)]


class MessageBatchCounts(msgspec.Struct):
    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True):
    """A batch of messages. Times are in RFC 3339."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None = None
    cancel_initiated_at: str | None = None
    archived_at: None = None
    results_url: str | None = None
    """URL of the results, once the batch has ended."""


class MessageBatchList(msgspec.Struct, kw_only=True):
    """Answer to `GET /v1/messages/batches`: a page of batches, newest first."""

    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedMessageBatch(msgspec.Struct):
    """Answer to `DELETE /v1/messages/batches/{id}`."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"
