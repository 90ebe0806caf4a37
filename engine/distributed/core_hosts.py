"""`CoreHosts`: the front end's connections to other hosts that run engine cores. Owned by `CoreManager`.

Hosts join at `master_port`. The core of replica r connects to port `master_port` + r, so that its requests and outputs
do not pass through its host's agent.
"""

import itertools
import logging
import math
import time
import uuid
import weakref
from contextlib import ExitStack
from threading import Thread

import zmq

from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.distributed.cluster import Cluster, CurvePair, HostAgreement
from engine.distributed.curve import CurveAuthenticator, bind_curve, endpoint, resolve
from engine.distributed.host_messages import CoreAddress, LaunchCore
from engine.distributed.host_resources import HostShare
from engine.distributed.host_router import HostRouter
from engine.distributed.lockstep import LockstepMember
from engine.distributed.remote_core import RemoteCore, ReplicaEndpoint

_log = logging.getLogger(__name__)

_LARGEST_BYTES = 1 << 30
"""Largest message of a core in bytes: more than any real one, but bounded, since any peer may claim any length."""


class CoreHosts:
    """The hosts of the replicas that are not on node 0. All calls come from one thread; the router runs in another."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        """Listen for the hosts of `cluster`, start them, and return at once. Takes ownership of `cluster`.

        Raises `ValueError` with a sentence for an invalid address or a port that is in use.
        """
        assert cluster.keys is not None
        self.positions = cluster.positions
        """The position of each replica."""
        self._config = config
        self._numbers = itertools.count()
        self._pair = CurvePair.new()
        self._keys: dict[int, bytes] = {}
        """Public key of the latest core of each replica."""
        self._begun: set[int] = set()
        self._cores: dict[int, ReplicaEndpoint] = {}
        with ExitStack() as undo:
            undo.callback(cluster.close)
            host, port = resolve(cluster.address), config.parallel_config.master_port
            self.joining = endpoint(host, port)
            self.address = host
            """IP address of this host for the others."""
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(context.destroy)
            self._authenticator = CurveAuthenticator(context)
            undo.callback(self._authenticator.close)
            self._authenticator.allow(cluster.keys.host.public)
            try:
                for replica, position in enumerate(cluster.positions):
                    if position.node:
                        calling = endpoint(host, port + replica)
                        # Prompts and log probabilities may be of any length.
                        socket = bind_curve(context, zmq.ROUTER, calling, self._pair, longest=_LARGEST_BYTES)
                        self._cores[replica] = ReplicaEndpoint(position.node, self.joining, calling, socket)
                nodes = sorted({core.node for core in self._cores.values()})
                self._router = HostRouter(
                    context,
                    self.joining,
                    cluster.keys.core,
                    agreement=None,
                    nodes={node: [] for node in nodes},
                    timeout=config.parallel_config.rank_start_timeout,
                )
            except OSError as error:
                raise ValueError(str(error)) from error
            undo.callback(self._router.close)
            cluster.start(self.joining, self._router.turn_away)
            self._end = weakref.finalize(self, undo.pop_all().close)
        # The checkpoint may have to be downloaded.
        Thread(target=_find_agreement, args=(config, self._router), name="agreement", daemon=True).start()

    @classmethod
    def of(cls, config: Config) -> "CoreHosts":
        """Create it for the other hosts of `config`.

        Raises `ValueError` with a sentence, also for a missing key, or a Ray cluster without room.
        """
        parallel = config.parallel_config
        size = parallel.data_parallel_size
        if parallel.distributed_executor_backend == "ray":
            from engine.distributed.ray_cluster import RayCluster

            ranks = parallel.tensor_parallel_size
            return cls(config, RayCluster(config, size, ranks_each=ranks, title="replicas", restarts=True))
        return cls(config, Cluster.of_hosts(parallel, size))

    def runs(self, replica: int) -> bool:
        """Return whether another host runs the replica."""
        return replica in self._cores

    def core(
        self,
        replica: int,
        name: str,
        num_kvcache_blocks: int | None,
        lockstep_member: LockstepMember | None = None,
    ) -> RemoteCore:
        """Create a core, not yet started, of a replica on another host. `name` is its name in messages."""
        endpoints = self._cores[replica]
        pair = CurvePair.new()
        self._authenticator.revoke(self._keys.pop(replica, b""))
        self._authenticator.allow(pair.public)
        self._keys[replica] = pair.public
        is_first = replica not in self._begun
        self._begun.add(replica)
        launch = LaunchCore(
            core=next(self._numbers),
            share=HostShare(replica, *self.positions[replica][1:]),
            num_kvcache_blocks=num_kvcache_blocks,
            is_first=is_first,
            front_end=CoreAddress(endpoints.calling, uuid.uuid4().hex, self._pair.public, *pair),
            lockstep_member=lockstep_member,
        )
        timeout = self._config.parallel_config.rank_start_timeout
        core = RemoteCore(launch, endpoints, name, time.monotonic() + timeout if is_first else math.inf)
        self._router.add(core)
        return core

    def announce_shutdown(self, why: str) -> None:
        """Notify the hosts that no other core will follow, so that they end. `why` is "" at an orderly end."""
        self._router.announce_shutdown(why)

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._end()


def _find_agreement(config: Config, router: HostRouter) -> None:
    """Compute the agreement that other hosts are compared with, and pass it to the router."""
    try:
        router.compare_with(HostAgreement.of(config, resolve_checkpoint(config.model)))
    except (OSError, ValueError) as error:
        # The cores of this host fail for the same reason, which ends the server.
        _log.debug("no host can join: %s", error)
