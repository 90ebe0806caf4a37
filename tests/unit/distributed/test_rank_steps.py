"""`RankSteps`: a step of several ranks ends on all of them, and its error names the rank that caused it."""

from collections.abc import Callable

import pytest

from engine.batch import ScheduledBatch
from engine.distributed import rank_steps
from engine.distributed.logs import before_stack
from engine.distributed.rank_steps import (
    ABORTED,
    AdapterMessage,
    RankStepError,
    RankSteps,
    StepMessage,
    decode_message,
    decode_step,
    encode_step,
)
from engine.distributed.step_transport import SharedMemorySteps
from engine.sequence import Sequence


class Recorded:
    """The group of one test, and its error messages."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.failures: list[str] = []
        self.can_leave = True

    def begin_step(self, number: int) -> None:
        self.calls.append(number)

    def abort(self) -> bool:
        self.calls.append("abort")
        return self.can_leave


class Ranks:
    """Ranks 1 and 2, simulated by the test."""

    def __init__(self) -> None:
        self.recorded = Recorded()
        transport = SharedMemorySteps.create(3)
        self.first, self.second = (SharedMemorySteps(*transport.descriptors, 3, rank) for rank in (1, 2))
        transport.close()
        self.steps = RankSteps(transport, 3, self.recorded, self.recorded.failures.append)

    def begin(self) -> list[StepMessage]:
        """Run a step of one row. Returns the message that each rank receives."""
        self.steps.begin(batch(), is_greedy=True)
        return [decode_step(rank.read()) for rank in (self.first, self.second)]


def batch() -> ScheduledBatch:
    seq = Sequence([5, 6, 7], 16, id=3)
    seq.slot, seq.block_table = 2, [9]
    return ScheduledBatch({3: seq}, [3], 3, 3, total_seqs_num=1, total_seqs_num_prefill=1, new_seqs=[seq])


def test_a_rank_receives_new_rows_whole_and_the_tokens_of_the_previous_step() -> None:
    ranks = Ranks()
    first = ranks.begin()
    assert first[0] == first[1]
    assert (first[0].slots, first[0].context_lens, first[0].sampled) == ([2], [3], [])
    [row] = first[0].new_rows
    assert (row.slot, row.token_ids, row.block_table, row.adapter) == (2, [5, 6, 7], [9], 0)
    for rank in (ranks.first, ranks.second):
        rank.report()
    ranks.steps.end([42])
    assert [message.sampled for message in ranks.begin()] == [[(1, [42])], [(1, [42])]]
    assert ranks.recorded.calls == [1, 2]


def test_a_rank_that_raised_fails_the_step_by_its_number_and_its_traceback_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks()
    ranks.begin()
    ranks.first.report()
    ranks.second.report("no memory\nTraceback ...\nMemoryError")
    with pytest.raises(RankStepError, match=r"^tensor-parallel rank 2: no memory$"):
        ranks.steps.end([1])
    assert before_stack("Traceback ...\nMemoryError").items() <= vars(caplog.records[-1]).items()
    # The tokens that the step sampled here were never used.
    assert ranks.begin()[0].sampled == []


def test_a_rank_that_only_followed_is_not_blamed() -> None:
    ranks = Ranks()
    ranks.begin()
    ranks.first.report(ABORTED)
    ranks.second.report("damaged\ntrace")
    with pytest.raises(RankStepError, match="rank 2: damaged"):
        ranks.steps.abandon(1, RuntimeError("another rank has left this step"))


def test_where_rank_0_raises_all_leave_and_its_own_error_stays() -> None:
    ranks = Ranks()
    ranks.begin()
    ranks.first.report(ABORTED)
    ranks.second.report()
    ranks.steps.abandon(1, ValueError("mine"))
    assert ranks.recorded.calls == [1, "abort"]
    # Only once; between steps there is no step to leave.
    ranks.steps.abandon(1, ValueError("mine"))
    assert ranks.recorded.calls == [1, "abort"]
    assert ranks.recorded.failures == []


def test_a_rank_that_does_not_leave_ends_the_process_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_steps, "_LEAVE_SECONDS", 0.05)
    ranks = Ranks()
    ranks.begin()
    ranks.first.report()
    ranks.steps.abandon(1, ValueError("mine"))
    [sentence] = ranks.recorded.failures
    assert "rank 0 (mine)" in sentence
    assert "rank 2 did not leave" in sentence


def test_a_rank_that_waits_in_collectives_which_cannot_be_left_ends_the_process() -> None:
    ranks = Ranks()
    ranks.recorded.can_leave = False
    ranks.begin()
    ranks.first.report("out of memory")
    ranks.second.report()
    ranks.steps.abandon(1, ValueError("mine"))
    [sentence] = ranks.recorded.failures
    assert "rank 0 (mine)" in sentence
    assert "rank 2 cannot leave the step's collectives" in sentence


def test_steps_end_in_order_while_the_next_one_runs() -> None:
    ranks = Ranks()
    ranks.begin()
    assert [message.sampled for message in ranks.begin()] == [[], []]
    for rank in (ranks.first, ranks.second):
        rank.report()
    ranks.steps.end([42])
    assert (ranks.steps.is_open(1), ranks.steps.is_open(2)) == (False, True)
    ranks.first.report()
    ranks.second.report("damaged\ntrace")
    with pytest.raises(RankStepError, match="rank 2: damaged"):
        ranks.steps.end([43])
    assert [message.sampled for message in ranks.begin()] == [[(1, [42])], [(1, [42])]]


def test_the_newest_step_is_abandoned_and_the_one_before_it_is_still_read() -> None:
    ranks = Ranks()
    ranks.begin()
    ranks.begin()
    for failure in ("", ABORTED):
        for rank in (ranks.first, ranks.second):
            rank.report(failure)
    ranks.steps.abandon(2, ValueError("mine"))
    assert (ranks.steps.is_open(1), ranks.steps.is_open(2)) == (True, False)
    ranks.steps.end([42])
    assert ranks.begin()[0].sampled == [(1, [42])]
    assert ranks.recorded.calls == [1, 2, "abort", 3]


def test_a_step_that_is_discarded_sends_no_tokens() -> None:
    ranks = Ranks()
    ranks.begin()
    for rank in (ranks.first, ranks.second):
        rank.report("damaged")
    ranks.steps.discard(1)
    ranks.steps.discard(1)
    assert ranks.begin()[0].sampled == []


@pytest.mark.parametrize("change", [lambda seq: None, lambda seq: seq.token_ids.extend(range(100_000))])
def test_the_message_holds_what_the_batch_does(change: Callable[[Sequence], None]) -> None:
    one = batch()
    [seq] = one.new_seqs
    change(seq)
    message = decode_step(encode_step(one, 7, [(6, [1, 2])], is_greedy=False))
    assert (message.number, message.sampled, message.is_greedy) == (7, [(6, [1, 2])], False)
    assert message.new_rows[0].token_ids == seq.token_ids
    assert message.slots == one.slots.tolist()


def test_adapters_change_on_all_ranks_between_steps_or_the_first_failure_is_raised() -> None:
    ranks = Ranks()
    ranks.first.report()
    ranks.second.report("the file is truncated")
    with pytest.raises(RankStepError, match="tensor-parallel rank 2: the file is truncated"):
        ranks.steps.change_adapter(3, "/a/1")
    assert [decode_message(rank.read()) for rank in (ranks.first, ranks.second)] == [AdapterMessage(3, "/a/1")] * 2
    # The next step is not disturbed.
    assert [message.number for message in ranks.begin()] == [1, 1]
