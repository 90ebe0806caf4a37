"""Batches on disk: what the input may be, what survives a server that is killed, and whose is what."""

import asyncio
import errno
import json
import os
import sqlite3
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Message

from engine.config.server import ServerConfig
from server.batches.lines import MAX_LINES, Line, Pace, output_line, read_lines
from server.batches.store import (
    Batch,
    BatchNotFound,
    BatchStore,
    DiskFull,
    FileNotFound,
    NoRoom,
    StoreUnusable,
    disk_errors,
    new_batch,
    open_store,
)
from server.errors import BadRequest, ShuttingDown
from server.limits.accounts import Accounts
from server.limits.admission import OpenFiles
from server.limits.jobs import Jobs
from server.limits.owners import Owner
from server.limits.turns import RequestTurns
from server.routes import batches, message_batches
from server.schemas.batches import BatchUsage, CachedTokens, ReasoningTokens

CHAT = "/v1/chat/completions"


def request(custom_id: str = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m"}, **changes}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def add_file(store: BatchStore, content: bytes, owner: str = "me") -> str:
    with store.new_file() as file:
        file.write(content)
        return store.add_file(file, owner, "in.jsonl").id


def add_batch(store: BatchStore, content: bytes, tmp_path: Path) -> Batch:
    """A batch in progress, whose input is `content`."""
    source = tmp_path / "source"
    source.write_bytes(content)
    batch = Batch(new_batch(add_file(store, content), CHAT, 60, {"job": "7"}), "me", "me")
    store.add_batch(batch.object, "me", "me", None)
    lines, errors = read_lines(source, CHAT)
    assert not errors
    store.begin(batch.object.id, lines)
    return batch


def fill_the_disk(*_: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


THREE = b"".join(json.dumps(request(name)).encode() + b"\n" for name in "abc")


# -- input ------------------------------------------------------------------------------------------------------


def test_the_lines_of_an_input_are_where_they_say(tmp_path: Path) -> None:
    path = write(tmp_path / "in", request("a"), "", request("ü", body={"model": "m", "x": "é"}), "  ")
    path.write_bytes(path.read_bytes() + json.dumps(request("c")).encode())
    lines, errors = read_lines(path, CHAT)
    assert errors == []
    content = path.read_bytes()
    found = [json.loads(content[line.start : line.start + line.length])["custom_id"] for line in lines]
    assert found == [line.custom_id for line in lines] == ["a", "ü", "c"]


@pytest.mark.parametrize(
    ("lines", "code", "number", "sentence"),
    [
        ([], "empty_file", None, "holds no request"),
        (["{"], "invalid_json_line", 1, "the line is not valid JSON"),
        (["[1]"], "invalid_json_line", 1, "it must be a JSON object"),
        ([request(), {"custom_id": "b"}], "missing_required_parameter", 2, "method is missing"),
        ([request(body=[])], "missing_required_parameter", 1, "body is missing, or is not an object"),
        ([request("")], "invalid_custom_id", 1, "custom_id has 0 characters"),
        ([request("x"), request("x")], "duplicate_custom_id", 2, "custom_id is 'x', as in an earlier line"),
        ([request(method="GET")], "invalid_method", 1, "method is 'GET'; it must be POST"),
        ([request(url="/v1/completions")], "mismatched_url", 1, "url is '/v1/completions'; the batch's is"),
        ([request(body={"stream": True})], "invalid_request", 1, "body.stream is set"),
    ],
)
def test_a_wrong_line_is_named(
    lines: list[object], code: str, number: int | None, sentence: str, tmp_path: Path
) -> None:
    _, errors = read_lines(write(tmp_path / "in", *lines), CHAT)
    [error] = errors
    assert (error.code, error.line) == (code, number)
    assert sentence in error.message


def test_errors_and_lines_are_bounded(tmp_path: Path) -> None:
    _, errors = read_lines(write(tmp_path / "in", *["x"] * 1000), CHAT)
    assert len(errors) == 100
    line = '{"custom_id":"%d","method":"POST","url":"' + CHAT + '","body":{}}\n'
    (tmp_path / "many").write_text("".join(line % number for number in range(MAX_LINES + 1)))
    assert [error.code for error in read_lines(tmp_path / "many", CHAT)[1]] == ["too_many_tasks"]


def test_reading_lines_leaves_three_quarters_of_the_time_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock by which each line takes 0.3 ms."""
    now, slept, longest = 0.0, 0.0, 0.0

    class Clock:
        def monotonic(self) -> float:
            nonlocal now
            now += 0.0003
            return now

        def sleep(self, seconds: float) -> None:
            nonlocal now, slept, longest
            now, slept, longest = now + seconds, slept + seconds, max(longest, seconds)

    monkeypatch.setattr("server.batches.lines.time", Clock())
    path = write(tmp_path / "in", *(request(str(number)) for number in range(1000)))
    lines, errors = read_lines(path, CHAT, Pace().rest)
    assert len(lines) == 1000
    assert not errors
    assert slept >= 0.7 * now
    assert longest <= 0.05


def test_a_line_that_no_server_would_take_fails_before_it_is_decoded(
    tmp_path: Path,
) -> None:
    values = json.dumps(request(body={"x": [[]] * 100_000}))
    [error] = read_lines(write(tmp_path / "in", request("first"), values), CHAT)[1]
    assert (error.code, error.line) == ("invalid_json_line", 2)
    assert "the line holds more than" in error.message
    [error] = read_lines(write(tmp_path / "in", request("first"), "x" * 10**6), CHAT, max_bytes=1000)[1]
    assert (error.code, error.line) == ("line_too_long", 2)


def test_the_lines_of_a_running_batch_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of four running batches of 50,000 lines let other keys' calls wait for 2.7 s."""
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    id, counted, query = batch.object.id, [], store._query

    def queried(statement: str, *values: Any) -> list[sqlite3.Row]:
        if "COUNT" in statement:
            counted.append(statement)
        return query(statement, *values)

    monkeypatch.setattr(store, "_query", queried)

    def counts() -> tuple[int, int, int]:
        found = store.batch(id, "me").request_counts
        return found.total, found.completed, found.failed

    assert counts() == (3, 0, 0)
    store.record(id, 0, output_line("a"), succeeded=True)
    store.record(id, 0, output_line("a"), succeeded=False)  # It is dropped.
    store.record(id, 1, output_line("b"), succeeded=False)
    assert counts() == (3, 1, 1)
    assert store.batches("me", "batch", None, 10).data[0].request_counts.failed == 1
    assert not counted  # They were when they were added.
    store.finish(batch, "cancelled")
    assert counts() == (3, 1, 2)
    assert not store._counts


def test_lines_are_added_failed_and_deleted_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other keys' calls waited 0.9 s while a batch of 50,000 lines began or was cancelled."""
    monkeypatch.setattr("server.batches.store._LINES_AT_ONCE", 2)
    store, found = BatchStore(tmp_path / "data", 10**6), []
    other = add_file(store, THREE, "other")

    def pause(seconds: float) -> None:
        # Another thread cannot acquire the lock if this one holds it.
        caller = threading.Thread(target=lambda: found.append(store.file(other, "other").id), daemon=True)
        caller.start()
        caller.join(10)

    monkeypatch.setattr("server.batches.store.time.sleep", pause)
    five = b"".join(json.dumps(request(name)).encode() + b"\n" for name in "abcde")
    batch = add_batch(store, five, tmp_path)
    assert found == [other] * 2
    store.record(batch.object.id, 2, output_line("c"), succeeded=True)
    store.finish(batch, "cancelled")
    assert found == [other] * 6  # Four lines failed, five were deleted.
    ended = store.batch(batch.object.id, "me")
    assert (ended.request_counts.total, ended.request_counts.failed) == (5, 4)
    assert not store._query("SELECT * FROM lines")
    assert len(store.path(str(ended.error_file_id), "me").read_text().splitlines()) == 4


def test_the_lines_of_a_batch_are_not_counted_before_all_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.batches.store._LINES_AT_ONCE", 1)
    store, seen = BatchStore(tmp_path / "data", 10**6), []

    def pause(seconds: float) -> None:
        seen.append(store.batches("me", "batch", None, 1).data[0].request_counts.total)

    monkeypatch.setattr("server.batches.store.time.sleep", pause)
    batch = add_batch(store, THREE, tmp_path)
    assert seen == [0, 0, 0]
    assert store.batch(batch.object.id, "me").request_counts.total == 3


@pytest.mark.parametrize("is_deleted", [False, True])
def test_lines_that_a_killed_server_left_to_an_ended_batch_are_deleted(
    is_deleted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = BatchStore(tmp_path / "data", 10**6)
    live, ended = (add_batch(killed, THREE, tmp_path) for _ in range(2))
    monkeypatch.setattr(killed, "_delete_lines", lambda id: None)
    killed.finish(ended, "cancelled")
    if is_deleted:
        killed.delete_batch(ended.object.id, "me")
    killed._lock_file.close()  # type: ignore[union-attr]  # as the system does

    store = BatchStore(tmp_path / "data", 10**6)
    assert {row["batch"] for row in store._query("SELECT batch FROM lines")} == {live.object.id}
    assert store.batch(live.object.id, "me").request_counts.total == 3


def test_lines_that_a_full_disk_left_to_an_ended_batch_are_deleted_when_its_end_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    with monkeypatch.context() as full:
        full.setattr(store, "_delete_lines", fill_the_disk)
        with pytest.raises(sqlite3.OperationalError):
            store.finish(batch, "cancelled")
    ended = store.batch(batch.object.id, "me")
    assert ended.status == "cancelled"
    assert store._query("SELECT * FROM lines")
    store.finish(batch, "cancelled")
    assert not store._query("SELECT * FROM lines")
    assert store.batch(batch.object.id, "me") == ended


def test_a_server_starts_although_it_cannot_delete_lines_of_ended_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(killed, THREE, tmp_path)
    monkeypatch.setattr(BatchStore, "_delete_lines", fill_the_disk)
    with pytest.raises(sqlite3.OperationalError):
        killed.finish(batch, "cancelled")
    killed.close()
    store = BatchStore(tmp_path / "data", 10**6)
    assert store.batch(batch.object.id, "me").status == "cancelled"
    [record] = caplog.records
    assert record.message == (
        f"lines of ended batches stay in {tmp_path / 'data'} until the next start: database or disk is full"
    )


def test_a_batch_is_being_cancelled_until_it_ends(tmp_path: Path) -> None:
    """A server that was killed after the lines were added left it in progress, and the next one computed it."""
    store = BatchStore(tmp_path / "data", 10**6)
    batch = Batch(new_batch(add_file(store, THREE), CHAT, 60), "me", "me")
    store.add_batch(batch.object, "me", "me", None)
    store.update(batch.object.id, "cancelling")
    store.begin(batch.object.id, [Line(0, "a", 0, 1)])
    [(left, _, _)] = store.unfinished()
    assert (left.status, left.in_progress_at is None) == ("cancelling", False)
    store.finish(batch, "cancelled")
    assert store.batch(batch.object.id, "me").status == "cancelled"


# -- a batch's life ---------------------------------------------------------------------------------------------


def test_output_has_each_line_once_in_the_inputs_order_and_errors_apart(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    id = batch.object.id
    assert [line.custom_id for line in store.pending(id, -1, 10)] == ["a", "b", "c"]
    assert [json.loads(store.content(batch, line))["custom_id"] for line in store.pending(id, 0, 1)] == ["b"]
    store.record(id, 2, output_line("c", {"status_code": 200}), succeeded=True)
    store.record(id, 0, output_line("a", {"status_code": 200}), succeeded=True)
    store.record(id, 0, output_line("a", {"status_code": 500}), succeeded=False)
    store.record(id, 1, output_line("b", {"status_code": 400}), succeeded=False)
    counts = store.batch(id, "me").request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    store.finish(batch, "completed")
    ended = store.batch(id, "me")
    assert (ended.status, ended.request_counts, ended.metadata) == ("completed", counts, {"job": "7"})
    assert ended.output_file_id is not None
    assert ended.error_file_id is not None
    output = store.path(ended.output_file_id, "me").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in output] == ["a", "c"]
    errors = store.path(ended.error_file_id, "me").read_text().splitlines()
    assert [json.loads(line)["response"]["status_code"] for line in errors] == [400]


def test_an_ended_batch_has_the_tokens_of_the_lines_that_succeeded(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    bodies = [
        {
            "model": "m",
            "usage": {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "total_tokens": 15,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
        },
        {
            "model": "m",
            "usage": {
                "input_tokens": 1,
                "cache_read_input_tokens": 16,
                "cache_creation_input_tokens": 32,
                "output_tokens": 7,
                "output_tokens_details": {"thinking_tokens": 3},
            },
        },
        {"error": {"message": "no"}, "usage": {"prompt_tokens": 1000}},
    ]
    for number, body in enumerate(bodies):
        line = output_line("abc"[number], {"status_code": 200, "body": body})
        store.record(batch.object.id, number, line, succeeded=number < 2)
    assert store.batch(batch.object.id, "me").usage is None
    store.finish(batch, "completed")
    ended = store.batch(batch.object.id, "me")
    assert ended.model == "m"
    assert ended.usage == BatchUsage(59, CachedTokens(20), 12, ReasoningTokens(5), 71)


@pytest.mark.parametrize("body", [b"data: x", b'{"response":{"body":%b%b}}' % (b"[" * 3000, b"]" * 3000)])
def test_an_answer_without_readable_tokens_does_not_keep_a_batch_from_its_end(body: bytes, tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    store.record(batch.object.id, 0, body, succeeded=True)
    store.finish(batch, "completed")
    ended = store.batch(batch.object.id, "me")
    assert (ended.status, ended.model, ended.usage) == ("completed", None, BatchUsage())


def test_the_answers_of_a_batch_that_ends_are_not_all_in_memory(tmp_path: Path) -> None:
    """An answer may have tens of megabytes of log probabilities."""
    lines = b"".join(json.dumps(request(str(number))).encode() + b"\n" for number in range(16))
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, lines, tmp_path)
    size = 2**18
    for number in range(16):
        line = output_line(str(number), {"status_code": 200, "body": {"model": "m", "text": "x" * size}})
        store.record(batch.object.id, number, line, succeeded=True)
    tracemalloc.start()
    try:
        store.finish(batch, "completed")
        assert tracemalloc.get_traced_memory()[1] < 4 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("status", "code"), [("expired", "batch_expired"), ("cancelled", "batch_cancelled")])
def test_lines_that_are_not_done_are_errors_of_a_batch_that_ends(status: Any, code: str, tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    store.record(batch.object.id, 1, output_line("b", {"status_code": 200}), succeeded=True)
    store.finish(batch, status)
    ended = store.batch(batch.object.id, "me")
    assert ended.error_file_id is not None
    errors = [json.loads(line) for line in store.path(ended.error_file_id, "me").read_text().splitlines()]
    assert [(error["custom_id"], error["error"]["code"]) for error in errors] == [("a", code), ("c", code)]


def ended_messages(store: BatchStore) -> str:
    """The id of a cancelled batch of three messages."""
    with store.new_file() as file:
        file.write(THREE)
        added = store.add_batch_of(file, "in", "me", "me", CHAT, 60, "msgbatch")
    store.begin(added.id, read_lines(store.path(added.input_file_id, "me"), CHAT)[0])
    store.finish(Batch(added, "me", "me"), "cancelled")
    return added.id


def serve_messages(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the routes of message batches use `store`, and threads of their own."""
    shared = SimpleNamespace(jobs=Jobs(Accounts()))
    monkeypatch.setattr("server.routes.batches.Models.of", lambda app: SimpleNamespace(shared=shared))
    monkeypatch.setattr(message_batches, "runner_of", lambda http: SimpleNamespace(store=store))


async def test_few_parts_of_uploads_are_parsed_in_a_round_of_the_event_loop() -> None:
    """64 KiB of bytes like the form's boundary take 11 ms, and a key may have very many uploads."""
    turns, in_round, most = RequestTurns(), 0, 0

    async def body() -> AsyncGenerator[bytes, None]:
        yield b"\r\n--" * 25_000
        yield b"y"

    async def parse() -> bytes:
        nonlocal in_round
        whole = b""
        async for part in batches.in_turns(turns, "key", body()):
            in_round += 1
            whole += part
        return whole

    uploads = [asyncio.create_task(parse()) for _ in range(20)]
    while not all(upload.done() for upload in uploads):
        in_round = 0
        await asyncio.sleep(0)
        most = max(most, in_round)
    assert 0 < most <= 16, "up to eight begin at once, and as many whose turn it is"
    assert {await upload for upload in uploads} == {b"\r\n--" * 25_000 + b"y"}


@pytest.mark.parametrize(
    ("content", "is_whole"),
    [
        (b'{"custom_id": "a",\t"text": "one -- two"}\r\n', True),
        (b"\r\n" + b"-" * 100, False),
        (b"\r\n" + b" " * 127 + b"x", True),
        (b" ", False),
        (b"\t ", False),
        (b"\r\n--xyza", False),
    ],
)
async def test_only_what_takes_long_to_parse_is_parsed_in_small_pieces(content: bytes, is_whole: bool) -> None:
    """Next to a busy event loop, uploads of which each chunk took four turns and threads were a third as fast."""
    chunk = (content * 2**16)[: 2**16]

    async def body() -> AsyncGenerator[bytes, None]:
        yield chunk
        yield b""

    pieces = [piece async for piece in batches.in_turns(RequestTurns(), "key", body())]
    assert b"".join(pieces) == chunk
    assert len(pieces) == (1 if is_whole else 8)


async def test_a_content_type_that_takes_long_to_parse_is_refused() -> None:
    async def body() -> AsyncGenerator[bytes, None]:
        yield b"--x--"

    for length, is_refused in ((900, False), (60_000, True)):
        content_type = 'multipart/form-data; boundary=x; a="' + ";" * length + '"'
        reading = batches.read_form(Headers({"content-type": content_type}), body())
        if is_refused:
            with pytest.raises(BadRequest, match="Content-Type"):
                await reading
        else:
            await (await reading).close()


async def test_the_event_loop_never_waits_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a batch with many lines holds its lock for a tenth of a second, which all streams would wait."""
    store = BatchStore(tmp_path / "data", 10**6)
    id = ended_messages(store)
    serve_messages(store, monkeypatch)
    query, in_loop = store._query, []

    def queried(*arguments: Any) -> list[sqlite3.Row]:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return query(*arguments)

    monkeypatch.setattr(store, "_query", queried)
    app = SimpleNamespace(state=SimpleNamespace(open_files=OpenFiles(1, Accounts())))
    asgi = {"spec_version": "2.4"}
    http = Request({"type": "http", "asgi": asgi, "app": app, "state": {"owner": Owner("me", key="me")}})
    results = await message_batches.message_batch_results(http, id)
    body = b""

    async def send(message: Message) -> None:
        nonlocal body
        body += message.get("body", b"")

    await results(http.scope, http.receive, send)
    assert len(body.splitlines()) == 3
    assert len(in_loop) == 2
    assert not any(in_loop)


async def test_a_list_of_message_batches_reads_each_error_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that listed 16 batches of 9000 cancelled lines delayed another key's stream by 188 ms."""
    store = BatchStore(tmp_path / "data", 10**6)
    id = ended_messages(store)
    serve_messages(store, monkeypatch)
    opened, open_path = Counter[str](), Path.open

    def counted(path: Path, *arguments: Any) -> Any:
        opened[path.name] += 1
        return open_path(path, *arguments)

    monkeypatch.setattr(Path, "open", counted)
    scope: dict[str, Any] = {
        "type": "http",
        "app": None,
        "state": {"owner": Owner("me", key="me")},
        "query_string": b"",
        "headers": [],
    }
    for _ in range(3):
        http = Request({**scope, "server": ("x", 1), "path": "/"})
        [listed] = json.loads(bytes((await message_batches.list_message_batches(http)).body))["data"]
        assert listed["request_counts"]["canceled"] == 3
    assert opened == {store.batch(id, "me").error_file_id: 1}


async def test_batches_of_other_endpoints_are_no_message_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lines may have tens of megabytes, which would be converted at once."""
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    store.finish(batch, "cancelled")
    serve_messages(store, monkeypatch)
    http = Request({"type": "http", "app": None, "state": {"owner": Owner("me", key="me")}})
    for route in (
        message_batches.retrieve_message_batch,
        message_batches.message_batch_results,
        message_batches.cancel_message_batch,
        message_batches.delete_message_batch,
    ):
        with pytest.raises(BatchNotFound):
            await route(http, batch.object.id)


def test_a_server_that_was_killed_leaves_what_was_recorded_and_no_output_twice(tmp_path: Path) -> None:
    killed = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(killed, THREE, tmp_path)
    id = batch.object.id
    killed.record(id, 1, output_line("b", {"status_code": 200}), succeeded=True)
    # Killed after it wrote the output, and before it ended the batch.
    killed._write_output(batch, "output", 1, None, lambda _: None)
    killed.update(id, "finalizing")
    killed._lock_file.close()  # type: ignore[union-attr]  # as the system does

    store = BatchStore(tmp_path / "data", 10**6)
    [found] = store.unfinished()
    assert (found.object.id, found.object.status) == (id, "finalizing")
    assert [line.custom_id for line in store.pending(found.object.id, -1, 10)] == ["a", "c"]
    for number, name in ((0, "a"), (2, "c")):
        store.record(id, number, output_line(name, {"status_code": 200}), succeeded=True)
    store.finish(found, "completed")
    outputs = store.files("me", "batch_output", None, 10, newest_first=True).data
    assert len(outputs) == 1
    names = [json.loads(line)["custom_id"] for line in store.path(outputs[0].id, "me").read_text().splitlines()]
    assert names == ["a", "b", "c"]
    assert store.unfinished() == []


# -- files ------------------------------------------------------------------------------------------------------


def test_files_and_batches_are_their_owners_alone(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    with pytest.raises(FileNotFound):
        store.path(batch.object.input_file_id, "you")
    with pytest.raises(FileNotFound):
        store.delete_file(batch.object.input_file_id, "you")
    with pytest.raises(BatchNotFound):
        store.batch(batch.object.id, "you")
    assert store.files("you", None, None, 10, newest_first=True).data == []
    assert store.batches("you", "batch", None, 10).data == []


def test_an_owners_files_have_a_bound_and_room_comes_back(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 1000)
    first = add_file(store, bytes(900))
    add_file(store, bytes(900), owner="you")
    with pytest.raises(NoRoom, match="would have 1001 bytes, and 1000 are the most"):
        add_file(store, bytes(101))
    store.delete_file(first, "me")
    add_file(store, bytes(101))
    assert not list((tmp_path / "data" / "files").glob("part-*"))


def test_the_number_of_an_owners_files_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.batches.store.MAX_FILES", 2)
    store = BatchStore(tmp_path / "data", 1000)
    first = add_file(store, b"x")
    add_file(store, b"x")
    with pytest.raises(NoRoom, match="this key has 2 files, and 2 are the most that a key may have; delete files"):
        add_file(store, b"x")
    with store.upload("me") as upload, pytest.raises(NoRoom, match="has 2 files"):
        upload(1)
    add_file(store, b"x", owner="you")
    store.delete_file(first, "me")
    add_file(store, b"x")


def test_batches_stop_at_the_number_of_an_owners_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One input may be used by any number of batches, each of which adds files."""
    monkeypatch.setattr("server.batches.store.MAX_FILES", 2)
    store = BatchStore(tmp_path / "data", 1000)
    batch = add_batch(store, THREE, tmp_path)
    store.record(batch.object.id, 0, output_line("a", {"status_code": 200}), succeeded=True)
    store.finish(batch, "completed")
    again = new_batch(batch.object.input_file_id, CHAT, 60)
    with pytest.raises(NoRoom, match="this key has 2 files, and 2 are the most"):
        store.add_batch(again, "me", "me", None)
    output = store.batch(batch.object.id, "me").output_file_id
    assert output is not None
    store.delete_file(output, "me")
    store.add_batch(again, "me", "me", None)


def test_uploads_count_as_they_arrive(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 1000, 1500)
    add_file(store, bytes(400))
    with store.upload("me") as first, store.upload("me") as second, store.upload("you") as other:
        first(300)
        second(300)
        with pytest.raises(NoRoom, match="would have 1001 bytes, and 1000 are the most"):
            first(1)
        other(499)
        with pytest.raises(NoRoom, match="the files of all keys would have more than 1500 bytes"):
            other(1)
    assert not store._arriving
    with store.upload("me") as again:
        again(600)


def test_the_files_of_all_owners_have_a_bound(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 1000, 1500)
    add_file(store, bytes(1000))
    with pytest.raises(NoRoom, match="max_file_bytes_total"):
        add_file(store, bytes(501), "you")
    input = add_file(store, bytes(500), "you")
    with store.new_file() as file:
        file.write(b"x")
        store.add_file(file, "you", "out.jsonl", "batch_output")
    with pytest.raises(NoRoom, match="max_file_bytes_total"):
        store.add_batch(new_batch(input, CHAT, 60), "you", "you", None)


def test_what_is_kept_no_longer_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = BatchStore(tmp_path / "data", 10**6)
    add_file(forever, b"x")
    ended, running = add_batch(forever, THREE, tmp_path), add_batch(forever, THREE, tmp_path)
    forever.finish(ended, "cancelled")
    forever.delete_expired()
    forever.close()
    now = time.time()
    store = BatchStore(tmp_path / "data", 10**6, seconds_kept=1000)
    new = store.file(add_file(store, b"y"), "me")
    assert new.expires_at == new.created_at + 1000
    monkeypatch.setattr(time, "time", lambda: now + 990)
    store.delete_expired()
    assert store.batch(ended.object.id, "me").status == "cancelled"
    monkeypatch.setattr(time, "time", lambda: now + 1010)
    store.delete_expired()
    with pytest.raises(BatchNotFound):
        store.batch(ended.object.id, "me")
    # The input of a batch that runs stays until it has ended.
    files = [file.name for file in (tmp_path / "data" / "files").iterdir()]
    assert files == [running.object.input_file_id]
    store.finish(running, "completed")
    store.delete_expired()
    assert store.batches("me", "batch", None, 10).data == []


def test_of_ended_batches_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.batches.store.MAX_ENDED", 2)
    store = BatchStore(tmp_path / "data", 10**6)
    running = add_batch(store, THREE, tmp_path)
    batches = [add_batch(store, THREE, tmp_path) for _ in range(4)]
    for batch in batches:
        store.finish(batch, "cancelled")
    new = add_batch(store, THREE, tmp_path)
    kept = [each.id for each in store.batches("me", "batch", None, 10).data]
    assert kept == [each.object.id for each in (new, batches[3], running)]


def test_the_input_of_a_live_batch_cannot_be_deleted(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    with pytest.raises(BadRequest, match="which is in_progress; cancel it first"):
        store.delete_file(batch.object.input_file_id, "me")
    store.finish(batch, "cancelled")
    store.delete_file(batch.object.input_file_id, "me")


def test_lists_come_in_pages(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    ids = [add_file(store, b"x") for _ in range(5)]
    page = store.files("me", "batch", None, 2, newest_first=False)
    assert ([file.id for file in page.data], page.has_more) == (ids[:2], True)
    page = store.files("me", None, ids[1], 3, newest_first=False)
    assert ([file.id for file in page.data], page.has_more) == (ids[2:], False)
    page = store.files("me", None, ids[1], 3, newest_first=True)
    assert ([file.id for file in page.data], page.has_more) == (ids[:1], False)


# -- the folder -------------------------------------------------------------------------------------------------


def test_nothing_is_made_before_the_first_file(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    assert store.files("me", None, None, 10, newest_first=True).data == []
    assert store.unfinished() == []
    assert not (tmp_path / "data").exists()


def test_a_folder_is_one_servers_alone(tmp_path: Path) -> None:
    first, late = (BatchStore(tmp_path / "data", 10**6) for _ in range(2))
    add_file(first, b"x")
    with pytest.raises(OSError, match="which another server uses"):
        BatchStore(tmp_path / "data", 10**6)
    with (
        pytest.raises(StoreUnusable, match=r"^the file cannot be kept: the data_dir cannot be used; "),
        disk_errors("the file cannot be kept"),
    ):
        add_file(late, b"x")
    first.close()
    BatchStore(tmp_path / "data", 10**6).close()


def test_an_empty_data_dir_belongs_to_the_first_server_that_is_given_it(tmp_path: Path) -> None:
    config = ServerConfig(data_dir=str(tmp_path / "new"))
    first = open_store(config)
    with pytest.raises(OSError, match="which another server uses"):
        open_store(config)
    first.close()
    open_store(config).close()


def test_a_data_dir_on_a_full_disk_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(store: BatchStore) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(BatchStore, "_open", opened)
    with pytest.raises(OSError, match=r"cannot be opened: database or disk is full; free some of its disk$"):
        open_store(ServerConfig(data_dir=str(tmp_path)))


def test_a_data_dir_that_cannot_be_opened_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite").write_text("not a database" * 1000)
    with pytest.raises(
        OSError, match=r"^data_dir is .*, whose batches.sqlite cannot be opened: file is not a database"
    ):
        open_store(ServerConfig(data_dir=str(tmp_path)))
    (tmp_path / "batches.sqlite").unlink()
    add_file(BatchStore(tmp_path, 10**6), b"x")
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").mkdir()
    with pytest.raises(OSError, match=r"cannot be used: Is a directory; let this user .* give another directory$"):
        open_store(ServerConfig(data_dir=str(tmp_path)))


def test_a_port_has_its_folder_and_a_temporary_one_ends_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    store = open_store(ServerConfig(port=8123))
    add_file(store, b"x", owner="")
    assert (tmp_path / "kaon" / "port-8123" / "batches.sqlite").exists()
    # The second server of the port's folder goes on without it.
    other = open_store(ServerConfig(port=8123))
    add_file(other, b"x", owner="")
    temporary = other._files
    other.close()
    assert not temporary.exists()
    with pytest.raises(OSError, match="which another server uses"):
        open_store(ServerConfig(data_dir=str(tmp_path / "kaon" / "port-8123")))


def test_a_home_that_cannot_be_used_makes_the_store_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, stat = tmp_path / "home", os.stat
    (home / ".local" / "state" / "kaon").mkdir(parents=True)

    def looked_up(path: Any, *arguments: Any, **keywords: Any) -> os.stat_result:
        if str(path).startswith(f"{home}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **keywords)

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    # A home that only its owner may search, a folder of another user in one's own, and no home.
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", looked_up)
        patched.setattr(os, "access", lambda path, mode: path != home)
        assert open_store(ServerConfig(port=8123))._is_temporary
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: path.name != "kaon")
        assert open_store(ServerConfig(port=8123))._is_temporary
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert open_store(ServerConfig(port=8123))._is_temporary


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    answer = output_line("a", {"status_code": 200, "body": "x" * 10**6})
    assert store._database is not None
    [pages] = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            store.record(batch.object.id, 0, answer, succeeded=True)

    def add_many() -> None:
        with disk_errors("the batch cannot be kept"):
            for _ in range(1000):
                add_batch(store, THREE, tmp_path)

    with pytest.raises(DiskFull, match=r"^the batch cannot be kept: database or disk is full; try again later$"):
        add_many()
    store._database.execute("PRAGMA max_page_count = 100000")
    store.record(batch.object.id, 0, answer, succeeded=True)
    assert store.batch(batch.object.id, "me").request_counts.completed == 1


@pytest.mark.parametrize(
    ("table", "action"),
    [("batches", "SELECT RAISE(FAIL, 'refused')"), ("files", "INSERT INTO late VALUES ('no file')")],
    ids=["statement", "commit"],
)
def test_a_batch_that_cannot_be_stored_leaves_no_input(tmp_path: Path, table: str, action: str) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    add_file(store, b"x")
    assert store._database is not None
    # The commit checks a deferred foreign key, and fails as it does when the disk is full.
    store._database.execute("PRAGMA foreign_keys = ON")
    store._database.execute("CREATE TABLE late (id TEXT REFERENCES files (id) DEFERRABLE INITIALLY DEFERRED)")
    store._database.execute(f"CREATE TRIGGER refuses BEFORE INSERT ON {table} BEGIN {action}; END")
    with store.new_file() as file:
        file.write(THREE)
        with pytest.raises(sqlite3.IntegrityError):
            store.add_batch_of(file, "in.jsonl", "me", "me", CHAT, 60, "msgbatch")
    assert len(store.files("me", None, None, 10, newest_first=False).data) == 1
    assert len(list(store._files.iterdir())) == 1
    assert store.unfinished() == []


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/data/secret"), "Permission denied"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (sqlite3.OperationalError("database is locked"), "database is locked"),
    ],
)
def test_a_disk_that_refuses_for_another_reason_is_no_full_one_and_logged(
    cause: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(StoreUnusable, match=f"^the file cannot be kept: {said}; the operator") as raised,
        disk_errors("the file cannot be kept"),
    ):
        raise cause
    assert raised.value.status == 500
    assert "secret" not in str(raised.value)
    assert f"the file cannot be kept: {cause} (data_dir)" in caplog.text


def test_a_closed_store_neither_opens_again_nor_seems_empty(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    store.close()
    for call in (lambda: store.finish(batch, "completed"), lambda: store.pending(batch.object.id, -1, 1)):
        with pytest.raises(ShuttingDown):
            call()
    again = BatchStore(tmp_path / "data", 10**6)
    assert [line.custom_id for line in again.pending(batch.object.id, -1, 10)] == ["a", "b", "c"]


def test_a_batch_ends_once(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    store.record(batch.object.id, 0, output_line("a", {"status_code": 200}), succeeded=True)
    store.finish(batch, "completed")
    ended = store.batch(batch.object.id, "me")
    store.finish(batch, "cancelled")
    assert store.batch(batch.object.id, "me") == ended
    assert ended.output_file_id is not None
    assert store.path(ended.output_file_id, "me").read_bytes().count(b"\n") == 1


def test_contents_that_no_file_has_are_deleted_by_the_next_server(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    kept = add_file(store, b"kept")
    (tmp_path / "data" / "files" / "file-0").write_bytes(b"of a server that was killed")
    store.close()
    again = BatchStore(tmp_path / "data", 10**6)
    assert [path.name for path in (tmp_path / "data" / "files").iterdir()] == [kept]
    again.close()


def test_a_file_whose_time_has_come_is_gone_and_a_batch_still_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    with store.new_file() as file:
        file.write(THREE)
        input = store.add_file(file, "me", "in.jsonl", seconds=3600).id
    batch = Batch(new_batch(input, CHAT, 60), "me", "me")
    store.add_batch(batch.object, "me", "me", None)
    store.begin(batch.object.id, read_lines(store.path(input, "me"), CHAT)[0])
    later = time.time() + 4000
    monkeypatch.setattr("time.time", lambda: later)
    with pytest.raises(FileNotFound):
        store.file(input, "me")
    assert store.files("me", None, None, 10, newest_first=True).data == []
    store.delete_expired()
    assert len(store.pending(batch.object.id, -1, 10)) == 3
    store.finish(batch, "completed")
    store.delete_expired()
    assert list((tmp_path / "data" / "files").iterdir()) == []


def test_an_owner_may_have_so_many_batches_and_no_more_with_a_full_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.batches.store.MAX_UNFINISHED", 2)
    store = BatchStore(tmp_path / "data", 1000)
    batches = [add_batch(store, THREE, tmp_path) for _ in range(2)]
    with pytest.raises(NoRoom, match="2 batches of this key have not ended"):
        add_batch(store, THREE, tmp_path)
    for batch in batches:
        store.record(batch.object.id, 0, output_line("a", {"status_code": 200, "body": "x" * 1000}), succeeded=True)
        store.finish(batch, "completed")
    with pytest.raises(NoRoom, match="delete files that are not needed"):
        store.add_batch(new_batch("file-1", CHAT, 60), "me", "me", None)
    store.add_batch(new_batch("file-1", CHAT, 60), "other", "other", None)


def test_a_batch_whose_files_were_deleted_can_be_deleted(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    batch = add_batch(store, THREE, tmp_path)
    store.finish(batch, "cancelled")
    error_file = store.batch(batch.object.id, "me").error_file_id
    assert error_file is not None
    store.delete_file(error_file, "me")
    store.delete_batch(batch.object.id, "me")
    with pytest.raises(BatchNotFound):
        store.batch(batch.object.id, "me")


def test_what_replaced_a_file_in_the_store_is_not_served(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "data", 10**6)
    put: Callable[[Path], object]
    for put in (lambda path: path.symlink_to("/etc/passwd"), os.mkfifo):
        with store.new_file() as file:
            file.write(b"x")
            id = store.add_file(file, "me", "in.jsonl").id
        path = store.path(id, "me")
        path.unlink()
        put(path)
        with pytest.raises(FileNotFound, match="is not a regular file"):
            store.path(id, "me")
        store.delete_file(id, "me")
    assert Path("/etc/passwd").exists()


def test_other_users_can_read_nothing_of_the_folder(tmp_path: Path) -> None:
    """Names, prompts and answers are in the database, and whoever can open the lock can hold it."""
    before = os.umask(0o022)
    try:
        for _ in range(2):
            store = BatchStore(tmp_path / "data", 10**6)
            store.open()
            found = sorted(each for each in (tmp_path / "data").iterdir() if each.stat().st_mode & 0o077)
            assert found == []
            assert (tmp_path / "data" / "batches.sqlite-wal").exists()
            store.close()
            for name in ("lock", "batches.sqlite"):
                (tmp_path / "data" / name).chmod(0o644)  # As earlier releases left them.
    finally:
        os.umask(before)


def test_a_folder_of_files_that_others_may_change_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "files").symlink_to(elsewhere)
    (tmp_path / "open" / "files").mkdir(parents=True)
    (tmp_path / "open" / "files").chmod(0o777)
    for name in ("linked", "open"):
        store = BatchStore(tmp_path / name, 10**6)
        with pytest.raises(OSError, match="whose folder files is a link"), store.new_file():
            pass
