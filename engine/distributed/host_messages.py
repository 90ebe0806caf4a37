"""What hosts say to each other over TCP: the first one's engine core to those that have its ranks, or the first one's
front end to those that have its replicas' cores.

Of ranks, most of it is what the core and a rank say, passed on.
"""

from typing import TypeAlias

import msgspec

from engine.distributed.cluster import HostAgreement
from engine.distributed.host_resources import HostShare
from engine.distributed.rank_link import FromRank, ToRank


class CoreAddress(msgspec.Struct, frozen=True):
    """Where a core calls that runs on another host than the front end; keys are of CURVE, made for this core alone."""

    address: str
    """`tcp://` a host and a port, of this replica."""
    name: str
    """Of its connections; see `connection_names`."""
    front_end_public: bytes
    public: bytes
    secret: bytes


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A host has come, and can start its ranks or cores."""

    node: int
    host: str
    """Its own name."""
    agreement: HostAgreement


class RankReport(msgspec.Struct, tag="said", frozen=True):
    """What one of its ranks says."""

    rank: int
    message: FromRank


class RankGone(msgspec.Struct, tag="gone", frozen=True):
    """The process of a rank has ended; `how`, such as "exited with code 1". `killed` by another process."""

    rank: int
    how: str
    killed: bool


class RankCommand(msgspec.Struct, tag="tell", frozen=True):
    """What one of its ranks is told; the first is the launch, which starts the process."""

    rank: int
    message: ToRank


class LaunchCore(msgspec.Struct, tag="launch_core", frozen=True, kw_only=True):
    """Start a core, by the host's own settings."""

    core: int
    """Its number among all that were ever started."""
    share: HostShare
    """Its replica's, but for the memory, which the host knows."""
    num_kvcache_blocks: int | None
    """That requests were checked against; None: as the settings say."""
    is_first: bool
    """Whether the other replicas' first cores load beside it."""
    front_end: CoreAddress


class CoreServes(msgspec.Struct, tag="core_serves", frozen=True):
    """The core was ready, and has connected all its sockets."""

    core: int


class DumpStacks(msgspec.Struct, tag="dump_stacks", frozen=True):
    """Have the core and its ranks write what their threads do to the log."""

    core: int


class KillCore(msgspec.Struct, tag="kill_core", frozen=True):
    """End the core now; how it ended is to be told."""

    core: int


class StopCore(msgspec.Struct, tag="stop_core", frozen=True):
    """End the core, of which nothing more is to be told."""

    core: int


class CoreStarted(msgspec.Struct, tag="core_started", frozen=True):
    """The core runs as that process."""

    core: int
    pid: int


class CoreEnded(msgspec.Struct, tag="core_ended", frozen=True):
    """The core is gone, or could not be started."""

    core: int
    exit_code: int
    """Or minus a signal."""
    in_step: list[int]
    """Its flight record."""
    error: str = ""
    """Why it could not be started."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The host cannot join, as `why` says."""

    why: str


class ShutdownMessage(msgspec.Struct, tag="shutdown", frozen=True):
    """There will be no other core; `why` is a sentence where that is not as it should be."""

    why: str = ""


CoreCommand: TypeAlias = LaunchCore | CoreServes | DumpStacks | KillCore | StopCore
FromHost: TypeAlias = Hello | RankReport | RankGone | CoreStarted | CoreEnded
ToHost: TypeAlias = RankCommand | CoreCommand | Refused | ShutdownMessage
