"""The input batch against sequences that store everything themselves, through random histories of random rows."""

import random

import numpy as np
import pytest

from engine.batch import AppendedBlocks, ScheduledBatch
from engine.runner.input_batch import InputBatch, StepInputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

MAX_MODEL_LEN = 100
NUM_SLOTS = 6


def batch_of(spans: list[tuple[Sequence, int, int]], num_decodes: int, new=(), gained=()) -> ScheduledBatch:
    """A step that computes the tokens `[start, end)` of each sequence."""
    counts = [end - start for _, start, end in spans]
    return ScheduledBatch(
        {seq.id: seq for seq, _, _ in spans},
        counts,
        sum(counts),
        total_seqs_num=len(spans),
        total_seqs_num_decode=num_decodes,
        total_seqs_num_prefill=len(spans) - num_decodes,
        context_lens=[end for _, _, end in spans],
        new_seqs=new,
        appended_blocks=gained,
    )


def assert_matches(inputs: StepInputs, spans: list[tuple[Sequence, int, int]], num_decodes: int) -> None:
    cells = [(seq, position) for seq, start, end in spans for position in range(start, end)]
    assert inputs.input_ids.tolist() == [seq.token_ids[position] for seq, position in cells]
    assert inputs.positions.tolist() == [position for _, position in cells]
    assert inputs.slot_mapping.tolist() == [
        seq.block_table[position // seq.block_size] * seq.block_size + position % seq.block_size
        for seq, position in cells
    ]
    assert inputs.query_lens.tolist() == [end - start for _, start, end in spans]
    assert inputs.seq_lens.tolist() == [end for _, _, end in spans]
    for table, (seq, _, end) in zip(inputs.block_tables.tolist(), spans, strict=True):
        used = -(-end // seq.block_size)
        assert table[:used] == seq.block_table[:used]
    assert inputs.num_decodes == num_decodes
    adapters = [seq.adapter for seq, _, _ in spans]
    # None, if no row has one, lets the step run as any other.
    assert (None if inputs.adapters is None else inputs.adapters.tolist()) == (adapters if any(adapters) else None)
    assert {inputs.input_ids.dtype, inputs.positions.dtype, inputs.slot_mapping.dtype} == {np.dtype(np.int64)}
    assert inputs.block_tables.dtype == np.int32

    complete = [row for row, (seq, _, end) in enumerate(spans) if end == len(seq.token_ids)]
    lasts = np.cumsum([end - start for _, start, end in spans]) - 1
    assert inputs.sampled_rows.tolist() == complete
    assert inputs.sampled_slots.tolist() == [spans[row][0].slot for row in complete]
    assert inputs.last_tokens.tolist() == lasts[complete].tolist()


class World:
    """A scheduler without a policy: it starts, runs, preempts and ends sequences at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.block_size = self.random.choice([1, 16, 32])
        self.batch = InputBatch(
            max_num_seqs=NUM_SLOTS, max_model_len=MAX_MODEL_LEN, block_size=self.block_size, vocab_size=1000, seed=0
        )
        self.running: list[Sequence] = []
        self.computed: dict[int, int] = {}
        self.preempted: list[Sequence] = []

    def blocks(self, count: int) -> list[int]:
        return [self.random.randrange(5000) for _ in range(count)]

    def step(self) -> None:
        for seq in self.random.sample(self.running, len(self.running)):
            if len(seq.token_ids) >= MAX_MODEL_LEN or self.random.random() < 0.1:
                self.running.remove(seq)
                if self.random.random() < 0.5 and len(seq.token_ids) < MAX_MODEL_LEN:
                    self.preempted.append(seq)
        new = self.start()
        gained, decodes, prefills = [], [], []
        for seq in self.running:
            start, length = self.computed[seq.id], len(seq.token_ids)
            if start == length - 1 and seq not in new:
                missing = -(-length // self.block_size) - len(seq.block_table)
                if missing:
                    gained.append(AppendedBlocks(seq.slot, len(seq.block_table), self.blocks(missing)))
                    seq.block_table += gained[-1].block_ids
                decodes.append((seq, start, length))
            else:
                end = self.random.randint(start + 1, length)
                prefills.append((seq, start, end))
        spans = decodes + prefills
        if not spans:
            return
        step = batch_of(spans, len(decodes), new, gained)
        self.batch.apply(step)
        inputs = self.batch.step_inputs(step)
        assert_matches(inputs, spans, len(decodes))
        tokens = np.array([self.random.randrange(1000) for _ in inputs.sampled_rows], dtype=np.int64)
        self.batch.store_tokens(inputs, tokens)
        for seq, _, end in spans:
            self.computed[seq.id] = end
        for row, token in zip(inputs.sampled_rows.tolist(), tokens.tolist(), strict=True):
            spans[row][0].append_token(token)

    def start(self) -> list[Sequence]:
        new = []
        free = sorted(set(range(NUM_SLOTS)) - {seq.slot for seq in self.running})
        while free and self.random.random() < 0.6:
            if self.preempted and self.random.random() < 0.5:
                seq = self.preempted.pop()
            else:
                length = self.random.randint(1, MAX_MODEL_LEN - 1)
                tokens = [self.random.randrange(1000) for _ in range(length)]
                seq = Sequence(tokens, self.block_size, adapter=self.random.choice([0, 0, 1, 2]))
            seq.slot = free.pop(self.random.randrange(len(free)))
            seq.block_table = self.blocks(seq.num_blocks)
            # A prefix hit may cover all but the last token.
            self.computed[seq.id] = self.random.choice([0, self.random.randrange(len(seq.token_ids)), len(seq) - 1])
            self.running.append(seq)
            new.append(seq)
        return new


@pytest.mark.parametrize("seed", range(25))
def test_every_step_of_a_random_schedule_is_what_the_sequences_say(seed: int):
    world = World(seed)
    for _ in range(60):
        world.step()


def input_batch() -> InputBatch:
    return InputBatch(max_num_seqs=2, max_model_len=64, block_size=16, vocab_size=100, seed=0)


def started(params: SamplingParams, tokens: list[int], slot: int = 0) -> Sequence:
    seq = Sequence(tokens, 16, params)
    seq.slot, seq.block_table, seq.end_tokens = slot, [3], frozenset({7})
    return seq


def inputs_of(batch: InputBatch, seq: Sequence) -> StepInputs:
    step = batch_of([(seq, 0, len(seq.token_ids))], 0, new=[seq])
    batch.apply(step)
    return batch.step_inputs(step)


def test_nothing_of_a_slots_former_owner_is_left():
    batch = input_batch()
    everything = SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=1.5,
        logit_bias={4: 1.0},
        min_tokens=5,
        logprobs=2,
    )
    before = inputs_of(batch, started(everything, [1, 2, 3])).sampling
    assert None not in (before.random, before.repetition, before.presence, before.frequency, before.bias)
    after = inputs_of(batch, started(SamplingParams(temperature=0.0), [9])).sampling
    assert after == type(after)()
    plain = inputs_of(batch, started(SamplingParams(), [9])).sampling.random
    assert plain is not None
    assert plain.filtered.tolist() == [False]
    assert plain.temperature.tolist() == [1.0]


def test_penalties_see_the_tokens_that_were_sampled_here():
    batch = input_batch()
    seq = started(SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=2.0), [5, 6])
    inputs = inputs_of(batch, seq)
    assert inputs.sampling.frequency is not None
    assert inputs.sampling.frequency.token_ids.tolist() == []
    batch.store_tokens(inputs, np.array([8]))
    seq.append_token(8)
    step = batch_of([(seq, 2, 3)], 1)
    sampling = batch.step_inputs(step).sampling
    assert sampling.frequency is not None
    assert sampling.repetition is not None
    assert (sampling.frequency.rows.tolist(), sampling.frequency.token_ids.tolist()) == ([0], [8])
    assert sampling.repetition.token_ids.tolist() == [5, 6, 8]
    assert sampling.repetition.values.tolist() == [2.0] * 3


def test_a_row_that_changes_hands_within_a_step_keeps_the_new_owners_blocks():
    batch = input_batch()
    seq = started(SamplingParams(), list(range(40)))
    seq.block_table = [4, 5, 6]
    step = batch_of([(seq, 0, 40)], 0, new=[seq], gained=[AppendedBlocks(0, 1, [90, 91])])
    batch.apply(step)
    assert batch.step_inputs(step).block_tables.tolist() == [[4, 5, 6]]


@pytest.mark.parametrize("max_model_len", [2**40, 2**100])
def test_rows_that_memory_cannot_hold_are_an_error_that_names_the_fields(max_model_len: int):
    with pytest.raises(
        ValueError, match=rf"max_num_seqs 65536 .* max_model_len {max_model_len} .*lower one of the two"
    ):
        InputBatch(max_num_seqs=65536, max_model_len=max_model_len, block_size=16, vocab_size=10, seed=0)
