"""The queue of waiting sequences: arrival, priority and ageing."""

import time
from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.waiting_queue import CREDIT_TOKENS, MAX_PRIORITY, WaitingQueue
from engine.fair_shares import FairShares
from engine.sequence import Sequence


def seq(arrive_time: float, priority: int = 0) -> Sequence:
    made = Sequence([1], 16, priority=priority)
    made.arrive_time = arrive_time
    return made


def queue_of(seqs: Iterable[Sequence], aging_seconds: float = 10.0) -> WaitingQueue:
    queue = WaitingQueue(aging_seconds)
    for each in seqs:
        queue.append(each)
    return queue


def taken(queue: WaitingQueue) -> list[Sequence]:
    return [queue.popleft() for _ in range(len(queue))]


def test_equal_priorities_are_served_in_order_of_addition() -> None:
    seqs = [seq(float(-i)) for i in range(50)]
    assert taken(queue_of(seqs)) == seqs


def test_a_lower_priority_is_served_first_until_the_other_has_waited_longer_than_it_weighs() -> None:
    old, urgent_soon, urgent_late = seq(0.0), seq(9.0, -1), seq(11.0, -1)
    assert taken(queue_of([old, urgent_soon, urgent_late])) == [urgent_soon, old, urgent_late]


def test_a_jump_of_the_wall_clock_changes_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """With wall-clock times, a priority that arrived in the far future would wait until then."""
    monkeypatch.setattr(time, "time", lambda: 4e9)
    old = Sequence([1], 16, priority=0)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    low = Sequence([1], 16, priority=MAX_PRIORITY)
    assert taken(queue_of([old, low])) == [old, low]


def test_priorities_beyond_the_bound_count_as_the_bound() -> None:
    bound, greedy = seq(0.0, -MAX_PRIORITY), seq(1.0, -(2**31))
    assert taken(queue_of([bound, greedy])) == [bound, greedy]


def test_an_aging_of_zero_ignores_priorities() -> None:
    seqs = [seq(1.0, 5), seq(2.0, -5)]
    assert taken(queue_of(seqs, aging_seconds=0.0)) == seqs


def test_preempted_sequences_come_before_every_priority() -> None:
    queue = queue_of([seq(0.0, -50)])
    first, second = seq(1.0, 50), seq(2.0)
    queue.appendleft(second)
    queue.appendleft(first)
    assert queue[0] is first
    assert list(queue)[:2] == taken(queue)[:2] == [first, second]


def test_iteration_indexing_and_length_follow_the_order_of_service() -> None:
    seqs = [seq(float(i), i % 3) for i in range(30)]
    queue = queue_of(seqs)
    order = list(queue)
    assert len(queue) == 30
    assert [queue[i] for i in (0, 3, 29)] == [order[i] for i in (0, 3, 29)]
    assert taken(queue) == order
    with pytest.raises(IndexError):
        queue[0]


def test_dropped_sequences_leave_the_others_in_order() -> None:
    seqs = [seq(float(i), -i % 5) for i in range(40)]
    queue = queue_of(seqs)
    queue.appendleft(gone := seq(0.0))
    order = [each for each in list(queue) if each is not gone and each.arrive_time % 2]
    queue.keep(lambda each: each is not gone and each.arrive_time % 2 == 1)
    assert taken(queue) == order


def test_owner_that_is_passed_over_because_it_holds_its_share_saves_up_no_turns() -> None:
    shares = FairShares(CREDIT_TOKENS)
    for owner in ("held", "served"):
        shares.join(owner)
    for _ in range(6):
        shares.serve("served", 1000)
    assert shares.served("held") < shares.served("served") - 1000
    shares.forgo("held")
    assert shares.served("held") == shares.served("served") - 1000


def test_owner_that_could_not_have_its_turns_has_no_more_credit_than_one_that_begins_to_wait() -> None:
    shares = FairShares(CREDIT_TOKENS)
    shares.join("stuck")
    for _ in range(100):
        shares.serve("served", 1000)
    assert shares.served("stuck") == shares.served("new")


def established(owners: list[str]) -> FairShares:
    """Shares of owners that were served equally for a while."""
    shares = FairShares(CREDIT_TOKENS)
    for owner in owners:
        shares.join(owner)
    for second in range(12):
        shares.set_time(float(second))
        for owner in owners:
            shares.serve(owner, 100)
    return shares


@given(
    num_known=st.integers(1, 40),
    costs=st.lists(st.integers(1, 4096), min_size=1, max_size=4),
    per_turn=st.integers(1, 3),
    chunk=st.sampled_from([64, 500]),
)
@settings(max_examples=30, deadline=None)
def test_a_stream_of_new_owners_leaves_known_ones_their_turns(
    num_known: int, costs: list[int], per_turn: int, chunk: int
) -> None:
    """Who sends each prompt from another address has any number of owners."""
    known = [f"known {number}" for number in range(num_known)]
    shares = established(known)
    new = deque[str]()
    taken = dict.fromkeys((*known, "new"), 0)
    for turn in range(1200):
        shares.set_time(12 + 0.01 * turn)
        for number in range(per_turn):
            shares.join(f"new {turn} {number}")
            new.append(f"new {turn} {number}")
        owner = min((*known, new[0]), key=shares.served)
        cost = chunk
        if owner == new[0]:
            new.popleft()
            cost = costs[turn % len(costs)]
        shares.serve(owner, cost)
        taken[owner if owner in taken else "new"] += cost
        if shares.is_crowded:
            shares.forget_all_but({*known, *new})
    part = sum(taken.values()) / (num_known + max(num_known, 16))
    # Turns differ by a few chunks, and new owners have one credit together.
    slack = 4 * max(chunk, *costs) + 4096
    assert all(taken[owner] >= part - slack for owner in known), (part, taken)


def test_a_known_owner_with_little_service_precedes_new_ones_however_many_came() -> None:
    shares = established(["light", "heavy"])
    for _ in range(10):
        shares.serve("heavy", 4000)
    for number in range(1000):
        shares.join(f"new {number}")
        shares.serve(f"new {number}", 300)
    shares.forget_all_but({"heavy"})
    shares.join("new")
    assert shares.from_lightest(["new", "heavy", "light"])[0] == "light"
    assert shares.from_lightest(["new", "heavy"])[0] == "new"
    assert shares.recent("light") < shares.recent("new") < 0.75 < 1.0 < shares.recent("heavy")


def test_a_known_owner_that_finds_the_engine_idle_stays_known() -> None:
    shares = established(["light", "heavy"])
    shares.restart("light")
    shares.join("light")
    assert not shares.is_new("light")
    shares.serve("light", 50)
    for number in range(100):
        shares.join(f"new {number}")
        shares.serve(f"new {number}", 10)
    shares.serve("heavy", 4000)
    assert shares.from_lightest(["new 0", "heavy", "light"])[0] == "light"
    shares.restart("another")
    assert shares.is_new("another")
    shares.join("another")
    assert shares.is_new("another")


def test_owners_that_begin_together_are_equal_from_the_start() -> None:
    shares = FairShares(CREDIT_TOKENS)
    for number in range(10):
        shares.join(f"owner {number}")
        shares.set_time(0.01 * number)
        shares.serve(f"owner {number}", 500)
    assert {shares.recent(f"owner {number}") for number in range(10)} == {1.0}
    assert shares.recent("another") == 0.0


@given(st.lists(st.integers(0, 40), min_size=20, max_size=200), st.integers(0, 30))
@settings(max_examples=50, deadline=None)
def test_the_owner_with_the_least_service_is_next_whether_new_or_known(events: list[int], num_known: int) -> None:
    """Owners take turns, join, and become known while others wait."""
    shares = established([f"owner {number}" for number in range(num_known)])
    queue, now = WaitingQueue(1.0, shares), 12.0
    for event in events:
        now += 0.4
        shares.set_time(now)
        waiting = Sequence([1], 16)
        waiting.owner = f"owner {event}"
        queue.append(waiting)
        if event % 3:
            owner = queue.next_owner()
            assert owner is not None
            assert shares.served(owner) == min(map(shares.served, queue.owners))
            queue.take(owner)
            shares.serve(owner, 100 * event)
        queue.check_integrity()


def test_an_owner_that_becomes_known_while_it_waits_precedes_new_ones() -> None:
    queue = WaitingQueue(1.0)
    for owner in ("client", *(f"new {number}" for number in range(50))):
        waiting = Sequence([1], 16)
        waiting.owner = owner
        queue.append(waiting)
    for now in (0.0, 5.0):
        queue.shares.set_time(now)
        queue.shares.serve("client", 100)
    queue.shares.set_time(10.0)
    queue.shares.serve("new 0", 5000)
    assert queue.next_owner() == "client"


def test_a_turn_costs_no_more_next_to_many_new_owners() -> None:
    """All of them are passed by the virtual time of new owners with each turn of one."""
    queue, num_calls = WaitingQueue(1.0), 0
    for number in range(500):
        waiting = Sequence([1], 16)
        waiting.owner = f"new {number}"
        queue.append(waiting)
    served = queue.shares.served

    def counted(owner: str) -> float:
        nonlocal num_calls
        num_calls += 1
        return served(owner)

    queue.shares.served = counted  # type: ignore[method-assign]
    for number in range(20):
        owner = queue.next_owner()
        assert owner == f"new {number}"
        queue.take(owner)
        queue.shares.serve(owner, 300)
    assert num_calls < 200
