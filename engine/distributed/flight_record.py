"""`FlightRecord`: which sequences the running step computes, in memory that outlives the core.

Written by the engine core around each step, and around taking a sequence in; read by `Supervisor` when the core has
died: who was in the step, or was taken in, may be why.
"""

import mmap
import os
from array import array
from collections.abc import Sequence
from typing import Self

from engine.distributed.processes import anonymous_file

_WORD = 8


class FlightRecord:
    """Ids of one step's sequences in an anonymous file that two processes map. # int64: [count, id, id, ...]"""

    def __init__(self, descriptor: int) -> None:
        """Map the file of that descriptor, which stays the caller's to close."""
        self._words = memoryview(mmap.mmap(descriptor, 0)).cast("q")

    @staticmethod
    def create(max_sequences: int) -> int:
        """A descriptor of a new record for steps of at most so many sequences. No name of it is in any directory."""
        return anonymous_file("kaon-flight-record", (1 + max_sequences) * _WORD)

    @classmethod
    def of_its_own(cls, max_sequences: int) -> Self:
        """A record that no other process reads."""
        descriptor = cls.create(max_sequences)
        try:
            return cls(descriptor)
        finally:
            os.close(descriptor)

    def begin(self, seq_ids: Sequence[int]) -> None:
        """A step of these sequences starts, or one is taken in."""
        self._words[1 : 1 + len(seq_ids)] = memoryview(array("q", seq_ids))
        self._words[0] = len(seq_ids)

    def end(self) -> None:
        """That has come to its end."""
        self._words[0] = 0

    def read(self) -> list[int]:
        """The sequences of the step that runs, or that never ended; none between steps."""
        return self._words[1 : 1 + self._words[0]].tolist()
