"""For any arrivals and priorities: no sequence waits for later ones longer than its priority allows."""

from hypothesis import given
from hypothesis import strategies as st

from engine.core.waiting_queue import MAX_PRIORITY, WaitingQueue
from engine.sequence import Sequence

AGING = 10.0


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 3)), max_size=60),
    st.data(),
)
def test_no_sequence_is_passed_by_one_that_came_later_than_its_priority_weighs(
    arrivals: list[tuple[float, int]], data: st.DataObject
) -> None:
    queue, now, served = WaitingQueue(AGING), 0.0, list[Sequence]()
    waiting: list[Sequence] = []
    for gap, priority in arrivals:
        now += gap
        seq = Sequence([1], 16, priority=priority)
        seq.arrive_time = now
        queue.append(seq)
        waiting.append(seq)
        for _ in range(data.draw(st.integers(0, len(waiting)), label="served")):
            first = queue.popleft()
            waiting.remove(first)
            served.append(first)
            counted = max(-MAX_PRIORITY, min(first.priority, MAX_PRIORITY))
            for other in waiting:
                own = max(-MAX_PRIORITY, min(other.priority, MAX_PRIORITY))
                assert first.arrive_time + counted * AGING <= other.arrive_time + own * AGING
                assert first.arrive_time - other.arrive_time <= 2 * MAX_PRIORITY * AGING
    served += [queue.popleft() for _ in range(len(queue))]
    assert sorted(seq.id for seq in served) == sorted({seq.id for seq in served})
    assert len(served) == len(arrivals)
