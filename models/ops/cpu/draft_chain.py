"""`DraftChain`: drafts several tokens for each row in one call of the operators, without Python between the passes.

An entry is one token's input to a drafter's pass. The first pass computes the entries of the step's tokens, the
following passes one entry per row. Between them, operators choose a token and make it the next pass's input:

    first pass -> last entry of each row -> head -> drafts -> next pass -> head -> drafts -> ...

`verify` computes the target's step before the first pass, in the same call. The tokens that the target's head chooses
are the inputs of the first pass, at the positions of the step:

    target's pass -> its head -> first pass; which drafts are accepted -> last accepted entry of each row -> ...

Such a call is one round. An operator prepares its step: of the first round from the rows' drafts and the tokens of
their slots, and of each further round from the drafts of the round before it, without any work of the host.

Heads take the argmax, or sample with each sequence's parameters and the noise of the token's position.
"""

import ctypes
import time
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from models.ops.cpu.program import Program
from models.ops.cpu.runtime import Library, Operations
from models.ops.cpu.sampling import GreedyHead, SampledHead
from models.ops.cpu.structures import (
    AcceptDrafts,
    Arguments,
    CopyRows,
    FirstRound,
    NextRound,
    OnStep,
    Sampling,
    Step,
    TakeDrafts,
)

MOST_ROUNDS = 8
"""The most rounds of one `DraftChain.verify`."""
_MOST_ACCEPTED = 17
"""The most tokens of a row in a round: one more than the most drafts of `SpeculativeConfig`."""

_Ints = npt.NDArray[np.int64]


class DraftingRows(NamedTuple):
    """The rows of `DraftChain.run` that draft, at most `max_rows`, in descending order of `counts`. # each [rows]"""

    counts: _Ints
    """Number of drafts of each row."""
    slots: _Ints
    """Slots of the rows' sequences."""
    last: _Ints
    """Index of each row's last entry in the first pass."""
    next_positions: _Ints
    """Position of the entry after it."""
    block_tables: npt.NDArray[np.int32]
    """Contain the blocks of all entries. # [rows, blocks]"""


class VerifyingRows(NamedTuple):
    """The rows of `DraftChain.verify`: each computes its last known token, and its drafts after it. # each [B]

    Lists are used where NumPy's functions would take longer for few rows.
    """

    slots: _Ints
    """Slots of the rows' sequences, which are rows of the block tables too."""
    positions: _Ints
    """Position of each row's last known token."""
    num_drafts: list[int]
    """Number of drafts that each row verifies."""
    drafts: list[int]
    """These drafts of all rows, in order. # [any]"""
    wanted: list[int]
    """Number of drafts after the step, limited by the row's blocks and the context length. At least one is not 0."""
    num_blocks: _Ints
    states: _Ints | None
    """Index of the recurrent state that each row begins with; None without recurrent layers."""
    states_after: _Ints | None
    """Index of the state after each token; None if no row verifies drafts. # [T]"""


class Rounds(NamedTuple):
    """Limits of the rounds of `DraftChain.verify`. Memory is needed for `max(wanted)` drafts of each row."""

    max_rounds: int
    limits: list[int]
    """Number of tokens after which a row leaves. # [B]"""
    ends: _Ints
    """Tokens after which a row leaves. # [any]"""


class Verified(NamedTuple):
    """The result of `DraftChain.verify`. All arrays are valid until the next call."""

    token_ids: list[list[int]]
    """The accepted tokens of each row; none if its first logits have no finite maximum. # [B]"""
    counted: _Ints
    """Number of drafts that each row verified in a round, and number of accepted tokens. # [rounds, 2, B]"""
    hidden: torch.Tensor  # [tokens, hidden_size], the target's final hidden states, if there was one round
    rows: _Ints  # [drafting rows], index of each row in the step
    drafts: _Ints  # [most, drafting rows], see `DraftChain.run`
    counts: _Ints  # [drafting rows], number of drafts of each row
    seconds: float
    """Time that drafting took in all rounds."""


HeadKind = TypeVar("HeadKind", GreedyHead, SampledHead)


class ChainHeads(NamedTuple, Generic[HeadKind]):
    """The heads of a drafter and of its target."""

    drafter: HeadKind
    target: HeadKind | None
    """None if `DraftChain.verify` is not used."""


class DraftChain:
    """A drafter's recorded passes and its head, with their own memory for the rows that draft."""

    def __init__(
        self,
        library: Library,
        first: Program,
        following: Program,
        greedy: ChainHeads[GreedyHead],
        sampled: ChainHeads[SampledHead] | None = None,
        *,
        block_size: int,
        max_len: int,
        target: Program | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        """`first`: the pass over a step's entries. `following`: the pass over one entry per row, whose input is the
        previous pass's output. `sampled`: heads for rows that sample; None if all rows take the argmax. `max_len`:
        length limit of sequences. `target`: for `verify`, the pass of the model whose final hidden states `first`
        reads. `sampling`: holds the tokens of all slots, to which `verify` adds the accepted ones.
        """
        self._sampling = sampling
        self._target = target
        self._max_len = max_len
        self._library, self._first, self._following = library, first, following
        self._greedy, self._sampled = greedy, sampled
        self._block_size = block_size
        self.max_rows = max_rows = greedy.drafter.max_rows
        self._ids, self._positions, self._slots, self._last, self._counts = np.zeros((5, max_rows), dtype=np.int64)
        self._drafting_slots = np.zeros(max_rows, dtype=np.int64)
        self._starts = np.arange(max_rows + 1, dtype=np.int32)
        self._seq_lens = np.zeros(max_rows, dtype=np.int32)
        self._step = Step(
            input_ids=self._ids.ctypes.data,
            positions=self._positions.ctypes.data,
            slots=self._slots.ctypes.data,
            query_starts=self._starts.ctypes.data,
            seq_lens=self._seq_lens.ctypes.data,
        )
        output = first.output
        if following.states is None:
            # The drafter is a language model, so that only its head reads a pass's output.
            self._states = torch.empty(max_rows, output.shape[1], dtype=output.dtype)
        else:
            self._states = following.states
        self._token_offset = int(following.states is not None)
        """Position of an entry's drafted token minus the entry's position."""
        self._chains: dict[tuple[int, bool], tuple[Operations, _Ints]] = {}
        """Operators and memory for drafts, by the number of drafts and whether they are sampled."""
        self._verifying: dict[tuple[int, bool], tuple[Operations, _Ints, NextRound]] = {}
        """Like `_chains`, with the target's step first, and the last operator."""
        self._order, self._wanted, self._num_blocks, self._slots_of_rows = np.zeros((4, max_rows), dtype=np.int64)
        self._slots_of_tokens = np.zeros(0 if greedy.target is None else greedy.target.max_rows, dtype=np.int64)
        self._verified, self._entries = Step(), Step()
        """The target's step, and the same with the input tokens of the first pass."""
        self._block_tables: npt.NDArray[np.int32] | None = None
        """The block tables of all slots, to which the operators of `verify` point."""
        self._tables, self._tables_address = np.zeros((0, 0), dtype=np.int32), 0
        self._state_rows = self._states.data_ptr(), self._states.stride(0)
        self._target_rows = (0, 0) if target is None else (target.output.data_ptr(), target.output.stride(0))
        self._accept = {is_sampled: AcceptDrafts() for is_sampled in (False, True)}
        self._num_drafting, self._began = np.zeros(1, dtype=np.int64), np.zeros(1)
        self._rounds = _RoundMemory(max_rows, len(self._slots_of_tokens))

    @property
    def samples(self) -> bool:
        """Whether rows may sample instead of taking the argmax."""
        return self._sampled is not None

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: Step,
        states: torch.Tensor | None,
        rows: DraftingRows,
        *,
        is_sampled: bool,
    ) -> _Ints:
        """Draft for each row; the result, padded with -1, is valid until the next call. # [most, rows]

        The first four arguments: see `Program.run`.
        """
        num_rows, most = len(rows.counts), int(rows.counts[0])
        self._counts[:num_rows], self._drafting_slots[:num_rows] = rows.counts, rows.slots
        self._last[:num_rows], self._positions[:num_rows] = rows.last, rows.next_positions
        own = self._step
        own.num_tokens = own.num_rows = num_rows
        own.block_tables, own.max_blocks = rows.block_tables.ctypes.data, rows.block_tables.shape[1]
        self._first.give(token_ids, positions, step, states)
        self._heads(is_sampled).drafter.read_from(*self._state_rows)
        operations, drafts = self._chains.get((most, is_sampled)) or self._chain(most, is_sampled=is_sampled)
        self._library.run(operations, step)
        return drafts[:, :num_rows]

    @property
    def verifies(self) -> bool:
        """Whether the chain has a target, so that `verify` can be called."""
        return self._target is not None and self._sampling is not None

    def holds(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a step of this size fits the memory of `verify`."""
        assert self._target is not None, "`verifies` says so"
        most = min(len(self._slots_of_tokens), self._target.max_tokens, self._first.max_tokens)
        return num_rows <= self.max_rows and num_tokens <= most

    def verify(
        self,
        rows: VerifyingRows,
        block_tables: npt.NDArray[np.int32],
        rounds: Rounds | None,
        *,
        is_sampled: bool,
    ) -> Verified:
        """Compute a step of the target, which chooses a token after each of its tokens, and draft after it.

        With `rounds`, these drafts are then verified in the same way; the rounds end when a row lacks a block. Stores
        the accepted tokens of each slot. # block_tables [slots, blocks]
        """
        assert self._target is not None, "`verifies` says so"
        program, (drafting_head, head) = self._target, self._heads(is_sampled)
        assert head is not None
        if block_tables is not self._block_tables:
            self._block_tables = block_tables
            self._tables = np.zeros((self.max_rows, block_tables.shape[1]), dtype=np.int32)
            self._tables_address = self._tables.ctypes.data
            self._rounds.make_tables(block_tables.shape[1])
            self._verifying.clear()
        num_rows, most = len(rows.slots), max(rows.wanted)
        self._wanted[:num_rows], self._num_blocks[:num_rows] = rows.wanted, rows.num_blocks
        self._slots_of_rows[:num_rows] = rows.slots
        step, own, memory = self._verified, self._step, self._rounds
        step.num_rows, step.num_tokens = num_rows, num_rows + len(rows.drafts)
        step.state_slots, step.states_after = _address(rows.states), _address(rows.states_after)
        own.block_tables, own.max_blocks = self._tables_address, block_tables.shape[1]
        head.read_from(*self._target_rows)
        drafting_head.read_from(*self._state_rows)
        key = most, is_sampled
        operations, drafts, following = self._verifying.get(key) or self._verification(most, is_sampled=is_sampled)
        # Without limits, the operators prepare no further round, for whose tokens there may be no memory.
        memory.begin(rows, None if rounds is None else rounds.limits)
        following.ends, following.num_ends = (
            (None, 0) if rounds is None else (rounds.ends.ctypes.data, len(rounds.ends))
        )
        num_rounds, seconds, count = 1 if rounds is None else rounds.max_rounds, 0.0, 0
        while count < num_rounds and (count == 0 or memory.continues[0]):
            self._library.run(operations, step)
            seconds += time.perf_counter() - self._began[0]
            count += 1
        num_drafting = int(self._num_drafting[0])
        counts = memory.num_accepted[:num_rows].tolist()
        token_ids = memory.accepted[:num_rows, : max(counts)].tolist()
        return Verified(
            [row[:count] for row, count in zip(token_ids, counts, strict=True)],
            memory.counted[:count, :, :num_rows],
            program.output,
            self._order[:num_drafting],
            drafts[:, :num_drafting],
            self._counts[:num_drafting],
            float(seconds),
        )

    def _heads(self, is_sampled: bool) -> ChainHeads[GreedyHead] | ChainHeads[SampledHead]:
        heads = self._sampled if is_sampled else self._greedy
        assert heads is not None, "`samples` says so"
        return heads

    def _chain(self, most: int, *, is_sampled: bool) -> tuple[Operations, _Ints]:
        drafts = np.zeros((most, self.max_rows), dtype=np.int64)
        after = self._drafts_after_first(drafts, self._heads(is_sampled).drafter)
        self._chains[most, is_sampled] = Operations([*self._first.arguments, *after]), drafts
        return self._chains[most, is_sampled]

    def _verification(self, most: int, *, is_sampled: bool) -> tuple[Operations, _Ints, NextRound]:
        program, (drafting_head, head) = self._target, self._heads(is_sampled)
        assert program is not None
        assert head is not None
        drafts = np.zeros((most, self.max_rows), dtype=np.int64)
        assert self._block_tables is not None, "`verify` has set them"
        accept, tables = self._accept[is_sampled], self._block_tables
        accept.verified, accept.tables = ctypes.addressof(self._verified), tables.ctypes.data
        accept.blocks = tables.shape[1]
        accept.peaks, accept.tokens = head.peaks.ctypes.data, head.token_ids.ctypes.data
        accept.next, accept.by = ctypes.addressof(self._step), _sampling_of(head)
        accept.wanted, accept.num_blocks = self._wanted.ctypes.data, self._num_blocks.ctypes.data
        accept.rows, accept.block_size, accept.max_len = (
            self._slots_of_rows.ctypes.data,
            self._block_size,
            self._max_len,
        )
        accept.order, accept.last, accept.counts, accept.slots = (
            each.ctypes.data for each in (self._order, self._last, self._counts, self._drafting_slots)
        )
        accept.num_drafting, accept.began = self._num_drafting.ctypes.data, self._began.ctypes.data
        assert self._first.states is not None, "the first pass reads the target's states"
        following = self._following_round(drafts, accept)
        memory = self._rounds
        inputs = (each.ctypes.data for each in (memory.positions, memory.counts, memory.drafts))
        first = FirstRound(ctypes.addressof(following), *inputs)
        arguments: list[Arguments] = [first, *program.arguments]
        arguments += [*_choice(head, self._slots_of_tokens, 1), _copy(program, self._first.states, None), accept]
        arguments += (_on(each, self._entries) for each in self._first.arguments)
        arguments += [*self._drafts_after_first(drafts, drafting_head), following]
        self._verifying[most, is_sampled] = Operations(arguments), drafts, following
        return self._verifying[most, is_sampled]

    def _following_round(self, drafts: _Ints, accept: AcceptDrafts) -> NextRound:
        assert self._sampling is not None, "`verifies` says so"
        rounds = self._rounds
        return NextRound(
            peaks=accept.peaks,
            tokens=accept.tokens,
            step=accept.verified,
            first=ctypes.addressof(self._entries),
            buffers=ctypes.addressof(rounds.buffers),
            rows=accept.rows,
            row_of=rounds.row_of.ctypes.data,
            wanted=accept.wanted,
            num_blocks=accept.num_blocks,
            limits=rounds.limits.ctypes.data,
            tables=accept.tables,
            blocks=accept.blocks,
            block_size=self._block_size,
            max_len=self._max_len,
            order=accept.order,
            counts=accept.counts,
            num_drafting=accept.num_drafting,
            drafts=drafts.ctypes.data,
            max_rows=self.max_rows,
            by=ctypes.addressof(self._sampling),
            slots=self._slots_of_tokens.ctypes.data,
            accepted=rounds.accepted.ctypes.data,
            num_accepted=rounds.num_accepted.ctypes.data,
            capacity=rounds.accepted.shape[1],
            counted=rounds.counted.ctypes.data,
            round=rounds.number.ctypes.data,
            continues=rounds.continues.ctypes.data,
        )

    def _drafts_after_first(self, drafts: _Ints, head: GreedyHead | SampledHead) -> list[Arguments]:
        arguments: list[Arguments] = [_copy(self._first, self._states, self._last), *self._draft(0, drafts, head)]
        for depth in range(1, len(drafts)):
            arguments += [*self._following.arguments, _copy(self._following, self._states, None)]
            arguments += self._draft(depth, drafts, head)
        return [_on(each, self._step) for each in arguments]

    def _draft(self, depth: int, drafts: _Ints, head: GreedyHead | SampledHead) -> list[Arguments]:
        take = TakeDrafts(
            peaks=head.peaks.ctypes.data,
            chosen=head.token_ids.ctypes.data,
            next=ctypes.addressof(self._step),
            counts=self._counts.ctypes.data,
            depth=depth,
            drafts=drafts[depth].ctypes.data,
            block_size=self._block_size,
            slots=self._drafting_slots.ctypes.data,
            by=_sampling_of(head),
            ahead=self._token_offset,
        )
        # `next` holds the position of the coming entry for the first draft, and of the previous entry afterwards.
        return [*_choice(head, self._drafting_slots, self._token_offset + (depth > 0)), take]


class _RoundMemory:
    """The memory of successive rounds: see `struct first_round` and `struct next_round`."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self.positions, self.counts, self.row_of, self.limits, self.num_accepted = np.zeros(
            (5, max_rows), dtype=np.int64
        )
        self.drafts = np.zeros(max_tokens, dtype=np.int64)
        self.accepted = np.zeros((max_rows, MOST_ROUNDS * _MOST_ACCEPTED), dtype=np.int64)
        self.counted = np.zeros((MOST_ROUNDS, 2, max_rows), dtype=np.int64)
        self.number, self.continues = np.zeros((2, 1), dtype=np.int64)
        self.buffers = (Step * 2)()
        self._first_rows = np.arange(max_rows)
        self._of_tokens = np.zeros((2, 3, max_tokens), dtype=np.int64)
        self._of_rows = np.zeros((2, 2, max_rows + 1), dtype=np.int32)
        self._tables = np.zeros((2, max_rows, 0), dtype=np.int32)
        for buffer, tokens, rows in zip(self.buffers, self._of_tokens, self._of_rows, strict=True):
            buffer.input_ids, buffer.positions, buffer.slots = (each.ctypes.data for each in tokens)
            buffer.query_starts, buffer.seq_lens = (each.ctypes.data for each in rows)

    def make_tables(self, width: int) -> None:
        """Allocate block tables of `width` blocks."""
        self._tables = np.zeros((2, len(self.row_of), width), dtype=np.int32)
        for buffer, table in zip(self.buffers, self._tables, strict=True):
            buffer.block_tables, buffer.max_blocks = table.ctypes.data, width

    def begin(self, rows: VerifyingRows, limits: list[int] | None) -> None:
        """Prepare the first round. `limits`: None if there is only one."""
        num_rows = len(rows.slots)
        self.positions[:num_rows], self.counts[:num_rows] = rows.positions, rows.num_drafts
        self.drafts[: len(rows.drafts)] = rows.drafts
        self.row_of[:num_rows] = self._first_rows[:num_rows]
        self.limits[:num_rows] = 0 if limits is None else limits
        self.num_accepted[:num_rows] = self.number[0] = 0
        self.counted.fill(0)


def _address(array: _Ints | None) -> int | None:
    return None if array is None else array.ctypes.data


def _sampling_of(head: GreedyHead | SampledHead) -> int | None:
    """Return the address of the parameters with which a head samples, or None for a greedy head."""
    return ctypes.addressof(head.by) if isinstance(head, SampledHead) else None


def _choice(head: GreedyHead | SampledHead, slots: _Ints, token_offset: int) -> tuple[Arguments, ...]:
    """Return a head's operators. The other arguments: see `SampledHead.choosing`."""
    return head.choosing(slots, token_offset) if isinstance(head, SampledHead) else head.arguments


def _copy(program: Program, to: torch.Tensor, sources: _Ints | None) -> CopyRows:
    """Copy rows of a pass's output to the first rows of `to`: the first ones, or those at `sources`."""
    output = program.output
    stride, row_bytes = output.stride(0) * output.itemsize, output.shape[1] * output.itemsize
    rows = None if sources is None else sources.ctypes.data
    return CopyRows(output.data_ptr(), stride, None, to.data_ptr(), row_bytes, rows)


def _on(arguments: Arguments, step: Step) -> OnStep:
    made = OnStep(arguments.kind, ctypes.addressof(arguments), ctypes.addressof(step))
    made.kept = arguments, step
    return made
