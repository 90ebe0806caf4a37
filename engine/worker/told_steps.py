"""How the process of a rank hears of steps: through shared memory, or over TCP. Used by `rank_process`."""

from typing import Protocol

from engine.worker.rank_messages import RankLaunch, SharedMemory
from engine.worker.step_ends import StepEnds
from engine.worker.step_ring import StepRing


class ToldSteps(Protocol):
    """A rank's end of what tells it of steps."""

    def read(self) -> bytes:
        """The next message, once there is one."""

    def tell(self, failure: str = "") -> None:
        """This rank has ended the step; `failure` says why it could not compute it."""


def open_steps(launch: RankLaunch) -> ToldSteps:
    """This rank's end."""
    if isinstance(launch.steps, SharedMemory):
        return _SharedSteps(launch.steps, launch)
    from engine.worker.step_socket import RankSocket

    return RankSocket(launch.steps, launch.rank)


class _SharedSteps:
    def __init__(self, shared: SharedMemory, launch: RankLaunch) -> None:
        others = launch.size - 1
        self._index = launch.rank - 1
        self._ring, self._ends = StepRing(shared.ring, others), StepEnds(shared.ends, others)

    def read(self) -> bytes:
        return self._ring.read(self._index)

    def tell(self, failure: str = "") -> None:
        self._ends.tell(self._index, failure)
