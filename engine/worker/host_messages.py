"""What the engine core and a host whose ranks it has say to each other over TCP.

Most of it is what the core and a rank say, passed on.
"""

from typing import TypeAlias

import msgspec

from engine.cluster_settings import CommonGround
from engine.worker.rank_messages import FromRank, ToRank


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A host has come, and can start its ranks."""

    node: int
    host: str
    """Its own name."""
    ground: CommonGround


class RankSaid(msgspec.Struct, tag="said", frozen=True):
    """What one of its ranks says."""

    rank: int
    message: FromRank


class RankGone(msgspec.Struct, tag="gone", frozen=True):
    """The process of a rank has ended; `how`, such as "exited with code 1". `killed` by another process."""

    rank: int
    how: str
    killed: bool


class TellRank(msgspec.Struct, tag="tell", frozen=True):
    """What one of its ranks is told; the first is the launch, which starts the process."""

    rank: int
    message: ToRank


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The host cannot join, as `why` says."""

    why: str


class Farewell(msgspec.Struct, tag="farewell", frozen=True):
    """There will be no other core; `why` is a sentence where that is not as it should be."""

    why: str = ""


FromHost: TypeAlias = Hello | RankSaid | RankGone
ToHost: TypeAlias = TellRank | Refused | Farewell
