"""The link from the engine core, in which rank 0 runs, to another rank: its messages and its process.

The messages concern a rank's start and its failures; `step_transport` carries the steps. `RankProc` is the process of
a rank, and on the same host also its link. On another host, `RankProc` belongs to the host's agent, and the link is a
`RemoteRank`.
"""

import contextlib
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from engine.distributed.host_resources import HostShare, Shard
from engine.distributed.lockstep import LockstepMember
from engine.distributed.processes import starting_child, wait_or_kill
from models.child_environment import code_environment, working_directory


class SharedMemory(msgspec.Struct, tag="memory", frozen=True):
    """The memory by which rank 0 sends steps to the ranks of its own host."""

    descriptor: int
    """Descriptor of the memory; see `SharedMemorySteps`."""


class StepAddress(msgspec.Struct, tag="tcp", frozen=True):
    """The address at which rank 0 sends steps to ranks of several hosts, with CURVE keys for this start alone."""

    address: str
    core_public: bytes
    public: bytes
    secret: bytes


class RankLaunch(msgspec.Struct, tag="launch", frozen=True, kw_only=True):
    """The parameters of a rank's start. `config` is `Config.model_dump_json()`."""

    name: str
    shard: Shard
    config: str
    path: str
    """Directory of the checkpoint."""
    steps: SharedMemory | StepAddress
    share: HostShare = HostShare()
    """Share of the host that its replica has."""
    lockstep_member: LockstepMember | None = None
    """Its replica, if several compute in lockstep."""


class Join(msgspec.Struct, tag="join", frozen=True):
    """All ranks have loaded: join their process groups."""


class Allocate(msgspec.Struct, tag="allocate", frozen=True):
    """Allocate a KV cache of `num_blocks`, for `num_slots` sequences; then follow the steps."""

    num_blocks: int
    num_slots: int


class RankLoaded(msgspec.Struct, tag="loaded", frozen=True):
    """The rank has loaded its shard."""

    own_cpus: list[int]
    """CPUs that other processes avoid."""
    num_parameters: int


class RankSized(msgspec.Struct, tag="sized", frozen=True):
    """The largest KV cache that this rank has room for."""

    num_blocks: int
    num_slots: int


class RankServes(msgspec.Struct, tag="serves", frozen=True):
    """The rank has warmed up, and waits for steps."""


class RankFailed(msgspec.Struct, tag="failed", frozen=True):
    """The rank ends; `error` is a sentence that says why. `usage`: whether it is a mistake of the user."""

    error: str
    usage: bool


class RankRaised(msgspec.Struct, tag="raised", frozen=True):
    """The rank could not compute this step; the others may still be in it."""

    number: int
    error: str


ToRank: TypeAlias = RankLaunch | Join | Allocate
FromRank: TypeAlias = RankLoaded | RankSized | RankServes | RankFailed | RankRaised

MAX_BYTES = 1 << 20
"""Largest size of a message, which is one packet of a socket."""

_to_rank = msgspec.msgpack.Encoder()
_from_rank = msgspec.msgpack.Decoder(FromRank)


class RankLink(ABC):
    """The connection to one rank: a socket, whose end shows that the rank is gone."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        """`connection` is a socket of packets, which this object closes."""
        self.rank = rank
        self._socket = connection

    @property
    def title(self) -> str:
        """Its name in error messages."""
        return f"tensor-parallel rank {self.rank}"

    @property
    def missing_step(self) -> str | None:
        """The pending step before the rank can receive messages, as the end of "did not"; None if there is none."""
        return None

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable when there is a message of the rank, or the rank is gone."""
        return self._socket.fileno()

    def send(self, message: ToRank) -> None:
        """Send a message to the rank, when its host has joined. If the rank is gone, `receive` shows that."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.send(_to_rank.encode(message))

    def receive(self) -> FromRank | None:
        """Wait for the next message of the rank; None when it is gone."""
        try:
            packet = self._socket.recv(MAX_BYTES)
        except ConnectionResetError:
            return None
        return _from_rank.decode(packet) if packet else None

    @abstractmethod
    def exit_reason(self) -> tuple[str, bool]:
        """Return how the rank has ended, as the end of a sentence, and whether another process ended it."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """End the rank, after `timeout` seconds by force."""


class RankError(RuntimeError):
    """A rank cannot start, or the ranks cannot connect. The message is a sentence for the user."""


RANK_MODULE = "engine.runner.rank_process"
"""Module that the process of a rank runs."""


class RankProc(RankLink):
    """A rank's process on this host."""

    def __init__(self, launch: RankLaunch, descriptors: Sequence[int]) -> None:
        """Start the process, which inherits `descriptors`. Raises `OSError` if it cannot be started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(launch.shard.rank, ours)
        self.name = launch.name
        with theirs, starting_child():
            # As the engine core is started: with the code of its parent, and no Ctrl-C.
            self._process = subprocess.Popen(
                launch.share.command(RANK_MODULE, launch.name),
                stdin=theirs.fileno(),
                pass_fds=descriptors,
                env=code_environment(),
                cwd=working_directory(),
                process_group=0,
            )
        self.send(launch)

    def exit_reason(self) -> tuple[str, bool]:
        """See `RankLink`; waits until the process has exited."""
        code = self._process.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}", code == -signal.SIGKILL
        return f"exited with code {code}; its log says why", False

    def close(self, timeout: float) -> None:
        """See `RankLink`: by its socket, and after `timeout` seconds by SIGKILL."""
        self._socket.close()
        wait_or_kill(self._process, timeout)
