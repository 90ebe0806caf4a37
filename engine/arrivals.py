"""`Arrivals`: how many meetings each replica in lockstep has come to, in memory that all of them and their parent map.

Written by the ranks that have the same place in their replicas, by exchange.c or here; read by `Seats` when replicas
have stalled: those that came to fewer are who the others wait for. No torch here.
"""

import mmap
import struct

from engine.anonymous_file import anonymous_file

_LINE = 64
"""Bytes of a replica's part; the first is nobody's. As in exchange.c."""
_NUMBER = struct.Struct("=q")


class Arrivals:
    """Of the replicas' ranks of one place."""

    def __init__(self, descriptor: int, num_replicas: int) -> None:
        """Map the file of that descriptor, which stays the caller's to close."""
        self._num_replicas = num_replicas
        self._memory = mmap.mmap(descriptor, _LINE * (1 + num_replicas))

    @staticmethod
    def create(num_replicas: int) -> int:
        """A descriptor of a file that no directory names, long enough for this. Ranks share more in it, behind."""
        return anonymous_file("kaon-replicas", _LINE * (1 + num_replicas))

    def note(self, replica: int) -> None:
        """It has come to a further one."""
        (number,) = _NUMBER.unpack_from(self._memory, _LINE * (1 + replica))
        _NUMBER.pack_into(self._memory, _LINE * (1 + replica), number + 1)

    def late(self) -> set[int]:
        """The replicas that others wait for."""
        numbers = [_NUMBER.unpack_from(self._memory, _LINE * (1 + each))[0] for each in range(self._num_replicas)]
        return {replica for replica, number in enumerate(numbers) if number < max(numbers)}

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()
