"""The scheduler with prompts whose log probabilities are requested, and with sequences that generate nothing."""

import pytest

from engine.batch import PromptSpan, ScheduledBatch, ScheduledBatchOutput
from engine.core.scheduler import Scheduler
from engine.messages import RequestOutput, TokenLogprobs
from engine.sequence import Sequence
from tests.unit.core.test_scheduler import EOS, Queue, make_scheduler, make_seq, run_step, schedule


def step(scheduler: Scheduler) -> tuple[ScheduledBatch, list[RequestOutput]]:
    """Run a step whose model samples 50 and gives each prompt token its position as its log probability."""
    batch, seqs = schedule(scheduler)
    read = {
        span.seq_id: [TokenLogprobs(token_id, -float(token_id)) for token_id in span.token_ids]
        for span in batch.prompt_spans
    }
    done = [seq for seq in seqs.values() if seq.num_computed_tokens == seq.num_tokens]
    queue = Queue()
    output = ScheduledBatchOutput({seq.id: (50,) for seq in done}, prompt_logprobs=read)
    scheduler.postprocess(list(seqs.values()), output, queue)
    scheduler.check_integrity()
    return batch, queue.outputs


def reported(output: RequestOutput) -> list[int] | None:
    return None if output.prompt_logprobs is None else [each.token_id for each in output.prompt_logprobs]


def test_a_prompt_is_reported_with_the_first_output_and_not_again() -> None:
    scheduler = make_scheduler()
    seq = make_seq(6, prompt_logprobs=2)
    scheduler.add(seq)
    batch, (first,) = step(scheduler)
    assert batch.prompt_spans == [PromptSpan(seq.id, 0, [11, 12, 13, 14, 15], 2)]
    assert reported(first) == [11, 12, 13, 14, 15]
    batch, (second,) = step(scheduler)
    assert batch.prompt_spans == []
    assert reported(second) is None


def test_spans_of_chunks_point_at_their_rows_tokens() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, scheduling_policy="mixed", max_num_seqs=4)
    decoding = make_seq(3, max_tokens=9)
    scheduler.add(decoding)
    step(scheduler)
    seq = make_seq(12, prompt_logprobs=0)
    scheduler.add(seq)
    batch, outputs = step(scheduler)
    assert batch.prompt_spans == [PromptSpan(seq.id, 1, list(range(11, 18)), 0)]
    assert [reported(output) for output in outputs] == [None]
    batch, outputs = step(scheduler)
    assert batch.prompt_spans == [PromptSpan(seq.id, 1, list(range(18, 22)), 0)]
    assert reported(outputs[-1]) == list(range(11, 22))


def test_a_sequence_preempted_within_its_prompt_reads_only_what_it_has_not_read() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    seq = make_seq(20, prompt_logprobs=1)
    scheduler.add(seq)
    step(scheduler)
    scheduler.preempt(seq)
    batch, _ = step(scheduler)
    assert batch.prompt_spans == []
    step(scheduler)
    _, (output,) = step(scheduler)
    assert reported(output) == list(range(11, 30))


def test_a_prompt_reported_before_preemption_may_come_from_the_cache_and_is_not_reported_again() -> None:
    scheduler = make_scheduler()
    seq = make_seq(9, prompt_logprobs=1, max_tokens=5)
    scheduler.add(seq)
    step(scheduler)
    scheduler.preempt(seq)
    batch, (output,) = step(scheduler)
    assert batch.prompt_spans == []
    assert batch.num_scheduled_tokens == [2]
    assert reported(output) is None


def test_a_read_prompt_takes_nothing_from_the_cache_and_leaves_it_for_others() -> None:
    scheduler = make_scheduler()
    for prompt_logprobs, computed in ((None, 9), (1, 9), (None, 1)):
        seq = make_seq(9, max_tokens=1, prompt_logprobs=prompt_logprobs)
        scheduler.add(seq)
        batch, (output,) = step(scheduler)
        assert batch.num_scheduled_tokens == [computed]
        assert output.num_cached_tokens == 9 - computed


def test_a_read_prompt_is_in_the_cache_for_its_twin_in_the_same_step() -> None:
    scheduler = make_scheduler()
    scheduler.extend([make_seq(9, prompt_logprobs=1), make_seq(9)])
    batch, _ = step(scheduler)
    assert batch.num_scheduled_tokens == [9, 1]


@pytest.mark.parametrize("sampled", [50, EOS])
def test_nothing_is_generated_where_max_tokens_is_zero(sampled: int) -> None:
    scheduler = make_scheduler()
    seq = make_seq(5, max_tokens=0)
    scheduler.add(seq)
    (output,) = run_step(scheduler, {seq.id: (sampled,)})
    assert (output.output_tokens, output.finished, output.finish_reason) == ([], True, "max_tokens")
    assert output.queue_time is not None
    assert seq.completion_token_ids == []
    assert scheduler.is_finished()


@pytest.mark.parametrize(("max_model_len", "longest"), [(None, 8), (6, 6)])
def test_a_prompt_behind_which_nothing_comes_may_fill_context_and_cache(
    max_model_len: int | None, longest: int
) -> None:
    scheduler = make_scheduler(num_kvcache_blocks=2, max_model_len=max_model_len)
    with pytest.raises(ValueError, match=f"has {longest + 1} tokens; at most {longest} fit"):
        scheduler.add(make_seq(longest + 1, max_tokens=0))
    seq = make_seq(longest, max_tokens=0)
    scheduler.add(seq)
    (output,) = run_step(scheduler, {seq.id: (50,)})
    assert output.finished


def test_a_lower_priority_starts_first() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    seqs = [Sequence([10], 4, priority=priority) for priority in (1, 0, -1)]
    scheduler.extend(seqs)
    _, started = schedule(scheduler)
    assert list(started.values()) == [seqs[2]]
