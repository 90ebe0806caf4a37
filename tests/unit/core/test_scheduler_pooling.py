"""The scheduler with sequences whose prompts are pooled: they end with a vector and without a token."""

import pytest

from engine.batch import ScheduledBatchOutput
from engine.core.scheduler import Scheduler
from engine.messages import PoolingParams, RequestOutput
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.unit.core.test_scheduler import BLOCK_SIZE, Queue, make_scheduler, make_seq, schedule


def pooled(num_tokens: int, first: int = 10) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=0)
    return Sequence([first + i for i in range(num_tokens)], BLOCK_SIZE, params, pooling=PoolingParams())


def step(scheduler: Scheduler) -> tuple[list[int], list[RequestOutput]]:
    """Run a step. Returns the tokens that each row computes, and the outputs: 50 for a sampled row, its id for a
    pooled one."""
    batch, seqs = schedule(scheduler)
    done = [seq for seq in seqs.values() if seq.num_computed_tokens == seq.num_tokens]
    queue = Queue()
    output = ScheduledBatchOutput(
        {seq.id: (50,) for seq in done if seq.pooling is None},
        vectors={seq.id: b"%d" % seq.id for seq in done if seq.pooling is not None},
    )
    scheduler.postprocess(list(seqs.values()), output, queue)
    scheduler.check_integrity()
    return batch.num_scheduled_tokens, queue.outputs


def test_a_pooled_sequence_ends_with_its_prefill_next_to_one_that_generates() -> None:
    scheduler = make_scheduler()
    seq, generating = pooled(6, first=40), make_seq(5, max_tokens=3)
    scheduler.extend([seq, generating])
    counts, outputs = step(scheduler)
    assert counts == [6, 5]
    ended = {output.request_id: output for output in outputs}
    assert ended[seq.id].vector == b"%d" % seq.id
    assert (ended[seq.id].finished, ended[seq.id].finish_reason, ended[seq.id].output_tokens) == (True, "pooled", [])
    assert ended[generating.id].output_tokens == [50]
    assert list(scheduler.running) == [generating]
    assert scheduler.block_manager.used_block_ids == set(generating.block_table)


def test_a_prompt_in_chunks_gives_its_vector_with_the_last_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(pooled(20))
    steps = [step(scheduler) for _ in range(3)]
    assert [counts for counts, _ in steps] == [[8], [8], [4]]
    assert [len(outputs) for _, outputs in steps] == [0, 0, 1]


def test_pooled_prompts_share_cached_prefixes_but_compute_their_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(pooled(8))
    step(scheduler)
    scheduler.add(pooled(8))
    counts, (output,) = step(scheduler)
    assert counts == [1], "the hidden state of the last token is pooled"
    assert output.num_cached_tokens == 8


def test_the_vector_of_a_preempted_sequence_is_dropped_and_computed_again() -> None:
    scheduler = make_scheduler()
    seq = pooled(6)
    scheduler.add(seq)
    batch, _ = schedule(scheduler)
    scheduler.begin_step(batch)
    scheduler.preempt(seq)
    assert scheduler.read_step(ScheduledBatchOutput({}, vectors={seq.id: b"stale"})) == []
    _, (output,) = step(scheduler)
    assert output.vector == b"%d" % seq.id


def test_a_sequence_that_was_aborted_during_its_step_ends_once() -> None:
    scheduler = make_scheduler()
    seq = pooled(6)
    scheduler.add(seq)
    _, seqs = schedule(scheduler)
    assert len(scheduler.abort([seq.id])) == 1
    queue = Queue()
    scheduler.postprocess(list(seqs.values()), ScheduledBatchOutput({}, vectors={seq.id: b"late"}), queue)
    assert queue.outputs == []
    scheduler.check_integrity()


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_prompts_that_may_not_be_split_are_computed_whole(policy: str) -> None:
    scheduler = make_scheduler(splits_prompts=False, max_num_batched_tokens=8, scheduling_policy=policy)
    lengths = [5, 4, 12, 3]
    scheduler.extend([pooled(length, first=20 * length) for length in lengths])
    steps = [step(scheduler)[0] for _ in range(4)]
    assert steps == [[5], [4], [12], [3]], "the third exceeds a step and is computed alone"
    assert scheduler.is_finished()


def test_a_single_whole_prompt_out_of_memory_cannot_be_made_smaller() -> None:
    scheduler = make_scheduler(splits_prompts=False, max_num_batched_tokens=8)
    assert scheduler.shrink_steps(8, 2)
    assert not scheduler.shrink_steps(12, 1)
