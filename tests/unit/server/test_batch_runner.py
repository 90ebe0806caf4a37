"""How `BatchRunner` ends batches: the effect of cancellation, shutdown, failing routes and refusals on their lines."""

import asyncio
import errno
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from server.batches.lines import Line, request_body
from server.batches.runner import BatchRunner
from server.batches.store import Batch, BatchStore, new_batch
from server.commands.run_batch import run as run_batch
from server.limits.accounts import Accounts
from server.limits.jobs import FairPool, Jobs
from server.limits.owners import Owner
from server.schemas.batches import BATCH_ENDED

CHAT = "/v1/chat/completions"


class App:
    """An application that answers 200, unless a test sets another answer for a line's `body.x`."""

    def __init__(self) -> None:
        self.refused: set[Any] = set()
        self.raising: set[Any] = set()
        self.tried: Counter[Any] = Counter()
        self.held: asyncio.Event | None = None
        """Set when lines may be answered; None: at once."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        x = json.loads((await receive())["body"])["x"]
        self.tried[x] += 1
        if self.held is not None:
            await self.held.wait()
        if x in self.raising:
            raise RuntimeError("a bug")
        await send({"type": "http.response.start", "status": 429 if x in self.refused else 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        await send({"type": "http.response.body", "body": b"}"})


def add(store: BatchStore, names: list[str], owner: str = "me") -> Batch:
    lines = [{"custom_id": name, "method": "POST", "url": CHAT, "body": {"x": name}} for name in names]
    with store.new_file() as file:
        file.writelines(json.dumps(line).encode() + b"\n" for line in lines)
        input = store.add_file(file, owner, "in.jsonl").id
    batch = Batch(new_batch(input, CHAT, 3600), owner, owner)
    store.add_batch(batch.object, owner, owner, None)
    return batch


def results(store: BatchStore, batch: Batch) -> tuple[str, list[str], list[str]]:
    """The status of a batch that has ended, and the custom ids in its output and error files."""
    ended = store.batch(batch.object.id, batch.owner)
    ids = []
    for file in (ended.output_file_id, ended.error_file_id):
        lines = [] if file is None else store.path(file, batch.owner).read_text().splitlines()
        ids.append([json.loads(line)["custom_id"] for line in lines])
    return ended.status, ids[0], ids[1]


async def until_ended(store: BatchStore, batch: Batch) -> None:
    while store.batch(batch.object.id, batch.owner).status not in BATCH_ENDED:
        await asyncio.sleep(0.005)


def runner_of(store: BatchStore, app: App, max_lines: int = 4) -> BatchRunner:
    return BatchRunner(store, app, lambda: 0, max_lines, Jobs(Accounts()), Owner.of_key)


class Gate:
    """Blocks the threads that call the store's method `name` with `argument`, until it is opened."""

    def __init__(self, store: BatchStore, name: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        called = getattr(store, name)
        is_first = iter([True])

        def held(*arguments: Any, **keywords: Any) -> Any:
            if any(isinstance(each, str) and each.startswith(argument) for each in arguments):
                is_late = not next(is_first, False)
                self.reached.set()
                assert self.opened.wait(20)
                if is_late:
                    time.sleep(0.2)  # A thread that should not be here goes on when the first one is done.
            return called(*arguments, **keywords)

        monkeypatch.setattr(store, name, held)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 20)


@pytest.mark.parametrize(("place", "argument"), [("begin", "batch_"), ("_write_output", "error")])
async def test_a_batch_that_is_cancelled_while_the_store_writes_has_each_line_once(
    place: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path, 10**6)
    batch, runner = add(store, list("abc")), runner_of(store, App())
    gate = Gate(store, place, argument, monkeypatch)
    runner.run(batch)
    await gate.wait()
    cancelling = asyncio.create_task(runner.cancel(batch))
    await asyncio.sleep(0.2)
    gate.opened.set()
    await cancelling
    await until_ended(store, batch)
    await runner.cancel(batch)
    _, done, undone = results(store, batch)
    assert sorted(done + undone) == ["a", "b", "c"]
    assert place != "_write_output" or done == ["a", "b", "c"]
    await asyncio.gather(*runner._tasks.values())
    assert store._query("SELECT * FROM lines") == []
    await runner.close()


async def test_a_cancellation_leaves_the_lines_of_an_ended_batch_to_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were deleted twice at once."""
    store = BatchStore(tmp_path, 10**6)
    batch, runner = add(store, list("abc")), runner_of(store, App())
    store.update(batch.object.id, "in_progress")
    runner.run(Batch(store.batch(batch.object.id, batch.owner), batch.owner, batch.party))
    gate = Gate(store, "_delete_lines", "batch_", monkeypatch)
    await gate.wait()
    monkeypatch.setattr(store, "_delete_lines", lambda id: pytest.fail("a second deletion"))
    cancelled = await runner.cancel(batch)
    gate.opened.set()
    await asyncio.gather(*runner._tasks.values())
    assert cancelled.status == "completed"
    await runner.close()


async def test_a_batch_whose_lines_were_added_in_part_when_it_was_cancelled_has_errors_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.batches.store._LINES_AT_ONCE", 1)
    killed = BatchStore(tmp_path, 10**6)
    batch = add(killed, list("abc"))
    killed.update(batch.object.id, "cancelling")

    def kill(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("server.batches.store.time.sleep", kill)
        with pytest.raises(KeyboardInterrupt):
            killed.begin(batch.object.id, [Line(0, "a", 0, 1), Line(1, "b", 1, 1)])
    assert killed.batch(batch.object.id, batch.owner).request_counts.total == 0
    killed.close()

    store = BatchStore(tmp_path, 10**6)
    runner = runner_of(store, App())
    runner.start()
    await until_ended(store, batch)
    assert results(store, batch) == ("cancelled", [], ["a", "b", "c"])
    assert store.batch(batch.object.id, batch.owner).request_counts.failed == 3
    await runner.close()


async def test_a_batch_that_is_cancelled_twice_at_once_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, jobs = BatchStore(tmp_path, 10**6), Jobs(Accounts())
    app = App()
    app.refused = {"a"}
    batch, runner = add(store, list("abc")), BatchRunner(store, app, lambda: 0, 4, jobs, Owner.of_key)
    runner.run(batch)
    while store.batch(batch.object.id, batch.owner).status != "in_progress":
        await asyncio.sleep(0.005)
    # Another batch is written meanwhile.
    written = threading.Event()
    other = asyncio.create_task(jobs.batches.run(Owner("other"), lambda: written.wait(20)))
    gate = Gate(store, "update", "cancelling", monkeypatch)
    cancelling = [asyncio.create_task(runner.cancel(batch)) for _ in range(2)]
    await gate.wait()
    gate.opened.set()
    await asyncio.gather(*cancelling)
    await asyncio.sleep(0.05)
    written.set()
    await other
    await asyncio.wait_for(until_ended(store, batch), 10)
    assert store.batch(batch.object.id, batch.owner).status == "cancelled"
    await runner.close()


async def test_a_batch_that_is_cancelled_before_a_line_begins_leaves_the_room_for_lines(tmp_path: Path) -> None:
    """The room is that of all batches of the owner, and exists as long as one of them runs."""
    store, app = BatchStore(tmp_path, 10**6), App()
    app.held = asyncio.Event()
    runner = runner_of(store, app, max_lines=3)
    runs, begins, then = (add(store, names) for names in (["a"], ["b", "c", "d"], ["e", "f"]))
    async with asyncio.timeout(20):
        runner.run(runs)
        while len(app.tried) < 1:
            await asyncio.sleep(0.005)
        async with runner._begins.hold("me"):
            runner.run(begins)
            while runner._unfinished["me"]._value > 1:
                await asyncio.sleep(0.005)
            await runner.cancel(begins)
            await until_ended(store, begins)
        runner.run(then)
        while len(app.tried) < 3:
            await asyncio.sleep(0.005)
        app.held.set()
        for batch in (runs, then):
            await until_ended(store, batch)
    assert sorted(app.tried) == ["a", "e", "f"]
    await runner.close()


async def test_work_in_the_loops_own_threads_delays_no_batch(tmp_path: Path) -> None:
    """They are shared with everything else, first come, first served."""
    store, app, busy = BatchStore(tmp_path, 10**6), App(), threading.Event()
    batch, runner = add(store, list("abc")), runner_of(store, app)
    app.held = asyncio.Event()
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        others = asyncio.create_task(asyncio.to_thread(busy.wait, 20))
        try:
            runner.run(batch)
            async with asyncio.timeout(10):
                while not app.tried:
                    await asyncio.sleep(0.005)
                assert (await runner.cancel(batch)).status == "cancelling"
                await until_ended(store, batch)
                assert (await runner.cancel(batch)).status == "cancelled"
        finally:
            busy.set()
            await others
        await runner.close()


async def test_no_line_is_decoded_by_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may have as many megabytes as a request, and is decoded again at each attempt."""
    threads: list[threading.Thread] = []

    def decoded(content: bytes, endpoint: str) -> bytes:
        threads.append(threading.current_thread())
        return request_body(content, endpoint)

    monkeypatch.setattr("server.batches.runner.request_body", decoded)
    store, app = BatchStore(tmp_path, 10**6), App()
    app.refused = {"b"}
    batch, runner = add(store, list("ab")), runner_of(store, app)
    runner.run(batch)
    while app.tried["b"] < 2:
        await asyncio.sleep(0.005)
    assert len(threads) >= 3
    assert threading.main_thread() not in threads
    await runner.close()


async def test_a_server_that_ends_while_the_output_is_written_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path, 10**6)
    batch, runner = add(store, list("abc")), runner_of(store, App())
    gate = Gate(store, "_query", "SELECT number, answer", monkeypatch)
    runner.run(batch)
    await gate.wait()
    closing = asyncio.create_task(runner.close())
    await asyncio.sleep(0.2)
    gate.opened.set()
    await closing
    again = BatchStore(tmp_path, 10**6)
    next_runner = runner_of(again, App())
    next_runner.start()
    await until_ended(again, batch)
    assert results(again, batch) == ("completed", ["a", "b", "c"], [])
    await next_runner.close()


async def test_files_of_batches_are_read_one_at_a_time_in_turns_of_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that read lines take turns of the interpreter, of which six would leave the event loop a seventh."""
    store, reading, most, order = BatchStore(tmp_path, 10**6), 0, 0, list[str]()
    path_of, gate = store.path, threading.Event()

    def path(id: str, owner: str) -> Path:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        order.append(owner)
        assert gate.wait(20)
        return path_of(id, owner)

    begin = store.begin

    def begun(id: str, lines: list[Line]) -> None:
        nonlocal reading
        begin(id, lines)
        reading -= 1

    monkeypatch.setattr(store, "path", path)
    monkeypatch.setattr(store, "begin", begun)
    runner = runner_of(store, App())
    batches = [add(store, ["a"], owner) for owner in ("heavy",) * 6 + ("light",)]
    for batch in batches:
        runner.run(batch)
    while not order:
        await asyncio.sleep(0.005)
    gate.set()
    for batch in batches:
        await until_ended(store, batch)
    assert most == 1
    assert order.index("light") <= 2
    assert all(results(store, batch) == ("completed", ["a"], []) for batch in batches)
    await runner.close()


async def test_a_batch_that_waits_to_be_read_does_not_delay_the_servers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path, 10**6)
    gate = Gate(store, "path", "file-", monkeypatch)
    runner = runner_of(store, App())
    batches = [add(store, ["a"]) for _ in range(3)]
    for batch in batches:
        runner.run(batch)
    await gate.wait()
    stopping = asyncio.create_task(runner.stop())
    await asyncio.sleep(0.05)
    assert not stopping.done()  # One is being read.
    gate.opened.set()
    await stopping
    assert [store.batch(each.object.id, "me").status for each in batches] == [
        "in_progress",
        "validating",
        "validating",
    ]
    await runner.close()


async def test_batches_that_are_stopped_go_on_with_the_next_server(tmp_path: Path) -> None:
    store, app = BatchStore(tmp_path, 10**6), App()
    app.refused = set("abc")
    batch, runner = add(store, list("abc")), runner_of(store, app)
    runner.run(batch)
    while not app.tried:
        await asyncio.sleep(0.005)
    await runner.stop()
    assert store.batch(batch.object.id, "me").status == "in_progress"
    await runner.close()
    again, app = BatchStore(tmp_path, 10**6), App()
    next_runner = runner_of(again, app)
    next_runner.start()
    await until_ended(again, batch)
    assert results(again, batch) == ("completed", list("abc"), [])
    await next_runner.close()


async def test_a_batch_that_is_made_while_the_server_ends_is_left_to_the_next_one(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 2**20)
    runner = runner_of(store, App())
    await runner.stop()
    batch = add(store, ["a"])
    runner.run(batch)
    await asyncio.sleep(0.1)
    assert store.batch(batch.object.id, "me").status == "validating"
    next_runner = runner_of(store, App())
    next_runner.start()
    await until_ended(store, batch)
    await next_runner.close()


async def test_a_line_whose_route_raises_is_an_error_of_its_own(tmp_path: Path) -> None:
    store, app = BatchStore(tmp_path, 10**6), App()
    app.raising = {"b"}
    batch, runner = add(store, list("abc")), runner_of(store, app)
    runner.run(batch)
    await until_ended(store, batch)
    assert results(store, batch) == ("completed", ["a", "c"], ["b"])
    await runner.close()


async def test_lines_that_are_refused_keep_no_other_owners_lines_waiting(tmp_path: Path) -> None:
    store, app = BatchStore(tmp_path, 10**6), App()
    app.refused = set("abcdef")
    refused, other, runner = add(store, list("abcdef")), add(store, ["x"], "you"), runner_of(store, app, max_lines=2)
    runner.run(refused)
    while sum(app.tried.values()) < 2:
        await asyncio.sleep(0.005)
    runner.run(other)
    await until_ended(store, other)
    assert store.batch(refused.object.id, "me").status == "in_progress"
    app.refused.clear()
    await until_ended(store, refused)
    assert results(store, refused) == ("completed", list("abcdef"), [])
    await runner.close()


async def test_lines_that_wait_are_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten batches, of which 30 lines of 3 MB waited each, took 700 MB."""
    store, app, read, fetched = BatchStore(tmp_path, 10**6), App(), Counter[str](), set[str]()
    pending, content = store.pending, store.content

    def counted(batch: Batch, line: Line) -> bytes:
        read[line.custom_id] += 1
        return content(batch, line)

    def noted(id: str, after: int, limit: int) -> list[Line]:
        fetched.add(id)
        return pending(id, after, limit)

    monkeypatch.setattr(store, "content", counted)
    monkeypatch.setattr(store, "pending", noted)
    app.held = asyncio.Event()
    runner = runner_of(store, app, max_lines=2)
    batches = [add(store, [f"{name}{number}" for number in range(5)]) for name in "abc"]
    for batch in batches:
        runner.run(batch)
    while len(fetched) < 3 or sum(app.tried.values()) < 2:
        await asyncio.sleep(0.005)
    assert read == app.tried  # Two lines, that run.
    app.held.set()
    app.refused = {"a4"}
    while app.tried["a4"] < 2:
        await asyncio.sleep(0.005)
    assert read["a4"] >= 2  # It was not kept while it waited.
    app.refused.clear()
    for batch in batches:
        await until_ended(store, batch)
    await runner.close()


async def test_a_key_with_many_batches_leaves_lines_to_others(tmp_path: Path) -> None:
    """Batches took turns, so that a key with a hundred of them began a hundred lines for each one of another key."""
    store, app, order = BatchStore(tmp_path, 10**6), App(), list[str]()
    app.held, answer = asyncio.Event(), app.__call__

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        order.append(scope["state"]["owner"].party)
        await answer(scope, receive, send)

    runner = BatchRunner(store, noted, lambda: 0, 1, Jobs(Accounts()))
    heavy = [add(store, [f"{number} {line}" for line in range(4)]) for number in range(6)]
    light = add(store, list("abcd"), "you")
    for batch in (*heavy, light):
        runner.run(batch)
    while not order or any(
        store.batch(each.object.id, each.owner).status != "in_progress" for each in (*heavy, light)
    ):
        await asyncio.sleep(0.005)
    app.held.set()
    await until_ended(store, light)
    assert order.index("you (batches)") <= 4
    assert len(order[: len(order) - order[::-1].index("you (batches)")]) <= 14  # Of 28, every second one.
    for batch in heavy:
        await until_ended(store, batch)
    await runner.close()


@pytest.mark.parametrize("num_live", [0, 1000])
async def test_lines_that_never_end_keep_no_other_owners_batch_from_running(tmp_path: Path, num_live: int) -> None:
    """Another key's batch did not begin before one of the long lines had ended."""
    store, app, heavy_began = BatchStore(tmp_path, 10**6), App(), asyncio.Event()
    app.held = asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["state"]["owner"].party == "me (batches)":
            heavy_began.set()
            await app(scope, receive, send)
            return
        for status in ("http.response.start", "http.response.body"):
            await send({"type": status, "status": 200, "headers": [], "body": b"{}"})

    runner = BatchRunner(store, answer, lambda: num_live, 4, Jobs(Accounts()))
    heavy = [add(store, [f"{number} {line}" for line in range(8)]) for number in range(3)]
    for batch in heavy:
        runner.run(batch)
    await heavy_began.wait()
    while runner._running.total() < (1 if num_live else 4):
        await asyncio.sleep(0.005)
    light = add(store, list("abcd"), "you")
    runner.run(light)
    async with asyncio.timeout(20):
        await until_ended(store, light)
    assert runner._running.total() == (1 if num_live else 4)  # Those of one owner are as many as before.
    app.held.set()
    for batch in heavy:
        await until_ended(store, batch)
    await runner.close()


async def test_an_owners_batches_together_try_as_many_lines_again_as_one(tmp_path: Path) -> None:
    """A hundred batches beyond a quota tried 3200 lines again every eight seconds."""
    store, app = BatchStore(tmp_path, 10**6), App()
    app.refused = set("abcdef")
    batches, runner = [add(store, list("abc")), add(store, list("def"))], runner_of(store, app, max_lines=2)
    for batch in batches:
        runner.run(batch)
    while sum(app.tried.values()) < 5:
        await asyncio.sleep(0.005)
    assert len(app.tried) == 2
    app.refused.clear()
    for batch in batches:
        await until_ended(store, batch)
    await runner.close()


async def test_a_line_waits_for_a_descriptor_to_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, content, failures = BatchStore(tmp_path, 10**6), BatchStore.content, iter([errno.EMFILE, errno.ENFILE])

    def scarce(store: BatchStore, batch: Batch, line: Line) -> bytes:
        if number := next(failures, 0):
            raise OSError(number, os.strerror(number))
        return content(store, batch, line)

    monkeypatch.setattr(BatchStore, "content", scarce)
    batch, runner = add(store, list("ab")), runner_of(store, App())
    runner.run(batch)
    await until_ended(store, batch)
    assert results(store, batch) == ("completed", ["a", "b"], [])
    await runner.close()


async def test_a_line_that_is_longer_than_a_request_may_be_fails_its_batch(tmp_path: Path) -> None:
    """Decoding 27 MB of numbers at once stopped the event loop for half a second."""
    store, jobs = BatchStore(tmp_path, 10**6), Jobs(Accounts())
    runner = BatchRunner(store, App(), lambda: 0, 4, jobs, max_body_bytes=lambda: 1000)
    fits, too_long = add(store, ["a" * 500]), add(store, ["a", "b" * 70_000])
    for batch in (fits, too_long):
        runner.run(batch)
        await until_ended(store, batch)
    assert store.batch(fits.object.id, "me").status == "completed"
    failed = store.batch(too_long.object.id, "me")
    assert failed.errors is not None
    [error] = failed.errors.data
    assert (failed.status, error.code, error.line) == ("failed", "line_too_long", 2)
    assert "max_request_bytes" in error.message
    await runner.close()


async def test_one_line_begins_in_each_round_of_the_event_loop(tmp_path: Path) -> None:
    """In 26 ms, 60 lines of a batch of 50,000 began in one round, for which probes and streams waited."""
    round_number, rounds = 0, list[int]()

    class CountingApp(App):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            rounds.append(round_number)
            await super().__call__(scope, receive, send)

    async def count() -> None:
        nonlocal round_number
        while True:
            round_number += 1
            await asyncio.sleep(0)

    store = BatchStore(tmp_path, 10**6)
    batch, runner = add(store, [str(each) for each in range(20)]), runner_of(store, CountingApp(), max_lines=20)
    counting = asyncio.create_task(count())
    runner.run(batch)
    await until_ended(store, batch)
    counting.cancel()
    assert max(Counter(rounds).values()) == 1
    assert len(rounds) == 20
    await runner.close()


async def test_a_full_disk_is_two_lines_of_the_log_however_many_writes_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "server.batches.runner")
    monkeypatch.setattr("server.batches.runner._RETRY_SECONDS", (0.0, 0.0))
    store = BatchStore(tmp_path, 10**6)
    batch, runner = add(store, ["1"]), runner_of(store, App())

    class AtOnce(FairPool):
        async def run(self, owner: Owner, work: Callable[[], Any], *, stays: bool = False) -> Any:
            return work()

    def write(failures: Iterator[int]) -> None:
        if next(failures, None) is not None:
            raise sqlite3.OperationalError("database or disk is full")

    pool = AtOnce("writes", 1, 8, Accounts())
    await asyncio.gather(*(runner._write(pool, batch, write, iter(range(3))) for _ in range(8)))
    assert [record.message for record in caplog.records] == [
        f"{batch.object.id} waits, because the store of batches cannot be written: database or disk is full",
        f"{batch.object.id} no longer waits for the store of batches",
    ]
    await runner.close()


async def test_lines_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    store, app = BatchStore(tmp_path, 10**7), App()
    batch, runner = add(store, [f"{number:0500}" for number in range(40)]), runner_of(store, app)
    assert store._database is not None
    [pages] = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    runner.run(batch)
    await asyncio.sleep(0.1)
    assert store.batch(batch.object.id, "me").status == "validating"
    store._database.execute("PRAGMA max_page_count = 100000")
    await until_ended(store, batch)
    status, done, undone = results(store, batch)
    assert (status, len(done), undone) == ("completed", 40, [])
    await runner.close()


@pytest.mark.parametrize("content", ["notes", '{"a": 1}', '{"custom_id": "a", "body": {}}\n{"custom', "{\n}"])
def test_run_batch_leaves_a_file_that_is_no_output_as_it_is(content: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": {}}))
    target.write_text(content)
    assert run_batch(str(source), str(target), []) == 2
    assert target.read_text() == content


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "line 1 of {} is not a request of a batch"),
        ('{"url": "/v1/audio"}', "url is '/v1/audio' in line 1 of {}"),
    ],
)
def test_run_batch_refuses_a_wrong_file_and_loads_nothing(
    content: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(content)
    assert run_batch(str(source), str(target), []) == 2
    assert sentence.format(source) in capsys.readouterr().err
    assert not target.exists()


def test_a_body_gets_the_lowest_priority_whatever_it_says() -> None:
    deep = "[" * 900 + "]" * 900
    for body in ("{}", " { } ", '{"priority": -5, "x": 1}', f'{{"x": {deep}}}'):
        line = f'{{"body": {{"x": 2}}, "custom_id": "a", "body": {body}}}'
        read = json.loads(request_body(line.encode(), CHAT))
        assert read == {**json.loads(body), "priority": 100}
    assert request_body(b'{"body": {"x": 1}}', "/v1/unknown") == b'{"x": 1}'
