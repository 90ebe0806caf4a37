"""`FullCollections`: when the API process and the engine core collect all garbage."""

import gc
import resource
import time
from collections.abc import Callable

_MOST_OBJECTS = 10_000
"""Objects that a full garbage collection visits in about 4 ms."""

_LEAST_GROWTH_BYTES, _GROWTH_SHARE = 256 * 2**20, 1 / 4
"""Growth of the process's memory after which a full garbage collection happens, however long it takes: in bytes, and
relative to the memory after the last one, so that few happen on the way to a large memory."""

_COUNTING_SHARE = 1 / 1000
"""Counting the objects of the oldest generation, 50 ns each, takes at most 1 / 1000 of the time."""


class FullCollections:
    """Lets full garbage collections happen only while they are short, instead of whenever the interpreter would.

    A full collection holds the interpreter's lock for 0.4 microseconds per object. In the API process, a waiting
    request has some 200 objects. In the engine core, next to sequences with many stop strings and bad words, a step
    waited 16 ms. The other collections visit only new objects and stay automatic. Requests, connections and sequences
    leave no reference cycles, so that they need no collection; should others leave some, the growth of memory limits
    what they hold, but not how many descriptors they keep open.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, resident: Callable[[], int] | None = None) -> None:
        """`resident` returns the bytes of the process's memory."""
        self._clock = clock
        self._resident = resident or _resident_bytes
        self._set_most_resident()
        self._check_at = 0.0
        young, middle, _ = gc.get_threshold()
        self._num_due = middle
        """Number of collections of the middle generation after which a full one is due, as in the interpreter."""
        gc.set_threshold(young, middle, 2**31 - 1)

    def collect_if_due(self) -> None:
        """Collect if a collection is due, and it is short or the memory has grown much."""
        if gc.get_count()[2] < self._num_due or (began := self._clock()) < self._check_at:
            return
        if len(gc.get_objects(2)) > _MOST_OBJECTS and self._resident() < self._most_resident:
            self._check_at = began + (self._clock() - began) / _COUNTING_SHARE
            return
        gc.collect()
        self._set_most_resident()

    def _set_most_resident(self) -> None:
        resident = self._resident()
        self._most_resident = resident + max(_LEAST_GROWTH_BYTES, int(_GROWTH_SHARE * resident))


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
