"""The scheduler as docs/specification.md#scheduler describes it, constructed from only the attributes listed there."""

from types import SimpleNamespace

import pytest

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.core.scheduler import Scheduler
from engine.messages import RequestOutput
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceStatus, SequenceType

BLOCK_SIZE = 4
EOS = 2


def make_scheduler(*, splits_prompts: bool = True, **overrides: object) -> Scheduler:
    config = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "stop_token_ids": [],
        "kv_cache_block_size": BLOCK_SIZE,
        "num_kvcache_blocks": 32,
        "enable_prefix_caching": True,
        "scheduler_delay_factor": 0.0,
        "speculative_config": None,
    }
    return Scheduler(SimpleNamespace(**(config | overrides)), splits_prompts=splits_prompts)


def make_seq(tokens: list[int] | int, stops: list[list[int]] | None = None, **params: object) -> Sequence:
    token_ids = [10 + i for i in range(tokens)] if isinstance(tokens, int) else tokens
    return Sequence(token_ids, BLOCK_SIZE, SamplingParams(**params), stop_token_sequences=stops)  # type: ignore[arg-type]


def schedule(scheduler: Scheduler) -> tuple[ScheduledBatch, dict[int, Sequence]]:
    scheduled = scheduler.schedule()
    assert scheduled is not None
    return scheduled


def run_step(scheduler: Scheduler, tokens: dict[int, tuple[int, ...]] | int = 50) -> list[RequestOutput]:
    """Schedule a step, give tokens to every row that samples, and return the outputs."""
    _, seqs = schedule(scheduler)
    if isinstance(tokens, int):
        done = (seq for seq in seqs.values() if seq.num_computed_tokens == seq.num_tokens)
        tokens = {seq.id: (tokens,) for seq in done}
    queue = Queue()
    scheduler.postprocess(list(seqs.values()), ScheduledBatchOutput(tokens, None), queue)
    scheduler.check_integrity()
    return queue.outputs


class Queue:
    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []

    def put_nowait(self, outputs: list[RequestOutput]) -> None:
        self.outputs += outputs


class TestPrefill:
    def test_nothing_to_do_gives_none(self) -> None:
        assert make_scheduler().schedule() is None

    def test_all_waiting_prompts_that_fit_start_together(self) -> None:
        scheduler = make_scheduler()
        seqs = [make_seq(5), make_seq([7, 8, 9])]
        scheduler.extend(seqs)
        batch, scheduled = schedule(scheduler)
        assert scheduled == {seq.id: seq for seq in seqs}
        assert batch.req_ids == [seq.id for seq in seqs]
        assert batch.num_scheduled_tokens == [5, 3]
        assert batch.scheduled_tokens == [seq.token_ids for seq in seqs]
        assert batch.context_lens == [5, 3]
        assert batch.block_tables == [seq.block_table for seq in seqs]
        assert batch.last_block_num_tokens == [1, 3]
        assert batch.num_cached_tokens == [0, 0]
        assert (batch.total_tokens_num, batch.total_tokens_num_prefill, batch.total_tokens_num_decode) == (8, 8, 0)
        assert (batch.total_seqs_num, batch.total_seqs_num_prefill, batch.total_seqs_num_decode) == (2, 2, 0)
        assert all(seq.status is SequenceStatus.RUNNING and seq.type is SequenceType.PREFILL for seq in seqs)
        assert scheduler.get_request_counts() == (2, 0)

    def test_prompts_start_before_running_sequences_go_on(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_seq(3))
        run_step(scheduler)
        scheduler.add(make_seq([90, 91]))
        batch, _ = schedule(scheduler)
        assert (batch.total_seqs_num_prefill, batch.total_seqs_num_decode) == (1, 0)

    def test_no_more_than_max_num_seqs_run(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2)
        scheduler.extend(make_seq([i] * 3) for i in range(3))
        schedule(scheduler)
        assert scheduler.get_request_counts() == (2, 1)

    def test_a_prompt_that_does_not_fit_the_rest_of_the_step_waits_for_the_next(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=10)
        first, second = make_seq(7), make_seq([9] * 7)
        scheduler.extend([first, second])
        assert schedule(scheduler)[1] == {first.id: first}
        assert schedule(scheduler)[1] == {second.id: second}

    def test_a_prompt_longer_than_a_whole_step_is_computed_in_chunks(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=8)
        seq = make_seq(19)
        scheduler.add(seq)
        counts, starts = [], []
        for _ in range(3):
            batch, _ = schedule(scheduler)
            counts += batch.num_scheduled_tokens
            starts.append(batch.scheduled_tokens[0][0])
        assert counts == [8, 8, 3]
        assert starts == [10, 18, 26]
        assert seq.num_computed_tokens == 19

    def test_the_step_that_ends_a_long_prompt_takes_others_along(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=8)
        long, short = make_seq(10), make_seq([9] * 4)
        scheduler.extend([long, short])
        assert schedule(scheduler)[0].num_scheduled_tokens == [8]
        assert schedule(scheduler)[0].num_scheduled_tokens == [2, 4]

    def test_the_budget_counts_tokens_after_prefix_hits(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=12)
        scheduler.add(make_seq(10))
        run_step(scheduler)
        twin, other = make_seq(10), make_seq([9] * 10)
        scheduler.extend([twin, other])
        batch, _ = schedule(scheduler)
        assert batch.num_scheduled_tokens == [2, 10]
        assert batch.num_cached_tokens == [8, 0]
        assert batch.scheduled_tokens[0] == [18, 19]

    def test_one_token_is_computed_on_a_full_hit(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_seq(8))
        run_step(scheduler)
        scheduler.add(make_seq(8))
        batch, _ = schedule(scheduler)
        assert batch.num_scheduled_tokens == [1]
        assert batch.scheduled_tokens == [[17]]
        assert batch.context_lens == [8]

    def test_twins_in_one_step_share(self) -> None:
        scheduler = make_scheduler()
        scheduler.extend([make_seq(9), make_seq(9)])
        batch, _ = schedule(scheduler)
        assert batch.num_scheduled_tokens == [9, 1]
        assert batch.block_tables[0][:2] == batch.block_tables[1][:2]

    def test_a_prompt_that_an_empty_cache_could_not_hold_is_refused_in_words(self) -> None:
        scheduler = make_scheduler(num_kvcache_blocks=2)
        with pytest.raises(ValueError, match="the prompt has 9 tokens; at most 8"):
            scheduler.add(make_seq(9))
        assert scheduler.is_finished()

    def test_a_prompt_that_fills_an_empty_cache_gets_one_token(self) -> None:
        scheduler = make_scheduler(num_kvcache_blocks=1)
        seq = make_seq(4)
        scheduler.add(seq)
        assert schedule(scheduler)[0].total_seqs_num_prefill == 1
        scheduler.postprocess([seq], ScheduledBatchOutput({seq.id: (50,)}))
        assert (seq.completion_token_ids, seq.leave_reason) == ([50], "max_tokens")

    def test_a_prompt_waits_while_blocks_are_short(self) -> None:
        scheduler = make_scheduler(num_kvcache_blocks=4)
        first, second = make_seq(9), make_seq([9] * 9)
        scheduler.extend([first, second])
        assert schedule(scheduler)[1] == {first.id: first}
        assert scheduler.get_request_counts() == (1, 1)


class TestDelay:
    def test_prompts_are_held_back_while_others_decode_and_the_delay_has_not_passed(self) -> None:
        scheduler = make_scheduler(scheduler_delay_factor=1e6)
        scheduler.add(make_seq(3))
        run_step(scheduler)
        run_step(scheduler)
        scheduler.last_prompt_latency = 1.0
        scheduler.add(make_seq([7] * 3))
        assert schedule(scheduler)[0].total_seqs_num_decode == 1
        scheduler.waiting[0].arrive_time -= 2e6
        assert schedule(scheduler)[0].total_seqs_num_prefill == 1

    def test_nothing_is_held_back_while_nothing_runs(self) -> None:
        scheduler = make_scheduler(scheduler_delay_factor=1e6)
        scheduler.last_prompt_latency = 1.0
        scheduler.add(make_seq(3))
        assert scheduler.schedule() is not None


class TestDecode:
    def test_every_running_sequence_computes_its_last_token(self) -> None:
        scheduler = make_scheduler()
        seqs = [make_seq(4), make_seq([7] * 6)]
        scheduler.extend(seqs)
        run_step(scheduler, 50)
        batch, _ = schedule(scheduler)
        assert batch.scheduled_tokens == [[50], [50]]
        assert batch.context_lens == [5, 7]
        assert (batch.total_tokens_num_decode, batch.total_seqs_num_decode) == (2, 2)
        assert [len(table) for table in batch.block_tables] == [2, 2]
        assert all(seq.type is SequenceType.DECODE for seq in seqs)

    def test_a_batch_stays_what_it_was_when_its_sequences_go_on(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_seq(5, max_tokens=1))
        run_step(scheduler)
        scheduler.add(make_seq(5, max_tokens=2))
        batch, seqs = schedule(scheduler)
        assert batch.num_cached_tokens == [4]
        tokens, tables = batch.scheduled_tokens, batch.block_tables
        scheduler.postprocess(list(seqs.values()), ScheduledBatchOutput({batch.req_ids[0]: (9,)}, None))
        run_step(scheduler)
        assert scheduler.is_finished()
        assert (batch.scheduled_tokens, batch.block_tables) == (tokens, tables)
        assert batch.num_cached_tokens == [4]

    def test_sequences_put_into_and_taken_from_running_by_hand_count(self) -> None:
        scheduler = make_scheduler()
        scheduler.extend([make_seq(3), make_seq([7] * 3)])
        run_step(scheduler)
        run_step(scheduler)
        taken = scheduler.running.pop()
        assert taken.id not in schedule(scheduler)[1]
        scheduler.running.append(taken)
        assert taken.id in schedule(scheduler)[1]

    def test_scheduling_again_before_the_tokens_came_computes_the_same_again(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_seq(4))
        run_step(scheduler)
        first, again = schedule(scheduler)[0], schedule(scheduler)[0]
        assert (again.scheduled_tokens, again.block_tables) == (first.scheduled_tokens, first.block_tables)
        scheduler.check_integrity()

    def test_the_last_running_sequence_is_preempted_when_blocks_run_out(self) -> None:
        scheduler = make_scheduler(num_kvcache_blocks=3, enable_prefix_caching=False)
        first, last = make_seq(4), make_seq([7] * 4)
        scheduler.extend([first, last])
        run_step(scheduler)
        batch, seqs = schedule(scheduler)
        assert seqs == {first.id: first}
        assert batch.total_seqs_num_decode == 1
        assert last.status is SequenceStatus.WAITING
        assert last.block_table == []
        assert list(scheduler.waiting) == [last]

    def test_a_preempted_sequence_waits_before_others_that_wait(self) -> None:
        scheduler = make_scheduler()
        preempted, waiting = make_seq(4), make_seq(4)
        scheduler.add(preempted)
        run_step(scheduler)
        scheduler.add(waiting)
        scheduler.preempt(preempted)
        assert list(scheduler.waiting) == [preempted, waiting]

    def test_a_preempted_sequence_prefills_its_prompt_and_what_it_had_generated(self) -> None:
        scheduler = make_scheduler()
        seq = make_seq(6)
        scheduler.add(seq)
        run_step(scheduler, 50)
        scheduler.preempt(seq)
        batch, _ = schedule(scheduler)
        assert batch.context_lens == [7]
        assert batch.total_seqs_num_prefill == 1
        assert batch.num_cached_tokens == [4]
        assert batch.scheduled_tokens == [[14, 15, 50]]


class TestMixedPolicy:
    def test_decodes_come_first_and_prompt_chunks_fill_the_rest(self) -> None:
        scheduler = make_scheduler(scheduling_policy="mixed", max_num_batched_tokens=6)
        first, second = make_seq(3), make_seq([7] * 9)
        scheduler.add(first)
        run_step(scheduler)
        scheduler.add(second)
        batch, _ = schedule(scheduler)
        assert batch.req_ids == [first.id, second.id]
        assert batch.num_scheduled_tokens == [1, 5]
        assert (batch.total_tokens_num_decode, batch.total_tokens_num_prefill) == (1, 5)
        assert batch.kind == "mixed"


class TestPostprocess:
    @pytest.mark.parametrize(
        ("params", "stops", "token", "reason"),
        [
            ({}, [[50]], 50, "stop_sequence"),
            ({}, None, EOS, "eos"),
            ({}, None, 33, "stop_33"),
            ({"stop_token_ids": [44]}, None, 44, "stop_44"),
            ({"max_tokens": 1}, None, 50, "max_tokens"),
            ({"max_tokens": 1}, [[EOS]], EOS, "stop_sequence"),
            ({"max_tokens": 1}, None, EOS, "eos"),
            ({"max_tokens": 1}, None, 33, "stop_33"),
            ({"ignore_eos": True}, None, EOS, None),
            ({"ignore_eos": True}, None, 33, None),
            ({"ignore_eos": True, "stop_token_ids": [33]}, None, 33, "stop_33"),
            ({}, None, 50, None),
        ],
    )
    def test_stops_in_the_order_of_the_specification(
        self, params: dict[str, object], stops: list[list[int]] | None, token: int, reason: str | None
    ) -> None:
        scheduler = make_scheduler(stop_token_ids=[33])
        seq = make_seq(3, stops, **params)
        scheduler.add(seq)
        (output,) = run_step(scheduler, token)
        assert output.output_tokens == [token]
        assert output.finish_reason == seq.leave_reason == reason
        assert output.finished == seq.is_finished == (reason is not None)

    def test_a_stop_sequence_spans_steps_but_not_the_prompt(self) -> None:
        scheduler = make_scheduler()
        seq = make_seq([50, 51], [[51, 52], [52, 53]])
        scheduler.add(seq)
        run_step(scheduler, 52)
        assert not seq.is_finished
        run_step(scheduler, 53)
        assert seq.leave_reason == "stop_sequence"

    def test_finished_sequences_are_returned_and_their_blocks_freed(self) -> None:
        scheduler = make_scheduler()
        seqs = [make_seq(5, max_tokens=1), make_seq([7] * 5)]
        scheduler.extend(seqs)
        _, scheduled = schedule(scheduler)
        output = ScheduledBatchOutput({seq.id: (9,) for seq in seqs}, None)
        assert scheduler.postprocess(list(scheduled.values()), output) == [seqs[0]]
        assert list(scheduler.running) == [seqs[1]]
        assert scheduler.block_manager.used_block_ids == set(seqs[1].block_table)
        assert seqs[0].status is SequenceStatus.FINISHED
        assert seqs[0].leave_time >= seqs[0].first_token_time > 0

    def test_the_length_limit_is_the_context_when_max_tokens_goes_past_it(self) -> None:
        scheduler = make_scheduler(max_model_len=6)
        seq = make_seq(4, max_tokens=100)
        scheduler.add(seq)
        run_step(scheduler)
        run_step(scheduler)
        assert seq.leave_reason == "max_tokens"
        assert seq.num_tokens == 6

    def test_tokens_past_a_stop_are_dropped(self) -> None:
        scheduler = make_scheduler(speculative_config=SimpleNamespace(num_speculative_tokens=2))
        seq = make_seq(3)
        scheduler.add(seq)
        (output,) = run_step(scheduler, {seq.id: (9, EOS, 9)})
        assert output.output_tokens == seq.completion_token_ids == [9, EOS]

    def test_a_token_after_a_part_of_a_prompt_is_dropped(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=4)
        seq = make_seq(6)
        scheduler.add(seq)
        assert run_step(scheduler, {seq.id: (9,)}) == []
        assert seq.completion_token_ids == []
        assert [output.output_tokens for output in run_step(scheduler, {seq.id: (9,)})] == [[9]]

    def test_a_sequence_aborted_while_its_step_ran_gets_nothing_more(self) -> None:
        scheduler = make_scheduler()
        seq = make_seq(3)
        scheduler.add(seq)
        _, seqs = schedule(scheduler)
        (output,) = scheduler.abort([seq.id])
        assert (output.finished, output.finish_reason) == (True, "abort")
        assert scheduler.postprocess(list(seqs.values()), ScheduledBatchOutput({seq.id: (9,)}, None)) == []
        assert seq.completion_token_ids == []

    def test_the_first_output_reports_the_cached_tokens(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_seq(9))
        assert run_step(scheduler)[0].num_cached_tokens == 0
        scheduler.add(make_seq(9))
        first = run_step(scheduler)[0]
        assert first.num_cached_tokens == 8
        assert first.queue_time is not None


class TestDrafts:
    def make(self, k: int = 1) -> Scheduler:
        return make_scheduler(speculative_config=SimpleNamespace(num_speculative_tokens=k))

    def test_drafts_are_scheduled_with_the_last_token_and_have_blocks(self) -> None:
        scheduler = self.make(3)
        seq = make_seq(4)
        scheduler.add(seq)
        _, seqs = schedule(scheduler)
        output = ScheduledBatchOutput({seq.id: (50,)}, {seq.id: [51, 52, 53]})
        scheduler.postprocess(list(seqs.values()), output)
        assert seq.spec_token_ids == [51, 52, 53]
        batch, _ = schedule(scheduler)
        assert batch.scheduled_spec_decode_tokens == {seq.id: [51, 52, 53]}
        assert batch.num_spec_step == 3
        assert batch.num_scheduled_tokens == [4]
        assert batch.scheduled_tokens == [[50, 51, 52, 53]]
        assert len(seq.block_table) == 2

    def test_no_draft_goes_past_the_length_limit(self) -> None:
        scheduler = self.make(3)
        seq = make_seq(4, max_tokens=3)
        scheduler.add(seq)
        run_step(scheduler)
        seq.spec_token_ids = [51, 52, 53]
        assert schedule(scheduler)[0].scheduled_tokens == [[50, 51]]

    def test_acceptance_is_counted(self) -> None:
        scheduler = self.make()
        scheduler.update_spec_stats(2)
        scheduler.update_spec_stats(1)
        assert (scheduler.total_draft_tokens, scheduler.total_accepted_tokens) == (2, 1)

    def test_acceptance_is_logged_every_thousand_drafts(self, caplog: pytest.LogCaptureFixture) -> None:
        scheduler = self.make()
        with caplog.at_level("INFO"):
            for _ in range(1000):
                scheduler.update_spec_stats(2)
        assert caplog.messages == ["[MTP Stats] Total draft tokens: 1000, Accepted: 1000, Acceptance rate: 100.00%"]


class TestQueue:
    def test_counts_and_next_batch(self) -> None:
        scheduler = make_scheduler()
        assert scheduler.is_finished()
        assert not scheduler.has_requests()
        assert scheduler.get_next_batch_info() == (False, 0)
        scheduler.add(make_seq(5))
        assert scheduler.get_next_batch_info() == (True, 5)
        assert scheduler.get_num_unfinished_requests() == 1
        run_step(scheduler)
        assert scheduler.get_next_batch_info() == (False, 1)
        assert scheduler.has_requests()

    def test_abort_ends_waiting_and_running_and_ignores_others(self) -> None:
        scheduler = make_scheduler(max_num_seqs=1)
        running, waiting = make_seq(3), make_seq([7] * 3)
        scheduler.extend([running, waiting])
        schedule(scheduler)
        outputs = scheduler.abort([running.id, waiting.id, 12345])
        assert {output.request_id for output in outputs} == {running.id, waiting.id}
        assert scheduler.is_finished()
        assert len(scheduler.block_manager.free_block_ids) == 32
        scheduler.check_integrity()

    def test_failed_sequences_end_with_their_error(self) -> None:
        scheduler = make_scheduler()
        seq = make_seq(3)
        scheduler.add(seq)
        schedule(scheduler)
        (output,) = scheduler.fail([seq], "the step broke")
        assert (output.finish_reason, output.error) == ("error", "the step broke")
        assert scheduler.is_finished()

    def test_what_a_failed_step_should_have_computed_is_not_found_later(self) -> None:
        scheduler = make_scheduler()
        seq = make_seq(9)
        scheduler.add(seq)
        schedule(scheduler)
        scheduler.fail([seq], "the step broke")
        scheduler.check_integrity()
        scheduler.add(make_seq(9))
        assert schedule(scheduler)[0].num_cached_tokens == [0]

    def test_a_row_that_could_not_be_sampled_fails_alone(self) -> None:
        scheduler = make_scheduler()
        broken, whole = make_seq(3), make_seq([7] * 3)
        scheduler.extend([broken, whole])
        _, seqs = schedule(scheduler)
        queue = Queue()
        output = ScheduledBatchOutput({whole.id: (50,)}, errors={broken.id: "not a number"})
        scheduler.postprocess(list(seqs.values()), output, queue)
        assert {out.request_id: (out.output_tokens, out.error) for out in queue.outputs} == {
            whole.id: ([50], None),
            broken.id: ([], "not a number"),
        }
        assert list(scheduler.running) == [whole]
        scheduler.check_integrity()


def test_a_sequence_that_a_caller_queued_itself_ends_as_any_other() -> None:
    scheduler, seq = make_scheduler(), make_seq(3, max_tokens=3)
    scheduler.waiting.append(seq)
    for _ in range(3):
        scheduled = scheduler.schedule()
        assert scheduled is not None
        scheduler.postprocess([seq], ScheduledBatchOutput({seq.id: (7,)}))
    assert (seq.completion_token_ids, seq.leave_reason) == ([7, 7, 7], "max_tokens")


def test_choices_of_a_request_share_the_set_of_tokens_that_end_them() -> None:
    scheduler = make_scheduler(stop_token_ids=[33])
    own = [40, 41]
    seqs = [make_seq(3, stop_token_ids=own, ignore_eos=ignores) for ignores in (False, False, True, True, False)]
    plain = make_seq(3)
    scheduler.extend([*seqs, plain])
    assert seqs[0].end_tokens is seqs[1].end_tokens
    assert seqs[0].end_tokens == seqs[4].end_tokens == {EOS, 33, 40, 41}
    assert seqs[2].end_tokens is seqs[3].end_tokens
    assert seqs[2].end_tokens == {40, 41}
    assert plain.end_tokens == {EOS, 33}
