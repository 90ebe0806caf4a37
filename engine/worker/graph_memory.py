"""`GraphMemory`: whether one more graph leaves steps the memory that they need. Asked by the graph runner.

All graphs share one pool of memory. The largest, which is captured first, fills it with what its pass takes; a smaller
one finds that there, and takes little more: as much as the one before it did.
"""

from engine.worker.memory import DeviceMemory, gib

_MARGIN = 256 << 20
"""Bytes kept beside the largest step's: for what is left between allocations, and for libraries that set up late."""


class GraphMemory:
    """Made while no step is under way, before the steps of the start, the largest of which shows what steps take."""

    def __init__(self, memory: DeviceMemory | None) -> None:
        """`memory`: of the device; None where graphs take none of their own."""
        self._memory = memory
        self._of_steps: int | None = None
        self._at_rest = self._free = self._in_use = 0
        """The last two: before the pass that is looked at."""
        self._num_graphs = self._free_before_last = 0
        """The second: before the last graph was captured."""
        if memory is not None:
            memory.reset_peak()
            self._at_rest = memory.in_use()

    def begin(self) -> None:
        """The pass of a graph is about to be run as it is, which shows what it takes."""
        memory = self._memory
        if memory is None:
            return
        if self._of_steps is None:
            self._of_steps = memory.peak() - self._at_rest
        memory.reset_peak()
        self._free, self._in_use = memory.free(), memory.in_use()

    def shortage(self) -> str | None:
        """Why a graph of the pass that was run is not to be captured, in words; None: there is room."""
        memory = self._memory
        if memory is None or self._of_steps is None:
            return None
        needed = 0
        if self._num_graphs == 0:
            needed = memory.peak() - self._in_use
        elif self._num_graphs > 1:
            needed = max(0, self._free_before_last - self._free)
        kept = self._of_steps + _MARGIN
        if needed + kept <= self._free:
            return None
        return f"it may take {gib(needed)}, and of {gib(self._free)} that are free steps need {gib(kept)}"

    def note_graph(self) -> None:
        """The graph was captured."""
        self._num_graphs += 1
        self._free_before_last = self._free
