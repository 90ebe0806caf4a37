"""`StepEnds`: each rank's word that it has ended a step, and what went wrong if anything did, in shared memory.

Rank 0 takes them all before the next step begins. An anonymous file, as the step ring is.
"""

import ctypes
import mmap
import struct
from typing import Self

from engine.anonymous_file import anonymous_file
from engine.worker.semaphore import Semaphore

_LENGTH = struct.Struct("q")
_TEXT_BYTES = (16 << 10) - Semaphore.BYTES - _LENGTH.size
"""Of a failure: a sentence and the end of its traceback."""
_ENTRY = Semaphore.BYTES + _LENGTH.size + _TEXT_BYTES


class StepEnds:
    """One entry a rank behind the first, numbered from 0."""

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        """Map the file of that descriptor, which stays the caller's to close."""
        self._memory = mmap.mmap(descriptor, num_ranks * _ENTRY)
        self._view = memoryview(self._memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._ended = [Semaphore(address + rank * _ENTRY) for rank in range(num_ranks)]

    @classmethod
    def create(cls, num_ranks: int) -> tuple[int, Self]:
        """New ones, and the descriptor that the ranks map them by."""
        descriptor = anonymous_file("kaon-step-ends", num_ranks * _ENTRY)
        ends = cls(descriptor, num_ranks)
        for ended in ends._ended:
            ended.initialise(0)
        return descriptor, ends

    def tell(self, rank: int, failure: str = "") -> None:
        """A rank has ended the step; `failure` says why it could not compute it."""
        text = shortened(failure.encode(), _TEXT_BYTES)
        begin = rank * _ENTRY + Semaphore.BYTES
        _LENGTH.pack_into(self._view, begin, len(text))
        self._view[begin + _LENGTH.size : begin + _LENGTH.size + len(text)] = text
        self._ended[rank].post()

    def take(self, rank: int) -> str:
        """Wait until a rank has ended the step; its failure, "" for none."""
        self._ended[rank].wait()
        return self._failure(rank)

    def take_within(self, rank: int, seconds: float) -> str | None:
        """As `take`; None where the rank has not ended the step after so many seconds."""
        return self._failure(rank) if self._ended[rank].wait_for(seconds) else None

    def _failure(self, rank: int) -> str:
        begin = rank * _ENTRY + Semaphore.BYTES
        (length,) = _LENGTH.unpack_from(self._view, begin)
        if length == 0:
            return ""
        text = bytes(self._view[begin + _LENGTH.size : begin + _LENGTH.size + length])
        return text.decode(errors="replace")


def shortened(text: bytes, most: int) -> bytes:
    """A failure in at most so many bytes: the sentence comes first, what raised comes last."""
    half = most // 2 - 8
    return text if len(text) <= most else text[:half] + b"\n...\n" + text[-half:]
