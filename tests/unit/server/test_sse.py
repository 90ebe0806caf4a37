"""Pre-rendered events equal, byte for byte, events with OpenAI's chunk objects."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from starlette.types import Message

from server.anthropic.rendering import PING
from server.limits.owners import Owner
from server.routes.chat import ChatChunkWriter
from server.routes.completions import CompletionChunkWriter
from server.schemas.batches import DeletedFile
from server.schemas.chat import ChatLogprobs, TokenLogprob, TopLogprob
from server.schemas.completions import Completion as CompletionAnswer
from server.schemas.completions import CompletionChoice, CompletionLogprobs
from server.schemas.generation import AnswerHead, PromptTokenLogprob, PromptTokensDetails, StreamOptions, Usage
from server.streaming import sse
from server.streaming.sse import DONE, EventStream, as_json, error_event, json_response

TEXTS = ["Hi", "", '"\\/\b\f\n\r\t\x00\x1f', "漢字 😀 é", "\u2028\u2029", "data: x\n\ndata: y", "</script>"]
HEAD = AnswerHead("x-1", 5, 'a"b', "kaon")
USAGE = Usage(1, 2, 3, PromptTokensDetails(0))
_DELETED = DeletedFile("file-" + "0" * 40)


def events(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of each event in `raw`, which must consist of events only."""
    *blocks, rest = raw.decode().split("\n\n")
    assert rest == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("finish_reason", [None, "stop"])
def test_a_completion_chunk_holds_its_text_and_reason(text: str, finish_reason: str | None) -> None:
    frames = CompletionChunkWriter(HEAD)
    (chunk,) = events(frames.delta(3, text, None, finish_reason))
    choice = {"index": 3, "text": text, "logprobs": None, "finish_reason": finish_reason}
    assert chunk == {**HEAD._asdict(), "object": "text_completion", "choices": [choice]}
    Completion.model_validate({**chunk, "choices": [{**choice, "finish_reason": "stop"}]}, strict=True)


@pytest.mark.parametrize("text", TEXTS)
def test_chat_chunks_begin_with_the_role_and_end_with_an_empty_delta(text: str) -> None:
    frames = ChatChunkWriter(HEAD)
    raw = (
        frames.delta(1, "first", None, None) + frames.delta(1, text, None, None) + frames.delta(1, "", None, "length")
    )
    chunks = events(raw)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "first"},
        {"content": text},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    for chunk in chunks:
        assert {key: chunk[key] for key in HEAD._fields} == HEAD._asdict()
        assert chunk["choices"][0]["index"] == 1
        assert "usage" not in chunk
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_each_choice_has_a_role_of_its_own() -> None:
    frames = ChatChunkWriter(HEAD)
    chunks = events(frames.delta(0, "a", None, None) + frames.delta(1, "b", None, None))
    assert [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]] == [0, 1]


def test_text_and_end_that_come_together_are_two_chat_chunks() -> None:
    frames = ChatChunkWriter(HEAD)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(frames.delta(0, "all", None, "stop"))]
    assert [delta.get("content") for delta in deltas] == ["", "all", None]


@pytest.mark.parametrize("kind", [CompletionChunkWriter, ChatChunkWriter])
def test_with_usage_asked_for_chunks_carry_null_and_the_last_one_the_count(
    kind: type[CompletionChunkWriter] | type[ChatChunkWriter],
) -> None:
    frames = kind(HEAD, StreamOptions(include_usage=True))
    stream = frames.delta(0, "a", None, None) + frames.delta(0, "b", None, "stop") + frames.closing(USAGE)
    *chunks, last = events(stream.removesuffix(DONE))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_log_probabilities_ride_on_their_chunk() -> None:
    completion = CompletionChunkWriter(HEAD)
    logprobs = CompletionLogprobs(["a"], [-0.5], [{"a": -0.5, "b": -1.0}], [0])
    (chunk,) = events(completion.delta(0, "a", logprobs, None))
    assert chunk["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -1.0}]
    chat = ChatChunkWriter(HEAD)
    entry = TokenLogprob("a", -0.5, [97], [TopLogprob("a", -0.5, [97])])
    chunks = events(chat.delta(0, "a", ChatLogprobs([entry]), "stop"))
    assert chunks[1]["choices"][0]["logprobs"]["content"][0]["bytes"] == [97]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_an_error_event_holds_the_error_object() -> None:
    assert events(error_event(b'{"error":{"message":"x"}}')) == [{"error": {"message": "x"}}]


async def test_a_stream_that_waits_sends_its_ping_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before its first event; each ping is a body of its own, between whole events."""
    monkeypatch.setattr(sse, "_PING_SECONDS", 0.01)
    go_on = asyncio.Event()
    bodies: list[bytes] = []

    async def waits() -> AsyncGenerator[bytes, None]:
        await go_on.wait()
        yield b"event: a\ndata: 1\n\n"

    async def send(message: Message) -> None:
        bodies.append(message.get("body", b""))
        if len(bodies) == 4:
            go_on.set()

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    await EventStream(waits(), ping=PING)({"type": "http", "method": "POST"}, receive, send)
    begun, *pings, event, end = bodies
    assert (begun, end) == (b"", b"")
    assert event == b"event: a\ndata: 1\n\n"
    assert len(pings) >= 3
    assert set(pings) == {b'event: ping\ndata: {"type": "ping"}\n\n'}


@pytest.mark.parametrize("form", ["stream", "parts", "struct"])
async def test_a_large_answer_is_sent_in_pieces_between_which_others_are_served(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "_PING_SECONDS", 0)
    monkeypatch.setattr(sse, "PIECE_BYTES", 10)
    content = sse.encode(_DELETED) if form == "struct" else b"data: " + bytes(range(48, 90)) * 3 + b"\n\n"
    bodies: list[bytes] = []
    steps_of_others = 0

    async def others() -> None:
        nonlocal steps_of_others
        while True:
            steps_of_others += 1
            await asyncio.sleep(0)

    async def large() -> AsyncGenerator[bytes, None]:
        yield content

    async def send(message: Message) -> None:
        bodies.append(message.get("body", b""))

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    other = asyncio.create_task(others())
    whole = as_json(_DELETED) if form == "struct" else json_response(content[:7], content[7:])
    response = EventStream(large(), ping=PING) if form == "stream" else whole
    held: list[tuple[int, str]] = []
    state = {"owner": Owner("heavy"), "hold_answer": lambda *of: held.append(of)}
    await response({"type": "http", "method": "POST", "state": state}, receive, send)
    other.cancel()
    assert held == [(len(content), "heavy"), (0, "heavy")]
    assert max(map(len, bodies)) == 10
    assert b"".join(bodies) == content, "no ping is within an event"
    assert steps_of_others >= len(content) // 10


async def test_a_stream_to_a_head_request_has_no_events() -> None:
    bodies: list[Message] = []
    ended: list[bool] = []

    async def never() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"

    async def send(message: Message) -> None:
        bodies.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    await EventStream(never(), lambda: ended.append(True))({"type": "http", "method": "HEAD"}, receive, send)
    start, end = bodies
    assert (start["status"], end["body"], end["more_body"]) == (200, b"", False)
    assert ended == [True]


async def test_waiting_streams_have_two_tasks_and_end_when_their_clients_leave() -> None:
    left = asyncio.Event()
    ended: list[int] = []

    async def waits() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    async def send(message: Message) -> None:
        assert message["type"] == "http.response.start"

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    before = asyncio.all_tasks()
    for number in range(10):
        response = EventStream(waits(), lambda number=number: ended.append(number))  # type: ignore[misc]
        asyncio.create_task(response({"type": "http", "method": "POST"}, receive, send))  # noqa: RUF006
    for _ in range(5):
        await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - before
    assert len(tasks) == 20
    left.set()
    await asyncio.wait(tasks)
    assert sorted(ended) == list(range(10))
    assert all(each.cancelled() or each.exception() is None for each in tasks)


async def test_a_ping_waits_for_no_client_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dropped: a task for each ping of thousands of streams would wait until the client reads."""
    monkeypatch.setattr(sse, "_PING_SECONDS", 0.005)
    num_pings, go_on, tasks = 0, asyncio.Event(), asyncio.all_tasks()

    async def waits() -> AsyncGenerator[bytes, None]:
        await go_on.wait()
        yield b"data: 1\n\n"

    async def send(message: Message) -> None:
        nonlocal num_pings
        if message.get("body") == PING.encode():
            num_pings += 1
            if num_pings == 3:
                go_on.set()
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    response = EventStream(waits(), ping=PING)
    await asyncio.wait_for(response({"type": "http", "method": "POST"}, receive, send), 60)
    assert num_pings >= 3
    assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("length", [0, 1, 64, 65, 1000])
def test_long_lists_of_an_answer_are_encoded_in_slices(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    lists = ["é"] * length, [-0.5] * length, [{"a": -0.5}] * length, list(range(length))
    choices = [CompletionChoice(index, "t", CompletionLogprobs(*lists), "stop") for index in range(100)]
    choices[1].prompt_logprobs = [None, *([{5: PromptTokenLogprob(-0.5, 1, "a")}] * length)]
    answer = CompletionAnswer(**HEAD._asdict(), object="text_completion", choices=choices, usage=USAGE)
    sizes = [0]

    def noting(value: Any) -> bytes:
        sizes.append(len(value))
        return msgspec.json.encode(value)

    monkeypatch.setattr(sse, "encode", noting)
    sliced = sse.in_slices(answer)
    assert max(sizes) == (64 if length >= 64 else 0)
    first = sliced.choices[0].logprobs
    assert first is not None
    assert isinstance(first.top_logprobs, msgspec.Raw) == (length > 64)
    assert msgspec.json.encode(sliced) == msgspec.json.encode(answer)
