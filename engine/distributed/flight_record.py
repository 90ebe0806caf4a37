"""`FlightRecord`: the ids of the running step's sequences, in memory that outlives the core.

The engine core writes it around each step, and around accepting a sequence. When the core has died, `Supervisor` reads
it: the sequences of that step, or the accepted one, may be the cause.
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
        """Map the file of `descriptor`, which the caller closes."""
        self._words = memoryview(mmap.mmap(descriptor, 0)).cast("q")

    @staticmethod
    def create(max_sequences: int) -> int:
        """Create an anonymous file for steps of at most `max_sequences`. Returns its descriptor."""
        return anonymous_file("kaon-flight-record", (1 + max_sequences) * _WORD)

    @classmethod
    def of_its_own(cls, max_sequences: int) -> Self:
        """Create a record that no other process reads."""
        descriptor = cls.create(max_sequences)
        try:
            return cls(descriptor)
        finally:
            os.close(descriptor)

    def begin(self, seq_ids: Sequence[int]) -> None:
        """Note that a step of these sequences begins, or that a sequence is being accepted."""
        self._words[1 : 1 + len(seq_ids)] = memoryview(array("q", seq_ids))
        self._words[0] = len(seq_ids)

    def end(self) -> None:
        """Note that the step has ended."""
        self._words[0] = 0

    def read(self) -> list[int]:
        """Return the ids in the running step, or in the step in which the core ended; none between steps."""
        return self._words[1 : 1 + self._words[0]].tolist()
