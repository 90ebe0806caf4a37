"""`RemoteRanks`: the ranks behind the first on several hosts, told of steps over TCP.

Three ports, at which only this host listens: hosts join at `master_port`, steps are told at the next, and
torch.distributed meets at the one behind that.
"""

import logging
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import zmq

from engine.cluster_key import ClusterKeys, CurvePair, read_cluster_key
from engine.cluster_settings import CommonGround
from engine.config import Config
from engine.worker.control_groups import available_host_memory
from engine.worker.curve import Doorkeeper, endpoint, resolve, why_not
from engine.worker.host_router import HostRouter
from engine.worker.rank_messages import RankLaunch, StepAddress
from engine.worker.rank_places import EndTaker, RankError, RankLink, StepWriter
from engine.worker.rank_proc import RankProc
from engine.worker.remote_rank import RemoteRank
from engine.worker.shard import Shard
from engine.worker.step_socket import StepSocket

_log = logging.getLogger(__name__)

STEPS_PORT, STORE_PORT = 1, 2
"""Behind `master_port`."""
_NAME_SECONDS = 60.0
"""For this host's own name to have an address: caches keep for half a minute that it had none."""


class RankPlace(NamedTuple):
    """Where a rank runs."""

    node: int
    """Number of its host; 0 is the engine core's own."""
    local_rank: int
    """Among the ranks of its host."""
    local_size: int
    """How many those are."""


class RemoteRanks:
    """See `RankPlaces`."""

    def __init__(self, config: Config, path: Path) -> None:
        """Listen for the other hosts, start the ranks of this one, and return at once.

        Raises `ValueError`, a sentence, for a key that is missing and a port that is taken.
        """
        parallel = config.parallel_config
        per_node = parallel.tensor_parallel_size // parallel.nnodes
        key = read_cluster_key(parallel.cluster_key_file, parallel.master_addr)
        places = [RankPlace(*divmod(rank, per_node), per_node) for rank in range(parallel.tensor_parallel_size)]
        self._start(config, path, ClusterKeys.of(key), places, parallel.master_addr)
        _log.info("waiting for %d of %d hosts to join at %s", parallel.nnodes - 1, parallel.nnodes, self._joining)

    def _start(self, config: Config, path: Path, keys: ClusterKeys, places: Sequence[RankPlace], address: str) -> None:
        """`places`: by rank."""
        host, port = resolve(address, _NAME_SECONDS), config.parallel_config.master_port
        self._steps_port = f"port {port + STEPS_PORT} on {host}"
        size, here = len(places), places[0].local_size
        ground = CommonGround.of(config, path)
        own, theirs = CurvePair.new(), CurvePair.new()
        steps = StepAddress(endpoint(host, port + STEPS_PORT), own.public, theirs.public, theirs.secret)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.links: Sequence[RankLink] = []
        with ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            doorkeeper = Doorkeeper(self._context)
            undo.callback(doorkeeper.close)
            doorkeeper.admit(keys.host.public)
            doorkeeper.admit(theirs.public)
            self._joining = joining = endpoint(host, port)
            remote = [RemoteRank(rank, place.node, joining) for rank, place in enumerate(places) if place.node]
            nodes = {node: [link for link in remote if link.node == node] for node in {link.node for link in remote}}
            try:
                self._steps = StepSocket(self._context, steps.address, own, size - 1)
                listener = listening_socket(host, port + STORE_PORT)
                undo.callback(listener.close)
                self._router = HostRouter(
                    self._context,
                    joining,
                    keys.core,
                    ground=ground,
                    nodes=nodes,
                    timeout=config.parallel_config.rank_start_timeout,
                )
            except OSError as error:
                raise ValueError(str(error)) from error
            undo.callback(self._router.close)
            shard = Shard(
                rank=0,
                size=size,
                local_rank=0,
                local_size=here,
                store=endpoint(host, port + STORE_PORT),
                memory=None,
                available_bytes=available_host_memory() // here,
            )
            self.shard = shard._replace(listener=listener.detach())
            elsewhere = {link.rank: link for link in remote}
            links: list[RankLink] = []
            for rank, place in list(enumerate(places))[1:]:
                launch = RankLaunch(
                    name=f"kaon-worker-0.{rank}",
                    shard=shard._replace(rank=rank, local_rank=place.local_rank, local_size=place.local_size),
                    config=config.model_dump_json(),
                    path=str(path),
                    steps=steps,
                )
                if place.node:
                    elsewhere[rank].send(launch)
                    links.append(elsewhere[rank])
                else:
                    links.append(RankProc(launch, ()))
            self.links = links
            undo.pop_all()
        self._doorkeeper = doorkeeper

    def open_steps(self, timeout: float) -> tuple[StepWriter, EndTaker]:
        """See `RankPlaces`."""
        missing = self._steps.wait_for_ranks(timeout)
        if missing is not None:
            raise RankError(f"{self.links[missing - 1].title} does not reach {self._steps_port}; open it to the hosts")
        return self._steps, self._steps

    def part(self, why: str) -> None:
        """See `RankPlaces`."""
        self._router.part(why)

    def close(self) -> None:
        """See `RankPlaces`."""
        self._router.close()
        self._steps.close()
        self._doorkeeper.close()
        self._context.term()


def listening_socket(host: str, port: int) -> socket.socket:
    """For torch's store, which by itself would listen at every address of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(why_not(endpoint(host, port), error.errno or 0, os.strerror(error.errno or 0))) from error
