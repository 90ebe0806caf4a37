"""`EventLog`: the events of a background response, for those who follow it, from wherever they left off."""

import asyncio
from collections.abc import AsyncGenerator

_EVENT_END = b"\n\n"


class EventLog:
    """Grows until it is closed. An event's place is its sequence number."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._is_closed = False
        self._changed = asyncio.Event()
        self.num_bytes = 0

    def append(self, events: bytes) -> None:
        """Add events, one behind the other. Wakes those who follow."""
        self._events += [event + _EVENT_END for event in events.split(_EVENT_END) if event]
        self.num_bytes += len(events)
        self._wake()

    def close(self) -> None:
        """There will be no more."""
        self._is_closed = True
        self._wake()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """The events from number `start` on, as they come, to the last one."""
        while True:
            changed = self._changed
            if events := self._events[start:]:
                start += len(events)
                yield b"".join(events)
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
