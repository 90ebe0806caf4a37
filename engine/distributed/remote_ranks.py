"""`RemoteRanks`: the ranks behind the first on several hosts, told of steps over TCP.

Three ports, at which only this host listens: hosts join at `master_port`, steps are told at the next, and
torch.distributed meets at the one behind that.
"""

import contextlib
import logging
import math
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from engine.config.config import Config
from engine.distributed.cluster import ClusterKeys, CommonGround, CurvePair, read_cluster_key
from engine.distributed.curve import Doorkeeper, endpoint, resolve, why_not
from engine.distributed.host_messages import FromHost, RankGone, RankSaid, TellRank
from engine.distributed.host_resources import Shard, available_host_memory
from engine.distributed.host_router import HostRouter
from engine.distributed.rank_link import (
    MAX_BYTES,
    EndTaker,
    FromRank,
    RankError,
    RankFailed,
    RankLaunch,
    RankLink,
    RankLoaded,
    RankProc,
    StepAddress,
    StepWriter,
    ToRank,
    hear_rank,
    tell_rank,
)
from engine.distributed.step_transport import StepSocket

# [remote_rank] `RemoteRank`: a rank on another host as the engine core sees it. Made by `RemoteRanks`, served by
# `HostRouter`.

_to_rank = msgspec.msgpack.Decoder(ToRank)
_encoder = msgspec.msgpack.Encoder()


class RemoteRank:
    """See `RankLink` and `Member`.

    A pair of sockets: the one end is the manager's, the other the thread's that talks to hosts.
    """

    join_by = math.inf
    """Its manager looks at the clock."""

    def __init__(self, rank: int, node: int, address: str) -> None:
        """`address` is where its host is to come."""
        self.rank = rank
        self.node = node
        self._address = address
        self._host: str | None = None
        self._socket, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._how_gone = ("is gone", True)

    # -- for the manager ----------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """See `RankLink`."""
        where = f" on node {self.node}" if self._host is None else f" on node {self.node} ({self._host})"
        return f"tensor-parallel rank {self.rank}{where}"

    @property
    def absence(self) -> str | None:
        """See `RankLink`."""
        return f"join at {self._address}" if self._host is None else None

    @property
    def descriptor(self) -> int:
        """See `RankLink`."""
        return self._socket.fileno()

    def send(self, message: ToRank) -> None:
        """See `RankLink`; kept until the host has joined."""
        tell_rank(self._socket, message)

    def receive(self) -> FromRank | None:
        """See `RankLink`."""
        message = hear_rank(self._socket)
        # Another host's CPUs are none that processes of this one could keep off.
        return msgspec.structs.replace(message, own_cpus=[]) if isinstance(message, RankLoaded) else message

    def how_gone(self) -> tuple[str, bool]:
        """See `RankLink`."""
        return self._how_gone

    def close(self, timeout: float) -> None:
        """See `RankLink`: the rank ends with the connection of its host."""
        self._socket.close()

    # -- for the thread that talks to hosts ---------------------------------------------------------------------

    @property
    def number(self) -> int:
        """See `Member`."""
        return self.rank

    @property
    def far_descriptor(self) -> int:
        """See `Member`."""
        return self._far_end.fileno()

    def joined(self, host: str) -> None:
        """See `Member`."""
        self._host = host

    def take(self) -> TellRank | None:
        """See `Member`."""
        try:
            packet = self._far_end.recv(MAX_BYTES)
        except ConnectionResetError:
            # It has closed with something unheard, which is what the system calls this.
            return None
        return TellRank(self.rank, _to_rank.decode(packet)) if packet else None

    def hear(self, message: FromHost) -> None:
        """See `Member`."""
        if isinstance(message, RankSaid):
            self.give(message.message)
        elif isinstance(message, RankGone):
            self.lose(message.how, message.killed)

    def differ(self, host: str, difference: str) -> None:
        """See `Member`."""
        self._host = host
        self.give(RankFailed(f"its host {difference}", usage=True))

    def be_late(self, timeout: float) -> None:
        """See `Member`: its manager says so."""

    def give(self, message: FromRank) -> None:
        """What the rank says; a manager that has closed hears no more."""
        if self._far_end.fileno() >= 0:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._far_end.send(_encoder.encode(message))

    def lose(self, how: str, killed: bool) -> None:
        """See `Member`."""
        if self._far_end.fileno() >= 0:
            self._how_gone = how, killed
            self._far_end.close()


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
