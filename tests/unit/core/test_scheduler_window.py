"""A model whose layers all attend in a window: sequences hold the blocks of the window, and no others."""

from types import SimpleNamespace

import pytest

from engine.batch import ScheduledBatchOutput
from engine.core.scheduler import Scheduler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

BLOCK_SIZE = 4
WINDOW = 8


def make_scheduler(window: int | None = WINDOW, **overrides: object) -> Scheduler:
    config = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "eos_token_id": None,
        "stop_token_ids": [],
        "kv_cache_block_size": BLOCK_SIZE,
        "num_kvcache_blocks": 32,
        "enable_prefix_caching": True,
        "scheduler_delay_factor": 0.0,
    }
    return Scheduler(SimpleNamespace(**(config | overrides)), window=window)


def make_seq(length: int, max_tokens: int = 60, first: int = 10) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(list(range(first, first + length)), BLOCK_SIZE, params)


def run_step(scheduler: Scheduler) -> None:
    scheduled = scheduler.schedule()
    assert scheduled is not None
    _, seqs = scheduled
    done = [seq for seq in seqs.values() if seq.num_computed_tokens == seq.num_tokens]
    scheduler.postprocess(list(seqs.values()), ScheduledBatchOutput({seq.id: (50,) for seq in done}))
    scheduler.check_integrity()


def held(seq: Sequence) -> int:
    return len(seq.block_table) - seq.num_released_blocks


@pytest.mark.parametrize("window", [1, 4, 7, 8, 9])
def test_a_decode_holds_its_window_and_the_block_it_writes_to(window: int) -> None:
    scheduler = make_scheduler(window)
    seq = make_seq(5)
    scheduler.add(seq)
    most = 0
    for step in range(40):
        run_step(scheduler)
        if step:
            most = max(most, held(seq))
        # The first position to which the query at the next position attends.
        first_seen = seq.num_tokens - 1 - window + 1
        assert seq.num_released_blocks <= max(0, first_seen) // BLOCK_SIZE
    assert most <= -(-(window - 1) // BLOCK_SIZE) + 1


def test_without_a_window_a_sequence_holds_all_its_blocks() -> None:
    scheduler = make_scheduler(None)
    seq = make_seq(5)
    scheduler.add(seq)
    for _ in range(40):
        run_step(scheduler)
    # 44 tokens, and the one just sampled, which is not computed yet.
    assert held(seq) == len(seq.block_table) == 11


def test_a_prompt_in_chunks_gives_back_what_its_later_chunks_do_not_see() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    seq = make_seq(40)
    scheduler.add(seq)
    released = []
    for _ in range(6):
        run_step(scheduler)
        released.append(seq.num_released_blocks)
    # Each chunk of two blocks attends to its window: the two blocks before it, except for their first token.
    assert released == [0, 0, 2, 4, 6, 8]


def test_a_prefix_hit_beyond_the_window_holds_no_more_than_the_window() -> None:
    scheduler = make_scheduler()
    first, second = make_seq(41, max_tokens=1), make_seq(41)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(second)
    run_step(scheduler)
    assert second.num_cached_tokens == 40
    assert held(second) == 3


def test_sequences_longer_than_the_cache_together_run_without_preemption() -> None:
    scheduler = make_scheduler(num_kvcache_blocks=12)
    seqs = [make_seq(3, max_tokens=40, first=10 * number) for number in range(4)]
    scheduler.extend(seqs)
    while scheduler.has_requests():
        run_step(scheduler)
        assert all(held(seq) <= 3 for seq in seqs)
    assert scheduler.stats("decode", 0.0).preemptions == 0
    assert all(seq.num_completion_tokens == 40 for seq in seqs)


def test_a_preempted_sequence_starts_again_with_all_its_blocks() -> None:
    scheduler = make_scheduler()
    seq = make_seq(5)
    scheduler.add(seq)
    for _ in range(20):
        run_step(scheduler)
    scheduler.preempt(seq)
    assert (seq.block_table, seq.num_released_blocks) == ([], 0)
    scheduler.check_integrity()
    run_step(scheduler)
    assert len(seq.block_table) == seq.num_blocks
