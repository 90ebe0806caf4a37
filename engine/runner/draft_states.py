"""`StoredStates`: the target's hidden states of entries that a drafter has not computed yet.

The latest states of each slot are in one buffer. In consecutive steps in which no row drafts, each step's states are
only copied, which is cheaper; they are moved to the buffer when a row drafts again.
"""

import ctypes
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.runner.draft_passes import Ints
from engine.runner.input_batch import StepInputs

_MAX_STORED = 8
"""The most states of a slot: more make drafts after a pause better, and take longer to compute."""


class Entries(NamedTuple):
    """Entries `[begins, ends)` of some slots. # each [rows]"""

    slots: Ints
    begins: Ints
    ends: Ints


class StoredStates:
    """The latest hidden states of each slot, each at its position modulo `most`."""

    def __init__(self, num_slots: int) -> None:
        self.most = _MAX_STORED
        """The most states of a slot; entries before these are skipped."""
        self._num_slots = num_slots
        self._buffer: torch.Tensor | None = None  # [num_slots * most, features]
        self._idle_steps: deque[tuple[Ints, Ints, torch.Tensor | npt.NDArray[np.uint8]]] = deque()
        """Slots, positions and states (from `_copy`) of idle steps, at most `most`."""

    @property
    def has_idle_steps(self) -> bool:
        """Whether states of idle steps are not in the buffer yet."""
        return bool(self._idle_steps)

    def store_idle_step(self, hidden: torch.Tensor, inputs: StepInputs) -> None:
        """Store the states of a step in which no row drafts and no drafts were verified. # [T, features]"""
        self._room(hidden)
        if len(self._idle_steps) == self.most:
            # An interposed step is not in the count of steps that the plan made, so one more may arrive.
            self._end_idle_step()
        slots = inputs.slots
        if len(hidden) == len(slots):
            self._idle_steps.append((slots, inputs.positions, _copy(hidden)))
            return
        counts = np.minimum(inputs.query_lens, self.most)
        stops = np.cumsum(counts)
        at = np.arange(int(stops[-1])) + np.repeat(np.cumsum(inputs.query_lens) - stops, counts)
        self._idle_steps.append((np.repeat(slots, counts), inputs.positions[at], _rows_of(hidden, at)))

    def end_idle_steps(self) -> None:
        """Move the states of idle steps to the buffer."""
        while self._idle_steps:
            self._end_idle_step()

    def drop_idle_steps(self) -> None:
        """Forget the states of idle steps."""
        self._idle_steps.clear()

    def _end_idle_step(self) -> None:
        slots, positions, states = self._idle_steps.popleft()
        buffer = self._buffer
        assert buffer is not None, "`store_idle_step` makes room"
        where = slots * self.most + positions % self.most
        if isinstance(states, torch.Tensor):
            _write_rows(buffer, where, states)
        else:
            buffer.view(torch.uint8).numpy()[where] = states.reshape(len(slots), -1)

    def _room(self, hidden: torch.Tensor) -> torch.Tensor:
        """The buffer, for states like these. # [T, features] -> [num_slots * most, features]"""
        if self._buffer is None:
            self._buffer = hidden.new_empty(self._num_slots * self.most, hidden.shape[1])
        return self._buffer

    def store(
        self, hidden: torch.Tensor, spans: tuple[Ints, Ints, Ints], rows: Ints, begins: Ints, ends: Ints
    ) -> None:
        """Store a step's states of some rows, at the last positions of `[begins, ends)` of each.

        `spans`: slot, number of tokens and end of each row of the step. # hidden [T, features], rows to ends [n]
        """
        if not len(rows):
            return
        slots, query_lens, seq_lens = spans
        begins = np.maximum(begins, ends - self.most)
        counts = ends - begins
        stops = np.cumsum(counts)
        positions = np.arange(int(stops[-1])) + np.repeat(ends - stops, counts)
        at = positions + np.repeat((np.cumsum(query_lens) - seq_lens)[rows], counts)
        where = np.repeat(slots[rows], counts) * self.most + positions % self.most
        _write_rows(self._room(hidden), where, _rows_of(hidden, at))

    def of_entries(
        self, entries: Entries, hidden: torch.Tensor, inputs: StepInputs, firsts: Ints, rows: Ints
    ) -> torch.Tensor:
        """The states of entries of some rows of a step that begins at `firsts`: the step's own, or stored ones.

        # hidden [T, features] -> [entries, features]
        """
        slots, begins, ends = entries
        counts = ends - begins
        stops = np.cumsum(counts)
        total = int(stops[-1])
        has_stored = bool((begins < firsts).any())
        if not has_stored and total == len(hidden):
            # Rows and positions ascend.
            return hidden
        positions = np.arange(total) + np.repeat(ends - stops, counts)
        # The state of position p lies as far before its row's end in the step as p is before the sequence's end.
        row_ends = np.cumsum(inputs.query_lens)[rows]
        at = positions + np.repeat(row_ends - inputs.seq_lens[rows], counts)
        if not has_stored:
            return _rows_of(hidden, at)
        is_stored = positions < np.repeat(firsts, counts)
        assert self._buffer is not None
        states = hidden.new_empty(total, hidden.shape[1])
        _write_rows(states, np.flatnonzero(~is_stored), _rows_of(hidden, at[~is_stored]))
        where = (np.repeat(slots, counts) * self.most + positions % self.most)[is_stored]
        _write_rows(states, np.flatnonzero(is_stored), _rows_of(self._buffer, where))
        return states


def _rows_of(states: torch.Tensor, rows: Ints) -> torch.Tensor:
    """A copy of the chosen rows. # [T, features], [rows] -> [rows, features]

    On a CPU, NumPy copies: torch would copy a prompt's states on its own threads, which then busy-wait on cores that
    the CPU operators use.
    """
    if states.device.type != "cpu":
        return states[torch.from_numpy(rows).to(states.device)]
    return torch.from_numpy(states.view(torch.uint8).numpy()[rows]).view(states.dtype)


def _copy(states: torch.Tensor) -> torch.Tensor | npt.NDArray[np.uint8]:
    """A copy of all rows; on a CPU, bytes that are copied without torch, see `_rows_of`. # [T, features]"""
    if states.device.type != "cpu" or not states.is_contiguous():
        return states.clone()
    copied = np.empty(states.numel() * states.itemsize, dtype=np.uint8)
    ctypes.memmove(copied.ctypes.data, states.data_ptr(), copied.nbytes)
    return copied


def _write_rows(to: torch.Tensor, rows: Ints, states: torch.Tensor) -> None:
    """Write states to some rows of `to`. # [R, features], [n], [n, features]"""
    if to.device.type != "cpu":
        to[torch.from_numpy(rows).to(to.device)] = states
    else:
        to.view(torch.uint8).numpy()[rows] = states.view(torch.uint8).numpy()
