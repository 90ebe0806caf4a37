"""A request leaves no state, whether it is refused, never begun, late, read too slowly, or failed."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from starlette.requests import ClientDisconnect, Request

from engine.messages import RequestOutput, StepOutputs, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.request_state import RequestDelta
from server.errors import BadRequest, EngineError, Overloaded, RequestTimeout
from server.limits.owners import ANYONE, Owner
from server.streaming import generation, logprob_room
from server.streaming.generation import Generation
from server.streaming.hub import DeltaStream
from server.streaming.sse import EventStream, while_connected
from tests.unit.generation_support import PROMPT, WORD, FrontEnd, renderer
from tests.unit.responses_support import renderer_of

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "headers": [], "path": "/"}
FINISHED, REJECTED = "kaon_requests_finished_total", "kaon_requests_rejected_total"


def frontend_at_rest(front: FrontEnd) -> bool:
    reported = front.count("kaon_requests_received_total") == front.count(FINISHED) + front.count(REJECTED)
    reported &= not any(front.admission.accounts.of_owner(ANYONE.party).values())
    return reported and front.admission.is_empty and not front.hub.num_live and front.count("kaon_requests_live") == 0


async def stays() -> Any:
    """The client's side of a connection without events."""
    await asyncio.Event().wait()


async def leaves() -> Any:
    return {"type": "http.disconnect"}


def http(receive: Any = stays) -> Request:
    return Request(SCOPE, receive)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def later(events: AsyncGenerator[bytes, None]) -> "asyncio.Future[bytes]":
    """The stream's next events, as they arrive."""
    return asyncio.ensure_future(anext(events))


def error_of(event: bytes) -> dict[str, Any]:
    reported: dict[str, Any] = json.loads(event.removeprefix(b"data: "))["error"]
    return reported


# -- admission --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_over_the_bound_is_refused_before_its_response_begins(stream: bool) -> None:
    front = FrontEnd(max_queued_requests=1)
    first = front.generation(time.monotonic())
    _ = first.events(renderer())
    with pytest.raises(Overloaded):
        await front.generation(time.monotonic()).respond(http(), renderer(), stream=stream)
    assert front.core.running == {0}
    first.end()
    assert frontend_at_rest(front)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_without_an_engine_leaves_nothing_behind(stream: bool) -> None:
    front = FrontEnd(max_requests_per_key=1)
    front.core.is_dead = True
    for _ in range(2):
        with pytest.raises(EngineError, match="has stopped"):
            await front.generation(time.monotonic()).respond(http(), renderer(), stream=stream)
    assert front.count('kaon_requests_rejected_total{reason="engine"}') == 2
    assert frontend_at_rest(front)


async def test_choices_of_a_prompt_add_it_to_the_queue_once() -> None:
    front = FrontEnd()
    generation = front.generation(time.monotonic(), n=4)
    _ = generation.events(renderer(4))
    assert (front.admission.num_queued, front.admission.queued_tokens) == (4, 3)
    generation.end()
    assert frontend_at_rest(front)


# -- clients that leave -----------------------------------------------------------------------------------------


async def test_a_client_that_left_before_the_streams_first_byte_ends_it_in_the_core() -> None:
    front = FrontEnd()
    response = await front.generation(time.monotonic(), n=2).respond(http(), renderer(2), stream=True)
    assert isinstance(response, EventStream)
    assert front.core.running == {0, 1}

    async def send(message: Any) -> None:
        await stays()

    await response(SCOPE, leaves, send)
    assert front.core.aborted == [0, 1]
    assert frontend_at_rest(front)


async def test_a_response_that_is_cancelled_before_its_first_step_ends_in_the_core() -> None:
    front = FrontEnd()
    response = await front.generation(time.monotonic()).respond(http(), renderer(), stream=True)

    async def send(message: Any) -> None:
        raise OSError("the connection is gone")

    with pytest.raises(OSError, match="connection is gone"):
        await response(SCOPE, stays, send)
    assert front.core.aborted == [0]
    assert frontend_at_rest(front)


async def test_a_client_that_leaves_a_whole_answer_ends_it_in_the_core() -> None:
    front = FrontEnd()
    with pytest.raises(ClientDisconnect):
        await front.generation(time.monotonic()).respond(http(leaves), renderer(), stream=False)
    assert front.core.aborted == [0]
    assert frontend_at_rest(front)


# -- deadlines --------------------------------------------------------------------------------------------------


TIMEOUT = 600.0


def half_over(front: FrontEnd, **keywords: Any) -> Generation:
    """A request that arrived half of its timeout ago."""
    return front.generation(time.monotonic() - TIMEOUT / 2, timeout=TIMEOUT, **keywords)


async def pass_time(seconds: float) -> None:
    """Move the event loop's timers past the timeout, however long this machine has taken."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
    await settle()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_whole_answer_that_is_late_is_a_408_that_asks_for_no_repetition(begun: bool) -> None:
    front = FrontEnd()
    response = asyncio.ensure_future(half_over(front, n=2).respond(http(), renderer(2), stream=False))
    await settle()
    if begun:
        front.core.step([0])
    await pass_time(TIMEOUT / 2 - 100)
    assert not response.done()
    await pass_time(101)
    assert response.done()
    with pytest.raises(RequestTimeout, match="not done within 600 s") as reported:
        await response
    assert (reported.value.status, reported.value.code) == (408, "request_timeout")
    assert reported.value.headers == {"x-should-retry": "false"}
    assert front.core.aborted == [0, 1]
    assert front.count('kaon_requests_finished_total{reason="timeout"}') == 2
    assert frontend_at_rest(front)


async def test_a_late_stream_ends_with_an_error_event_behind_what_was_written() -> None:
    front = FrontEnd()
    events = half_over(front).events(renderer())
    taken = later(events)
    await settle()
    front.core.step()
    await pass_time(TIMEOUT)
    assert b'"text":"Hello"' in await taken
    assert error_of(await anext(events))["code"] == "request_timeout"
    assert [event async for event in events] == []
    assert frontend_at_rest(front)


async def test_a_request_whose_time_is_over_before_it_is_admitted_never_reaches_the_core() -> None:
    front = FrontEnd()
    generation = front.generation(time.monotonic() - 11, timeout=10.0)
    with pytest.raises(RequestTimeout):
        await generation.respond(http(), renderer(), stream=True)
    assert not front.core.running
    assert front.count('kaon_requests_rejected_total{reason="timeout"}') == 1
    assert frontend_at_rest(front)


@pytest.mark.parametrize(("servers", "own"), [(TIMEOUT, 5000.0), (5000.0, TIMEOUT), (TIMEOUT, None)])
async def test_the_smaller_of_the_requests_and_the_servers_timeout_counts(servers: float, own: float | None) -> None:
    front = FrontEnd(request_timeout=servers)
    generation = front.generation(time.monotonic(), timeout=own)
    response = asyncio.ensure_future(generation.respond(http(), renderer(), stream=False))
    await settle()
    await pass_time(TIMEOUT)
    assert response.done()
    with pytest.raises(RequestTimeout, match="within 600 s"):
        await response


async def test_a_whole_answer_of_too_many_log_probabilities_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay in memory until it is sent: 128 choices of 4000 tokens with 20 alternatives would take 0.7 GB."""
    monkeypatch.setattr(generation, "_MAX_ANSWER_LOGPROBS", 5)
    front = FrontEnd()
    response = asyncio.ensure_future(
        front.generation(time.monotonic(), n=2).respond(http(), renderer(2), stream=False)
    )
    await settle()
    position = TokenLogprobs(WORD[0], -1.0, (1, 2), (-1.0, -2.0))
    for id in (0, 1):
        assert not front.core.aborted
        front.hub.receive(StepOutputs([RequestOutput(id, WORD, logprobs=[position])]))
    with pytest.raises(BadRequest, match="more than 5 log probabilities"):
        await response
    assert front.core.aborted == [0, 1]
    assert frontend_at_rest(front)


@pytest.mark.parametrize("repeats", [True, False])
async def test_a_stream_that_repeats_too_many_log_probabilities_at_its_end_is_ended(
    monkeypatch: pytest.MonkeyPatch, repeats: bool
) -> None:
    """Those of a response stay in memory until its last events, each of which has all of them."""
    monkeypatch.setattr(generation, "_MAX_REPEATED_LOGPROBS", 5)
    front = FrontEnd()
    include = ["message.output_text.logprobs"]
    of_response = renderer_of(include=include, top_logprobs=2)
    events = front.generation(time.monotonic()).events(of_response if repeats else renderer())
    if repeats:
        await anext(events)
    position = TokenLogprobs(WORD[0], -1.0, (1, 2), (-1.0, -2.0))
    texts = []
    for _ in range(2):
        front.hub.receive(StepOutputs([RequestOutput(0, WORD, logprobs=[position])]))
        texts.append(await anext(events))
    assert (b"response.failed" in texts[1]) == (b"more than 5 log probabilities" in texts[1]) == repeats
    assert b"response.failed" not in texts[0]
    await events.aclose()
    assert front.core.aborted == [0]
    assert frontend_at_rest(front)


@pytest.mark.parametrize("kind", ["whole", "response"])
async def test_beyond_the_log_probabilities_of_all_answers_those_of_the_owner_with_most_end(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer has a bound, and holds them until it is complete; together they took gigabytes."""
    monkeypatch.setattr(logprob_room, "MAX_LOGPROB_BYTES", 20_000)
    front, params = FrontEnd(), SamplingParams(logprobs=20)
    accounts, heavy, light = front.admission.accounts, Owner.of_address("10.0.0.7"), Owner.of_address("10.0.0.8")
    position = TokenLogprobs(WORD[0], -1.0, (1,) * 20, (-1.0,) * 20)

    def answered(owner: Owner) -> "asyncio.Future[object]":
        request = front.generation(time.monotonic(), params=params, owner=owner)
        if kind == "whole":
            return asyncio.ensure_future(request.respond(http(), renderer(), stream=False))
        events = request.events(renderer_of(include=["message.output_text.logprobs"], top_logprobs=20))

        async def text() -> bytes:
            return b"".join([event async for event in events])

        return asyncio.ensure_future(text())

    answers = [answered(light), *(answered(heavy) for _ in range(4))]
    for _ in range(3):
        await settle()
        for id in range(5):
            front.hub.receive(StepOutputs([RequestOutput(id, WORD, logprobs=[position])]))
    await settle()
    assert accounts.used(light.party, "logprob_bytes") == 3 * 1856
    assert accounts.total("logprob_bytes") < 20_000
    assert len(front.core.aborted) == 2
    assert 0 not in front.core.aborted, "it is the light owner's"
    ended = answers[front.core.aborted[0]]
    if kind == "whole":
        with pytest.raises(Overloaded, match="log probabilities of answers that are not complete have") as refused:
            await ended
        assert refused.value.status == 429
    else:
        assert b"log probabilities of answers that are not complete have" in cast(bytes, await ended)
    for id in range(5):
        front.hub.receive(StepOutputs([RequestOutput(id, WORD, True, "stop", logprobs=[position])]))
    await asyncio.gather(*answers, return_exceptions=True)
    assert not answers[0].exception()
    assert not accounts.total("logprob_bytes")


async def test_answers_with_many_log_probabilities_wait_for_older_ones_and_lose_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprob_room, "MAX_LOGPROB_BYTES", 20_000)
    front, params = FrontEnd(), SamplingParams(max_tokens=4, logprobs=20)
    core, position = front.core, TokenLogprobs(WORD[0], -1.0, (1,) * 20, (-1.0,) * 20)
    requests = [front.generation(time.monotonic(), params=params) for _ in range(4)]
    answers = [asyncio.ensure_future(each.respond(http(), renderer(), stream=False)) for each in requests]
    await settle()
    running = []
    num_tokens = dict.fromkeys(range(4), 0)
    while core.running:
        running.append(len(core.running))
        for id in range(4):
            if id not in core.running:
                continue
            num_tokens[id] += 1
            is_last = num_tokens[id] == 4
            core.running -= {id} if is_last else set()
            reason = "max_tokens" if is_last else None
            front.hub.receive(StepOutputs([RequestOutput(id, WORD, is_last, reason, logprobs=[position])]))
        await settle()
    assert running[:2] == [4, 4]
    assert min(running) == 1
    for answer in await asyncio.gather(*answers):
        assert json.loads(bytes(answer.body))["usage"]["completion_tokens"] == 4
    assert not core.aborted
    assert not front.admission.accounts.total("logprob_bytes")


async def test_a_client_that_reads_again_does_not_continue_an_answer_that_waits_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprob_room, "MAX_LOGPROB_BYTES", 20_000)
    front, params = FrontEnd(), SamplingParams(max_tokens=20, logprobs=20)
    core, position = front.core, TokenLogprobs(WORD[0], -1.0, (1,) * 20, (-1.0,) * 20)
    requests = [front.generation(time.monotonic(), params=params) for _ in range(2)]
    include = ["message.output_text.logprobs"]
    streams = [each.events(renderer_of(include=include, top_logprobs=20)) for each in requests]
    for _ in range(5):
        front.hub.receive(StepOutputs([RequestOutput(id, WORD, logprobs=[position]) for id in (0, 1)]))
        for stream in streams:
            while b"output_text.delta" not in await anext(stream):
                pass
    assert (core.running, core.paused) == ({0}, {1})
    full = requests[1]._stream
    assert full is not None
    requests[1]._on_full(full)
    requests[1]._on_drained()
    assert core.running == {0}, "the older one runs"
    oldest = requests[0]._stream
    assert oldest is not None
    requests[0]._on_full(oldest)
    assert core.running == {1}, "the older one waits for its client"
    requests[0]._on_drained()
    assert core.running == {0}
    requests[0].end()
    assert core.running == {1}
    requests[1].end()
    for stream in streams:
        await stream.aclose()
    assert not front.admission.accounts.total("logprob_bytes")


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_prompts_count_from_the_admission_on(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_room, "MAX_LOGPROB_BYTES", 1000)
    front, params = FrontEnd(), SamplingParams(prompt_logprobs=1)
    first = front.generation(time.monotonic(), params=params)
    _ = first.events(renderer())  # Alone, it may have more than all together.
    assert front.admission.accounts.total("logprob_bytes") == len(PROMPT) * 336
    refused = front.generation(time.monotonic(), params=params)
    with pytest.raises(Overloaded, match="this server holds about 1000, shared among 1"):
        await refused.respond(http(), renderer(), stream=stream)
    assert front.count(f'{REJECTED}{{reason="logprobs"}}') == 1
    front.generation(time.monotonic()).events(renderer())  # Others are admitted.
    first.end()
    assert not front.admission.accounts.total("logprob_bytes")


async def test_an_answer_in_time_is_not_disturbed_by_its_deadline() -> None:
    front = FrontEnd()
    events = half_over(front).events(renderer())
    taken = later(events)
    await settle()
    front.core.step(last=True)
    await pass_time(TIMEOUT)
    assert (await taken).endswith(b"data: [DONE]\n\n")
    assert front.count('kaon_requests_finished_total{reason="timeout"}') == 0


# -- slow readers -----------------------------------------------------------------------------------------------


def lag(front: FrontEnd, steps: int = 500) -> int:
    """Words that the core writes before it is paused, while the client reads none."""
    for step in range(steps):
        if not front.core.running:
            return step
        front.core.step()
    raise AssertionError("the request was never stopped")


async def test_a_request_is_paused_while_its_reader_lags_and_goes_on_when_it_has_read() -> None:
    front = FrontEnd(stream_buffer_bytes=4096)
    generation = front.generation(time.monotonic(), n=2)
    events = generation.events(renderer(2))
    taken = later(events)
    await settle()
    front.core.step()
    await taken
    written = lag(front)
    assert 4 < written < 20
    assert front.core.paused == {0, 1}
    front.core.step([0])
    read = await anext(events)
    assert front.core.paused == {0, 1}, "what was taken has not gone out yet"
    taken = later(events)
    await settle()
    assert front.core.running == {0, 1}
    front.core.step(last=True)
    read += await taken
    assert read.count(b"Hello") == 2 * written + 3
    assert read.endswith(b"data: [DONE]\n\n")
    assert front.count('kaon_slow_readers_total{action="pause"}') == 1
    generation.end()
    assert frontend_at_rest(front)


async def test_a_reader_that_keeps_up_is_never_paused() -> None:
    front = FrontEnd(stream_buffer_bytes=1024)
    events = front.generation(time.monotonic()).events(renderer())
    for _ in range(100):
        taken = later(events)
        await settle()
        front.core.step()
        await taken
    assert front.count("kaon_slow_readers_total") == 0
    await events.aclose()


async def test_a_paused_request_leaves_the_queue() -> None:
    front = FrontEnd(stream_buffer_bytes=1024, max_queued_requests=2)
    generation = front.generation(time.monotonic(), n=2)
    _ = generation.events(renderer(2))
    for _ in range(50):
        front.core.step([0])
    assert front.core.paused == {0, 1}
    assert front.admission.num_queued == 0
    generation.end()
    assert front.core.aborted == [0, 1]
    assert frontend_at_rest(front)


async def test_a_slow_reader_may_be_ended_and_gets_an_error_after_the_written_text() -> None:
    front = FrontEnd(stream_buffer_bytes=4096, slow_readers="end")
    events = front.generation(time.monotonic()).events(renderer())
    written = lag(front)
    assert front.core.aborted == [0]
    assert (await anext(events)).count(b"Hello") == written
    error = error_of(await anext(events))
    assert error["code"] == "slow_reader"
    assert "at most about 4096 bytes" in error["message"]
    assert front.count('kaon_slow_readers_total{action="end"}') == 1
    assert front.count('kaon_requests_finished_total{reason="abort"}') == 1
    assert [event async for event in events] == []
    assert frontend_at_rest(front)


async def test_a_paused_request_that_is_late_ends() -> None:
    front = FrontEnd(stream_buffer_bytes=1024)
    events = half_over(front).events(renderer())
    lag(front)
    assert front.core.paused == {0}
    await pass_time(TIMEOUT)
    assert not front.core.paused
    assert b"Hello" in await anext(events)
    assert error_of(await anext(events))["code"] == "request_timeout"
    assert [event async for event in events] == []
    assert frontend_at_rest(front)


async def test_log_probabilities_count_as_bytes() -> None:
    def steps_until_full(alternatives: int) -> int:
        full: list[object] = []
        stream = DeltaStream(lambda: 100_000, full.append, lambda: None)
        logprobs = [TokenLogprobs(5, -1.0, (5,) * alternatives, (-1.0,) * alternatives)]
        for step in range(10_000):
            stream.put(0, RequestDelta("a", [5], logprobs))
            if full:
                return step
        raise AssertionError("it was never full")

    assert steps_until_full(20) < steps_until_full(0) / 2


async def test_beyond_what_all_streams_may_hold_those_of_the_owner_that_holds_most_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each paused stream keeps its text, and lets another one run: with thousands of connections that is gigabytes."""
    monkeypatch.setattr(generation, "_MAX_UNREAD_BYTES", 20_000)
    front = FrontEnd(stream_buffer_bytes=4096)
    accounts, heavy, light = front.admission.accounts, Owner.of_address("10.0.0.7"), Owner.of_address("10.0.0.8")
    before = front.generation(time.monotonic(), owner=light)
    _ = before.events(renderer())
    lag(front)
    streams = []
    for _ in range(20):
        of_heavy = front.generation(time.monotonic(), owner=heavy)
        streams.append((of_heavy, of_heavy.events(renderer())))
        lag(front)
    after = front.generation(time.monotonic(), owner=light)
    _ = after.events(renderer())
    lag(front)
    assert accounts.total("stream_bytes") < 20_000 + 2 * 4500
    paused = len(front.core.paused)
    assert (len(front.core.aborted), front.count('kaon_slow_readers_total{action="end"}')) == (
        22 - paused,
        22 - paused,
    )
    assert paused >= 4, "both of the light owner's, too"
    *_, (_, ended) = streams
    assert b"Hello" in await anext(ended)
    assert error_of(await anext(ended))["code"] == "slow_reader"
    for each in (before, after, *(of_heavy for of_heavy, _ in streams)):
        each.end()
    assert not accounts.total("stream_bytes")


async def test_prompts_of_paused_streams_count_to_that_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 131,072 tokens has 4.7 MB, and is computed once for all streams that send it."""
    monkeypatch.setattr(generation, "_MAX_UNREAD_BYTES", 60_000)
    monkeypatch.setattr(generation, "_PROMPT_TOKEN_BYTES", 5000)
    front = FrontEnd(stream_buffer_bytes=1024)
    accounts, owner = front.admission.accounts, Owner.of_address("10.0.0.7")
    streams = []
    for _ in range(20):
        streams.append(front.generation(time.monotonic(), owner=owner))
        events = streams[-1].events(renderer())
        lag(front)
    paused = len(front.core.paused)
    assert 2 <= paused <= 4
    num_texts = accounts.total("stream_bytes") - 20 * 15_000
    assert 0 < num_texts < 60_000 + 20 * 8 * 400, "the prompts of ended streams stay in memory, too"
    for each in streams[:-1]:
        each.end()
    assert accounts.total("stream_bytes") < 2 * 15_000
    streams[-1].end()
    assert not accounts.total("stream_bytes")

    events = front.generation(time.monotonic(), owner=owner).events(renderer())
    lag(front)
    while front.core.paused:  # It goes on once all events have been taken.
        taken = later(events)
        await settle()
    assert not accounts.total("stream_bytes")
    front.core.step(last=True)
    assert await taken
    assert not [event async for event in events]
    assert not any(accounts.of_owner(owner.party).values())


@pytest.mark.parametrize("ending", ["last", "error", "timeout", "slow"])
async def test_the_prompt_of_a_stream_that_only_waits_for_its_reader_counts_as_unread(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short answer is never paused, and holds its prompt for as long as its client does not read."""
    monkeypatch.setattr(generation, "_PROMPT_TOKEN_BYTES", 5000)
    front = FrontEnd(stream_buffer_bytes=1024, slow_readers="end")
    accounts = front.admission.accounts
    for is_read in (True, False):
        running = half_over(front, n=2)
        events = running.events(renderer(2))
        first, second = sorted(front.core.running)
        front.core.step([first], last=True)
        front.core.step([second])
        assert accounts.total("stream_bytes") < 15_000, "another choice runs"
        if ending == "timeout":
            await pass_time(TIMEOUT)
        elif ending == "slow":
            for _ in range(20):
                front.core.step([second])
                if not front.hub.num_live:
                    break
        else:
            front.core.step([second], last=True, error="it broke" if ending == "error" else None)
        assert not front.hub.num_live
        assert 15_000 <= accounts.total("stream_bytes") < 30_000
        if is_read:
            assert [event async for event in events]
        else:
            running.end()
        assert frontend_at_rest(front)
        assert not accounts.total("stream_bytes")


async def test_streams_that_are_not_full_add_up_to_that_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete stream keeps what its client has not read, too, and never becomes full."""
    monkeypatch.setattr(generation, "_MAX_UNREAD_BYTES", 20_000)
    front = FrontEnd(stream_buffer_bytes=2**20)
    accounts, owner = front.admission.accounts, Owner.of_address("10.0.0.7")
    streams = []
    for _ in range(20):
        streams.append(front.generation(time.monotonic(), owner=owner))
        _ = streams[-1].events(renderer())
        for _ in range(20):
            front.core.step()
    assert front.count('kaon_slow_readers_total{action="end"}')
    assert accounts.total("stream_bytes") < 20_000 + 20 * 8 * 400
    for each in streams:
        each.end()
    assert not accounts.total("stream_bytes")


async def test_what_a_client_has_not_read_is_accounted_to_its_owner_and_leaves_with_it() -> None:
    front = FrontEnd(stream_buffer_bytes=2**20)
    accounts, owner = front.admission.accounts, Owner.of_address("10.0.0.7")
    read, left = (front.generation(time.monotonic(), owner=owner) for _ in range(2))
    events = read.events(renderer())
    _ = left.events(renderer())
    for _ in range(50):
        front.core.step()
    unread = accounts.used(owner.party, "stream_bytes")
    assert unread > 2 * 49 * 256
    assert accounts.used(owner.party, "sequences") == 2
    await anext(events)
    assert accounts.used(owner.party, "stream_bytes") == unread / 2
    left.end()
    assert accounts.used(owner.party, "stream_bytes") == 0
    front.core.step(last=True)
    assert [event async for event in events]
    assert not any(accounts.of_owner(owner.party).values())


async def test_silent_tokens_are_no_readers_fault() -> None:
    full: list[object] = []
    stream = DeltaStream(lambda: 1024, full.append, lambda: None)
    for _ in range(1000):
        stream.put(0, RequestDelta("", [5]))
    assert not full
    stream.put(0, RequestDelta("a", [5]))
    assert len((await stream.take())[0].token_ids) == 1001


# -- before the generation --------------------------------------------------------------------------------------


async def test_work_for_a_client_that_leaves_is_given_up() -> None:
    left = asyncio.Event()

    async def leaves_later() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    was_cancelled = False

    async def work() -> None:
        nonlocal was_cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    async def handle() -> None:
        async with while_connected(http(leaves_later).receive):
            await work()

    handling = asyncio.create_task(handle())
    await settle()
    assert not handling.done()
    left.set()
    with pytest.raises(ClientDisconnect):
        await handling
    assert was_cancelled


@pytest.mark.parametrize("receive", [stays, leaves])
async def test_a_client_that_leaves_after_the_work_disturbs_nothing(receive: Any) -> None:
    async with while_connected(http(receive).receive):
        pass
    await settle()


async def test_a_handler_that_answers_its_cancellation_with_an_error_may_go_on() -> None:
    """`asyncio.timeout`, for instance, takes a task whose cancellation is still counted for a cancelled one."""

    async def work() -> None:
        async with while_connected(http(leaves).receive):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise RuntimeError from None

    async def handle() -> int:
        with pytest.raises(RuntimeError):
            await work()
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert await asyncio.create_task(handle()) == 0


async def test_a_failure_to_receive_is_not_taken_for_a_client_that_left() -> None:
    async def fails() -> Any:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        async with while_connected(http(fails).receive):
            await asyncio.Event().wait()


async def test_a_cancelled_handler_is_cancelled_and_not_taken_for_a_client_that_left() -> None:
    async def handle() -> None:
        async with while_connected(http().receive):
            await asyncio.Event().wait()

    handling = asyncio.create_task(handle())
    await settle()
    handling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handling
