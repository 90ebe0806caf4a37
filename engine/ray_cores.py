"""`RayCores`: the replicas behind the first as actors of a Ray cluster that runs already, one each.

An actor is a host of `CoreHosts` with one replica, all ranks of which are at its place. One that ends is followed by
another, wherever Ray has moved its place.
"""

import logging
import time
import weakref
from threading import Event, Thread
from typing import Any, NamedTuple

from engine.config import Config
from engine.core_hosts import CoreHosts
from engine.replica_places import ReplicaPlace
from engine.worker.host_router import HostRouter
from engine.worker.ray_cluster import Asked, RayCluster

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_AGAIN_SECONDS = 1.0, 30.0
"""Until another actor is started: after the first that ended, and, doubled each time, at most.

One that ran for longer than the longest has ended that row."""


class RayCores(CoreHosts):
    """As `CoreHosts`."""

    def __init__(self, config: Config, cluster: RayCluster) -> None:
        """Start the actors, and return. Raises `ValueError` as `CoreHosts` does."""
        size = config.parallel_config.data_parallel_size
        places = [ReplicaPlace(replica, *cluster.share(replica)) for replica in range(size)]
        super().__init__(config, cluster.keys, cluster.address, places)
        closing = Event()
        keeper = Thread(
            target=_keep, args=(cluster, range(1, size), self.joining, self._router, closing), name="ray", daemon=True
        )
        keeper.start()
        self._leave = weakref.finalize(self, _leave, cluster, closing, keeper)

    @classmethod
    def of(cls, config: Config) -> "RayCores":
        """Take places in the cluster and start the actors. Raises `ValueError`, a sentence, where that cannot be."""
        parallel = config.parallel_config
        cluster = RayCluster(config, Asked(parallel.data_parallel_size, parallel.tensor_parallel_size, "replicas"))
        try:
            return cls(config, cluster)
        except BaseException:
            cluster.close()
            raise

    def close(self) -> None:
        """See `CoreHosts`."""
        super().close()
        self._leave()


def _keep(cluster: RayCluster, replicas: range, joining: str, router: HostRouter, closing: Event) -> None:
    """Keep an actor at each place, until `closing`."""
    first, longest = _AGAIN_SECONDS
    waits = dict.fromkeys(replicas, first)
    # Of the replicas without an actor.
    start_at = dict.fromkeys(replicas, time.monotonic())
    running: dict[Any, _Running] = {}
    while not closing.is_set():
        now = time.monotonic()
        for replica in [replica for replica, at in start_at.items() if at <= now]:
            del start_at[replica]
            running[cluster.serve(replica, joining)] = _Running(replica, now)
        seconds = min([_LOOK_SECONDS, *(at - now for at in start_at.values())])
        if not running:
            closing.wait(seconds)
            continue
        ended, _ = cluster.wait(list(running), seconds)
        for served in ended:
            replica, since = running.pop(served)
            now = time.monotonic()
            wait = first if now - since > longest else waits[replica]
            start_at[replica] = now + wait
            waits[replica] = min(2 * wait, longest)
            why = cluster.failure(served)
            if why is not None:
                _log.warning("the Ray actor of replica %d ended (%s); another is started in %g s", replica, why, wait)
                router.turn_away(replica, why)


class _Running(NamedTuple):
    """An actor."""

    replica: int
    since: float
    """When it was asked for, on the monotonic clock."""


def _leave(cluster: RayCluster, closing: Event, keeper: Thread) -> None:
    closing.set()
    keeper.join()
    cluster.close()
