"""`RemoteRank`: a rank on another host as the engine core sees it. Made by `RemoteRanks`, served by `HostRouter`."""

import contextlib
import math
import socket

import msgspec

from engine.worker.host_messages import FromHost, RankGone, RankSaid, TellRank
from engine.worker.rank_messages import MAX_BYTES, FromRank, RankFailed, RankLoaded, ToRank, hear_rank, tell_rank

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
