"""What the engine core and the process of a further rank say to each other while it starts, and when it fails."""

import contextlib
import socket
from typing import TypeAlias

import msgspec

from engine.seats import Seat
from engine.worker.shard import HostShare, Shard


class SharedMemory(msgspec.Struct, tag="memory", frozen=True):
    """Descriptors of what the ranks of one host are told of steps by."""

    ring: int
    ends: int


class StepAddress(msgspec.Struct, tag="tcp", frozen=True):
    """Where rank 0 tells a rank of steps that cannot share its memory; keys are of CURVE, made for this one start."""

    address: str
    core_public: bytes
    public: bytes
    secret: bytes


class RankLaunch(msgspec.Struct, tag="launch", frozen=True, kw_only=True):
    """What the process is to be. `config` is `Config.model_dump_json()`."""

    name: str
    shard: Shard
    config: str
    path: str
    """Of the checkpoint."""
    steps: SharedMemory | StepAddress
    share: HostShare = HostShare()
    """Its replica's."""
    seat: Seat | None = None
    """Of its replica, where several compute in lockstep."""


class Join(msgspec.Struct, tag="join", frozen=True):
    """All ranks have loaded: meet them."""


class Allocate(msgspec.Struct, tag="allocate", frozen=True):
    """Make a KV cache of so many blocks, for so many sequences; then follow the steps."""

    num_blocks: int
    num_slots: int


class RankLoaded(msgspec.Struct, tag="loaded", frozen=True):
    """The shard is in memory."""

    own_cpus: list[int]
    """CPUs that other processes keep off."""
    num_parameters: int


class RankSized(msgspec.Struct, tag="sized", frozen=True):
    """The largest KV cache that this rank has room for."""

    num_blocks: int
    num_slots: int


class RankServes(msgspec.Struct, tag="serves", frozen=True):
    """The rank has warmed up, and waits for steps."""


class RankFailed(msgspec.Struct, tag="failed", frozen=True):
    """The rank ends, as `error` says in a sentence. `usage` marks the user's mistake, not a fault."""

    error: str
    usage: bool


class RankRaised(msgspec.Struct, tag="raised", frozen=True):
    """The rank could not compute this step, and may have left the others in it."""

    number: int
    error: str


ToRank: TypeAlias = RankLaunch | Join | Allocate
FromRank: TypeAlias = RankLoaded | RankSized | RankServes | RankFailed | RankRaised

MAX_BYTES = 1 << 20
"""Of a message, which is one packet of a socket."""

_to_rank = msgspec.msgpack.Encoder()
_from_rank = msgspec.msgpack.Decoder(FromRank)


def tell_rank(connection: socket.socket, message: ToRank) -> None:
    """Send a rank something. One that is gone is told of by the socket's end."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(_to_rank.encode(message))


def hear_rank(connection: socket.socket) -> FromRank | None:
    """What a rank says next; None when it is gone."""
    try:
        packet = connection.recv(MAX_BYTES)
    except ConnectionResetError:
        return None
    return _from_rank.decode(packet) if packet else None
