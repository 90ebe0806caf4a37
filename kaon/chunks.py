"""`ChatChunk`: a chunk of a streamed chat in the form of `/v1/chat/completions`. `chunks` parses them from events."""

from collections.abc import Iterator
from typing import Any

import msgspec


class ChatDelta(msgspec.Struct):
    """The part of a choice that a chunk adds."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    """The model's reasoning before the answer."""
    tool_calls: list[dict[str, Any]] | None = None
    """Pieces of calls, each with the `index` of the call: first `id` and the function's name, then pieces of its
    `arguments`."""


class ChunkChoice(msgspec.Struct):
    """One choice in a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class ChatChunk(msgspec.Struct):
    """A chunk of a streamed chat. Fields that a request did not ask for are None."""

    id: str
    choices: list[ChunkChoice]
    usage: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(ChatChunk).decode


def chunks(events: bytes) -> Iterator[ChatChunk]:
    """Parse the chunks in complete server-sent events."""
    for event in events.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data and data != b"[DONE]":
            yield _decode(data)
