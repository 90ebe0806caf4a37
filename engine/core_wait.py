"""`CoreWait`: blocks until something happens to one of several engine cores. For callers without an event loop."""

import math
import time
from collections.abc import Sequence

import zmq

from engine.core_link import CoreLink
from engine.supervisor import Supervisor


class CoreWait:
    """Over the supervisors of all replicas; their cores come and go."""

    def __init__(self, supervisors: Sequence[Supervisor]) -> None:
        self._supervisors = supervisors
        self._links: list[CoreLink] = []
        self._poller = zmq.Poller()
        """Of `_links`: those that there were last time."""

    def wait(self, deadline: float | None) -> bool:
        """Block until something happened and take it in; False when `deadline` came first, on the monotonic clock."""
        due = min(each.next_look for each in self._supervisors)
        if deadline is not None:
            due = min(due, deadline)
        # Without a time to look, something will be heard.
        timeout = None if due == math.inf else max(0.0, due - time.monotonic())
        links = [each.link for each in self._supervisors if each.link is not None]
        if links != self._links:
            self._links, self._poller = links, zmq.Poller()
            for link in links:
                link.register(self._poller)
        if links:
            self._poller.poll(None if timeout is None else round(timeout * 1e3))
        else:
            assert timeout is not None
            time.sleep(timeout)
        for supervisor in self._supervisors:
            supervisor.look()
        return deadline is None or time.monotonic() < deadline
