"""Reads a recorded HTTP response as a stream of server-sent events, each with the time at which its last byte came.

The load generator records bytes and does nothing else while a server works; this is run when the load is over.
"""

import bisect
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class ResponseError(Exception):
    """A response is no stream of events, or not a whole one."""


class Piece(NamedTuple):
    """Bytes as they came from a socket, and when."""

    time: float
    data: bytes


class Event(NamedTuple):
    """One `data:` line's JSON, and when its last byte came."""

    time: float
    payload: dict[str, Any]


def events(pieces: Sequence[Piece]) -> list[Event]:
    """The events of a response with or without chunked transfer coding; `[DONE]` and comments are left out.

    Raises `ResponseError` with the status and body of an answer that is not 200, and for JSON that is cut off.
    """
    raw = b"".join(piece.data for piece in pieces)
    ends = list(itertools.accumulate(len(piece.data) for piece in pieces))
    head, separator, _ = raw.partition(b"\r\n\r\n")
    if not separator:
        raise ResponseError(f"the connection was closed before a response's head: {raw[:200]!r}")
    lines = head.decode("latin-1").lower().split("\r\n")
    spans = [(len(head) + 4, len(raw))]
    if any(line.startswith("transfer-encoding:") and "chunked" in line for line in lines):
        spans = list(_chunks(raw, len(head) + 4))
    body = b"".join(raw[start:end] for start, end in spans)
    if lines[0].split()[1] != "200":
        raise ResponseError(f"{lines[0]}: {body[:2000].decode(errors='replace')}")
    offsets = _Offsets(spans)
    found = []
    for end, data in _data_lines(body):
        if data == b"[DONE]":
            break
        try:
            payload = json.loads(data)
        except ValueError as error:
            raise ResponseError(f"an event is not JSON: {data[:200]!r}") from error
        found.append(Event(pieces[bisect.bisect_left(ends, offsets.raw_end(end))].time, payload))
    return found


def _chunks(raw: bytes, position: int) -> Iterator[tuple[int, int]]:
    """Start and end of each chunk's data, up to the last chunk or to where the recording ends."""
    while (line_end := raw.find(b"\r\n", position)) >= 0:
        size = int(raw[position:line_end].split(b";")[0], 16)
        if size == 0:
            return
        yield line_end + 2, min(line_end + 2 + size, len(raw))
        position = line_end + 2 + size + 2


def _data_lines(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Every `data:` line: the offset of its end in the body, and what it holds."""
    position = 0
    for line in body.splitlines(keepends=True):
        position += len(line)
        if line.startswith(b"data:"):
            yield position, line[5:].strip()


class _Offsets:
    """From offsets in a decoded body to offsets in the recording."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = spans
        self._ends = list(itertools.accumulate(end - start for start, end in spans))

    def raw_end(self, body_end: int) -> int:
        """Where the byte before `body_end` ends in the recording."""
        index = bisect.bisect_left(self._ends, body_end)
        return self._spans[index][1] - (self._ends[index] - body_end)
