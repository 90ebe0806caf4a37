"""Rank 0's connections to ranks on other hosts: `RankNetwork`, and a `RemoteRank` for each rank.

Only the host of rank 0 listens, at three ports: hosts join at `master_port`, ranks receive steps at the next port, and
the third is the rendezvous of torch.distributed's process groups. `HostRouter` exchanges the messages of each rank
between its host and its `RemoteRank`.
"""

import contextlib
import math
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import msgspec
import zmq

from engine.config.config import Config
from engine.distributed.cluster import Cluster, HostAgreement
from engine.distributed.curve import CurveAuthenticator, endpoint, resolve, why_not
from engine.distributed.host_messages import FromHost, RankCommand, RankGone, RankReport
from engine.distributed.host_router import HostRouter
from engine.distributed.rank_link import (
    MAX_BYTES,
    FromRank,
    RankFailed,
    RankLink,
    RankLoaded,
    ToRank,
)
from engine.distributed.step_transport import TcpSteps

_to_rank = msgspec.msgpack.Decoder(ToRank)
_encoder = msgspec.msgpack.Encoder()


class RemoteRank(RankLink):
    """A rank on another host. See also `RemoteMember`.

    It is a pair of sockets: one end for the rank manager, the other for the thread of `HostRouter`.
    """

    join_by = math.inf
    """No limit, since the rank manager has its own timeout."""

    def __init__(self, rank: int, node: int, address: str) -> None:
        """`address` is the address at which its host joins."""
        near_end, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(rank, near_end)
        self.node = node
        self._address = address
        self._host: str | None = None
        self._exit_reason = ("is gone", True)

    # -- for the manager ----------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """See `RankLink`."""
        where = f" on node {self.node}" if self._host is None else f" on node {self.node} ({self._host})"
        return f"{super().title}{where}"

    @property
    def missing_step(self) -> str | None:
        """See `RankLink`."""
        return f"join at {self._address}" if self._host is None else None

    def receive(self) -> FromRank | None:
        """See `RankLink`."""
        message = super().receive()
        # CPU numbers of another host have no meaning for the processes of this host.
        return msgspec.structs.replace(message, own_cpus=[]) if isinstance(message, RankLoaded) else message

    def exit_reason(self) -> tuple[str, bool]:
        """See `RankLink`."""
        return self._exit_reason

    def close(self, timeout: float) -> None:
        """See `RankLink`. The rank ends with the connection of its host."""
        self._socket.close()

    # -- for the thread that talks to hosts ---------------------------------------------------------------------

    @property
    def number(self) -> int:
        """See `RemoteMember`."""
        return self.rank

    @property
    def far_descriptor(self) -> int:
        """See `RemoteMember`."""
        return self._far_end.fileno()

    def on_joined(self, host: str) -> None:
        """See `RemoteMember`."""
        self._host = host

    def next_message(self) -> RankCommand | None:
        """See `RemoteMember`."""
        try:
            packet = self._far_end.recv(MAX_BYTES)
        except ConnectionResetError:
            # The manager closed before it received all messages.
            return None
        return RankCommand(self.rank, _to_rank.decode(packet)) if packet else None

    def on_message(self, message: FromHost) -> None:
        """See `RemoteMember`."""
        if isinstance(message, RankReport):
            self.deliver(message.message)
        elif isinstance(message, RankGone):
            self.on_lost(message.how, message.killed)

    def on_mismatch(self, host: str, difference: str) -> None:
        """See `RemoteMember`."""
        self._host = host or None
        self.deliver(RankFailed(f"its host {difference}", usage=True))

    def on_timeout(self, timeout: float) -> None:
        """See `RemoteMember`. No effect: the rank manager reports it."""

    def deliver(self, message: FromRank) -> None:
        """Deliver a message of the rank to the manager, unless the manager has closed."""
        if self._far_end.fileno() >= 0:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._far_end.send(_encoder.encode(message))

    def on_lost(self, how: str, killed: bool) -> None:
        """See `RemoteMember`."""
        if self._far_end.fileno() >= 0:
            self._exit_reason = how, killed
            self._far_end.close()


STEPS_PORT, STORE_PORT = 1, 2
"""Offsets of the ports from `master_port`."""
_NAME_SECONDS = 60.0
"""Seconds until this host's name must have an address: caches remember for half a minute that it had none."""


class RankNetwork:
    """The ports at which the ranks of other hosts reach rank 0, and the links to those ranks."""

    def __init__(self, config: Config, path: Path, cluster: Cluster) -> None:
        """Listen at all ports. Raises `ValueError` with a sentence for a port that is in use."""
        assert cluster.keys is not None
        host, port = resolve(cluster.address, _NAME_SECONDS), config.parallel_config.master_port
        self.joining = endpoint(host, port)
        """Address at which the other hosts join."""
        self.store = endpoint(host, port + STORE_PORT)
        """Rendezvous address of torch.distributed's process groups of all ranks."""
        positions = enumerate(cluster.positions)
        self.links = {rank: RemoteRank(rank, each.node, self.joining) for rank, each in positions if each.node}
        nodes: dict[int, list[RemoteRank]] = {}
        for link in self.links.values():
            nodes.setdefault(link.node, []).append(link)
        agreement = HostAgreement.of(config, path)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with ExitStack() as undo:
            undo.callback(context.destroy, linger=0)
            authenticator = CurveAuthenticator(context)
            undo.callback(authenticator.close)
            try:
                self.transport = TcpSteps(context, host, port + STEPS_PORT, len(cluster.positions))
                undo.callback(self.transport.close)
                self.listener = listening_socket(host, port + STORE_PORT)
                """Socket that listens at `store`. The caller that detaches it closes it."""
                undo.callback(self.listener.close)
                authenticator.allow(cluster.keys.host.public)
                authenticator.allow(self.transport.address.public)
                self.router = HostRouter(
                    context,
                    self.joining,
                    cluster.keys.core,
                    agreement=agreement,
                    nodes=nodes,
                    timeout=config.parallel_config.rank_start_timeout,
                )
            except OSError as error:
                raise ValueError(str(error)) from error
            undo.callback(self.router.close)
            self._resources = undo.pop_all()

    def close(self) -> None:
        """End all connections."""
        self._resources.close()


def listening_socket(host: str, port: int) -> socket.socket:
    """Create a listening socket for torch's store, which would otherwise listen at every address of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(why_not(endpoint(host, port), error.errno or 0, os.strerror(error.errno or 0))) from error
