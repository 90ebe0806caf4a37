"""`StepMessage`: what rank 0 tells the other ranks of a step; `RankBatch`: the step as they compute it."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from engine.batch import AppendedBlocks, PromptSpan, ScheduledBatch
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

_GREEDY = SamplingParams(temperature=0.0)
"""Ranks behind the first never sample: they need nothing of how."""


class NewRow(msgspec.Struct, array_like=True, frozen=True):
    """A sequence that begins in this step, or begins again."""

    slot: int
    token_ids: list[int]
    block_table: list[int]
    adapter: int


class StepMessage(msgspec.Struct, array_like=True, frozen=True):
    """One step. Rows as in `ScheduledBatch`."""

    number: int
    """Steps are numbered, so that ranks which left one early meet again in the next."""
    sampled: list[int]
    """Tokens that were sampled at the last step's places; none where that step failed, or was the first."""
    slots: list[int]
    num_scheduled_tokens: list[int]
    context_lens: list[int]
    num_decodes: int
    new_rows: list[NewRow]
    appended_blocks: Rows[AppendedBlocks]
    prompt_spans: list[tuple[int, int]]
    """Of each, the first position and how many."""
    is_greedy: bool
    """Whether every row takes its likeliest token, so that no logits move."""
    tokens_across_dp: tuple[int, ...]
    """How many tokens each replica computes, where they do so in lockstep."""
    draft_tokens: list[int]
    """Of all rows, in order."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """As much of a `ScheduledBatch` as a rank that does not sample needs."""

    slots: npt.NDArray[np.int64]
    num_scheduled_tokens: list[int]
    context_lens: list[int]
    total_tokens_num: int
    total_seqs_num_decode: int
    new_seqs: Rows[Sequence]
    appended_blocks: Rows[AppendedBlocks]
    prompt_spans: list[PromptSpan]
    draft_tokens: list[int]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepMessage)


def encode_step(
    batch: ScheduledBatch,
    number: int,
    sampled: list[int],
    *,
    is_greedy: bool,
    tokens_across_dp: tuple[int, ...] = (),
) -> bytes:
    """The message of a step."""
    return _encoder.encode(
        StepMessage(
            number=number,
            sampled=sampled,
            slots=batch.slot_list,
            num_scheduled_tokens=batch.num_scheduled_tokens,
            context_lens=batch.context_lens,
            num_decodes=batch.total_seqs_num_decode,
            new_rows=[NewRow(seq.slot, seq.token_ids, seq.block_table, seq.adapter) for seq in batch.new_seqs],
            appended_blocks=batch.appended_blocks,
            prompt_spans=[(span.first, len(span.token_ids)) for span in batch.prompt_spans],
            is_greedy=is_greedy,
            tokens_across_dp=tokens_across_dp,
            draft_tokens=batch.draft_tokens,
        )
    )


def decode_step(message: bytes) -> StepMessage:
    """What `encode_step` made the bytes of."""
    return _decoder.decode(message)


def rank_batch(message: StepMessage, block_size: int) -> RankBatch:
    """The step of a message."""
    return RankBatch(
        slots=np.array(message.slots, dtype=np.int64),
        num_scheduled_tokens=message.num_scheduled_tokens,
        context_lens=message.context_lens,
        total_tokens_num=sum(message.num_scheduled_tokens),
        total_seqs_num_decode=message.num_decodes,
        new_seqs=[_sequence(row, block_size) for row in message.new_rows],
        appended_blocks=message.appended_blocks,
        prompt_spans=[PromptSpan(-1, first, [0] * count, 0) for first, count in message.prompt_spans],
        draft_tokens=message.draft_tokens,
    )


def _sequence(row: NewRow, block_size: int) -> Sequence:
    seq = Sequence(row.token_ids, block_size, _GREEDY, id=-1, adapter=row.adapter)
    seq.slot, seq.block_table = row.slot, row.block_table
    return seq
