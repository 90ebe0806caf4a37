"""`Seats`: where engine cores that compute in lockstep find each other, and who belongs together. No torch here.

Owned by `CoreManager`. Each core is given a `Seat` when it is started. One that takes the place of another cannot
join the cores that were there: all begin a new round of seats, in a directory of their own.
"""

import contextlib
import os
import shutil
import tempfile
import weakref

import msgspec

from engine.arrivals import Arrivals


class Seat(msgspec.Struct, frozen=True):
    """A replica among those that compute in lockstep."""

    replica: int
    num_replicas: int
    directory: str
    """Private to the user; gone, if these replicas will not meet."""
    memory: tuple[int, ...] = ()
    """By rank, a descriptor of what it shares with those of its place in the other replicas: see `Arrivals`."""


class Seats:
    """Gives them out. That of a core that has ended stays empty, and the others of its round end by themselves."""

    def __init__(self, num_replicas: int, num_ranks: int = 1) -> None:
        """`num_ranks`: of each replica."""
        self._num_replicas, self._num_ranks = num_replicas, num_ranks
        self._directories: list[str] = []
        self._memory: list[int] = []
        self._seated: set[int] = set()
        self._remove = weakref.finalize(self, _remove, self._directories, self._memory)

    def give(self, replica: int) -> Seat:
        """For a core that is about to be started, with descriptors that it is to inherit.

        Raises `OSError` where no directory can be made.
        """
        if not self._directories or replica in self._seated:
            # Who still waits for the one that has ended sees by this that it will not come.
            _remove(self._directories, self._memory)
            self._seated.clear()
            self._directories.append(tempfile.mkdtemp(prefix="kaon-"))
            self._memory += [Arrivals.create(self._num_replicas) for _ in range(self._num_ranks)]
        self._seated.add(replica)
        return Seat(replica, self._num_replicas, self._directories[-1], tuple(self._memory))

    def is_held_up(self, replica: int) -> bool:
        """Whether it waits for others and none for it; or for its own end, as another of its round has ended."""
        if replica not in self._seated:
            return True
        late: set[int] = set()
        for descriptor in self._memory:
            arrivals = Arrivals(descriptor, self._num_replicas)
            late |= arrivals.late()
            arrivals.close()
        return bool(late) and replica not in late

    def close(self) -> None:
        """There will be no more cores."""
        self._remove()


def _remove(directories: list[str], memory: list[int]) -> None:
    while memory:
        os.close(memory.pop())
    while directories:
        directory = directories.pop()
        # At once, whoever is making a file in it.
        with contextlib.suppress(FileNotFoundError):
            os.rename(directory, f"{directory}.over")
        shutil.rmtree(f"{directory}.over", ignore_errors=True)
