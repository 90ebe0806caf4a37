"""`ResponsesService`: stores responses, and runs background responses. `server.app` creates it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

from fastapi import FastAPI

from engine.config.server import ServerConfig
from server.limits.accounts import Accounts
from server.limits.owners import Owner
from server.responses.rendering import ResponsesRenderer, encode_in_parts, joined_items
from server.responses.store import EventLog, ResponseStore, StoredResponse, StoreFull, Turn
from server.schemas.response_objects import ResponseObject

_CLOSE_SECONDS = 1.0
"""Seconds that background responses may take, at the end of the server, to record their end."""

_PROMPT_READERS, _READER_SECONDS, _SHORT_BYTES = 8, 0.001, 2**15
"""Readers of events that an owner may have before each waits, after it has got fewer bytes than the last number, for
this time per further reader: a response's tokens cost once in the engine, but the event loop once for each reader."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A running background response."""

    stored: StoredResponse
    renderer: ResponsesRenderer
    on_end: Callable[[], object]
    task: asyncio.Task[None]


class ResponsesService:
    """Stores and runs the responses of one server."""

    def __init__(self, config: ServerConfig, accounts: Accounts | None = None) -> None:
        self._accounts = Accounts() if accounts is None else accounts
        self.store = ResponseStore(
            config.max_stored_responses,
            config.max_stored_response_bytes,
            self._accounts,
            self._end_for_room,
            config.most_background_responses_per_key,
        )
        self._max_bytes = config.max_stored_response_bytes
        self._runs: dict[str, _Run] = {}

    @classmethod
    def of(cls, app: FastAPI) -> Self:
        """Return the service of an application."""
        service: Self = app.state.responses
        return service

    def keeper(self, owner: Owner, turn: Turn) -> Callable[[ResponseObject], None]:
        """Return a function that stores an ended response, the answer to `turn`, and that any thread may call: answers
        with many log probabilities are rendered in one. The store changes in the running event loop."""
        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def keep(response: ResponseObject) -> None:
            body, answered = encode_in_parts(response), turn.answered(joined_items(response.output))
            if threading.get_ident() == thread:
                self._keep(response, owner, answered, body)
            else:
                # The loop calls this before it continues with what the thread returns.
                loop.call_soon_threadsafe(self._keep, response, owner, answered, body)

        return keep

    def _keep(self, response: ResponseObject, owner: Owner, turn: Turn, body: list[bytes]) -> None:
        """Store an ended response. For a background response, update its entry in the store."""
        run, size = self._runs.get(response.id), sum(map(len, body))
        if run is None:
            self.store.put(StoredResponse(response.id, owner, turn, lambda: body, size=size))
        else:
            # The last event, which is added later, contains the response again.
            logged = 0 if run.stored.events is None else run.stored.events.num_bytes + size
            self.store.finish(run.stored, turn, body, size + logged)

    def start(
        self,
        renderer: ResponsesRenderer,
        events: AsyncIterator[bytes],
        on_end: Callable[[], object],
        owner: Owner,
        turn: Turn,
        log: EventLog | None,
    ) -> None:
        """Run a response in the background. Clients read its events from `log`. Raises `StoreFull`.

        `on_end` is called when the response has ended, even if it never begins.
        """
        id = renderer.head.id
        stored = StoredResponse(id, owner, turn, renderer.snapshot, events=log, is_background=True, running=True)
        try:
            self.store.put(stored)
        except StoreFull:
            on_end()
            raise
        task = asyncio.create_task(self._consume(events, stored), name=id)
        self._runs[id] = _Run(stored, renderer, on_end, task)
        task.add_done_callback(lambda _: self._ended(id))

    async def follow(self, log: EventLog, start: int, owner: Owner) -> AsyncGenerator[bytes, None]:
        """Yield the events of `log` from number `start` to the last one, as they are added, for a reader of `owner`.

        All readers of an owner together get events about 1 / `_READER_SECONDS` times per second.
        """
        party, accounts = owner.party, self._accounts
        accounts.change(party, "event_readers", 1)
        try:
            async with aclosing(log.follow(start)) as pieces:
                async for events in pieces:
                    yield events
                    num_further = accounts.used(party, "event_readers") - _PROMPT_READERS
                    if num_further > 0 and len(events) < _SHORT_BYTES:
                        await asyncio.sleep(num_further * _READER_SECONDS)
        finally:
            accounts.change(party, "event_readers", -1)

    def cancel(self, stored: StoredResponse) -> None:
        """Cancel a background response. No effect if it has ended."""
        run = self._runs.get(stored.id)
        if run is None or not stored.running:
            return
        last_event = run.renderer.cancel()
        if stored.events is not None:
            stored.events.append(last_event)
        run.task.cancel()

    def _end_for_room(self, stored: StoredResponse) -> None:
        """End a background response whose events do not fit into the store. Its events are dropped, its answer
        stays."""
        run = self._runs.get(stored.id)
        if run is None:  # It is just being added, and has no events.
            return
        num_bytes = stored.size
        if stored.events is not None:
            stored.events.drop()
        last_event = run.renderer.failure(
            StoreFull(
                f"the response was ended because its events had grown to {num_bytes} bytes, and this server stores at "
                f"most {self._max_bytes} bytes of all responses (max_stored_response_bytes); stream it without "
                "background, or ask for fewer tokens or log probabilities"
            )
        )
        if stored.events is not None:
            stored.events.append(last_event)
        run.task.cancel()

    async def close(self) -> None:
        """Wait briefly for the end of all background responses, which the front end has failed; then cancel the
        rest."""
        runs = list(self._runs.values())
        if runs:
            await asyncio.wait([run.task for run in runs], timeout=_CLOSE_SECONDS)
        for run in runs:
            self.cancel(run.stored)

    def _ended(self, id: str) -> None:
        run = self._runs[id]
        self.cancel(run.stored)
        del self._runs[id]
        # If the task was cancelled before its first step, the generator of events did not run its own cleanup.
        run.on_end()
        if run.stored.events is not None:
            run.stored.events.close()

    async def _consume(self, events: AsyncIterator[bytes], stored: StoredResponse) -> None:
        log = stored.events
        async for each in events:
            if log is not None:
                log.append(each)
                self.store.grown(stored, log.num_bytes)
