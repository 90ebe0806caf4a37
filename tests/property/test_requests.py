"""Random clients, cores and clocks: each request is counted once, and no request leaves any state."""

import asyncio
import time
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from starlette.requests import ClientDisconnect, Request

from server.errors import ApiError, NotReady
from server.limits.owners import Owner
from tests.unit.generation_support import FrontEnd, renderer

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "headers": [], "path": "/"}
SOON, LATE = 4.0, 5.0
"""A timeout, and the event loop's time that passes until it is over."""


class Client:
    """An HTTP request: it reads its answer as specified, or disconnects."""

    def __init__(self, front: FrontEnd, n: int, owner: str, timeout: float | None, *, stream: bool) -> None:
        self._left = asyncio.Event()
        self._may_send = asyncio.Event()
        generation = front.generation(time.monotonic(), n, owner=Owner(party=owner), timeout=timeout)
        self.task = asyncio.ensure_future(self._run(generation, n, stream))
        self.received = b""

    async def _run(self, generation: Any, n: int, stream: bool) -> None:
        try:
            response = await generation.respond(Request(SCOPE, self._receive), renderer(n), stream=stream)
        except (ApiError, ClientDisconnect):
            return
        await response(SCOPE, self._receive, self._send)

    async def _receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self._may_send.wait()
        self.received += message.get("body", b"")

    def read(self, *, on: bool) -> None:
        """Read all further output, or none of it."""
        self._may_send.set() if on else self._may_send.clear()

    def leave(self) -> None:
        """Close the connection: everything sent from now on is discarded, and nothing waits for it."""
        self._left.set()
        self._may_send.set()


class Requests(RuleBasedStateMachine):
    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.front: FrontEnd
        self.all: list[Client] = []
        self.loop.run_until_complete(self._make())

    async def _make(self) -> None:
        bounds = {"max_queued_requests": 6, "max_queued_tokens": 15, "max_requests_per_key": 3}
        self.front = FrontEnd(stream_buffer_bytes=1024, slow_readers="pause", **bounds)
        self.ending = FrontEnd(stream_buffer_bytes=1024, slow_readers="end", **bounds)

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(13):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    @rule(
        target=clients,
        n=st.integers(1, 8),
        owner=st.sampled_from("ab"),
        timeout=st.sampled_from([None, None, 3600.0, SOON]),
        stream=st.booleans(),
        slow=st.booleans(),
        settled=st.booleans(),
    )
    def ask(self, n: int, owner: str, timeout: float | None, stream: bool, slow: bool, settled: bool) -> Client:
        async def make() -> Client:
            return Client(self.ending if owner == "b" else self.front, n, owner, timeout, stream=stream)

        client = self.loop.run_until_complete(make())
        self.all.append(client)
        client.read(on=not slow)
        if settled:
            self.settle()
        return client

    @rule(steps=st.sampled_from([1, 1, 3, 30]), some=st.integers(1, 9), settled=st.booleans())
    def write(self, steps: int, some: int, settled: bool) -> None:
        for front in (self.front, self.ending):
            for _ in range(steps):
                front.core.step(sorted(front.core.running)[:some])
        if settled:
            self.settle()

    @rule(some=st.integers(1, 3), error=st.sampled_from([None, None, "the step failed"]))
    def finish(self, some: int, error: str | None) -> None:
        for front in (self.front, self.ending):
            front.core.step(sorted(front.core.running)[:some], last=True, error=error)
        self.settle()

    @rule(client=clients, on=st.booleans())
    def read(self, client: Client, on: bool) -> None:
        client.read(on=on)
        self.settle()

    @rule(client=consumes(clients), settled=st.booleans())
    def leave(self, client: Client, settled: bool) -> None:
        client.leave()
        if settled:
            self.settle()

    @rule()
    def wait_for_timeouts(self) -> None:
        now = self.loop.time
        self.loop.time = lambda: now() + LATE  # type: ignore[method-assign]
        self.settle()

    @rule()
    def late_output_of_nobody(self) -> None:
        self.front.core.step([10**9], last=True)

    @rule()
    def shut_down(self) -> None:
        self.front.hub.fail_all(NotReady("the server is shutting down"))
        self.settle()

    @rule(is_dead=st.booleans())
    def die(self, is_dead: bool) -> None:
        self.front.core.is_dead = is_dead

    @invariant()
    def the_queue_is_within_the_live_requests_and_the_counts_agree(self) -> None:
        for front in (self.front, self.ending):
            assert front.admission.num_queued <= front.hub.num_live
            assert (front.admission.queued_tokens == 0) or front.admission.num_queued
            assert len(front.core.running | front.core.paused) == front.hub.num_live
            received = front.count("kaon_requests_received_total")
            ended = front.count("kaon_requests_finished_total") + front.count("kaon_requests_rejected_total")
            assert received == ended + front.hub.num_live

    def teardown(self) -> None:
        for client in self.all:
            client.leave()

        async def ended() -> None:
            async with asyncio.timeout(60):
                await asyncio.gather(*(client.task for client in self.all))

        try:
            self.loop.run_until_complete(ended())
            for front in (self.front, self.ending):
                assert front.admission.is_empty
                assert front.hub.num_live == 0
                assert not front.core.running
                assert not front.core.paused
            assert not asyncio.all_tasks(self.loop)
        finally:
            self.loop.close()


Requests.TestCase.settings = settings(
    max_examples=settings.default.max_examples * 2 // 5, stateful_step_count=30, deadline=None
)
TestRequests = Requests.TestCase
