"""Streams that outlive their connection: the output for a client that reconnects, and the time for which it is
stored."""

import asyncio
import re
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from server.access_log import RequestFacts
from server.errors import BadRequest
from server.limits.accounts import Accounts
from server.limits.owners import ANYONE, Owner
from server.streaming import resumable
from server.streaming.resumable import ResumableStreams, StreamNotFound
from server.streaming.sse import EventStream


class Answer:
    """An answer whose events the test provides."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.num_taken = 0
        self.ended = False

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        while (event := await self.events.get()) is not None:
            self.num_taken += 1
            yield b"data: " + event + b"\n\n"

    def write(self, *events: bytes) -> None:
        for event in events:
            self.events.put_nowait(event)

    def end(self) -> None:
        self.ended = True


class Reader:
    """A connection: `read` returns what has arrived; leaving is like closing it."""

    def __init__(self, response: EventStream) -> None:
        self._response = response
        self._events: AsyncIterator[bytes] = response._events
        self.received = b""

    async def read(self) -> bytes:
        chunk = await asyncio.wait_for(anext(self._events, b""), 60)
        self.received += chunk
        return chunk

    async def rest(self) -> bytes:
        while await self.read():
            pass
        return self.received

    async def leave(self) -> None:
        async with aclosing(self._response._events):
            pass
        assert self._response._on_end is not None
        self._response._on_end()


def numbers(content: bytes) -> list[int]:
    return [int(number) for number in re.findall(rb"^id: s:(\d+)$", content, re.M)]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_rest_is_what_was_not_received_wherever_the_client_was_cut_off() -> None:
    streams, answer = ResumableStreams(10**6, 60, 10**6), Answer()
    first = Reader(streams.begin("s", ANYONE, answer(), answer.end))
    answer.write(b"a", b"b", b"c", b"[DONE]", None)  # type: ignore[arg-type]
    whole = await first.rest()
    assert whole == b"".join(b"id: s:%d\ndata: %b\n\n" % each for each in enumerate([b"a", b"b", b"c", b"[DONE]"]))
    await first.leave()
    for number in range(4):
        again = Reader(streams.resume(f"s:{number}", ANYONE))
        _, cut, rest = whole.partition(b"id: s:%d\n" % (number + 1))
        assert await again.rest() == cut + rest
        await again.leave()
    assert answer.ended
    await streams.close()


async def test_large_events_are_not_joined_with_others() -> None:
    """Each copy of an event of megabytes delays all other clients."""
    streams, answer, size = ResumableStreams(10**9, 60, 10**9), Answer(), 2**20
    reader = Reader(streams.begin("s", ANYONE, answer(), answer.end))
    large = b"x" * size
    answer.write(b"a", b"b", large, b"c", None)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        await settle()
        assert tracemalloc.get_traced_memory()[1] < 2.5 * size, "the chunk and the stored event"
    finally:
        tracemalloc.stop()
    assert [numbers(await reader.read()) for _ in range(3)] == [[0, 1], [2], [3]]
    assert reader.received == b"".join(b"id: s:%d\ndata: %b\n\n" % e for e in enumerate([b"a", b"b", large, b"c"]))
    await reader.leave()
    await streams.close()


async def test_the_answer_goes_on_without_a_client_until_its_events_fill_the_bound() -> None:
    streams, answer = ResumableStreams(1000, 60, 10**6), Answer()
    first = Reader(streams.begin("s", ANYONE, answer(), answer.end))
    answer.write(b"a")
    assert numbers(await first.read()) == [0]
    await first.leave()
    answer.write(*[b"x"] * 50)
    await settle()
    taken = answer.num_taken
    assert 1 < taken < 20
    again = Reader(streams.resume("s:0", ANYONE))
    answer.events.put_nowait(None)
    assert numbers(await again.rest()) == list(range(1, 51))
    await again.leave()
    await streams.close()


async def test_what_was_sent_is_dropped_over_the_bound_and_its_loss_is_a_sentence() -> None:
    streams, answer = ResumableStreams(1000, 60, 10**6), Answer()
    first = Reader(streams.begin("s", ANYONE, answer(), answer.end))
    for _ in range(50):
        answer.write(b"x")
        await first.read()
    answer.write(b"last")
    await first.read()
    await first.leave()
    with pytest.raises(StreamNotFound, match=r"event 0 is not one of those that are held of stream s, \d+ to 50"):
        streams.resume("s:0", ANYONE)
    again = Reader(streams.resume("s:48", ANYONE))
    answer.events.put_nowait(None)
    assert numbers(await again.rest()) == [49, 50]
    await again.leave()
    await streams.close()


async def test_what_a_client_asks_for_again_is_held_until_it_has_it() -> None:
    streams, answer = ResumableStreams(1000, 60, 10**6), Answer()
    first = Reader(streams.begin("s", ANYONE, answer(), answer.end))
    for _ in range(8):
        answer.write(b"x")
        await first.read()
    await first.leave()
    again = Reader(streams.resume("s:0", ANYONE))
    answer.write(*[b"x"] * 20, None)  # type: ignore[arg-type]
    await settle()
    assert numbers(await again.rest()) == list(range(1, 28))
    await again.leave()
    await streams.close()


async def test_a_second_client_takes_the_stream_over() -> None:
    streams, answer = ResumableStreams(10**6, 60, 10**6), Answer()
    first = Reader(streams.begin("s", ANYONE, answer(), answer.end))
    answer.write(b"a")
    await first.read()
    second = Reader(streams.resume("s:0", ANYONE))
    assert await first.rest() == b"id: s:0\ndata: a\n\n"
    await first.leave()
    answer.write(b"b")
    assert numbers(await second.read()) == [1]
    await streams.close()


async def test_a_stream_is_its_keys_alone_and_a_wrong_id_is_a_sentence() -> None:
    streams, answer = ResumableStreams(10**6, 60, 10**6), Answer()
    reader = Reader(streams.begin("s", Owner.of_key("1"), answer(), answer.end))
    answer.write(b"a")
    await reader.read()
    for id in ("s:0", "t:0"):
        with pytest.raises(StreamNotFound, match="there is no stream"):
            streams.resume(id, Owner.of_key("2"))
    for wrong in ("", "s", "s:", ":0", "s:-1", "s:x", "s:" + "9" * 300):
        with pytest.raises(BadRequest, match="must be the id of an event"):
            streams.resume(wrong, Owner.of_key("1"))
    with pytest.raises(StreamNotFound, match="event 7 is not one of those"):
        streams.resume("s:7", Owner.of_key("1"))
    await streams.close()


async def test_a_stream_without_a_client_ends_after_its_time() -> None:
    streams, answer = ResumableStreams(10**6, 0.01, 10**6), Answer()
    reader = Reader(streams.begin("s", ANYONE, answer(), answer.end))
    answer.write(b"a")
    await reader.read()
    await reader.leave()
    while not answer.ended:
        await asyncio.sleep(0.005)
    with pytest.raises(StreamNotFound):
        streams.resume("s:0", ANYONE)


async def test_streams_without_a_client_share_a_bound_and_the_oldest_goes() -> None:
    streams = ResumableStreams(10**6, 60, 5000)
    for name in ("one", "two", "three"):
        answer = Answer()
        reader = Reader(streams.begin(name, ANYONE, answer(), answer.end))
        answer.write(bytes(1200), None)  # type: ignore[arg-type]
        await reader.rest()
        await reader.leave()
    with pytest.raises(StreamNotFound):
        streams.resume("one:0", ANYONE)
    streams.resume("two:0", ANYONE)
    await streams.close()


@pytest.mark.parametrize("is_complete", [True, False])
async def test_an_owner_that_leaves_many_streams_behind_loses_its_own(is_complete: bool) -> None:
    accounts = Accounts()
    streams = ResumableStreams(10**6, 60, 20_000, accounts)
    you, me = Owner.of_key("you"), Owner.of_key("me")
    answers = []
    for number in range(30):
        owner = you if number == 0 else me
        answers.append(answer := Answer())
        reader = Reader(streams.begin(f"s{number}", owner, answer(), answer.end))
        answer.write(b"x" * 1000)
        await reader.read()
        if is_complete:
            answer.events.put_nowait(None)
            await reader.rest()
        await reader.leave()
    await settle()
    assert accounts.total("held_stream_bytes") <= 20_000
    assert [answer.ended for answer in answers[1:20]] == [True] * 19
    for name, owner in (("s0", you), ("s29", me)):
        await Reader(streams.resume(f"{name}:0", owner)).leave()
    with pytest.raises(StreamNotFound):
        streams.resume("s1:0", me)
    await streams.close()
    assert accounts.total("held_stream_bytes") == 0


async def test_streams_of_slow_readers_store_less_once_all_together_hold_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that reads a byte a second keeps its stream: with thousands of connections that is gigabytes."""
    monkeypatch.setattr(resumable, "_MAX_CONNECTED_BYTES", 30_000)
    monkeypatch.setattr(resumable, "_LEAST_BYTES", 1000)
    accounts = Accounts()
    streams = ResumableStreams(10_000, 60, 10**6, accounts)
    heavy, light = Owner.of_key("heavy"), Owner.of_key("light")
    written: dict[str, Answer] = {}
    for number in range(20):
        owner = light if number == 19 else heavy
        written[str(number)] = answer = Answer()
        streams.begin(str(number), owner, answer(), answer.end)
        answer.write(*[b"x" * 500] * 100)
        await settle()
    assert accounts.used(heavy.party, "resumable_stream_bytes") < 30_000 + 11_000 + 19 * 3_000
    assert 10_000 < accounts.used(light.party, "resumable_stream_bytes") < 13_000
    assert not any(answer.ended for answer in written.values()), "they are paused"
    reader = Reader(streams.resume("18:0", heavy))
    assert await reader.read()
    await reader.leave()
    await streams.close()
    assert not accounts.total("resumable_stream_bytes")
    assert not accounts.total("held_stream_bytes")


async def test_a_stream_that_grows_without_a_client_is_counted() -> None:
    accounts = Accounts()
    streams, answer = ResumableStreams(10**6, 60, 10**4, accounts), Answer()
    reader = Reader(streams.begin("s", ANYONE, answer(), answer.end))
    answer.write(b"a")
    await reader.read()
    assert accounts.total("held_stream_bytes") == 0
    await reader.leave()
    answer.write(*[b"x" * 1000] * 20)
    await settle()
    assert answer.ended
    assert accounts.total("held_stream_bytes") == 0
    await streams.close()


async def test_a_client_that_was_replaced_drops_nothing_that_the_new_one_lacks() -> None:
    streams, answer = ResumableStreams(1000, 60, 10**6), Answer()
    first = Reader(streams.begin("s", ANYONE, answer(), answer.end))
    for _ in range(8):
        answer.write(b"x")
        await first.read()
    # The first connection still sends its last event when the client reconnects with an earlier one.
    second = Reader(streams.resume("s:0", ANYONE))
    assert await first.read() == b""
    answer.write(*[b"x"] * 20, None)  # type: ignore[arg-type]
    await settle()
    assert numbers(await second.rest()) == list(range(1, 28))
    await first.leave()
    await second.leave()
    await streams.close()


async def test_the_log_of_a_request_that_goes_on_has_the_facts_of_the_first() -> None:
    streams, answer, facts, state = ResumableStreams(10**6, 60, 10**6), Answer(), RequestFacts(), dict[str, object]()
    first = Reader(streams.begin("s", ANYONE, answer(), answer.end, facts))
    answer.write(b"a")
    await first.read()
    await first.leave()
    streams.resume("s:0", ANYONE, state)
    assert state["facts"] is facts
    await streams.close()


async def test_an_answer_that_fails_ends_its_stream() -> None:
    streams, ended = ResumableStreams(10**6, 60, 10**6), []

    async def failing() -> AsyncGenerator[bytes, None]:
        yield b"data: a\n\n"
        raise RuntimeError

    reader = Reader(streams.begin("s", ANYONE, failing(), lambda: ended.append(True)))
    assert numbers(await reader.rest()) == [0]
    assert ended == [True]
    await streams.close()
