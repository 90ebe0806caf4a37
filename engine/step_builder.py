"""`StepBuilder`: gathers what the scheduler puts into one step, and makes the `ScheduledBatch` of it."""

import operator
from collections.abc import Iterable

from engine.batch import AppendedBlocks, ScheduledBatch
from engine.sequence import Sequence, SequenceType


class DecodeRows:
    """The sequences that decode, and what of them stays the same from step to step."""

    def __init__(self, seqs: Iterable[Sequence]) -> None:
        self.seqs = list(seqs)
        self.by_id = {seq.id: seq for seq in self.seqs}
        self.token_ids = [seq.token_ids for seq in self.seqs]
        self.counts = [1] * len(self.seqs)
        self.limits = [seq.token_limit for seq in self.seqs]
        for seq in self.seqs:
            seq.type = SequenceType.DECODE

    def going_on(self) -> tuple["DecodeRows", list[int]]:
        """Those that a token still unread will not bring to their limit, and their lengths with it."""
        lengths = [len(seq.token_ids) + seq.num_placeholder for seq in self.seqs]
        if not any(map(operator.ge, lengths, self.limits)):
            return self, lengths
        rows = DecodeRows(seq for seq, length in zip(self.seqs, lengths, strict=True) if length < seq.token_limit)
        return rows, [seq.num_tokens for seq in rows.seqs]


class StepBuilder:
    """The step being scheduled: what it computes so far, and the token budget that is left."""

    def __init__(self, budget: int, num_drafts: int) -> None:
        self.budget = budget
        self.num_drafts = num_drafts
        self.seqs: dict[int, Sequence] = {}
        self.counts: list[int] = []
        self.context_lens: list[int] = []
        self.drafts: dict[int, list[int]] = {}
        self.num_decodes = 0
        self.num_decode_tokens = 0
        self.new_seqs: list[Sequence] = []
        self.appended_blocks: list[AppendedBlocks] = []

    @property
    def num_prefills(self) -> int:
        return len(self.seqs) - self.num_decodes

    def add_prefill(self, seq: Sequence, count: int) -> None:
        """Compute the next `count` tokens of a prompt; `seq.num_computed_tokens` counts them already."""
        self.seqs[seq.id] = seq
        self.counts.append(count)
        self.context_lens.append(seq.num_computed_tokens)
        self.budget -= count

    def add_decodes(self, rows: DecodeRows, lengths: list[int]) -> None:
        """Compute the last known token of running sequences of these lengths, and their drafts. Comes first."""
        for seq, length in zip(rows.seqs, lengths, strict=True):
            seq.num_computed_tokens = length
        self.seqs = rows.by_id.copy()
        self.num_decodes = len(rows.seqs)
        self.counts, self.context_lens = rows.counts.copy(), lengths
        if self.num_drafts:
            drafts = ((seq.id, seq.spec_token_ids[: seq.num_drafts]) for seq in rows.seqs)
            self.drafts = {seq_id: tokens for seq_id, tokens in drafts if tokens}
            drafted = [len(self.drafts.get(seq.id, ())) for seq in rows.seqs]
            self.counts = [1 + count for count in drafted]
            self.context_lens = [length + count for length, count in zip(lengths, drafted, strict=True)]
        self.num_decode_tokens = sum(self.counts)
        # A device may compute all drafts of each row where one has any.
        self.budget -= self.num_decodes * (1 + self.num_drafts) if self.drafts else self.num_decodes

    def batch(self) -> tuple[ScheduledBatch, dict[int, Sequence]]:
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
        )
        return batch, self.seqs
