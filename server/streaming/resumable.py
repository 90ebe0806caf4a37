"""`ResumableStreams`: streams that outlive their connection: a client that was cut off asks for the rest.

A request opts in. Each event then has an id, the stream's with the event's number. Events are held after they were
sent, because what was sent may not have arrived. While no client is connected, the answer goes on until the events
that no client took fill the bound; then it is paused. After a time without a client, the stream ends and is forgotten.
All streams without a client share a bound too: beyond it, the owner that has most of them loses its oldest one.
"""

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from server.access_log import RequestFacts
from server.errors import BadRequest
from server.limits.accounts import Accounts
from server.limits.owners import Owner
from server.streaming.sse import EventStream

_EVENT_END = b"\n\n"
_EVENT_BYTES = 64
"""Memory of an event besides its text."""
_STREAM_BYTES = 1024
"""Memory of a stream besides its events."""
_MAX_ID = 200


class StreamNotFound(BadRequest):
    """The stream, or the part of it that is asked for, is not held for this client."""

    status = 404
    code = "stream_not_found"


class _Stream:
    """The last events of one answer, and the task that takes them from the answer."""

    def __init__(self, id: str, owner: Owner, max_bytes: int, on_change: Callable[["_Stream"], object]) -> None:
        """`on_change` is called when more or fewer bytes are held."""
        self.id = id
        self.owner = owner
        self.facts = RequestFacts()
        """Of the request that began it, which those that go on with it log too."""
        self.reader: object | None = None
        """Whoever follows it now; another one takes over."""
        self.expiry: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_complete = False
        self.num_bytes = 0
        self.num_counted = 0
        """Of its bytes, those that are counted as its owner's."""
        self._on_change = on_change
        self._max_bytes = max_bytes
        self._events: deque[bytes] = deque()
        self._first = 0
        """Number of the first held event."""
        self._num_taken = 0
        """Number behind the last event that the reader has taken, or the one before it."""
        self._changed = asyncio.Event()

    @property
    def first(self) -> int:
        """Number of the first held event."""
        return self._first

    @property
    def end(self) -> int:
        """Number behind the last event."""
        return self._first + len(self._events)

    async def fill(self, answer: AsyncGenerator[bytes, None]) -> None:
        """Hold the answer's events as they come; waits while those that no client took fill the bound."""
        async for chunk in answer:
            for event in chunk.split(_EVENT_END)[:-1]:
                held = b"id: %b:%d\n%b\n\n" % (self.id.encode(), self.end, event)
                self._events.append(held)
                self.num_bytes += len(held) + _EVENT_BYTES
            self._wake()
            while not self._drop_taken():
                self._on_change(self)
                await self._wait()
            self._on_change(self)

    def _drop_taken(self) -> bool:
        """Drop the oldest events over the bound, as far as they were taken; whether the rest is within it."""
        while self.num_bytes > self._max_bytes and self._first < self._num_taken:
            self.num_bytes -= len(self._events.popleft()) + _EVENT_BYTES
            self._first += 1
        return self.num_bytes <= self._max_bytes

    def complete(self) -> None:
        """No more events follow."""
        self.is_complete = True
        self._wake()

    async def follow(self, start: int, reader: object) -> AsyncGenerator[bytes, None]:
        """The events from number `start` on, until the last one, or until another reader takes over."""
        while self.reader is reader:
            if start < self.end:
                end = self.end
                yield b"".join(itertools.islice(self._events, start - self._first, None))
                if self.reader is not reader:
                    return  # What this one has taken must not be dropped: the other one may lack it.
                # Asked for more: these events have been sent, and perhaps others have come.
                start = end
                if start > self._num_taken:
                    self._num_taken = start
                    self._wake()
            elif self.is_complete:
                return
            else:
                await self._wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait(self) -> None:
        await self._changed.wait()

    def take_over(self, reader: object, start: int) -> None:
        """`reader` follows the stream from now on, from event `start`."""
        self.reader = reader
        self._num_taken = start
        self._wake()


class ResumableStreams:
    """The streams that are held. Used from the event loop's thread."""

    def __init__(self, max_bytes: int, seconds: float, max_held_bytes: int, accounts: Accounts | None = None) -> None:
        """`max_bytes`: of the events of one stream. `seconds`: how long a stream without a client is held.

        `max_held_bytes`: of all streams without a client, which `accounts` counts by owner.
        """
        self._max_bytes, self._seconds, self._max_held_bytes = max_bytes, seconds, max_held_bytes
        self._streams: dict[str, _Stream] = {}
        self._left_alone: OrderedDict[str, _Stream] = OrderedDict()
        """Streams without a client, those first whose clients left first."""
        self._accounts = Accounts() if accounts is None else accounts

    def begin(
        self,
        id: str,
        owner: Owner,
        answer: AsyncGenerator[bytes, None],
        on_end: Callable[[], object],
        facts: RequestFacts | None = None,
    ) -> EventStream:
        """The response to a request whose events are those of `answer`; `on_end` is called when that has ended."""
        stream = self._streams[id] = _Stream(id, owner, self._max_bytes, self._count)

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
        """The events behind the one that a client of the same key received last. Raises `BadRequest`.

        `state` is that of the request's scope, whose line in the log has what the stream's first request learnt.
        """
        id, _, text = last_event_id.rpartition(":")
        if not (id and text.isascii() and text.isdecimal() and len(last_event_id) <= _MAX_ID):
            raise BadRequest(f"Last-Event-ID is {last_event_id[:80]!r}; it must be the id of an event of a stream")
        stream = self._streams.get(id)
        if stream is None or stream.owner.key != owner.key:
            raise StreamNotFound(
                f"there is no stream {id[:80]!r}: it was not resumable, had no client for {self._seconds:g} s, or the "
                "server was started again; send the request anew, without Last-Event-ID"
            )
        start = int(text) + 1
        if not stream.first <= start <= stream.end:
            raise StreamNotFound(
                f"event {text} is not one of those that are held of stream {id}, {stream.first} to {stream.end - 1}; "
                "send the request anew, without Last-Event-ID"
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
        """A response has ended: the stream waits for another client, for a time."""
        if stream.reader is reader and stream.id in self._streams:
            stream.reader = None
            loop = asyncio.get_running_loop()
            stream.expiry = loop.call_later(self._seconds, self._forget, stream)
            self._left_alone[stream.id] = stream
            self._count(stream)

    def _count(self, stream: _Stream) -> None:
        """Count the bytes of a stream as its owner's while it has no client, and keep all of them within the bound."""
        count = _STREAM_BYTES + stream.num_bytes if stream.id in self._left_alone else 0
        added, stream.num_counted = count - stream.num_counted, count
        if not added:
            return
        self._accounts.change(stream.owner.party, "held_stream_bytes", added)
        while added > 0 and self._accounts.total("held_stream_bytes") > self._max_held_bytes:
            largest = self._accounts.largest_user("held_stream_bytes")
            self._forget(next(each for each in self._left_alone.values() if each.owner.party == largest))

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
