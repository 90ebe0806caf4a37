"""`ChatChunk`: a chunk of a streamed chat, as `/v1/chat/completions` sends it; `chunks` reads them from its events."""

from collections.abc import Iterator
from typing import Any

import msgspec


class ChatDelta(msgspec.Struct):
    """What a chunk adds to a choice."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    """The model's reasoning before the answer."""
    tool_calls: list[dict[str, Any]] | None = None
    """Parts of calls: `index`, at first `id` and the function's name, then pieces of its `arguments`."""


class ChunkChoice(msgspec.Struct):
    """One choice in a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class ChatChunk(msgspec.Struct):
    """A chunk of a streamed chat; fields that a request must ask for are None without."""

    id: str
    choices: list[ChunkChoice]
    usage: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(ChatChunk).decode


def chunks(events: bytes) -> Iterator[ChatChunk]:
    """The chunks in whole server-sent events."""
    for event in events.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data and data != b"[DONE]":
            yield _decode(data)
