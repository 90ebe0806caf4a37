"""`DraftChain`: several greedy drafts of each row as one call of the operators, without Python between the passes.

The first pass runs on the entries that a step has added, the passes after it on one entry a row. Between them stand the
operators that choose a token and make it the next pass's:

    first pass -> last entry of each row -> head -> drafts -> next pass -> head -> drafts -> ...
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from models.ops.cpu.program import Program
from models.ops.cpu.runtime import Library, Operations
from models.ops.cpu.sampling import GreedyHead
from models.ops.cpu.structures import Arguments, CopyRows, OnStep, Step, TakeDrafts

_Ints = npt.NDArray[np.int64]


class DraftChain:
    """A drafter's recorded passes and its head, over memory of their own for the rows that draft."""

    def __init__(
        self,
        library: Library,
        first: Program,
        following: Program,
        head: GreedyHead,
        *,
        block_size: int,
    ) -> None:
        """`first` computes a step's entries, and `following` one entry of each row of what a pass has returned."""
        self._library, self._first, self._following, self._head = library, first, following, head
        self._block_size = block_size
        self.max_rows = max_rows = head.max_rows
        self._ids, self._positions, self._slots, self._last, self._counts = np.zeros((5, max_rows), dtype=np.int64)
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
            # A language model of its own: only its head reads what a pass returns.
            self._states = torch.empty(max_rows, output.shape[1], dtype=output.dtype)
        else:
            self._states = following.states
        self._chains: dict[int, tuple[Operations, npt.NDArray[np.int64]]] = {}
        """By their number of drafts: the operators, and where the drafts go."""

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: Step,
        states: torch.Tensor | None,
        *,
        last: _Ints,
        next_positions: _Ints,
        counts: _Ints,
        block_tables: npt.NDArray[np.int32],
    ) -> _Ints:
        """`counts` drafts of each row, valid until the next call; -1 where there was none. # [most, rows]

        The first four as of `Program.run`. Of the rows that draft, at most `max_rows`, in descending order of
        `counts` [rows]: `last` is the index of the last entry of the first pass, `next_positions` the position of
        the entry after it, and `block_tables` [rows, blocks] reach to the last entry.
        """
        num_rows, most = len(counts), int(counts[0])
        self._last[:num_rows], self._positions[:num_rows], self._counts[:num_rows] = last, next_positions, counts
        own = self._step
        own.num_tokens = own.num_rows = num_rows
        own.block_tables, own.max_blocks = block_tables.ctypes.data, block_tables.shape[1]
        self._first.give(token_ids, positions, step, states)
        self._head.read_from(self._states)
        operations, drafts = self._chains.get(most) or self._chain(most)
        self._library.run(operations, step)
        return drafts[:, :num_rows]

    def _chain(self, most: int) -> tuple[Operations, _Ints]:
        drafts = np.zeros((most, self.max_rows), dtype=np.int64)
        arguments: list[Arguments] = [*self._first.arguments, *self._on_rows(self._rows(self._first, self._last))]
        arguments += self._on_rows(self._choice(0, drafts))
        for depth in range(1, most):
            arguments += self._on_rows(self._following.arguments)
            arguments += self._on_rows(self._rows(self._following, None))
            arguments += self._on_rows(self._choice(depth, drafts))
        self._chains[most] = Operations(arguments), drafts
        return self._chains[most]

    def _rows(self, program: Program, sources: _Ints | None) -> list[Arguments]:
        """Copy what a pass has returned for the rows to where the head and the next pass read it."""
        output, size = program.output, program.output.itemsize
        row_bytes = output.shape[1] * size
        places = None if sources is None else sources.ctypes.data
        return [CopyRows(output.data_ptr(), output.stride(0) * size, None, self._states.data_ptr(), row_bytes, places)]

    def _choice(self, depth: int, drafts: _Ints) -> list[Arguments]:
        take = TakeDrafts(
            head=ctypes.addressof(self._head.arguments[0]),
            next=ctypes.addressof(self._step),
            counts=self._counts.ctypes.data,
            depth=depth,
            drafts=drafts[depth].ctypes.data,
            block_size=self._block_size,
        )
        return [*self._head.arguments, take]

    def _on_rows(self, arguments: Sequence[Arguments]) -> list[Arguments]:
        """The same operators on the step of the rows that draft."""
        return [_on(each, self._step) for each in arguments]


def _on(arguments: Arguments, step: Step) -> OnStep:
    made = OnStep(arguments.kind, ctypes.addressof(arguments), ctypes.addressof(step))
    made.kept = arguments, step
    return made
