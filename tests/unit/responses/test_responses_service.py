"""Background responses: they run on their own, are followed, cancelled and deleted, and end with the server."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator

import pytest
from openai.types.responses import Response

from engine.config.server import ServerConfig
from engine.text.request_state import RequestDelta
from server.errors import NotReady
from server.limits.accounts import Accounts
from server.limits.owners import ANYONE, Owner
from server.responses.service import ResponsesService
from server.responses.store import EventLog, ResponseNotFound, StoredResponse, StoreFull, Turn
from server.schemas.response_objects import InputText, MessageItem
from tests.unit.responses_support import USAGE, renderer_of, types_of

TURN = Turn(None, [MessageItem(id="msg_1", role="user", content=(InputText("Hi"),))])


class Run:
    """A background response whose model writes a word at each call of the test."""

    def __init__(self, service: ResponsesService, log: EventLog | None = None) -> None:
        self.steps: asyncio.Queue[RequestDelta | Exception] = asyncio.Queue()
        self.was_closed = False
        self.renderer = renderer_of(background=True)
        self.renderer._on_end = service.keeper(ANYONE, TURN)
        self.id = self.renderer.head.id
        self.ends = 0
        service.start(self.renderer, self._events(), self._on_end, ANYONE, TURN, log)

    def write(self, text: str, *, last: bool = False) -> None:
        self.steps.put_nowait(RequestDelta(text, [1], None, last, "stop" if last else None))

    def _on_end(self) -> None:
        self.ends += 1

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            yield self.renderer.opening()
            while True:
                step = await self.steps.get()
                if isinstance(step, NotReady):
                    yield self.renderer.failure(step)
                    return
                assert isinstance(step, RequestDelta)
                yield self.renderer.chunk(0, step)
                if step.finished:
                    break
            yield self.renderer.closing(USAGE)
        finally:
            self.was_closed = True


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def state_of(stored: StoredResponse) -> tuple[str, str]:
    response = Response.model_validate_json(b"".join(stored.body()))
    return response.status or "", response.output_text


async def followed(log: EventLog, start: int = 0) -> bytes:
    return b"".join([events async for events in log.follow(start)])


async def test_a_response_runs_by_itself_and_can_be_read_at_any_time() -> None:
    service = ResponsesService(ServerConfig())
    run = Run(service)
    stored = service.store.get(run.id, ANYONE)
    assert state_of(stored) == ("queued", "")
    run.write("Hel")
    await settle()
    assert state_of(stored) == ("in_progress", "Hel")
    run.write("lo", last=True)
    await settle()
    assert state_of(stored) == ("completed", "Hello")
    (said,) = service.store.previous_turn(run.id, ANYONE).output
    assert isinstance(said, MessageItem)
    assert said.text == "Hello"
    service.cancel(stored)
    assert state_of(stored) == ("completed", "Hello")


async def test_an_answer_that_a_thread_renders_is_stored_by_the_event_loop() -> None:
    """The thread changed the store and its counts while the event loop used them."""
    service = ResponsesService(ServerConfig())
    renderer = renderer_of()
    renderer.chunk(0, RequestDelta("Hello", [1], None, True, "stop"))
    renderer._on_end = service.keeper(ANYONE, TURN)
    added: list[int] = []
    service.store.put = lambda stored: added.append(threading.get_ident())  # type: ignore[method-assign]
    await asyncio.to_thread(renderer.closing, USAGE)
    assert added == [threading.get_ident()]


async def test_all_who_follow_see_all_events_from_where_they_want() -> None:
    service, log = ResponsesService(ServerConfig()), EventLog()
    run = Run(service, log)
    early = asyncio.create_task(followed(log))
    run.write("Hel")
    await settle()
    late = asyncio.create_task(followed(log))
    run.write("lo", last=True)
    stream = await early
    assert types_of(stream)[:3] == ["created", "queued", "in_progress"]
    assert types_of(stream)[-1] == "completed"
    assert await late == stream
    assert await followed(log) == stream
    assert stream.endswith(await followed(log, 3))
    assert len((await followed(log, 3)).split(b"\n\n")) == len(stream.split(b"\n\n")) - 3
    assert await followed(log, 1000) == b""


@pytest.mark.parametrize("begun", [True, False])
async def test_a_cancelled_response_ends_there(begun: bool) -> None:
    service, log = ResponsesService(ServerConfig()), EventLog()
    run = Run(service, log)
    stored = service.store.get(run.id, ANYONE)
    if begun:
        run.write("Hel")
        await settle()
    service.cancel(stored)
    run.write("lo", last=True)
    await settle()
    assert state_of(stored) == ("cancelled", "Hel" if begun else "")
    assert types_of(await followed(log))[-1] == "incomplete"
    assert run.was_closed == begun
    assert run.ends == 1
    service.cancel(stored)
    assert types_of(await followed(log)).count("incomplete") == 1


async def test_a_response_that_is_deleted_stops_running() -> None:
    service = ResponsesService(ServerConfig())
    run = Run(service)
    await settle()
    service.cancel(service.store.delete(run.id, ANYONE))
    await settle()
    assert run.was_closed
    with pytest.raises(ResponseNotFound):
        service.store.get(run.id, ANYONE)
    assert service.store.num_bytes == 0


async def test_the_end_of_the_server_is_reported_by_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.responses.service._CLOSE_SECONDS", 60.0)
    service, log = ResponsesService(ServerConfig()), EventLog()
    run = Run(service, log)
    await settle()
    run.steps.put_nowait(NotReady("the server is shutting down"))
    await service.close()
    stored = service.store.get(run.id, ANYONE)
    response = Response.model_validate_json(b"".join(stored.body()))
    assert response.status == "failed"
    assert response.error is not None
    assert response.error.message == "the server is shutting down"
    assert types_of(await followed(log))[-1] == "failed"


async def test_what_does_not_end_with_the_server_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.responses.service._CLOSE_SECONDS", 0.01)
    service = ResponsesService(ServerConfig())
    run = Run(service)
    stored = service.store.get(run.id, ANYONE)
    await service.close()
    await settle()
    assert state_of(stored) == ("cancelled", "")
    assert run.was_closed


async def test_no_more_run_than_can_be_stored() -> None:
    service = ResponsesService(ServerConfig(max_stored_responses=1))
    run = Run(service)
    with pytest.raises(StoreFull):
        Run(service)
    run.write("Hi", last=True)
    await settle()
    Run(service).write("Hi", last=True)
    await settle()
    assert len(service.store) == 1


async def test_the_events_of_a_response_count_as_stored_bytes() -> None:
    sizes = []
    for log in (None, EventLog()):
        service = ResponsesService(ServerConfig())
        run = Run(service, log)
        run.write("Hi", last=True)
        await settle()
        sizes.append(service.store.num_bytes)
        logged = 0 if log is None else log.num_bytes
    assert sizes[1] - sizes[0] >= 0.9 * logged


async def test_a_response_whose_events_exceed_the_store_ends_in_words_and_its_followers_learn_it() -> None:
    service, log = ResponsesService(ServerConfig(max_stored_response_bytes=20_000)), EventLog()
    run = Run(service, log)
    stored = service.store.get(run.id, ANYONE)
    slow = log.follow(0)
    first = await anext(slow)
    largest = 0
    while stored.running:
        run.write("x" * 100)
        await settle()
        largest = max(largest, service.store.num_bytes)
    assert largest <= 20_000
    await settle()
    assert run.was_closed
    assert run.ends == 1
    response = Response.model_validate_json(b"".join(stored.body()))
    assert response.status == "failed"
    assert response.error is not None
    assert "max_stored_response_bytes" in response.error.message
    assert response.output_text.startswith("xxxx")
    rest = b"".join([events async for events in slow])
    assert first.startswith(b"event: response.created")
    assert rest.startswith(b"event: response.failed")
    assert await followed(log) == await followed(log, 3) == rest


async def test_a_follower_that_reads_slowly_holds_a_piece_of_the_log_at_a_time() -> None:
    log = EventLog()
    for number in range(1000):
        log.append(b"data: %05d %b\n\n" % (number, b"x" * 1000))
    log.close()
    pieces = [piece async for piece in log.follow(10)]
    assert max(map(len, pieces)) < 70_000
    assert b"".join(pieces).count(b"data: ") == 990


async def test_many_readers_of_an_owner_wait_between_events_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 readers of one response took the event loop for themselves: probes took 137 ms in the median."""
    accounts, log, waits = Accounts(), EventLog(), list[float]()
    service = ResponsesService(ServerConfig(), accounts)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("server.responses.service.asyncio.sleep", sleep)
    heavy, light = Owner("heavy"), Owner("light")
    log.append(b"data: 1\n\n")
    readers = [service.follow(log, 0, heavy) for _ in range(108)]
    for reader in readers:
        await anext(reader)
    other = service.follow(log, 0, light)
    await anext(other)
    assert accounts.used("heavy", "event_readers") == 108
    assert not waits
    log.append(b"data: 2\n\n")
    assert await anext(other) == await anext(readers[0]) == b"data: 2\n\n"
    assert waits == [pytest.approx(0.1)]
    log.append(b"x" * 2**15 + b"\n\n")
    await anext(
        readers[0]
    )  # After a short piece; the long one, of a reader that lags, is followed by the next at once.
    waits.clear()
    log.close()
    assert [events async for events in readers[0]] == []
    assert not waits
    for reader in readers:
        await reader.aclose()
    await other.aclose()
    assert not accounts.users("event_readers")


def test_a_log_holds_the_same_number_of_objects_however_many_events_it_has() -> None:
    """The garbage collector visits the objects that others refer to: logs with a list of events each delayed the event
    loop."""

    def num_referents(log: EventLog) -> int:
        found: dict[int, object] = {}
        ahead: list[object] = [log.__dict__]
        while ahead:
            each = ahead.pop()
            if id(each) not in found and not isinstance(each, type):
                found[id(each)] = each
                ahead += gc.get_referents(each)
        return len(found)

    log = EventLog()
    log.append(b"data: 0\n\n")
    before = num_referents(log)
    for number in range(1, 1000):
        log.append(b"event: x\ndata: %d\n\nevent: y\ndata: %d\n\n" % (number, number))
    assert num_referents(log) <= before + 2
