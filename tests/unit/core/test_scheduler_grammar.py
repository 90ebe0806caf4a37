"""The scheduler and grammars: how sequences with a matcher advance, end, fail and survive preemption."""

from types import SimpleNamespace

import pytest

from engine.batch import ScheduledBatchOutput
from engine.core.scheduler import Scheduler
from engine.messages import RequestOutput, openai_finish_reason
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

EOS = 2


class Script:
    """A replacement of a matcher: it allows a list of tokens, in order."""

    def __init__(self, *tokens: int) -> None:
        self.left = list(tokens)
        self.error: str | None = None
        self.uncharged_seconds = 0.0

    @property
    def is_complete(self) -> bool:
        return not self.left

    def accept(self, token_id: int) -> bool:
        if self.left and token_id == self.left[0]:
            self.left.pop(0)
            return True
        self.error = f"the grammar of this request cannot be followed: {token_id} was not allowed"
        return False


def make_scheduler(**overrides: object) -> Scheduler:
    config = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "eos_token_id": EOS,
        "stop_token_ids": [],
        "kv_cache_block_size": 4,
        "num_kvcache_blocks": 32,
        "enable_prefix_caching": True,
        "scheduler_delay_factor": 0.0,
    }
    return Scheduler(SimpleNamespace(**(config | overrides)))


def make_seq(*script: int, **params: object) -> Sequence:
    seq = Sequence([10, 11, 12], 4, SamplingParams(**params))  # type: ignore[arg-type]
    seq.matcher = Script(*script) if script else None  # type: ignore[assignment]
    return seq


def step(scheduler: Scheduler, *tokens: int, **output: object) -> dict[int, list[RequestOutput]]:
    """Run a step in which each row samples the next of `tokens`. Returns the output of each sequence."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    _, seqs = scheduled
    outputs: list[RequestOutput] = []
    sampled = {seq_id: (token,) for seq_id, token in zip(seqs, tokens, strict=True) if token >= 0}
    queue = SimpleNamespace(put_nowait=outputs.extend)
    scheduler.postprocess(list(seqs.values()), ScheduledBatchOutput(sampled, **output), queue)  # type: ignore[arg-type]
    scheduler.check_integrity()
    return {seq_id: [each for each in outputs if each.request_id == seq_id] for seq_id in seqs}


@pytest.mark.parametrize("params", [{}, {"ignore_eos": True}, {"min_tokens": 9}, {"max_tokens": 2}])
def test_a_sequence_ends_at_once_where_nothing_may_follow(params: dict[str, object]) -> None:
    scheduler = make_scheduler()
    seq = make_seq(50, 51, **params)
    scheduler.add(seq)
    step(scheduler, 50)
    (output,) = step(scheduler, 51)[seq.id]
    assert (output.output_tokens, output.finish_reason, output.finished) == ([51], "grammar", True)
    assert openai_finish_reason(output.finish_reason) == "stop"
    assert scheduler.is_finished()


def test_an_eos_where_the_grammar_may_end_is_an_eos() -> None:
    scheduler = make_scheduler()
    seq = make_seq(50, 51)
    scheduler.add(seq)
    step(scheduler, 50)
    (output,) = step(scheduler, EOS)[seq.id]
    assert (output.finish_reason, output.error) == ("eos", None)


def test_length_ends_an_answer_that_is_not_complete() -> None:
    scheduler = make_scheduler()
    seq = make_seq(50, 51, max_tokens=1)
    scheduler.add(seq)
    (output,) = step(scheduler, 50)[seq.id]
    assert output.finish_reason == "max_tokens"


def test_a_token_against_the_grammar_fails_its_request_and_no_other() -> None:
    scheduler = make_scheduler()
    guilty, neighbour = make_seq(50, 51), make_seq()
    scheduler.extend([guilty, neighbour])
    reported = step(scheduler, 99, 60)
    (failure,) = reported[guilty.id]
    assert (failure.finish_reason, failure.bad_request, failure.output_tokens) == ("error", True, [])
    assert "99" in (failure.error or "")
    assert reported[neighbour.id][0].output_tokens == [60]
    assert guilty.completion_token_ids == []


def test_a_row_without_any_token_left_is_refused_and_the_others_go_on() -> None:
    scheduler = make_scheduler()
    guilty, neighbour = make_seq(50, 51), make_seq()
    scheduler.extend([guilty, neighbour])
    reported = step(scheduler, -1, 60, refusals={guilty.id: "no token is left"})
    (failure,) = reported[guilty.id]
    assert (failure.error, failure.bad_request, failure.finished) == ("no token is left", True, True)
    assert reported[neighbour.id][0].output_tokens == [60]


def test_drafts_are_followed_token_by_token_to_the_grammar_s_end() -> None:
    scheduler = make_scheduler(speculative_config=SimpleNamespace(num_speculative_tokens=3))
    seq = make_seq(50, 51, 52)
    scheduler.add(seq)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    outputs: list[RequestOutput] = []
    tokens = {seq.id: (50, 51, 52, 53)}
    scheduler.postprocess([seq], ScheduledBatchOutput(tokens), SimpleNamespace(put_nowait=outputs.extend))
    assert [(output.output_tokens, output.finish_reason) for output in outputs] == [([50, 51, 52], "grammar")]


def test_a_preempted_sequence_keeps_its_place_in_the_grammar() -> None:
    scheduler = make_scheduler()
    seq = make_seq(50, 51, 52)
    scheduler.add(seq)
    step(scheduler, 50)
    scheduler.preempt(seq)
    step(scheduler, 51)
    (output,) = step(scheduler, 52)[seq.id]
    assert output.finish_reason == "grammar"
    assert seq.completion_token_ids == [50, 51, 52]


def test_tokens_of_a_sequence_preempted_meanwhile_do_not_move_its_matcher() -> None:
    scheduler = make_scheduler()
    seq = make_seq(50, 51)
    scheduler.add(seq)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    scheduler.preempt(seq)
    scheduler.postprocess([seq], ScheduledBatchOutput({seq.id: (50,)}))
    assert seq.matcher.left == [50, 51]  # type: ignore[union-attr]
