"""`StepRing`: how rank 0 tells the other ranks of each step: written once into memory that all of them map.

A rank with nothing to do sleeps. The memory is an anonymous file, passed on by its descriptor: it has no name, and
nothing is left of it when its processes are gone.
"""

import ctypes
import mmap
import struct
from typing import Self

from engine.anonymous_file import anonymous_file
from engine.worker.semaphore import Semaphore

SLOTS = 8
SLOT_BYTES = 64 << 10
"""Of a message; longer ones go piece by piece."""
_HEADER = struct.Struct("qq")
"""Bytes of this piece, and bytes of the message behind it."""
_SLOT = Semaphore.BYTES + SLOT_BYTES
_PER_READER = 2
"""Semaphores: pieces that it may read, and slots that it has left."""


class StepRing:
    """Messages from one writer to every reader, in order."""

    def __init__(self, descriptor: int, num_readers: int) -> None:
        """Map the file of that descriptor, which stays the caller's to close."""
        self._memory = mmap.mmap(descriptor, _num_bytes(num_readers))
        self._view = memoryview(self._memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        semaphores = [Semaphore(address + at * Semaphore.BYTES) for at in range(_PER_READER * num_readers)]
        self._filled, self._free = semaphores[:num_readers], semaphores[num_readers:]
        self._slots = len(semaphores) * Semaphore.BYTES
        self._next = 0

    @classmethod
    def create(cls, num_readers: int) -> tuple[int, Self]:
        """A new ring, and the descriptor that readers map it by."""
        descriptor = anonymous_file("kaon-steps", _num_bytes(num_readers))
        ring = cls(descriptor, num_readers)
        for filled, free in zip(ring._filled, ring._free, strict=True):
            filled.initialise(0)
            free.initialise(SLOTS)
        return descriptor, ring

    def write(self, message: bytes) -> None:
        """Give every reader a message. Blocks while one of them has all slots still to read."""
        left = len(message)
        while True:
            begin = len(message) - left
            piece = message if left <= SLOT_BYTES and not begin else message[begin : begin + SLOT_BYTES]
            left -= len(piece)
            for free in self._free:
                free.wait()
            at = self._take_slot()
            _HEADER.pack_into(self._view, at, len(piece), left)
            self._view[at + Semaphore.BYTES : at + Semaphore.BYTES + len(piece)] = piece
            for filled in self._filled:
                filled.post()
            if left == 0:
                return

    def read(self, reader: int) -> bytes:
        """The next message, once there is one. Each reader is one thread."""
        pieces = []
        while True:
            self._filled[reader].wait()
            at = self._take_slot()
            size, left = _HEADER.unpack_from(self._view, at)
            pieces.append(bytes(self._view[at + Semaphore.BYTES : at + Semaphore.BYTES + size]))
            self._free[reader].post()
            if left == 0:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _take_slot(self) -> int:
        at = self._slots + self._next * _SLOT
        self._next = (self._next + 1) % SLOTS
        return at


def _num_bytes(num_readers: int) -> int:
    return _PER_READER * num_readers * Semaphore.BYTES + SLOTS * _SLOT
