"""How the process of a rank hears of steps: through shared memory, or over TCP. Used by `rank_process`."""

from typing import Protocol

from engine.worker.rank_messages import SharedMemory, StepAddress
from engine.worker.step_ends import StepEnds
from engine.worker.step_ring import StepRing


class ToldSteps(Protocol):
    """A rank's end of what tells it of steps."""

    def read(self) -> bytes:
        """The next message, once there is one."""

    def tell(self, failure: str = "") -> None:
        """This rank has ended the step; `failure` says why it could not compute it."""


def open_steps(steps: SharedMemory | StepAddress, rank: int, size: int) -> ToldSteps:
    """The end of that one of so many ranks."""
    if isinstance(steps, SharedMemory):
        return _SharedSteps(steps, rank, size)
    from engine.worker.step_socket import RankSocket

    return RankSocket(steps, rank)


class _SharedSteps:
    def __init__(self, shared: SharedMemory, rank: int, size: int) -> None:
        others = size - 1
        self._index = rank - 1
        self._ring, self._ends = StepRing(shared.ring, others), StepEnds(shared.ends, others)

    def read(self) -> bytes:
        return self._ring.read(self._index)

    def tell(self, failure: str = "") -> None:
        self._ends.tell(self._index, failure)
