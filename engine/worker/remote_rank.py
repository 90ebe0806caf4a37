"""`RemoteRank`: a rank on another host as the engine core sees it. Made by `RemoteRanks`, served by `HostRouter`."""

import contextlib
import socket

import msgspec

from engine.worker.rank_messages import MAX_BYTES, FromRank, RankLoaded, ToRank, hear_rank, tell_rank

_to_rank = msgspec.msgpack.Decoder(ToRank)
_encoder = msgspec.msgpack.Encoder()


class RemoteRank:
    """See `RankLink`. A pair of sockets: the one end is the manager's, the other the thread's that talks to hosts."""

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
    def far_descriptor(self) -> int:
        """Readable when there is something to pass on, or the manager has closed; -1 once the rank is lost."""
        return self._far_end.fileno()

    def joined(self, host: str) -> None:
        """Its host, of that name, is there."""
        self._host = host

    def take(self) -> ToRank | None:
        """What the manager says next; None when it has closed."""
        try:
            packet = self._far_end.recv(MAX_BYTES)
        except ConnectionResetError:
            # It has closed with something unheard, which is what the system calls this.
            return None
        return _to_rank.decode(packet) if packet else None

    def give(self, message: FromRank) -> None:
        """What the rank says; a manager that has closed hears no more."""
        if self._far_end.fileno() >= 0:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._far_end.send(_encoder.encode(message))

    def lose(self, how: str, killed: bool) -> None:
        """The rank is gone."""
        if self._far_end.fileno() >= 0:
            self._how_gone = how, killed
            self._far_end.close()
