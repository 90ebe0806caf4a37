"""The queue of waiting sequences: arrival, priority and ageing."""

import time
from collections.abc import Iterable

import pytest

from engine.core.waiting_queue import MAX_PRIORITY, FairShares, WaitingQueue
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
    shares = FairShares()
    for owner in ("held", "served"):
        shares.join(owner)
    for _ in range(6):
        shares.serve("served", 1000)
    assert shares.served("held") < shares.served("served") - 1000
    shares.forgo("held")
    assert shares.served("held") == shares.served("served") - 1000


def test_owner_that_could_not_have_its_turns_has_no_more_credit_than_one_that_begins_to_wait() -> None:
    shares = FairShares()
    shares.join("stuck")
    for _ in range(100):
        shares.serve("served", 1000)
    assert shares.served("stuck") == shares.served("new")
