"""`Sequence`: counts, derived fields and names, as in docs/specification.md#sequence."""

import pytest

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceStatus, SequenceType


def test_fields_of_a_new_sequence() -> None:
    seq = Sequence([1, 2, 3], 16, SamplingParams(temperature=0.5, max_tokens=7, stop_strings=["x"]), [[9]])
    assert (seq.token_ids, seq.num_tokens, seq.num_prompt_tokens, len(seq)) == ([1, 2, 3], 3, 3, 3)
    assert (seq.status, seq.type) == (SequenceStatus.WAITING, SequenceType.DUMMY)
    assert (seq.temperature, seq.max_tokens, seq.ignore_eos, seq.stop_strings) == (0.5, 7, False, ["x"])
    assert (seq.stop_token_sequences, seq.block_table, seq.num_cached_tokens) == ([[9]], [], 0)
    assert (seq.last_token, seq.num_blocks, seq.last_block_num_tokens) == (3, 1, 3)
    assert (seq.spec_token_ids, seq.num_placeholder, seq.leave_reason) == ([], 0, None)
    assert Sequence([1], 16).max_tokens == 64


def test_ids_count_up_unless_given() -> None:
    first, second = Sequence([1], 4), Sequence([1], 4)
    assert second.id == first.id + 1
    assert Sequence([1], 4, id=77).id == 77


def test_appended_tokens_are_the_completion() -> None:
    prompt = [1, 2]
    seq = Sequence(prompt, 2)
    seq.append_token(8)
    seq.append_token(9)
    assert seq.prompt_token_ids == prompt == [1, 2]
    assert seq.completion_token_ids == seq.output_tokens == [8, 9]
    assert (seq.num_completion_tokens, seq.num_tokens, seq.last_token) == (2, 4, 9)


@pytest.mark.parametrize(("length", "blocks", "last"), [(1, 1, 1), (16, 1, 16), (17, 2, 1), (33, 3, 1)])
def test_setting_num_tokens_updates_what_derives_from_it(length: int, blocks: int, last: int) -> None:
    seq = Sequence([1], 16)
    seq.num_tokens = length
    assert (seq.num_blocks, seq.last_block_num_tokens, seq.num_placeholder) == (blocks, last, length - 1)


def test_known_tokens_cannot_be_set_away() -> None:
    with pytest.raises(ValueError, match="2 tokens are known"):
        Sequence([1, 2], 4).num_tokens = 1


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 prompt token"):
        Sequence([], 16)


def test_a_batch_built_by_hand_computes_the_last_tokens() -> None:
    seqs = {seq.id: seq for seq in (Sequence([1, 2, 3], 2), Sequence([4, 5], 2, SamplingParams(temperature=0.25)))}
    batch = ScheduledBatch(seqs, [3, 1], 4, total_tokens_num_prefill=4)
    assert batch.req_ids == list(seqs)
    assert batch.scheduled_tokens == [[1, 2, 3], [5]]
    assert batch.context_lens == [3, 2]
    assert batch.temperatures == [1.0, 0.25]
    assert batch.block_tables == []
    assert batch.last_block_num_tokens == [1, 2]
    assert (batch.is_dummy_run, batch.num_spec_step, batch.scheduled_spec_decode_tokens) == (False, 0, {})


def test_batch_output_lists_its_requests() -> None:
    output = ScheduledBatchOutput({4: (1,), 2: (3, 4)}, {4: [5]})
    assert output.req_ids == [4, 2]
    assert output.draft_token_ids == {4: [5]}
