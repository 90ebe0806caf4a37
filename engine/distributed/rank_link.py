"""What the engine core and the process of a further rank say to each other while it starts, and when it fails."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec

from engine.distributed.host_resources import HostShare, Shard
from engine.distributed.lockstep import LockstepMember
from engine.distributed.processes import wait_or_kill
from models.child_environment import code_environment


class SharedMemory(msgspec.Struct, tag="memory", frozen=True):
    """Where rank 0 sends steps to the ranks of its own host."""

    descriptor: int
    """Of the memory; see `SharedMemorySteps`."""


class StepAddress(msgspec.Struct, tag="tcp", frozen=True):
    """Where rank 0 sends steps to ranks of several hosts; the keys are of CURVE, made for this one start."""

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
    lockstep_member: LockstepMember | None = None
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


def send_to_rank(connection: socket.socket, message: ToRank) -> None:
    """Send a rank something. One that is gone is told of by the socket's end."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(_to_rank.encode(message))


def receive_from_rank(connection: socket.socket) -> FromRank | None:
    """What a rank says next; None when it is gone."""
    try:
        packet = connection.recv(MAX_BYTES)
    except ConnectionResetError:
        return None
    return _from_rank.decode(packet) if packet else None


class RankLink(Protocol):
    """The connection to one rank."""

    rank: int

    @property
    def title(self) -> str:
        """As sentences call it."""

    @property
    def missing_step(self) -> str | None:
        """What the rank still has to do before it can be told anything, as `did not` goes on; None for nothing."""

    @property
    def descriptor(self) -> int:
        """Readable when the rank has said something, or is gone."""

    def send(self, message: ToRank) -> None:
        """Tell the rank something. One that is gone is told of by the connection's end."""

    def receive(self) -> FromRank | None:
        """What it says next; None when it is gone."""

    def exit_reason(self) -> tuple[str, bool]:
        """How the rank, which is gone, ended, as the end of a sentence; whether something outside ended it."""

    def close(self, timeout: float) -> None:
        """End the rank, after `timeout` seconds by force."""


class RankError(RuntimeError):
    """A rank cannot start, or the ranks cannot meet; one sentence for the user."""


RANK_MODULE = "engine.runner.rank_process"
"""What the process runs."""


class RankProc:
    """A process, and the socket by which it hears and is heard; the socket's end tells either side of the other's."""

    def __init__(self, launch: RankLaunch, descriptors: Sequence[int]) -> None:
        """Start it; it inherits `descriptors`. Raises `OSError` when it cannot be started."""
        self.rank = launch.shard.rank
        self.name = launch.name
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # As the engine core itself is started: a name for `ps`, the parent's own code, and no Ctrl-C.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", RANK_MODULE, launch.name],
                stdin=theirs.fileno(),
                pass_fds=descriptors,
                env=code_environment(),
                process_group=0,
            )
        self.send(launch)

    @property
    def title(self) -> str:
        """As sentences call it."""
        return f"tensor-parallel rank {self.rank}"

    @property
    def missing_step(self) -> str | None:
        """Nothing: the process was started here."""
        return None

    @property
    def descriptor(self) -> int:
        """Readable when the process has said something, or is gone."""
        return self._socket.fileno()

    def send(self, message: ToRank) -> None:
        """Tell the process something. One that is gone is told of by the socket's end."""
        send_to_rank(self._socket, message)

    def receive(self) -> FromRank | None:
        """What it says next; None when it is gone."""
        return receive_from_rank(self._socket)

    def exit_reason(self) -> tuple[str, bool]:
        """How the process, which is gone, ended, as the end of a sentence; whether another process killed it."""
        code = self._process.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}", code == -signal.SIGKILL
        return f"exited with code {code}; its log says why", False

    def close(self, timeout: float) -> None:
        """End the process, by its socket and after `timeout` seconds by SIGKILL."""
        self._socket.close()
        wait_or_kill(self._process, timeout)
