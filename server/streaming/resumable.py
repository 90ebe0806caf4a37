"""`ResumableStreams`: streams that outlive their connection, so that a disconnected client can request the rest.

A request opts in. Each event then has an id: the stream's id and the event's number. Sent events stay stored, because
the client may not have received them. Without a connected client, generation continues until the events that were not
sent fill the bound; then it is paused. After a time without a client, the stream is ended and dropped. All streams
without a client share a second bound: beyond it, the owner with the most bytes loses its oldest stream. Those with a
client share a third: beyond it, streams of owners that hold their equal part store less.
"""

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

from server.access_log import RequestFacts
from server.errors import BadRequest
from server.limits.accounts import Accounts
from server.limits.owners import Owner
from server.streaming.sse import PIECE_BYTES, EventStream

_EVENT_END = b"\n\n"
_EVENT_BYTES = 64
"""Bytes of an event in addition to its text."""
_STREAM_BYTES = 1024
"""Bytes of a stream in addition to its events."""
_MAX_ID = 200

_MAX_CONNECTED_BYTES = 2**29
"""Bytes of all streams with a client, beyond which owners that hold their equal part store `_LEAST_BYTES` each."""

_LEAST_BYTES = 2**16
"""Bytes of a stream that are stored in any case."""

_Resource = Literal["resumable_stream_bytes", "held_stream_bytes"]
"""The counted bytes of streams with a client, and of those without one."""


class StreamNotFound(BadRequest):
    """The stream, or the requested part of it, is not stored for this client."""

    status = 404
    code = "stream_not_found"


class _Stream:
    """The latest events of one answer, and the task that generates them."""

    def __init__(
        self, id: str, owner: Owner, max_bytes: Callable[[], int], on_change: Callable[["_Stream"], object]
    ) -> None:
        """`max_bytes` returns the present bound; `on_change` is called when the number of stored bytes changes."""
        self.id = id
        self.owner = owner
        self.facts = RequestFacts()
        """Facts about the request that began the stream. Requests that resume it log them too."""
        self.reader: object | None = None
        """Token of the response that sends the stream now. A later response replaces it."""
        self.expiry: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_complete = False
        self.num_bytes = 0
        self.num_counted: dict[_Resource, int] = {"resumable_stream_bytes": 0, "held_stream_bytes": 0}
        """Bytes of it that are counted in the owner's account: with and without a client."""
        self._on_change = on_change
        self._max_bytes = max_bytes
        self._events: deque[bytes] = deque()
        self.first = 0
        """Number of the first stored event."""
        self._num_taken = 0
        """1 + the number of the last event that a reader has taken."""
        self._changed = asyncio.Event()

    @property
    def end(self) -> int:
        """1 + the number of the last stored event."""
        return self.first + len(self._events)

    async def fill(self, answer: AsyncGenerator[bytes, None]) -> None:
        """Store the events of `answer` as they are generated. Waits while the events that no client took fill the
        bound."""
        async for chunk in answer:
            start = end = 0
            while end := chunk.find(b"\n", end) + 1:
                # A search for both line breaks at once takes 60 ms for 22 MB.
                if chunk[end - 2 : end] != _EVENT_END:
                    continue
                event, start = chunk[start:end], end  # No copy if it is the whole chunk.
                held = b"id: %b:%d\n%b" % (self.id.encode(), self.end, event)
                self._events.append(held)
                self.num_bytes += len(held) + _EVENT_BYTES
            self._wake()
            while not self._drop_taken():
                self._on_change(self)
                await self._changed.wait()
            self._on_change(self)

    def _drop_taken(self) -> bool:
        """Drop the oldest taken events beyond the bound. Returns whether the rest is within the bound."""
        max_bytes = self._max_bytes()
        while self.num_bytes > max_bytes and self.first < self._num_taken:
            self.num_bytes -= len(self._events.popleft()) + _EVENT_BYTES
            self.first += 1
        return self.num_bytes <= max_bytes

    def complete(self) -> None:
        """Note that no more events follow."""
        self.is_complete = True
        self._wake()

    async def follow(self, start: int, reader: object) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `start` to the last one, or until another reader takes over."""
        while self.reader is reader:
            if start < self.end:
                taken = [self._events[start - self.first]]
                num_bytes = len(taken[0])
                for event in itertools.islice(self._events, start - self.first + 1, None):
                    num_bytes += len(event)
                    if num_bytes > PIECE_BYTES:
                        break
                    taken.append(event)
                yield b"".join(taken)
                if self.reader is not reader:
                    return  # Keep the events that this reader took: the other reader may lack them.
                # The next iteration: these events have been sent, and more may be stored.
                start += len(taken)
                if start > self._num_taken:
                    self._num_taken = start
                    self._wake()
            elif self.is_complete:
                return
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def take_over(self, reader: object, start: int) -> None:
        """Make `reader` the reader of the stream, from event `start`."""
        self.reader = reader
        self._num_taken = start
        self._wake()


class ResumableStreams:
    """The stored streams. Used from the event loop's thread only."""

    def __init__(self, max_bytes: int, seconds: float, max_held_bytes: int, accounts: Accounts | None = None) -> None:
        """`max_bytes` bounds the events of one stream, `seconds` the time that a stream without a client is stored.

        `max_held_bytes` bounds all streams without a client together; `accounts` counts them by owner.
        """
        self._max_bytes, self._seconds, self._max_held_bytes = max_bytes, seconds, max_held_bytes
        self._streams: dict[str, _Stream] = {}
        self._left_alone: OrderedDict[str, _Stream] = OrderedDict()
        """Streams without a client, in the order in which their clients disconnected."""
        self._accounts = Accounts() if accounts is None else accounts

    def begin(
        self,
        id: str,
        owner: Owner,
        answer: AsyncGenerator[bytes, None],
        on_end: Callable[[], object],
        facts: RequestFacts | None = None,
    ) -> EventStream:
        """Return the response that streams `answer`. `on_end` is called when `answer` has ended."""
        stream = self._streams[id] = _Stream(id, owner, lambda: self._limit(owner), self._count)

        async def fill() -> None:
            try:
                await stream.fill(answer)
            finally:
                await answer.aclose()
                on_end()
                stream.complete()

        if facts is not None:
            stream.facts = facts
        stream.task = asyncio.create_task(fill(), name=id)
        return self._response(stream, 0)

    def resume(self, last_event_id: str, owner: Owner, state: dict[str, Any] | None = None) -> EventStream:
        """Return the response with the events after the last one that the client received. Raises `BadRequest`.

        The client must use the same key. `state` is the state of the request's scope: it receives the facts of the
        stream's first request, for the log.
        """
        id, _, text = last_event_id.rpartition(":")
        if not (id and text.isascii() and text.isdecimal() and len(last_event_id) <= _MAX_ID):
            raise BadRequest(f"Last-Event-ID is {last_event_id[:80]!r}; it must be the id of an event of a stream")
        stream = self._streams.get(id)
        if stream is None or stream.owner.key != owner.key:
            raise StreamNotFound(
                f"there is no stream {id[:80]!r}: it was not resumable, had no client for {self._seconds:g} s, or the "
                "server was started again; send the request again, without Last-Event-ID"
            )
        start = int(text) + 1
        if not stream.first <= start <= stream.end:
            raise StreamNotFound(
                f"event {text} is not one of those that are held of stream {id}, {stream.first} to {stream.end - 1}; "
                "send the request again, without Last-Event-ID"
            )
        if state is not None:
            state["facts"] = stream.facts
        return self._response(stream, start)

    async def close(self) -> None:
        """End all streams."""
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        for stream in list(self._streams.values()):
            self._forget(stream)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _response(self, stream: _Stream, start: int) -> EventStream:
        reader = object()
        if stream.expiry is not None:
            stream.expiry.cancel()
            stream.expiry = None
        stream.take_over(reader, start)
        self._left_alone.pop(stream.id, None)
        self._count(stream)
        return EventStream(stream.follow(start, reader), lambda: self._left(stream, reader))

    def _left(self, stream: _Stream, reader: object) -> None:
        """Note that a response has ended: the stream waits a limited time for another one."""
        if stream.reader is reader and stream.id in self._streams:
            stream.reader = None
            loop = asyncio.get_running_loop()
            stream.expiry = loop.call_later(self._seconds, self._forget, stream)
            self._left_alone[stream.id] = stream
            self._count(stream)

    def _limit(self, owner: Owner) -> int:
        """Return how many bytes of a stream of the owner may be stored now."""
        is_crowded = self._accounts.is_crowded_by(owner.party, "resumable_stream_bytes", _MAX_CONNECTED_BYTES)
        return _LEAST_BYTES if is_crowded else self._max_bytes

    def _count(self, stream: _Stream) -> None:
        """Update the owner's account with the bytes of a stream, and enforce the bound of those without a client."""
        num_bytes, is_alone = _STREAM_BYTES + stream.num_bytes, stream.id in self._left_alone
        is_stored = stream.id in self._streams
        self._set_count(stream, "resumable_stream_bytes", num_bytes if is_stored and not is_alone else 0)
        added = self._set_count(stream, "held_stream_bytes", num_bytes if is_alone else 0)
        while added > 0 and self._accounts.total("held_stream_bytes") > self._max_held_bytes:
            largest = self._accounts.largest_user("held_stream_bytes")
            self._forget(next(each for each in self._left_alone.values() if each.owner.party == largest))

    def _set_count(self, stream: _Stream, resource: _Resource, num_bytes: int) -> int:
        """Count a stream's bytes; return the change."""
        added, stream.num_counted[resource] = num_bytes - stream.num_counted[resource], num_bytes
        if added:
            self._accounts.change(stream.owner.party, resource, added)
        return added

    def _forget(self, stream: _Stream) -> None:
        if self._streams.pop(stream.id, None) is None:
            return
        self._left_alone.pop(stream.id, None)
        self._count(stream)
        if stream.expiry is not None:
            stream.expiry.cancel()
        if stream.task is not None:
            stream.task.cancel()
        stream.complete()
