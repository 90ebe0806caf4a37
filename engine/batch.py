"""`ScheduledBatch`: one step's work, from the scheduler to the workers; `ScheduledBatchOutput`: its tokens."""

import logging
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.messages import TokenLogprobs
from engine.sequence import Sequence


class AppendedBlocks(NamedTuple):
    """Blocks that a running row gained: `block_ids` go at `start` of the row's block table."""

    slot: int
    start: int
    block_ids: list[int]


class PromptSpan(NamedTuple):
    """Prompt tokens whose log probabilities a row must tell, each from the position before it."""

    seq_id: int
    first: int
    """Index in the step's tokens of the position before the first of them."""
    token_ids: list[int]
    num_alternatives: int


class ScheduledBatch:
    """A frozen snapshot of one step, rows in batch order: decodes first, then prefill spans.

    Row `i` computes its sequence's tokens `[context_lens[i] - num_scheduled_tokens[i], context_lens[i])`. The
    worker keeps rows between steps by `slot`: it needs `new_seqs` whole and, of the others, only
    `appended_blocks`. Tokens and block tables are kept as a reference and a length, which is exact because
    both only grow in place.
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
    ) -> None:
        """`context_lens` defaults to each sequence's `num_tokens`: the span then ends at its last token."""
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
        """Tokens of each row that came from the prefix cache."""
        self.new_seqs = new_seqs
        self.appended_blocks = appended_blocks
        self.prompt_spans = _prompt_spans(rows, num_scheduled_tokens, self.context_lens, total_seqs_num_decode)
        """Positions of prompts whose log probabilities are to be told."""
        self._rows = rows
        self._slots = [seq.slot for seq in rows]
        self._tables = [seq.block_table for seq in rows]

    @property
    def sequences(self) -> list[Sequence]:
        """Of each row."""
        return self._rows

    @property
    def tables(self) -> list[list[int]]:
        """Block table of each row, which the step may only see grow."""
        return self._tables

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """Worker row of each sequence. # [num_seqs]"""
        return np.array(self._slots, dtype=np.int64)

    @property
    def slot_list(self) -> list[int]:
        """`slots` as a list."""
        return self._slots

    @property
    def scheduled_tokens(self) -> list[list[int]]:
        """The token ids that each row computes, drafts included."""
        tokens = []
        for seq, end, count in zip(self._rows, self.context_lens, self.num_scheduled_tokens, strict=True):
            drafts = self.scheduled_spec_decode_tokens.get(seq.id, [])
            tokens.append(seq.token_ids[end - count : end - len(drafts)] + drafts)
        return tokens

    @property
    def draft_tokens(self) -> list[int]:
        """The drafts of all rows, in order; each row's are the last of the tokens that it computes."""
        if not self.scheduled_spec_decode_tokens:
            return []
        drafts = self.scheduled_spec_decode_tokens
        return [token for seq_id in self.req_ids for token in drafts.get(seq_id, ())]

    @property
    def temperatures(self) -> list[float]:
        return [seq.temperature for seq in self._rows]

    @property
    def block_tables(self) -> list[list[int]]:
        """Block ids that hold each row's context, of the rows that have blocks."""
        size = self._rows[0].block_size if self._rows else 1
        lengths = (-(-length // size) for length in self.context_lens)
        return [table[:length] for table, length in zip(self._tables, lengths, strict=True) if table]

    @property
    def last_block_num_tokens(self) -> list[int]:
        """Valid tokens in each row's last block once the step has run."""
        size = self._rows[0].block_size if self._rows else 1
        return [(length - 1) % size + 1 for length in self.context_lens]

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
    """Tokens sampled in one step.

    `token_ids` maps a sequence's id to the tokens accepted for it; a row whose prompt is not yet fully computed is
    absent. `draft_token_ids` maps it to the drafts for its next step. `logprobs` holds, for the rows that asked, one
    entry a token; `prompt_logprobs`, for the batch's `prompt_spans`, one entry a token of theirs. `errors` says why of
    rows that could not be sampled, which are absent from the rest, and `refusals` the same where the request itself
    left no token to sample. The key -1 in `token_ids` marks deferred output, as in the specification.
    """

    token_ids: dict[int, tuple[int, ...]]
    draft_token_ids: dict[int, list[int]] | None = None
    logprobs: dict[int, list[TokenLogprobs]] | None = None
    errors: dict[int, str] | None = None
    refusals: dict[int, str] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    req_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.req_ids = list(self.token_ids)


def _prompt_spans(
    rows: Rows[Sequence], counts: list[int], context_lens: list[int], num_decodes: int
) -> list[PromptSpan]:
    """The spans of the rows behind the decodes that still owe log probabilities of their prompts."""
    spans = []
    first = sum(counts[:num_decodes])
    for seq, count, end in zip(rows[num_decodes:], counts[num_decodes:], context_lens[num_decodes:], strict=True):
        if seq.prompt_logprobs is not None:
            # A sequence preempted half-way through its prompt comes by its beginning again.
            begin = max(end - count, len(seq.prompt_logprobs))
            token_ids = seq.token_ids[begin + 1 : min(end + 1, seq.num_prompt_tokens)]
            if token_ids:
                assert seq.sampling_params.prompt_logprobs is not None
                position = first + begin - (end - count)
                spans.append(PromptSpan(seq.id, position, token_ids, seq.sampling_params.prompt_logprobs))
        first += count
    return spans


# [step_limits] `StepLimits`: how large a step may be, which a device that ran out of memory makes less for a while.
#
# Owned by the scheduler. No memory is measured here: a step that was too large is tried again as smaller ones.

logger = logging.getLogger(__name__)

_STEPS_BEFORE_MORE = 1024
"""Steps that must succeed before larger ones are tried again: each failure has prompts computed twice."""


class StepOutOfMemory(MemoryError):
    """A step needed more of the device's memory than was free."""


class StepLimits:
    """Tokens that a step computes, and sequences that run at a time, at most."""

    def __init__(self, num_tokens: int, num_rows: int) -> None:
        self._most_tokens, self._most_rows = num_tokens, num_rows
        self.num_tokens, self.num_rows = num_tokens, num_rows
        self._steps_left = 0

    def shrink(self, num_tokens: int, num_rows: int) -> bool:
        """A step of so much found no memory: half of it is allowed. False where that step cannot be less."""
        if num_tokens <= 1:
            return False
        if num_tokens > num_rows:
            # Prompts, which are computed in smaller parts.
            self.num_tokens = max(1, min(self.num_tokens, num_tokens) // 2)
        else:
            self.num_rows = max(1, min(self.num_rows, num_rows) // 2)
        self._steps_left = _STEPS_BEFORE_MORE
        logger.warning(
            "the device ran out of memory in a step of %d tokens of %d sequences; steps have at most %d tokens and %d "
            "sequences run for now: lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization",
            num_tokens,
            num_rows,
            self.num_tokens,
            self.num_rows,
        )
        return True

    def note_step(self) -> None:
        """A step is scheduled."""
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self.num_tokens = min(2 * self.num_tokens, self._most_tokens)
                self.num_rows = min(2 * self.num_rows, self._most_rows)
                if (self.num_tokens, self.num_rows) != (self._most_tokens, self._most_rows):
                    self._steps_left = _STEPS_BEFORE_MORE
