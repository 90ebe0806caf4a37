"""`RemoteRanks`: the ranks behind the first on several hosts, told of steps over TCP.

Three ports, at which only this host listens: hosts join at `master_port`, steps are told at the next, and
torch.distributed meets at the one behind that.
"""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import zmq

from engine.cluster_key import ClusterKeys, CurvePair, read_cluster_key
from engine.cluster_settings import CommonGround
from engine.config import Config
from engine.worker.curve import Doorkeeper, endpoint, resolve, why_not
from engine.worker.host_router import HostRouter
from engine.worker.memory import available_host_memory
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


class RemoteRanks:
    """See `RankPlaces`."""

    def __init__(self, config: Config, path: Path) -> None:
        """Listen for the other hosts, start the ranks of this one, and return at once.

        Raises `ValueError`, a sentence, for a key that is missing and a port that is taken.
        """
        parallel = config.parallel_config
        per_node = parallel.tensor_parallel_size // parallel.nnodes
        key = read_cluster_key(parallel.cluster_key_file, parallel.master_addr)
        places = {rank: divmod(rank, per_node) for rank in range(parallel.tensor_parallel_size)}
        hosts = {rank: (*place, per_node) for rank, place in places.items()}
        self._start(config, path, ClusterKeys.of(key), hosts, parallel.master_addr)
        _log.info("waiting for %d of %d hosts to join at %s", parallel.nnodes - 1, parallel.nnodes, self._joining)

    def _start(
        self, config: Config, path: Path, keys: ClusterKeys, places: Mapping[int, tuple[int, int, int]], address: str
    ) -> None:
        """`places`: of each rank the node, and which of how many ranks of that host it is."""
        host, port = resolve(address, _NAME_SECONDS), config.parallel_config.master_port
        self._steps_port = f"port {port + STEPS_PORT} on {host}"
        store = endpoint(host, port + STORE_PORT)
        size, here = len(places), places[0][2]
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
            remote = [RemoteRank(rank, node, joining) for rank, (node, _, _) in places.items() if node]
            nodes = {node: [link for link in remote if link.node == node] for node in {link.node for link in remote}}
            try:
                self._steps = StepSocket(self._context, steps.address, own, size - 1)
                listener = listening_socket(host, port + STORE_PORT)
                undo.callback(listener.close)
                self._router = HostRouter(
                    self._context, joining, keys.core, ground, nodes, config.parallel_config.rank_start_timeout
                )
            except OSError as error:
                raise ValueError(str(error)) from error
            undo.callback(self._router.close)
            memory = available_host_memory() // here
            self.shard = Shard(0, size, 0, here, store, None, memory, listener.detach())
            by_rank = {link.rank: link for link in remote}
            links: list[RankLink] = []
            for rank, (node, local_rank, local_size) in list(places.items())[1:]:
                launch = RankLaunch(
                    f"kaon-worker-0.{rank}",
                    0,
                    rank,
                    size,
                    local_rank,
                    local_size,
                    config.model_dump_json(),
                    str(path),
                    store,
                    memory,
                    steps,
                    None,
                )
                if node:
                    by_rank[rank].send(launch)
                    links.append(by_rank[rank])
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
