"""The scheduler while steps are not read: what waits for them, and what becomes of sequences behind a failed row."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.core.scheduler import Scheduler
from engine.messages import RequestOutput
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

BLOCK = 4
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


class Told:
    """A scheduler one step ahead, and what it tells."""

    def __init__(self, **fields: Any) -> None:
        settings: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "kv_cache_block_size": BLOCK,
            "num_kvcache_blocks": 16,
            "enable_prefix_caching": True,
            "scheduler_delay_factor": 0.0,
            "eos_token_id": 0,
            "stop_token_ids": [],
            **fields,
        }
        self.now = 0.0
        self.scheduler = Scheduler(SimpleNamespace(**settings), clock=lambda: self.now)
        self.outputs: list[RequestOutput] = []
        self.unread: list[ScheduledBatch] = []

    def add(self, seq_id: int, prompt: list[int] = PROMPT, max_tokens: int = 20) -> Sequence:
        seq = Sequence(prompt, BLOCK, SamplingParams(max_tokens=max_tokens), id=seq_id)
        self.scheduler.add(seq)
        return seq

    def submit(self) -> ScheduledBatch | None:
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return None
        self.scheduler.begin_step(scheduled[0])
        self.unread.append(scheduled[0])
        return scheduled[0]

    def read(self, token: int = 50, **fields: Any) -> None:
        batch = self.unread.pop(0)
        errors = fields.get("errors") or {}
        tokens = {seq_id: (token,) for seq_id in batch.req_ids if seq_id not in errors}
        self.outputs += self.scheduler.read_step(ScheduledBatchOutput(tokens, **fields))
        self.scheduler.check_integrity()


def test_a_token_that_is_not_read_is_counted_and_read_later() -> None:
    told = Told()
    seq = told.add(0)
    told.submit()
    assert (seq.num_tokens, seq.num_placeholder) == (10, 1)
    second = told.submit()
    assert second is not None
    assert (second.kind, second.context_lens) == ("decode", [10])
    told.read(51)
    told.read(52)
    assert (seq.completion_token_ids, seq.num_placeholder) == ([51, 52], 0)


def test_a_token_behind_a_stop_is_dropped_and_slot_and_blocks_wait_for_its_step() -> None:
    told = Told(max_num_seqs=1)
    told.add(0)
    told.add(1)
    told.submit()
    told.submit()
    told.read(0)
    assert [output.finish_reason for output in told.outputs] == ["eos"]
    assert told.submit() is None, "the slot was given out before the step that computes for it was read"
    assert len(told.scheduler.block_manager.free_block_ids) < 16
    told.read(99)
    assert len(told.outputs) == 1
    assert len(told.scheduler.block_manager.free_block_ids) == 16
    batch = told.submit()
    assert batch is not None
    assert batch.req_ids == [1]


def test_no_step_is_computed_for_a_sequence_that_the_unread_token_completes() -> None:
    told = Told()
    told.add(0, max_tokens=1)
    told.add(1, max_tokens=2)
    told.submit()
    second = told.submit()
    assert second is not None
    assert second.req_ids == [1]
    assert told.submit() is None
    told.read()
    told.read()
    assert [(output.request_id, output.finish_reason) for output in told.outputs] == [
        (0, "max_tokens"),
        (1, None),
        (1, "max_tokens"),
    ]


def test_nobody_is_preempted_while_a_step_is_unread() -> None:
    told = Told(num_kvcache_blocks=5, enable_prefix_caching=False)
    seqs = [told.add(seq_id, [seq_id] * 7, max_tokens=12) for seq_id in (1, 2)]
    told.submit()
    told.submit()
    told.read()
    assert told.submit() is None
    assert all(seq.slot >= 0 for seq in seqs)
    told.read()
    third = told.submit()
    assert third is not None
    assert third.req_ids == [1]
    assert seqs[1].slot == -1


@pytest.mark.parametrize("aborted", [False, True])
def test_who_began_behind_blocks_of_a_row_that_failed_begins_again(aborted: bool) -> None:
    told = Told()
    told.add(0)
    told.submit()
    other = told.add(1, [*PROMPT[:8], 60])
    stranger = told.add(2, [70, 71, 72])
    batch = told.submit()
    assert batch is not None
    assert (batch.req_ids, other.num_cached_tokens) == ([1, 2], 8)
    if aborted:
        told.outputs += told.scheduler.abort([0])
    told.read(errors={0: "not a number"})
    told.read(55)
    assert (other.completion_token_ids, stranger.completion_token_ids) == ([], [55])
    again = told.submit()
    assert again is not None
    assert (again.req_ids, other.num_cached_tokens) == ([1], 0)


def test_a_generated_block_is_found_again_once_its_tokens_are_known() -> None:
    told = Told()
    seq = told.add(0, PROMPT, max_tokens=8)
    while told.scheduler.has_requests():
        if told.submit() is None or len(told.unread) > 1:
            told.read(80)
    assert seq.is_finished
    longer = told.add(1, [*PROMPT, *[80] * 8, 5])
    assert told.scheduler.block_manager.count_cached_tokens(longer) == 16


def test_steps_that_are_dropped_leave_everybody_waiting_and_nothing_to_be_found() -> None:
    told = Told()
    seqs = [told.add(seq_id, [*PROMPT, seq_id]) for seq_id in range(3)]
    told.submit()
    told.submit()
    told.scheduler.abort([1])
    told.scheduler.drop_steps()
    told.scheduler.check_integrity()
    assert [seq.id for seq in told.scheduler.waiting] == [0, 2]
    assert all(seq.num_placeholder == 0 for seq in seqs)
    assert told.scheduler.block_manager.count_cached_tokens(seqs[0]) == 0


def test_the_delay_factor_measures_until_a_prompt_is_read_and_not_until_the_next_step_is_launched() -> None:
    told = Told(scheduler_delay_factor=2.0)
    told.add(0)
    told.submit()
    told.now = 1.0
    told.submit()
    told.now = 10.0
    told.read()
    assert told.scheduler.last_prompt_latency == 10.0
    late = told.add(1, [8, 9])
    late.arrive_time = 0.0
    told.now = 15.0
    batch = told.submit()
    assert batch is not None
    assert batch.req_ids == [0], "a prompt starts while it has not waited for twice as long as prompts take"
    told.now = 21.0
    batch = told.submit()
    assert batch is not None
    assert batch.req_ids == [1]
