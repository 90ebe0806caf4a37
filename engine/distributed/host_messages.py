"""Messages between hosts over TCP: between the first host's engine core and the hosts of its ranks, or between the
first host's front end and the hosts of its engine cores. Messages of ranks are mostly forwarded ones of `rank_link`.
"""

from typing import TypeAlias

import msgspec

from engine.distributed.cluster import HostAgreement
from engine.distributed.host_resources import HostShare
from engine.distributed.lockstep import LockstepMember
from engine.distributed.rank_link import FromRank, ToRank


class CoreAddress(msgspec.Struct, frozen=True):
    """The address at which a core on another host connects to the front end, with CURVE keys for this core alone."""

    address: str
    """`tcp://` address: the front end's host and the port of the replica."""
    name: str
    """Name of its connections; see `connection_names`."""
    front_end_public: bytes
    public: bytes
    secret: bytes


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A host has connected, and can start its ranks or cores."""

    node: int
    host: str
    """Its host name."""
    agreement: HostAgreement


class RankReport(msgspec.Struct, tag="rank_report", frozen=True):
    """A message from one of the host's ranks."""

    rank: int
    message: FromRank


class RankGone(msgspec.Struct, tag="rank_gone", frozen=True):
    """The process of a rank has ended: `how`, such as "exited with code 1"; `killed`: by another process."""

    rank: int
    how: str
    killed: bool


class RankCommand(msgspec.Struct, tag="rank_command", frozen=True):
    """A message to one of the host's ranks. The first one is the launch, which starts the process."""

    rank: int
    message: ToRank


class LaunchCore(msgspec.Struct, tag="launch_core", frozen=True, kw_only=True):
    """Start a core, with the settings of its host."""

    core: int
    """Its number among all cores ever started."""
    share: HostShare
    """Share of the replica, without the memory, which the host determines."""
    num_kvcache_blocks: int | None
    """Number of blocks that requests were checked against; None: as configured."""
    is_first: bool
    """Whether it is the first core of its replica, and loads at the same time as those of the others."""
    front_end: CoreAddress
    lockstep_member: LockstepMember | None = None
    """Its replica, if several compute in lockstep."""


class CoreServes(msgspec.Struct, tag="core_serves", frozen=True):
    """The core is ready, and has connected all its sockets."""

    core: int


class DumpStacks(msgspec.Struct, tag="dump_stacks", frozen=True):
    """Make the core and its ranks log the stacks of their threads."""

    core: int


class KillCore(msgspec.Struct, tag="kill_core", frozen=True):
    """Kill the core, and report how it ended."""

    core: int


class StopCore(msgspec.Struct, tag="stop_core", frozen=True):
    """End the core, and report nothing more about it."""

    core: int


class CoreStarted(msgspec.Struct, tag="core_started", frozen=True):
    """The core runs as process `pid`."""

    core: int
    pid: int


class CoreEnded(msgspec.Struct, tag="core_ended", frozen=True):
    """The core has ended, or could not be started."""

    core: int
    exit_code: int
    """Exit code, or the negative number of a signal."""
    in_step: list[int]
    """Ids in its flight record."""
    error: str = ""
    """Reason why it could not be started, else empty."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The host cannot join, as `why` says."""

    why: str


class ShutdownMessage(msgspec.Struct, tag="shutdown", frozen=True):
    """No other core will follow. `why` is a sentence, or "" at an orderly end."""

    why: str = ""


CoreCommand: TypeAlias = LaunchCore | CoreServes | DumpStacks | KillCore | StopCore
FromHost: TypeAlias = Hello | RankReport | RankGone | CoreStarted | CoreEnded
ToHost: TypeAlias = RankCommand | CoreCommand | Refused | ShutdownMessage
