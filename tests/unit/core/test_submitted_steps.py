"""The scheduler while steps are unread: the operations that wait for them, and sequences that started after a failed
row."""

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


class SubmittedSteps:
    """A scheduler one step ahead, and its outputs."""

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
    pipeline = SubmittedSteps()
    seq = pipeline.add(0)
    pipeline.submit()
    assert (seq.num_tokens, seq.num_placeholder) == (10, 1)
    second = pipeline.submit()
    assert second is not None
    assert (second.kind, second.context_lens) == ("decode", [10])
    pipeline.read(51)
    pipeline.read(52)
    assert (seq.completion_token_ids, seq.num_placeholder) == ([51, 52], 0)


def test_a_token_behind_a_stop_is_dropped_and_slot_and_blocks_wait_for_its_step() -> None:
    pipeline = SubmittedSteps(max_num_seqs=1)
    pipeline.add(0)
    pipeline.add(1)
    pipeline.submit()
    pipeline.submit()
    pipeline.read(0)
    assert [output.finish_reason for output in pipeline.outputs] == ["eos"]
    assert pipeline.submit() is None, "the slot was given out before the step that computes for it was read"
    assert len(pipeline.scheduler.block_manager.free_block_ids) < 16
    pipeline.read(99)
    assert len(pipeline.outputs) == 1
    assert len(pipeline.scheduler.block_manager.free_block_ids) == 16
    batch = pipeline.submit()
    assert batch is not None
    assert batch.req_ids == [1]


def test_no_step_is_computed_for_a_sequence_that_the_unread_token_completes() -> None:
    pipeline = SubmittedSteps()
    pipeline.add(0, max_tokens=1)
    pipeline.add(1, max_tokens=2)
    pipeline.submit()
    second = pipeline.submit()
    assert second is not None
    assert second.req_ids == [1]
    assert pipeline.submit() is None
    pipeline.read()
    pipeline.read()
    assert [(output.request_id, output.finish_reason) for output in pipeline.outputs] == [
        (0, "max_tokens"),
        (1, None),
        (1, "max_tokens"),
    ]


def test_no_sequence_is_preempted_while_a_step_is_unread() -> None:
    pipeline = SubmittedSteps(num_kvcache_blocks=5, enable_prefix_caching=False)
    seqs = [pipeline.add(seq_id, [seq_id] * 7, max_tokens=12) for seq_id in (1, 2)]
    pipeline.submit()
    pipeline.submit()
    pipeline.read()
    assert pipeline.submit() is None
    assert all(seq.slot >= 0 for seq in seqs)
    pipeline.read()
    third = pipeline.submit()
    assert third is not None
    assert third.req_ids == [1]
    assert seqs[1].slot == -1


@pytest.mark.parametrize("aborted", [False, True])
def test_who_began_behind_blocks_of_a_row_that_failed_begins_again(aborted: bool) -> None:
    pipeline = SubmittedSteps()
    pipeline.add(0)
    pipeline.submit()
    other = pipeline.add(1, [*PROMPT[:8], 60])
    stranger = pipeline.add(2, [70, 71, 72])
    batch = pipeline.submit()
    assert batch is not None
    assert (batch.req_ids, other.num_cached_tokens) == ([1, 2], 8)
    if aborted:
        pipeline.outputs += pipeline.scheduler.abort([0])
    pipeline.read(errors={0: "not a number"})
    pipeline.read(55)
    assert (other.completion_token_ids, stranger.completion_token_ids) == ([], [55])
    again = pipeline.submit()
    assert again is not None
    assert (again.req_ids, other.num_cached_tokens) == ([1], 0)


def test_a_generated_block_is_found_again_once_its_tokens_are_known() -> None:
    pipeline = SubmittedSteps()
    seq = pipeline.add(0, PROMPT, max_tokens=8)
    while pipeline.scheduler.has_requests():
        if pipeline.submit() is None or len(pipeline.unread) > 1:
            pipeline.read(80)
    assert seq.is_finished
    longer = pipeline.add(1, [*PROMPT, *[80] * 8, 5])
    assert pipeline.scheduler.block_manager.count_cached_tokens(longer) == 16


def test_steps_that_are_dropped_leave_everybody_waiting_and_nothing_to_be_found() -> None:
    pipeline = SubmittedSteps()
    seqs = [pipeline.add(seq_id, [*PROMPT, seq_id]) for seq_id in range(3)]
    pipeline.submit()
    pipeline.submit()
    pipeline.scheduler.abort([1])
    pipeline.scheduler.drop_steps()
    pipeline.scheduler.check_integrity()
    assert [seq.id for seq in pipeline.scheduler.waiting] == [0, 2]
    assert all(seq.num_placeholder == 0 for seq in seqs)
    assert pipeline.scheduler.block_manager.count_cached_tokens(seqs[0]) == 0


def test_the_delay_factor_measures_until_a_prompt_is_read_and_not_until_the_next_step_is_launched() -> None:
    pipeline = SubmittedSteps(scheduler_delay_factor=2.0)
    pipeline.add(0)
    pipeline.submit()
    pipeline.now = 1.0
    pipeline.submit()
    pipeline.now = 10.0
    pipeline.read()
    assert pipeline.scheduler.last_prompt_latency == 10.0
    late = pipeline.add(1, [8, 9])
    late.arrive_time = 0.0
    pipeline.now = 15.0
    batch = pipeline.submit()
    assert batch is not None
    assert batch.req_ids == [0], "a prompt starts while it has not waited for twice as long as prompts take"
    pipeline.now = 21.0
    batch = pipeline.submit()
    assert batch is not None
    assert batch.req_ids == [1]
