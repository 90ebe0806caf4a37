"""`ScheduledBatch`: the work of one step, from the scheduler to the workers. `ScheduledBatchOutput`: its results.

The scheduler builds a batch with `StepBuilder` and `DecodeRows`, the part that is equal in most successive steps.
"""

import math
import operator
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.messages import TokenLogprobs
from engine.sequence import Sequence, SequenceType

UNREAD_DRAFT = -1
"""Placeholder for a draft token that the device has computed and the host has not read."""


class AppendedBlocks(NamedTuple):
    """Blocks appended to a running row: `block_ids` are written at index `start` of the row's block table."""

    slot: int
    start: int
    block_ids: list[int]


class DraftWork(NamedTuple):
    """The work of drafting by a model in a step, or in one round of several."""

    seconds: float
    num_rows: int
    """Number of rows that drafted; 0 if the drafter computed only prompts."""
    depth: int
    """Most drafts of a row; 0 if the drafter computed more than the previous step's tokens and the drafts."""


class PromptSpan(NamedTuple):
    """Prompt tokens whose log probabilities a row must report. Each is computed at the previous position."""

    seq_id: int
    first: int
    """Index, among the step's tokens, of the position that precedes the first of `token_ids`."""
    token_ids: list[int]
    num_alternatives: int


class ScheduledBatch:
    """A frozen snapshot of one step, rows in batch order: decodes first, then prefill spans.

    Row `i` computes its sequence's tokens `[context_lens[i] - num_scheduled_tokens[i], context_lens[i])`. The
    worker stores rows between steps by `slot`: it needs `new_seqs` completely, and only `appended_blocks` of the
    others. Tokens and block tables are stored as a reference and a length, which is exact because both only grow in
    place. The contract is docs/specification.md#scheduledbatch.
    """

    def __init__(
        self,
        seqs: dict[int, Sequence],
        num_scheduled_tokens: list[int],
        total_tokens_num: int,
        total_tokens_num_prefill: int = 0,
        total_tokens_num_decode: int = 0,
        total_seqs_num: int = 0,
        total_seqs_num_prefill: int = 0,
        total_seqs_num_decode: int = 0,
        is_dummy_run: bool = False,
        num_spec_step: int = 0,
        scheduled_spec_decode_tokens: dict[int, list[int]] | None = None,
        *,
        context_lens: list[int] | None = None,
        new_seqs: Rows[Sequence] = (),
        appended_blocks: Rows[AppendedBlocks] = (),
        num_next_drafts: list[int] | None = None,
        num_rounds: int = 1,
    ) -> None:
        """`context_lens` defaults to each sequence's `num_tokens`: the span then ends at its last token.

        `num_next_drafts` defaults to `num_spec_step` for each row. `num_rounds`: most rounds in which the step may
        verify drafts, draft, and verify again.
        """
        rows = list(seqs.values())
        self.req_ids = list(seqs)
        self.num_scheduled_tokens = num_scheduled_tokens
        self.total_tokens_num = total_tokens_num
        self.total_tokens_num_prefill = total_tokens_num_prefill
        self.total_tokens_num_decode = total_tokens_num_decode
        self.total_seqs_num = total_seqs_num
        self.total_seqs_num_prefill = total_seqs_num_prefill
        self.total_seqs_num_decode = total_seqs_num_decode
        self.is_dummy_run = is_dummy_run
        self.num_spec_step = num_spec_step
        self.scheduled_spec_decode_tokens = scheduled_spec_decode_tokens or {}
        self.context_lens = [seq.num_tokens for seq in rows] if context_lens is None else context_lens
        self.num_cached_tokens = [seq.num_cached_tokens for seq in rows]
        """Number of tokens of each row that were found in the prefix cache."""
        self.new_seqs = new_seqs
        self.appended_blocks = appended_blocks
        self.prompt_spans = _prompt_spans(rows, num_scheduled_tokens, self.context_lens, total_seqs_num_decode)
        """Prompt tokens whose log probabilities the step must report."""
        self.num_next_drafts = [num_spec_step] * len(rows) if num_next_drafts is None else num_next_drafts
        """Number of drafts that a drafter in the worker computes for each row's next step."""
        self.num_rounds = num_rounds
        self._rows = rows
        self._block_size = rows[0].block_size if rows else 1
        self._slots = [seq.slot for seq in rows]
        self._tables = [seq.block_table for seq in rows]

    @property
    def sequences(self) -> list[Sequence]:
        """The sequence of each row."""
        return self._rows

    @property
    def tables(self) -> list[list[int]]:
        """The complete block table of each row, which may have grown since the step was scheduled."""
        return self._tables

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """Slot (worker row) of each sequence. # [num_seqs]"""
        return np.array(self._slots, dtype=np.int64)

    @property
    def slot_list(self) -> list[int]:
        """`slots` as a list."""
        return self._slots

    @property
    def scheduled_tokens(self) -> list[list[int]]:
        """Token ids that each row computes, including drafts."""
        tokens = []
        for seq, end, count in zip(self._rows, self.context_lens, self.num_scheduled_tokens, strict=True):
            drafts = self.scheduled_spec_decode_tokens.get(seq.id, [])
            tokens.append(seq.token_ids[end - count : end - len(drafts)] + drafts)
        return tokens

    @cached_property
    def draft_tokens(self) -> list[int]:
        """Drafts of all rows, in order. A row's drafts are the last of its scheduled tokens."""
        if not self.scheduled_spec_decode_tokens:
            return []
        drafts = self.scheduled_spec_decode_tokens
        return [token for seq_id in self.req_ids for token in drafts.get(seq_id, ())]

    @property
    def temperatures(self) -> list[float]:
        """Sampling temperature of each row. Part of the contract; workers store it by slot."""
        return [seq.temperature for seq in self._rows]

    @property
    def block_tables(self) -> list[list[int]]:
        """Block ids of each row's context, for the rows that have blocks."""
        lengths = (-(-length // self._block_size) for length in self.context_lens)
        return [table[:length] for table, length in zip(self._tables, lengths, strict=True) if table]

    @property
    def last_block_num_tokens(self) -> list[int]:
        """Number of valid tokens in each row's last block after the step. Part of the contract."""
        return [(length - 1) % self._block_size + 1 for length in self.context_lens]

    @property
    def written_blocks(self) -> set[int]:
        """Return the blocks to which the step writes keys and values."""
        size = self._block_size
        rows = zip(self._tables, self.num_scheduled_tokens, self.context_lens, strict=True)
        return {table[index] for table, count, end in rows for index in range((end - count) // size, -(-end // size))}

    @property
    def kind(self) -> str:
        """`prefill`, `decode` or `mixed`; `dummy` for a warm-up."""
        if self.is_dummy_run:
            return "dummy"
        if self.total_seqs_num_prefill and self.total_seqs_num_decode:
            return "mixed"
        return "prefill" if self.total_seqs_num_prefill else "decode"


@dataclass(slots=True)
class ScheduledBatchOutput:
    """Tokens sampled in one step; every field is keyed by sequence id.

    `token_ids` has the sampled or accepted tokens of a sequence; a row whose prompt is not fully computed is absent.
    `draft_token_ids` has the drafts for its next step, from drafters in the worker. `logprobs` has one entry per
    token, for rows that asked for them; `prompt_logprobs` has one entry per token of the batch's `prompt_spans`.
    `vectors` has the vector, as bytes of float32, of each pooled row whose prompt is now fully computed. `draft_work`
    describes the work of drafting, if a model drafts. If the step had several rounds of verification, `num_rounds` is
    their number, and `verified_drafts` has the number of drafts and of accepted drafts of each round, -1 if the row
    got no token in it. `errors` has the reason for each row that could not be sampled, which is absent from the other
    fields; `refusals` has the same if the request itself excluded every token.
    """

    token_ids: dict[int, tuple[int, ...]]
    draft_token_ids: dict[int, list[int]] | None = None
    logprobs: dict[int, list[TokenLogprobs]] | None = None
    errors: dict[int, str] | None = None
    refusals: dict[int, str] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    vectors: dict[int, bytes] | None = None
    draft_work: DraftWork | None = None
    num_rounds: int = 1
    verified_drafts: dict[int, list[tuple[int, int]]] | None = None
    req_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.req_ids = list(self.token_ids)


class StepOutOfMemory(MemoryError):
    """A step needed more device memory than was free."""


def _prompt_spans(
    rows: Rows[Sequence], counts: list[int], context_lens: list[int], num_decodes: int
) -> list[PromptSpan]:
    """Return the spans of the prefill rows, which follow the decodes, whose prompt log probabilities are pending."""
    spans: list[PromptSpan] = []
    if len(rows) == num_decodes:
        return spans
    first = sum(counts[:num_decodes])
    for seq, count, end in zip(rows[num_decodes:], counts[num_decodes:], context_lens[num_decodes:], strict=True):
        if seq.prompt_logprobs is not None:
            # A sequence that was preempted within its prompt computes the beginning of the prompt again.
            begin = max(end - count, len(seq.prompt_logprobs))
            token_ids = seq.token_ids[begin + 1 : min(end + 1, seq.num_prompt_tokens)]
            if token_ids:
                assert seq.sampling_params.prompt_logprobs is not None
                position = first + begin - (end - count)
                spans.append(PromptSpan(seq.id, position, token_ids, seq.sampling_params.prompt_logprobs))
        first += count
    return spans


class DecodeRows:
    """The decoding sequences, with the per-row lists that do not change from step to step."""

    def __init__(self, seqs: Iterable[Sequence]) -> None:
        self.seqs = list(seqs)
        self.by_id = {seq.id: seq for seq in self.seqs}
        self.token_ids = [seq.token_ids for seq in self.seqs]
        self.counts = [1] * len(self.seqs)
        self.limits = [seq.decode_limit for seq in self.seqs]
        self.costs: dict[str, float] = {}
        """Cost of one token of each of an owner's rows, divided by the owner's weight, by owner."""
        for seq in self.seqs:
            seq.type = SequenceType.DECODE
            self.costs[seq.owner] = self.costs.get(seq.owner, 0.0) + 1.0 / seq.weight

    def continuing(self) -> tuple["DecodeRows", list[int]]:
        """Return the rows that do not reach their limit by their unread tokens, and their lengths with these
        tokens."""
        lengths = [len(seq.token_ids) + seq.num_placeholder for seq in self.seqs]
        if not any(map(operator.ge, lengths, self.limits)):
            return self, lengths
        rows = DecodeRows(seq for seq, length in zip(self.seqs, lengths, strict=True) if length < seq.decode_limit)
        return rows, [seq.num_tokens for seq in rows.seqs]


class StepBuilder:
    """The step that is being scheduled: its work so far, and the rest of the token budget."""

    def __init__(self, budget: int, num_drafts: int) -> None:
        self.budget = budget
        self.seconds = math.inf
        """Seconds left for prompts."""
        self.num_drafts = num_drafts
        self.seqs: dict[int, Sequence] = {}
        self.counts: list[int] = []
        self.context_lens: list[int] = []
        self.drafts: dict[int, list[int]] = {}
        self.num_decodes = 0
        self.num_decode_tokens = 0
        self.num_prompt_tokens = 0
        self.num_added = 0
        """Number of prompts that were added beyond the step's time."""
        self.num_next_drafts: list[int] | None = None
        """Number of drafts that the runner computes for each row; None: the largest number."""
        self.num_rounds = 1
        self.new_seqs: list[Sequence] = []
        self.appended_blocks: list[AppendedBlocks] = []

    @property
    def num_prefills(self) -> int:
        return len(self.seqs) - self.num_decodes

    def add_prefill(self, seq: Sequence, count: int) -> None:
        """Add the next `count` tokens of a prompt, which `seq.num_computed_tokens` already includes."""
        self.seqs[seq.id] = seq
        self.counts.append(count)
        self.context_lens.append(seq.num_computed_tokens)
        self.num_prompt_tokens += count
        self.budget -= count

    def add_decodes(self, rows: DecodeRows, lengths: list[int]) -> None:
        """Add the last token of running sequences of these lengths, and their drafts. Call it before `add_prefill`."""
        for seq, length in zip(rows.seqs, lengths, strict=True):
            seq.num_computed_tokens = length
        self.seqs = rows.by_id.copy()
        self.num_decodes = len(rows.seqs)
        self.counts, self.context_lens = rows.counts.copy(), lengths
        if self.num_drafts and any(seq.spec_token_ids for seq in rows.seqs):
            room = [max(0, limit - length - 1) for limit, length in zip(rows.limits, lengths, strict=True)]
            drafts = [seq.spec_token_ids[:most] for seq, most in zip(rows.seqs, room, strict=True)]
            self.drafts = {seq.id: tokens for seq, tokens in zip(rows.seqs, drafts, strict=True) if tokens}
            drafted = [*map(len, drafts)]
            self.counts = [1 + count for count in drafted]
            self.context_lens = [length + count for length, count in zip(lengths, drafted, strict=True)]
        self.num_decode_tokens = sum(self.counts)
        # A device may compute as many tokens of each row as the longest row has.
        self.budget -= self.num_decodes * max(self.counts, default=0)

    def batch(self) -> tuple[ScheduledBatch, dict[int, Sequence]]:
        """Return the step built so far, and its sequences by id."""
        total = sum(self.counts)
        batch = ScheduledBatch(
            self.seqs,
            self.counts,
            total,
            total - self.num_decode_tokens,
            self.num_decode_tokens,
            len(self.seqs),
            self.num_prefills,
            self.num_decodes,
            num_spec_step=self.num_drafts,
            scheduled_spec_decode_tokens=self.drafts,
            context_lens=self.context_lens,
            new_seqs=self.new_seqs,
            appended_blocks=self.appended_blocks,
            num_next_drafts=self.num_next_drafts,
            num_rounds=self.num_rounds,
        )
        return batch, self.seqs
