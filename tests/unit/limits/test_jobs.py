"""Blocking work in threads: the order of owners, refusals, and work whose caller is cancelled."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from server.limits.accounts import Accounts, has_room
from server.limits.jobs import FairPool, Jobs, TooManyJobs
from server.limits.owners import Owner

LIGHT, HEAVY, OTHER = Owner.of_address("10.0.0.1"), Owner.of_address("10.0.0.2"), Owner.of_address("10.0.0.3")


class Work:
    """A pool whose jobs take the time of a test clock, and end when they are released."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, num_threads: int, max_waiting: int = 100, rest: float = 0.0
    ) -> None:
        self.accounts = Accounts()
        self.pool = FairPool("jobs", num_threads, max_waiting, self.accounts, rest=rest)
        self.started: list[str] = []
        self.now = 0.0
        self._releases: dict[str, threading.Event] = {}
        self.tasks: dict[str, asyncio.Task[str]] = {}
        monkeypatch.setattr("server.limits.jobs.time", self)

    def monotonic(self) -> float:
        return self.now

    async def ask(self, owner: Owner, name: str) -> None:
        """Submit a job. It starts, waits or is refused before this returns."""
        release = self._releases[name] = threading.Event()

        def work() -> str:
            self.started.append(name)
            release.wait()
            return name

        self.tasks[name] = asyncio.create_task(self.pool.run(owner, work))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self, name: str, seconds: float = 1.0) -> None:
        """End a job that has taken `seconds`."""
        await self.until(lambda: name in self.started)
        self.now += seconds
        self._releases[name].set()
        assert await self.tasks[name] == name

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.001)

    async def end_all(self) -> None:
        for release in self._releases.values():
            release.set()
        for task in self.tasks.values():
            with suppress(TooManyJobs, asyncio.CancelledError):
                await task
        assert self.pool.num_waiting == 0
        assert self.accounts.total("jobs") == 0
        self.pool.close()


async def test_a_thread_rests_as_long_as_its_job_took_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, num_threads=1, rest=1.0)
    loop = asyncio.get_running_loop()
    call_later, rests = loop.call_later, list[tuple[float, Callable[[], None]]]()

    def note(delay: float, callback: Callable[..., None], *args: Any, **options: Any) -> Any:
        if callback == work.pool._free_thread:
            return rests.append((delay, callback))
        return call_later(delay, callback, *args, **options)

    monkeypatch.setattr(loop, "call_later", note)
    for name in ("first", "second"):
        await work.ask(LIGHT, name)
    await work.end("first", 0.03)
    assert (work.started, work.pool.num_waiting) == (["first"], 1)
    ((delay, callback),) = rests
    assert delay == pytest.approx(0.03)
    callback()
    await work.end("second", 7.0)
    assert rests[1][0] <= 0.1, "a rest is bounded"
    await work.end_all()


async def test_an_owner_with_one_job_does_not_wait_for_anothers_many(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, num_threads=1)
    for number in range(5):
        await work.ask(HEAVY, f"heavy{number}")
    await work.ask(LIGHT, "light")
    await work.end("heavy0")
    await work.until(lambda: len(work.started) == 2)
    assert work.started == ["heavy0", "light"]
    await work.end_all()


async def test_one_owner_leaves_a_thread_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, num_threads=3)
    for number in range(9):
        await work.ask(HEAVY, f"heavy{number}")
    await work.until(lambda: len(work.started) == 2)
    await work.ask(LIGHT, "light")
    await work.end("light")
    assert work.started == ["heavy0", "heavy1", "light"]
    assert work.accounts.users("jobs") == {HEAVY.party: 9}
    await work.end_all()


async def num_heavy_turns(work: Work, heavy: Owner, num_turns: int, seconds: float) -> int:
    """Let two owners ask for 8 jobs each, of `seconds` and of 1 s, and return how many turns of the first ones are
    the heavy owner's."""
    await work.ask(OTHER, "first")
    await work.until(lambda: work.started == ["first"])
    for number in range(8):
        await work.ask(heavy, f"heavy{number}")
        await work.ask(LIGHT, f"light{number}")
    await work.end("first")
    for count in range(1, num_turns + 1):
        await work.until(lambda count=count: len(work.started) == count + 1)  # type: ignore[misc]
        name = work.started[-1]
        await work.end(name, seconds if name.startswith("heavy") else 1.0)
    served = work.started[1 : num_turns + 1]
    await work.end_all()
    return sum(name.startswith("heavy") for name in served)


async def test_turns_are_shared_by_time_and_not_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of 4 s and jobs of 1 s: four of the latter for each of the former."""
    work = Work(monkeypatch, num_threads=1)
    assert await num_heavy_turns(work, HEAVY, 10, 4.0) == 2


async def test_a_weight_buys_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, num_threads=1)
    assert await num_heavy_turns(work, HEAVY._replace(weight=3.0), 8, 1.0) == 6


async def test_an_owner_that_asks_one_by_one_gains_no_turn_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, num_threads=1)
    await work.ask(HEAVY, "long")
    await work.end("long", 10.0)
    await work.ask(OTHER, "other")
    await work.until(lambda: "other" in work.started)
    await work.ask(HEAVY, "again")
    await work.ask(LIGHT, "light")
    await work.end("other")
    await work.until(lambda: len(work.started) == 3)
    assert work.started[2] == "light"
    await work.end_all()


async def test_jobs_from_ever_new_addresses_leave_a_known_owner_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, num_threads=1, max_waiting=1000)
    await work.ask(LIGHT, "light")
    await work.end("light")
    for number in range(5):
        await work.ask(Owner.of_address(f"10.1.0.{number}"), f"new{number}")
    await work.ask(LIGHT, "again")
    while "again" not in work.started:
        count = len(work.started)
        await work.until(lambda count=count: len(work.started) >= count)  # type: ignore[misc]
        name = work.started[-1]
        await work.ask(Owner.of_address(f"10.2.0.{count}"), f"more{count}")
        await work.end(name)
        await work.until(lambda count=count: len(work.started) > count)  # type: ignore[misc]
        assert len(work.started) < 30
    await work.end_all()


async def test_a_new_owner_does_not_wait_for_as_long_as_many_others_have_been_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, owners = Work(monkeypatch, num_threads=1, max_waiting=1000), 24
    busy = [Owner.of_address(f"10.1.0.{number}") for number in range(owners)]
    for turn in range(2):
        for number, owner in enumerate(busy):
            await work.ask(owner, f"{number}, {turn}")
    for count in range(8 * owners):
        await work.until(lambda count=count: len(work.started) > count)  # type: ignore[misc]
        number, turn = map(int, work.started[count].split(", "))
        await work.ask(busy[number], f"{number}, {turn + 2}")
        await work.end(work.started[count])
    asked = len(work.started)
    await work.ask(LIGHT, "light")
    while "light" not in work.started:
        count = len(work.started)
        await work.end(work.started[-1])
        await work.until(lambda count=count: len(work.started) > count)  # type: ignore[misc]
    assert len(work.started) - asked <= owners
    await work.end_all()


async def test_whoever_fills_the_queue_is_refused_in_words_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, num_threads=1, max_waiting=8)
    for number in range(20):
        await work.ask(HEAVY, f"heavy{number}")
    refused = [name for name, task in work.tasks.items() if task.done()]
    assert len(refused) == 11  # One runs, and eight wait.
    error = work.tasks[refused[0]].exception()
    assert isinstance(error, TooManyJobs)
    assert error.status == 429
    assert "8 jobs are waiting, 8 of them of this key or address" in str(error)
    assert 1 <= int(error.headers["Retry-After"]) <= 60
    for number in range(2):
        await work.ask(LIGHT, f"light{number}")
        assert not work.tasks[f"light{number}"].done()
    await work.end_all()


async def test_work_whose_caller_leaves_while_it_waits_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, num_threads=1)
    for name in ("first", "gone", "next"):
        await work.ask(LIGHT, name)
    work.tasks["gone"].cancel()
    await work.end("first")
    await work.end("next")
    assert work.started == ["first", "next"]
    await work.end_all()


async def test_callers_that_leave_at_once_give_their_turns_back(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, 1)
    for name in "abc":
        await work.ask(HEAVY, name)
    await work.ask(LIGHT, "d")
    grant = work.pool._start_next
    leaving = ["b", "c", "d"]

    def grant_and_leave() -> None:
        grant()
        while leaving:
            work.tasks[leaving.pop()].cancel()

    # One of them has just got the thread, and has not run yet.
    monkeypatch.setattr(work.pool, "_start_next", grant_and_leave)
    await work.end("a")
    for name in "bcd":
        with pytest.raises(asyncio.CancelledError):
            await work.tasks[name]
    assert work.started == ["a"]
    assert work.pool.num_waiting == 0
    assert not work.accounts.users("jobs")
    await work.ask(HEAVY, "e")
    await work.end("e")


async def test_work_whose_caller_leaves_keeps_its_thread_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, num_threads=1)
    await work.ask(LIGHT, "first")
    await work.until(lambda: work.started == ["first"])
    await work.ask(LIGHT, "next")
    work.tasks["first"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await work.tasks["first"]
    await asyncio.sleep(0.01)
    assert (work.started, work.accounts.used(LIGHT.party, "jobs")) == (["first"], 2)
    work._releases["first"].set()
    await work.end("next")
    await work.end_all()


async def test_the_error_of_work_is_its_callers_and_frees_the_thread() -> None:
    accounts = Accounts()
    pool = FairPool("jobs", 1, 10, accounts)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await pool.run(LIGHT, lambda: 1 // 0)
    assert await pool.run(LIGHT, lambda: "done") == "done"
    assert accounts.total("jobs") == 0
    pool.close()


def test_an_owner_gets_its_equal_part_of_a_queue_that_others_fill() -> None:
    def room(own: int, total: int, owners: int, amount: int = 1) -> bool:
        return has_room(own, amount, total, 100, owners, least=2)

    assert room(99, 99, 1)
    assert not room(100, 100, 1)
    assert room(0, 100, 2)
    assert room(49, 149, 2)
    assert not room(50, 150, 2)
    assert not room(100, 150, 2)
    assert room(1, 500, 100)
    assert not room(2, 500, 100)
    assert not room(0, 100, 2, amount=51)


async def test_on_two_cores_prompts_of_many_messages_are_rendered_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each thread that computes in Python delays the event loop's turn of the interpreter's lock."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    jobs, running, most = Jobs(Accounts()), 0, 0
    together = threading.Barrier(2)

    def render() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.002)
        running -= 1

    owners = (LIGHT, HEAVY, OTHER) * 3
    await asyncio.gather(*(jobs.of(owner).text(render, is_large=True) for owner in owners))
    assert most == 1
    # Others are rendered side by side: these two end only if both run.
    await asyncio.gather(*(jobs.of(owner).text(together.wait) for owner in (LIGHT, HEAVY)))
    jobs.close()


async def test_a_slot_is_freed_once_early_or_after_its_longest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for its model to load must not keep others waiting."""
    accounts = Accounts()
    pool = FairPool("jobs", 1, 10, accounts)
    loop = asyncio.get_running_loop()
    limits = list[Callable[[], None]]()
    monkeypatch.setattr(loop, "call_later", lambda _, free: limits.append(free) or asyncio.Handle(free, (), loop))
    entered = list[str]()

    async def hold(name: str, end: asyncio.Event) -> None:
        async with pool.slot(HEAVY) as free:
            entered.append(name)
            if name == "early":
                free()
            await end.wait()

    end = asyncio.Event()
    holders = [asyncio.ensure_future(hold(name, end)) for name in ("early", "long", "last")]
    for _ in range(5):
        await asyncio.sleep(0)
    assert entered == ["early", "long"]
    limits[1]()
    for _ in range(5):
        await asyncio.sleep(0)
    assert entered == ["early", "long", "last"]
    assert accounts.total("jobs") == 1
    end.set()
    await asyncio.gather(*holders)
    assert (accounts.total("jobs"), pool._num_free) == (0, 1)
    pool.close()
