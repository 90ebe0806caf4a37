"""`InputBatch`: holds the running sequences by slot between steps, and builds the arrays of a step from them.

Owned by the model runner. A step's message holds new rows in full, but for running rows only their appended blocks:
their sampled tokens were stored here.
"""

import dataclasses
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.batch import UNREAD_DRAFT, AppendedBlocks, PromptSpan
from engine.messages import PoolingParams
from engine.sampling.parameters import SamplingColumns, SamplingRows
from engine.sampling.verification import accepted_positions
from engine.sequence import Sequence
from models.attention.backend import NO_SLOT, AttentionBatch
from models.config.rope import with_lengths
from models.ops.cpu.structures import Sampling


class StepRows(Protocol):
    """The message that a step's arrays are built from: a `ScheduledBatch`, or a `RankBatch` on other ranks than 0."""

    @property
    def slots(self) -> npt.NDArray[np.int64]: ...
    @property
    def num_scheduled_tokens(self) -> list[int]: ...
    @property
    def context_lens(self) -> list[int]: ...
    @property
    def total_tokens_num(self) -> int: ...
    @property
    def total_seqs_num_decode(self) -> int: ...
    @property
    def new_seqs(self) -> Rows[Sequence]: ...
    @property
    def appended_blocks(self) -> Rows[AppendedBlocks]: ...
    @property
    def prompt_spans(self) -> list[PromptSpan]: ...
    @property
    def draft_tokens(self) -> list[int]: ...
    @property
    def num_next_drafts(self) -> list[int]: ...


class PooledSpan(NamedTuple):
    """The tokens of a pooled prompt that a step computes."""

    row: int
    slot: int
    first: int
    """Index of the first token in the step."""
    end: int
    """Index in the step after the last token."""
    position: int
    """Position of the first token in the prompt."""
    is_last: bool
    """Whether the last token is the prompt's last."""
    params: PoolingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs(AttentionBatch):
    """One step's arrays: those that attention reads, and those of S positions where a token is sampled.

    A row samples a token after its last known token; a row that verifies drafts also samples after each draft. A row
    that computes a chunk before a prompt's end, or a pooled prompt, samples none.
    """

    input_ids: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T]
    num_blocks: int
    """Blocks of the longest row."""
    slots: npt.NDArray[np.int64]  # [B]
    sampled_rows: npt.NDArray[np.int64]  # [S], row of each sampled position, ascending
    sampled_slots: npt.NDArray[np.int64]  # [S]
    last_tokens: npt.NDArray[np.int64]  # [S], index in the T tokens of the token before each sampled position
    pending_rows: npt.NDArray[np.int64]  # [U], decodes whose last token the host has not read yet
    pending_tokens: npt.NDArray[np.int64]  # [U], index of that token in the T tokens
    sampling: SamplingRows | None
    """None if sampling a row depends on its last token, and the host has not read that token yet."""
    adapters: npt.NDArray[np.int32] | None  # [B], LoRA adapter of each row, 0: none; None where no row has one
    rope_lengths: npt.NDArray[np.int64] | None = None  # [T], `Sequence.rope_length`; None where all are 0
    has_drafts: bool = False
    """Whether a row verifies drafts."""
    pooled: Rows[PooledSpan] = ()
    """The rows whose prompts are pooled; no token is sampled for them."""
    bounds: "RowBounds | None" = None
    """Set for a step with rows whose first position only the device knows. `positions` and `seq_lens` are then upper
    bounds and `input_ids` unknown until `InputBatch.resolve`; the device computes `slot_mapping`, `states` and
    `states_after`."""

    @property
    def carried_positions(self) -> npt.NDArray[np.int64]:
        """The positions as models take them, combined with the length that selects rotary frequencies. # [T]"""
        return self.positions if self.rope_lengths is None else with_lengths(self.positions, self.rope_lengths)

    @property
    def sampled_positions(self) -> npt.NDArray[np.int64]:
        """The position of each sampled token in its sequence. # [S]"""
        return self.positions[self.last_tokens] + 1


class RowBounds(NamedTuple):
    """Decode rows of `query_len` tokens; rows that verify fewer drafts are padded at the end. # each [B]"""

    counts: npt.NDArray[np.int64]
    """Tokens of each row without padding; 0 for a padding row of a graph."""
    is_unread: npt.NDArray[np.bool_]
    """Whether the row starts at the position that an unread step has stored for its slot."""
    num_blocks: npt.NDArray[np.int64]
    """Blocks of each row; 0 for a padding row of a graph."""


class DraftSpan(NamedTuple):
    """T entries of a drafter, in B slots."""

    token_ids: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T], as `StepInputs.carried_positions`
    slot_mapping: npt.NDArray[np.int64]  # [T]
    block_tables: npt.NDArray[np.int32]  # [B, num_blocks]


class UniformRows(NamedTuple):
    """The common length of the rows of a step that verifies drafts, for captured graphs and decode attention."""

    max_len: int
    """One plus the most drafts of a row. All rows of a step have the longest row's length; a row with fewer drafts
    computes earlier tokens again."""
    padding_slot: int
    """Slot mapping of those earlier tokens, whose keys and values are stored already."""
    max_tokens: int
    """The most tokens of a step."""


class TableChanges:
    """Entries of the block table that were not sent to its copy on the device yet."""

    def __init__(self, table: npt.NDArray[np.int32]) -> None:
        self._flat = table.reshape(-1)
        self._width = table.shape[1]
        self._indexes: list[int] = []

    def note(self, slot: int, start: int, count: int) -> None:
        """Record that `count` entries of a slot's row were written, from index `start` on."""
        first = slot * self._width + start
        self._indexes.extend(range(first, first + count))

    def entries(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """The changed entries: indices in the flat table, possibly repeated, and current values. # 2 x [changes]"""
        indexes = np.array(self._indexes, dtype=np.int64)
        return indexes, self._flat[indexes]

    def forget(self) -> None:
        """Clear the changes once all of them were sent."""
        self._indexes.clear()


class InputBatch:
    """Token table, lengths, block table and sampling columns of `max_num_seqs` slots.

    The tables are as wide as the longest sequence; the system commits their pages as rows grow. Raises `ValueError`
    when the system refuses the allocation.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        seed: int,
        device_has_tables: bool = False,
        num_lookahead_tokens: int = 0,
        states_per_slot: int = 0,
    ) -> None:
        """`device_has_tables`: steps carry no block tables, and `table_changes` records what to send to the device's
        copy. `num_blocks` of a step covers `num_lookahead_tokens` further positions, for a drafter that runs after it.

        `states_per_slot`: states of a sequence in each recurrent layer: one plus one for each draft that a step
        verifies, so that the state after the accepted drafts can be selected; 0 without recurrent layers.
        """
        self.block_size = block_size
        self._states_per_slot = states_per_slot
        self._device_has_tables = device_has_tables
        self._num_lookahead_tokens = num_lookahead_tokens if device_has_tables else 0
        try:
            # One more position, since a token is also sampled, and dropped, after a prompt that fills the context.
            self._tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
            self._block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        except (MemoryError, OverflowError, ValueError) as error:
            raise ValueError(
                f"the system refused memory for the tokens of max_num_seqs {max_num_seqs} sequences of max_model_len "
                f"{max_model_len} ({error}); lower one of the two"
            ) from error
        self.table_changes = TableChanges(self._block_table)
        self._num_read = np.zeros(max_num_seqs, dtype=np.int64)
        """Number of tokens of each slot that the host knows."""
        self._num_unread = np.zeros(max_num_seqs, dtype=np.int64)
        """Upper bound of the tokens of each slot that launched steps have sampled and the host has not read."""
        self._has_unread = False
        """Whether a step was ever launched before the previous step was read."""
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._valid_state = np.zeros(max_num_seqs, dtype=np.int64)
        """Index among each slot's states of the one after all computed and accepted tokens."""
        self._adapters: npt.NDArray[np.int32] | None = None
        self._rope_lengths: npt.NDArray[np.int64] | None = None
        self._pooling: dict[int, PoolingParams] = {}
        """Pooling parameters by slot, for sequences whose prompts are pooled."""
        self._sampling = SamplingColumns(max_num_seqs=max_num_seqs, vocab_size=vocab_size, seed=seed)

    @property
    def max_blocks(self) -> int:
        """The most blocks of a sequence."""
        return self._block_table.shape[1]

    def apply(self, batch: StepRows) -> None:
        """Apply a step's changes: appended blocks first, since a slot may get a new sequence in this step."""
        for gained in batch.appended_blocks:
            end = gained.start + len(gained.block_ids)
            self._block_table[gained.slot, gained.start : end] = gained.block_ids
            self._num_blocks[gained.slot] = end
            if self._device_has_tables:
                self.table_changes.note(gained.slot, gained.start, len(gained.block_ids))
        for seq in batch.new_seqs:
            self._write(seq)

    def step_inputs(self, batch: StepRows, uniform_rows: "UniformRows | None" = None) -> StepInputs:
        """Build the arrays of a step whose changes have been applied.

        `uniform_rows`: the common length of decodes where one of them verifies drafts, if all sequences are that long.
        """
        slots = batch.slots
        seq_lens = np.array(batch.context_lens, dtype=np.int64)
        scheduled = query_lens = np.array(batch.num_scheduled_tokens, dtype=np.int64)
        num_decodes, query_len, drafts = batch.total_seqs_num_decode, 1, batch.draft_tokens
        num_read, num_unread = self._num_read[slots], self._num_unread[slots]
        if self._num_lookahead_tokens and self.are_positions_unread(batch):
            return self._bounded_inputs(slots, seq_lens, scheduled, drafts)
        # Prompt spans refer to tokens of the step by index, so rows cannot grow.
        is_movable = not batch.prompt_spans
        if drafts and uniform_rows and is_movable:
            # In a model with states, a row cannot start before its first position: tokens that must not change the
            # state again would have no valid keys and values for the other tokens of the step.
            num_before = int(self._states_per_slot > 0)
            query_lens = _of_one_length(scheduled, seq_lens - num_before, num_decodes, uniform_rows)
        ends = np.cumsum(query_lens)
        num_tokens_in_step = int(ends[-1])
        if num_tokens_in_step == len(slots):
            token_slots, positions = slots, seq_lens - 1
        else:
            # Token t of row r has the position t - (first t of r) + (first position of r); both firsts are end - span.
            token_slots = np.repeat(slots, query_lens)
            positions = np.arange(num_tokens_in_step) + np.repeat(seq_lens - ends, query_lens)
        blocks, offsets = np.divmod(positions, self.block_size)
        num_blocks = self._num_table_blocks(seq_lens)
        num_tokens = num_read + num_unread
        sampled = np.flatnonzero(seq_lens >= num_tokens)
        pooled: list[PooledSpan] = []
        if self._pooling:
            pooled = self._pooled_spans(slots, seq_lens, query_lens, ends)
            sampled = np.setdiff1d(sampled, [span.row for span in pooled], assume_unique=True)
        last_tokens = ends[sampled] - 1
        slot_mapping = self._block_table[token_slots, blocks] * np.int64(self.block_size) + offsets
        if drafts:
            counts = np.where(sampled < num_decodes, scheduled[sampled], 1)
            sampled, last_tokens, drafted = _verification_positions(sampled, last_tokens, counts)
            self._tokens[token_slots[drafted], positions[drafted]] = drafts
            if uniform_rows:
                slot_mapping[positions < np.repeat(seq_lens - scheduled, query_lens)] = uniform_rows.padding_slot
            # The attention backend takes rows of one length as decodes, and others as spans like those of a prompt.
            shortest, longest = query_lens[:num_decodes].min(), query_lens[:num_decodes].max()
            num_decodes, query_len = (num_decodes, int(longest)) if shortest == longest else (0, 1)
        states = self.states(slots)
        states_after = None
        if drafts and states is not None:
            states_after = self.states_after(slots, states, scheduled, query_lens, batch.total_seqs_num_decode)
        sampled_slots, sampled_positions = slots[sampled], positions[last_tokens] + 1
        # Apart from drafts, the host may lack only the last token of a row.
        unread = np.flatnonzero((num_read < num_tokens) & (num_read < seq_lens))
        needs_pending_token = len(unread) > 0 and self._sampling.need_last_token(slots[unread], seq_lens[unread])
        return StepInputs(
            input_ids=self._tokens[token_slots, positions].astype(np.int64),
            positions=positions,
            slot_mapping=slot_mapping,
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_tables=None if self._device_has_tables else self._block_table[:, :num_blocks][slots],
            num_blocks=num_blocks,
            num_decodes=num_decodes,
            slots=slots,
            states=states,
            states_after=states_after,
            num_by_token=0 if states_after is None else batch.total_seqs_num_decode,
            sampled_rows=sampled,
            sampled_slots=sampled_slots,
            last_tokens=last_tokens,
            pending_rows=unread,
            pending_tokens=(ends - seq_lens + num_read)[unread],
            sampling=None
            if needs_pending_token
            else self._sampling.rows(sampled_slots, sampled_positions, self._tokens),
            adapters=self.adapters_of(slots),
            rope_lengths=None if self._rope_lengths is None else self._rope_lengths[token_slots],
            query_len=query_len,
            has_drafts=bool(drafts),
            pooled=pooled,
        )

    def are_positions_unread(self, batch: StepRows) -> bool:
        """Whether only the device knows the first position or the drafts of a row in this step."""
        return bool((self._num_unread[batch.slots] > 1).any()) or UNREAD_DRAFT in batch.draft_tokens

    def _bounded_inputs(
        self,
        slots: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        drafts: list[int],
    ) -> StepInputs:
        """Build a step of decodes in which only the device knows the first position and the drafts of some rows.

        `seq_lens`: upper bounds, drafts included. `counts`: tokens of each row. `drafts`: `UNREAD_DRAFT` if unknown.
        """
        length, num_rows = int(counts.max()), len(slots)
        is_unread = self._num_unread[slots] > 0
        starts, offsets = seq_lens - counts, np.arange(length)
        positions = starts[:, None] + offsets
        if not is_unread.all() and drafts:
            is_draft = (offsets > 0) & (offsets < counts[:, None])
            known = np.zeros(positions.shape, dtype=np.int64)
            known[is_draft] = drafts
            is_draft &= ~is_unread[:, None]
            self._tokens[np.repeat(slots, length).reshape(positions.shape)[is_draft], positions[is_draft]] = known[
                is_draft
            ]
        rows = np.repeat(np.arange(num_rows), counts)
        firsts = np.cumsum(counts) - counts
        placeholder = np.zeros(positions.size, dtype=np.int64)
        has_states = self._states_per_slot > 0
        seq_lens = starts + length
        return StepInputs(
            input_ids=self._tokens[slots[:, None], positions].astype(np.int64).ravel(),
            positions=positions.ravel(),
            slot_mapping=placeholder,
            query_lens=np.full(num_rows, length),
            seq_lens=seq_lens,
            block_tables=None,
            num_blocks=self._num_table_blocks(seq_lens),
            num_decodes=num_rows,
            slots=slots,
            states=self.states(slots),
            states_after=placeholder if has_states and length > 1 else None,
            num_by_token=num_rows if has_states and length > 1 else 0,
            sampled_rows=rows,
            sampled_slots=slots[rows],
            last_tokens=rows * length + np.arange(len(rows)) - firsts[rows],
            pending_rows=np.flatnonzero(is_unread),
            pending_tokens=np.flatnonzero(is_unread) * length,
            sampling=None,
            adapters=self.adapters_of(slots),
            query_len=length,
            has_drafts=bool(drafts),
            bounds=RowBounds(counts, is_unread, self._num_blocks[slots]),
        )

    def resolve(self, inputs: StepInputs) -> StepInputs:
        """`inputs` with exact positions, tokens and sampling parameters, once all earlier steps have been read."""
        if inputs.bounds is not None:
            starts = self._num_read[inputs.slots] - 1
            positions = starts[:, None] + np.arange(inputs.query_len)
            ids = self._tokens[inputs.slots[:, None], positions].astype(np.int64)
            inputs = dataclasses.replace(
                inputs, input_ids=ids.ravel(), positions=positions.ravel(), seq_lens=starts + inputs.query_len
            )
        return dataclasses.replace(inputs, sampling=self.sampling_rows(inputs))

    def _num_table_blocks(self, seq_lens: npt.NDArray[np.int64]) -> int:
        """Number of block table columns of a step with rows of these lengths. # [B]"""
        return min(-(-(int(seq_lens.max()) + self._num_lookahead_tokens) // self.block_size), self.max_blocks)

    def states(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """The index of the valid state of each slot; None without recurrent layers. # [B] -> [B]"""
        return slots * self._states_per_slot + self._valid_state[slots] if self._states_per_slot else None

    def states_after(
        self,
        slots: npt.NDArray[np.int64],
        states: npt.NDArray[np.int64],
        scheduled: npt.NDArray[np.int64],
        computed: npt.NDArray[np.int64],
        num_decodes: int,
    ) -> npt.NDArray[np.int64]:
        """The index of the state that is written after each token of a step. # 4 x [B] -> [T]

        `scheduled`: tokens of each row, the last ones of `computed`. The first token of a decode overwrites the state
        that it reads, and each draft writes the next of the slot's states, cyclically.
        """
        after = np.repeat(states, computed)
        is_decode = np.repeat(np.arange(len(slots)) < num_decodes, computed)
        index = np.arange(len(after)) - np.repeat(np.cumsum(computed) - scheduled, computed)
        count = self._states_per_slot
        base = np.repeat(slots * count, computed)
        after[is_decode] = (base + (after - base + index) % count)[is_decode]
        after[index < 0] = NO_SLOT
        return after

    def _pooled_spans(
        self,
        slots: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
    ) -> list[PooledSpan]:
        """The spans of pooled prompts. # 4 x [B]; `ends`: the index after each row's last token."""
        spans = []
        for row, slot in enumerate(slots.tolist()):
            params = self._pooling.get(slot)
            if params is not None:
                length, count, end = int(seq_lens[row]), int(query_lens[row]), int(ends[row])
                is_last = bool(length >= self._num_read[slot] + self._num_unread[slot])
                spans.append(PooledSpan(row, slot, end - count, end, length - count, is_last, params))
                if is_last:
                    # Later steps need not look the prompt up. If this step fails, the sequence is written again.
                    del self._pooling[slot]
        return spans

    def sampling_rows(self, inputs: StepInputs) -> SamplingRows:
        """`inputs.sampling`, once the tokens of all earlier steps have been read."""
        return self._sampling.rows(inputs.sampled_slots, inputs.sampled_positions, self._tokens)

    def adapters_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | None:
        """The LoRA adapter of each slot; None where no row of the step uses one."""
        if self._adapters is None:
            return None
        adapters = self._adapters[slots]
        return adapters if adapters.any() else None

    def are_greedy(self, slots: npt.NDArray[np.int64]) -> bool:
        """Whether each of these slots takes its argmax, and no log-probabilities or other processing of the logits."""
        return self._sampling.are_greedy(slots)

    def are_of_operators(self, slots: npt.NDArray[np.int64]) -> bool:
        """Whether `sampling_operands` includes all sampling parameters that these slots use."""
        return self._sampling.are_of_operators(slots)

    def sampling_operands(self) -> Sampling:
        """The sampling parameters and tokens of all slots, as the CPU's operators read them."""
        return self._sampling.operands(self._tokens)

    def reserve_tokens(self, inputs: StepInputs) -> None:
        """Reserve the most tokens that each sequence may sample in a launched step; see `store_tokens`."""
        self._has_unread = True
        np.add.at(self._num_unread, inputs.sampled_slots, 1)

    def store_tokens(
        self,
        inputs: StepInputs,
        token_ids: npt.NDArray[np.int64],
        accepted: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.int64] | None:
        """Store the tokens that a step sampled; `accepted_positions`, or None where it verified no drafts. # [S]

        `accepted`: the accepted positions, where another rank has verified them.
        """
        slots, positions = inputs.sampled_slots, inputs.sampled_positions
        if inputs.has_drafts:
            if accepted is None:
                accepted = accepted_positions(inputs.sampled_rows, inputs.last_tokens, inputs.input_ids, token_ids)
            slots, positions, token_ids = slots[accepted], positions[accepted], token_ids[accepted]
        self._tokens[slots, positions] = token_ids
        # If a slot occurs several times, NumPy's assignment leaves the last value, which is that of its last position.
        self._num_read[slots] = positions + 1
        if inputs.has_drafts and inputs.states_after is not None:
            num_accepted = np.bincount(inputs.sampled_rows[accepted], minlength=len(inputs.slots))
            self._advance_states(inputs.slots, num_accepted)
        if self._has_unread:
            # A row may have no accepted position.
            np.subtract.at(self._num_unread, inputs.sampled_slots, 1)
            np.maximum(self._num_unread, 0, out=self._num_unread)
        return accepted

    def note_accepted(self, slots: npt.NDArray[np.int64], num_read: list[int], num_accepted: list[int]) -> None:
        """Replaces `store_tokens` where the operators have stored the accepted tokens of each slot. # each [B]

        `num_read`: the slots' tokens, including these.
        """
        self._num_read[slots] = num_read
        if self._states_per_slot:
            self._advance_states(slots, np.array(num_accepted))

    def _advance_states(self, slots: npt.NDArray[np.int64], num_accepted: npt.NDArray[np.int64]) -> None:
        """Select the state after the accepted drafts of each slot. # 2 x [B]"""
        valid = self._valid_state[slots] + np.maximum(num_accepted - 1, 0)
        self._valid_state[slots] = valid % self._states_per_slot

    # Read by a drafter, after a step's tokens were stored.

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence."""
        return self._tokens.shape[1] - 1

    @property
    def states_per_slot(self) -> int:
        """Recurrent states of a slot; 0 where layers keep none."""
        return self._states_per_slot

    def num_read(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Number of tokens of these slots that the host knows. # [B] -> [B]"""
        return self._num_read[slots]

    def capacity(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Number of positions for which these slots have blocks. # [B] -> [B]"""
        return self._num_blocks[slots] * self.block_size

    def num_blocks(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Number of blocks of these slots. # [B] -> [B]"""
        return self._num_blocks[slots]

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """The block table of all slots. # [slots, max_blocks]"""
        return self._block_table

    def draft_span(
        self,
        slots: npt.NDArray[np.int64],
        begins: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        token_offset: int,
        num_more: int = 0,
    ) -> DraftSpan:
        """The entries at positions `[begins, ends)` of slots; an entry's token is `token_offset` positions after it.

        # 3 x [B]

        The block tables cover `num_more` further positions, as far as blocks are allocated.
        """
        counts = ends - begins
        stops = np.cumsum(counts)
        if int(stops[-1]) == len(slots):
            token_slots, positions = slots, begins
        else:
            token_slots = np.repeat(slots, counts)
            positions = np.arange(int(stops[-1])) + np.repeat(ends - stops, counts)
        num_blocks = -(-(int(ends.max()) + num_more) // self.block_size)
        return DraftSpan(
            self._tokens[token_slots, positions + token_offset].astype(np.int64),
            self.carried_positions(token_slots, positions),
            self.slot_mapping(token_slots, positions),
            self._block_table[:, :num_blocks][slots],
        )

    def carried_positions(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """As `StepInputs.carried_positions`, for positions of slots. # 2 x [T] -> [T]"""
        return positions if self._rope_lengths is None else with_lengths(positions, self._rope_lengths[slots])

    def slot_mapping(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The slot mapping of positions of slots: block * block_size + offset. # 2 x [T] -> [T]"""
        blocks, offsets = np.divmod(positions, self.block_size)
        return self._block_table[slots, blocks] * np.int64(self.block_size) + offsets

    def tokens_at(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Tokens and drafts of slots. # 2 x [T] -> [T]"""
        return self._tokens[slots, positions]

    def need_drafts(self, slots: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]) -> bool:
        """Whether sampling a draft in one of these slots depends on the draft before it.

        `num_tokens`: the slots' lengths with all drafts. # 2 x [B]
        """
        return self._sampling.need_last_token(slots, num_tokens)

    def write_drafts(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]
    ) -> None:
        """Write drafts after the known tokens; the next step overwrites them. # 3 x [B]"""
        self._tokens[slots, positions] = token_ids

    def draft_sampling(
        self,
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        *,
        stream: int,
        are_tokens_known: bool = True,
    ) -> SamplingRows:
        """The parameters for sampling drafts at these positions as the target will. # 2 x [B]

        `stream`: the stream of the noise, `SAMPLE` for the target's own. `are_tokens_known`: False where tokens before
        the positions are not read yet; parameters that depend on them are then left out.
        """
        rows = self._sampling.rows(slots, positions, self._tokens, are_tokens_known=are_tokens_known)
        random = None if rows.random is None else rows.random.of_stream(stream)
        return dataclasses.replace(rows, random=random, num_logprobs=None)

    def _write(self, seq: Sequence) -> None:
        slot = seq.slot
        self._tokens[slot, : len(seq.token_ids)] = seq.token_ids
        self._num_read[slot], self._num_unread[slot] = len(seq.token_ids), 0
        self._valid_state[slot] = 0
        self._block_table[slot, : len(seq.block_table)] = seq.block_table
        self._num_blocks[slot] = len(seq.block_table)
        if self._device_has_tables:
            self.table_changes.note(slot, 0, len(seq.block_table))
        if seq.adapter and self._adapters is None:
            self._adapters = np.zeros(len(self._num_read), dtype=np.int32)
        if self._adapters is not None:
            self._adapters[slot] = seq.adapter
        if seq.rope_length and self._rope_lengths is None:
            self._rope_lengths = np.zeros(len(self._num_read), dtype=np.int64)
        if self._rope_lengths is not None:
            self._rope_lengths[slot] = seq.rope_length
        if seq.pooling is not None:
            self._pooling[slot] = seq.pooling
        elif self._pooling:
            self._pooling.pop(slot, None)
        self._sampling.write(slot, seq)


def _of_one_length(
    scheduled: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64], num_decodes: int, uniform_rows: UniformRows
) -> npt.NDArray[np.int64]:
    """Tokens to compute in each row, decodes extended to the longest one if sequences and step allow it. # [B]"""
    longest = int(scheduled[:num_decodes].max())
    padded = scheduled.copy()
    padded[:num_decodes] = longest
    is_possible = longest <= uniform_rows.max_len and seq_lens[:num_decodes].min() >= longest
    return padded if is_possible and int(padded.sum()) <= uniform_rows.max_tokens else scheduled


def _verification_positions(
    rows: npt.NDArray[np.int64], last_tokens: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For rows sampled at `counts` positions each: the row and the input token of each position, and which tokens are
    drafts.

    # 3 x [rows] -> [S], [S], [drafts]
    """
    ends = np.cumsum(counts)
    tokens = np.arange(ends[-1]) + np.repeat(last_tokens + 1 - ends, counts)
    is_draft = np.ones(len(tokens), dtype=np.bool_)
    is_draft[ends - counts] = False
    return np.repeat(rows, counts), tokens, tokens[is_draft]
