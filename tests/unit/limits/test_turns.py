"""When tasks begin: at once, as a task would run; or at the turn of their party, of which some precede others."""

import asyncio
import contextvars
import itertools
from collections import Counter

import pytest

from server.limits.turns import FairLock, HeadTurns, RequestTurns, begin_at_once

_VALUE = contextvars.ContextVar("_VALUE", default="outside")


# -- at once --------------------------------------------------------------------------------------------------------


async def test_it_runs_until_it_first_waits_and_ends_in_the_same_context() -> None:
    steps, gate = list[str](), asyncio.Event()

    async def work() -> None:
        token = _VALUE.set("inside")
        steps.append("begun")
        await gate.wait()
        await asyncio.sleep(0)
        steps.append(_VALUE.get())
        _VALUE.reset(token)  # An error in another context.

    task = begin_at_once(work())
    assert steps == ["begun"]
    assert _VALUE.get() == "outside"
    assert task is not None
    gate.set()
    await task
    assert steps == ["begun", "inside"]


async def test_one_that_waits_for_nothing_needs_no_task() -> None:
    async def work() -> None:
        pass

    assert begin_at_once(work()) is None


async def test_an_error_before_it_waits_is_the_caller_s_and_a_later_one_the_task_s() -> None:
    async def work(rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.sleep(0)
        raise ValueError("too bad")

    with pytest.raises(ValueError, match="too bad"):
        begin_at_once(work(0))
    task = begin_at_once(work(2))
    assert task is not None
    with pytest.raises(ValueError, match="too bad"):
        await task


async def test_it_is_cancelled_while_it_waits_and_may_wait_again_before_it_ends() -> None:
    steps = list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    task = begin_at_once(work())
    assert task is not None
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["cleaned up"]


async def test_a_task_cancelled_before_its_first_step_leaves_no_coroutine_that_waits() -> None:
    ended = list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    task = begin_at_once(work())
    assert task is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    assert ended == ["ended"]


async def test_a_task_cancelled_before_its_first_step_cancels_what_the_coroutine_waits_for() -> None:
    inner = asyncio.create_task(asyncio.Event().wait())

    async def work() -> None:
        await inner

    task = begin_at_once(work())
    assert task is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait([inner], timeout=10)
    assert inner.cancelled()


# -- turns of requests ----------------------------------------------------------------------------------------------


async def test_few_requests_begin_in_a_round_in_turns_of_parties() -> None:
    turns, rounds, began = RequestTurns(), 0, list[tuple[str, int]]()

    async def request(party: str) -> None:
        await turns.take(party)
        began.append((party, rounds))

    tasks = [asyncio.create_task(request("heavy")) for _ in range(100)]
    tasks += [asyncio.create_task(request("light")) for _ in range(2)]
    for gone in tasks[20:30]:
        asyncio.get_running_loop().call_soon(gone.cancel)
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        rounds += 1
    in_round = Counter(number for _, number in began)
    assert len(began) == 92
    assert max(in_round.values()) <= 8
    first = [party for party, _ in began]
    assert max(index for index, party in enumerate(first) if party == "light") < 8 + 8
    assert not turns._waiting


async def test_fewer_requests_begin_after_long_rounds_and_more_again_after_short_ones() -> None:
    now = 0.0
    turns, rounds, began = RequestTurns(lambda: now), 0, Counter[int]()

    async def request() -> None:
        nonlocal now
        await turns.take("heavy")
        began[rounds] += 1
        if rounds < 20:
            now += 0.005

    tasks = [asyncio.create_task(request()) for _ in range(200)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        rounds += 1
    numbers = [began[each] for each in sorted(began)]
    assert numbers[0] == 8
    assert set(numbers[3:15]) <= {1, 2, 3}
    assert numbers[-4:-1] == [8, 8, 8]


async def test_a_party_of_few_requests_precedes_the_others_in_short_rounds() -> None:
    """Ten keys with four clients each began eight requests a round, and a light key's were the last of eleven."""
    now = 0.0
    turns, rounds, began = RequestTurns(lambda: now), 0, list[tuple[str, int]]()
    waited = dict[int, int]()

    async def request(party: str) -> None:
        nonlocal now
        asked = rounds
        await turns.take(party)
        now += 0.0009
        began.append((party, rounds))
        if party == "light":
            waited[asked] = rounds - asked

    async def repeat(party: str) -> None:
        while rounds < 400:
            await request(party)
            await asyncio.sleep(0)

    heavy = [asyncio.create_task(repeat(f"heavy {number % 10}")) for number in range(40)]
    light = list[asyncio.Task[None]]()
    while not all(task.done() for task in heavy):
        await asyncio.sleep(0)
        rounds += 1
        if rounds == 100:
            now += 2.0  # All keys were light until all had sent requests.
        if rounds >= 200 and rounds % 20 == 0:
            light.append(asyncio.create_task(request("light")))
    in_round = Counter(number for _, number in began)
    assert {in_round[each] for each in range(120, 190)} == {8}
    assert max(in_round[each] for each in range(230, 390)) <= 3
    assert sum(task.done() for task in light) == len(light) == len(waited)
    assert max(waited.values()) <= 2


async def test_a_single_request_precedes_bursts_whatever_its_party_sent_before() -> None:
    """Ten keys sent four requests each at once, and a key with more requests a second waited for ten of them."""
    now = 0.0
    turns, began = RequestTurns(lambda: now), list[str]()

    async def request(party: str) -> None:
        await turns.take(party)
        began.append(party)

    for _ in range(28):
        await request("steady")
    now = 0.9
    bursts = [asyncio.create_task(request(f"burst {number % 10}")) for number in range(40)]
    await asyncio.sleep(0)
    before = len(began)
    await request("steady")
    assert len(began) - before <= 8 + 1
    await asyncio.gather(*bursts)
    assert len(began) == 28 + 40 + 1
    assert turns._num_waiting == 0
    assert not any((turns._single, turns._light, turns._waiting, turns._numbers, turns._num_waiting))


async def test_light_parties_leave_a_request_of_each_round_to_the_others() -> None:
    turns, rounds, began = RequestTurns(lambda: 0.0), 0, list[int]()

    async def request(party: str) -> None:
        await turns.take(party)
        if party == "heavy":
            began.append(rounds)

    tasks = [asyncio.create_task(request("heavy")) for _ in range(40)]
    tasks += [asyncio.create_task(request(f"new {number}")) for number in range(400)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        rounds += 1
    assert len(began) == 40
    assert max(later - earlier for earlier, later in itertools.pairwise(began)) <= 2
    assert not turns._light


# -- a fair lock ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "expected"),
    [(0, ["first", "busy", "light", "busy", "light"]), (5, ["first", "light", "light", "busy", "busy"])],
)
async def test_the_next_holder_is_of_the_party_with_the_least_load_and_equal_ones_take_turns(
    before: int, expected: list[str]
) -> None:
    load, order = Counter(busy=before), list[str]()
    lock, gate = FairLock(load.__getitem__), asyncio.Event()

    async def work(party: str) -> None:
        async with lock.hold(party):
            await gate.wait()
            load[party] += 1
            order.append(party)

    tasks = [asyncio.create_task(work(each)) for each in ("first", "busy", "busy", "light", "light")]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    assert order == expected


async def test_a_task_that_is_cancelled_at_its_turn_passes_the_lock_on() -> None:
    lock, order = FairLock(lambda party: 0), list[str]()

    async def work(party: str) -> None:
        async with lock.hold(party):
            order.append(party)

    async with lock.hold("first"):
        tasks = [asyncio.create_task(work(each)) for each in ("second", "third")]
        await asyncio.sleep(0)
    tasks[0].cancel()  # It has the lock, and has not run yet.
    await asyncio.wait(tasks, timeout=5)
    assert order == ["third"]


# -- heads ----------------------------------------------------------------------------------------------------------


async def test_a_connection_that_fails_does_not_keep_the_heads_of_others_unparsed() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    turns, parsed = HeadTurns(), list[object]()
    _VALUE.set("of a request")
    for divisor in (0, 1):
        turns.parse_later(lambda divisor=divisor: parsed.append(1 // divisor))
    turns.parse_later(lambda: parsed.append(_VALUE.get()))
    while len(parsed) < 2:
        await asyncio.sleep(0)
    assert parsed == [1, "outside"], "rounds run in the context of no request"
