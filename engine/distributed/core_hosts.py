"""`CoreHosts`: the other hosts that run engine cores, as the front end sees them. Owned by `CoreManager`.

Hosts join at `master_port`, and the core of replica r calls at the r-th port behind it, so that what it hears and says
does not pass through its host's agent.
"""

import itertools
import logging
import math
import time
import uuid
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from threading import Event, Thread
from typing import Any, NamedTuple

import zmq

from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.distributed.cluster import ClusterKeys, CommonGround, CurvePair, ReplicaPlace, deal_out, read_cluster_key
from engine.distributed.curve import Doorkeeper, endpoint, listen, resolve
from engine.distributed.host_messages import CoreAddress, LaunchCore
from engine.distributed.host_resources import HostShare
from engine.distributed.host_router import HostRouter
from engine.distributed.ray_cluster import Asked, RayCluster
from engine.distributed.remote_core import CorePlace, RemoteCore

_log = logging.getLogger(__name__)

_LARGEST_BYTES = 1 << 30
"""Of a message of a core: any that there is, but a stranger's claim of more makes nobody wait for it."""


class CoreHosts:
    """The hosts of those replicas that are not on node 0. All calls come from one thread; one of its own talks."""

    def __init__(self, config: Config, keys: ClusterKeys, address: str, places: Sequence[ReplicaPlace]) -> None:
        """Listen for the hosts at `address`, and return at once. `places`: by replica.

        Raises `ValueError`, a sentence, for an address that is none and a port that is taken.
        """
        self.places = places
        self._config = config
        self._numbers = itertools.count()
        self._pair = CurvePair.new()
        self._keys: dict[int, bytes] = {}
        """By replica the public key of its last core."""
        self._begun: set[int] = set()
        host, port = resolve(address), config.parallel_config.master_port
        self.joining = endpoint(host, port)
        self._cores: dict[int, CorePlace] = {}
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with ExitStack() as undo:
            undo.callback(context.destroy)
            self._doorkeeper = Doorkeeper(context)
            undo.callback(self._doorkeeper.close)
            self._doorkeeper.admit(keys.host.public)
            try:
                for replica, place in enumerate(places):
                    if place.node:
                        calling = endpoint(host, port + replica)
                        # Prompts and log probabilities may be of any length.
                        socket = listen(context, zmq.ROUTER, calling, self._pair, longest=_LARGEST_BYTES)
                        self._cores[replica] = CorePlace(place.node, self.joining, calling, socket)
                nodes = sorted({core.node for core in self._cores.values()})
                self._router = HostRouter(
                    context,
                    self.joining,
                    keys.core,
                    ground=None,
                    nodes={node: [] for node in nodes},
                    timeout=config.parallel_config.rank_start_timeout,
                )
            except OSError as error:
                raise ValueError(str(error)) from error
            undo.callback(self._router.close)
            self._end = weakref.finalize(self, undo.pop_all().close)
        # The checkpoint may have to be downloaded.
        Thread(target=_find_ground, args=(config, self._router), name="ground", daemon=True).start()

    @classmethod
    def of(cls, config: Config) -> "CoreHosts":
        """The other hosts that `config` speaks of. Raises `ValueError`, a sentence, also for a missing key."""
        parallel = config.parallel_config
        key = read_cluster_key(parallel.cluster_key_file, parallel.master_addr)
        places = deal_out(parallel.data_parallel_size, parallel.nnodes)
        return cls(config, ClusterKeys.of(key), parallel.master_addr, places)

    def runs(self, replica: int) -> bool:
        """Whether that replica is another host's."""
        return replica in self._cores

    def core(self, replica: int, name: str, num_kvcache_blocks: int | None) -> RemoteCore:
        """A new core of a replica that is another host's, to be started. `name` is for sentences."""
        place = self._cores[replica]
        pair = CurvePair.new()
        self._doorkeeper.dismiss(self._keys.pop(replica, b""))
        self._doorkeeper.admit(pair.public)
        self._keys[replica] = pair.public
        is_first = replica not in self._begun
        self._begun.add(replica)
        launch = LaunchCore(
            core=next(self._numbers),
            share=HostShare(replica, self.places[replica].place, self.places[replica].places),
            num_kvcache_blocks=num_kvcache_blocks,
            is_first=is_first,
            front_end=CoreAddress(place.calling, uuid.uuid4().hex, self._pair.public, *pair),
        )
        timeout = self._config.parallel_config.rank_start_timeout
        core = RemoteCore(launch, place, name, time.monotonic() + timeout if is_first else math.inf)
        self._router.add(core)
        return core

    def part(self, why: str) -> None:
        """There will be no other core: have the hosts end as well. `why` is "" at an orderly end."""
        self._router.part(why)

    def close(self) -> None:
        """End all connections; the second time, nothing."""
        self._end()


def _find_ground(config: Config, router: HostRouter) -> None:
    """Tell the router what hosts must have in common with this one."""
    try:
        router.compare_with(CommonGround.of(config, resolve_checkpoint(config.model)))
    except (OSError, ValueError) as error:
        # The cores of this host end for the same reason, and all with them.
        _log.debug("no host can join: %s", error)


# [ray_cores] `RayCores`: the replicas behind the first as actors of a Ray cluster that runs already, one each.
#
# An actor is a host of `CoreHosts` with one replica, all ranks of which are at its place. One that ends is followed
# by another, wherever Ray has moved its place.

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
