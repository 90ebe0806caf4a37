"""Where the ranks behind the first run, and how they are told of steps: what `AsyncIOProcManager` needs of either.

`LocalRanks`: processes of this host, by shared memory. `RemoteRanks`: processes of several hosts, over TCP.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.worker.rank_messages import FromRank, ToRank
from engine.worker.shard import Shard


class RankLink(Protocol):
    """The connection to one rank."""

    rank: int

    @property
    def title(self) -> str:
        """As sentences call it."""

    @property
    def absence(self) -> str | None:
        """What the rank still has to do before it can be told anything, as `did not` goes on; None for nothing."""

    @property
    def descriptor(self) -> int:
        """Readable when the rank has said something, or is gone."""

    def send(self, message: ToRank) -> None:
        """Tell the rank something. One that is gone is told of by the connection's end."""

    def receive(self) -> FromRank | None:
        """What it says next; None when it is gone."""

    def how_gone(self) -> tuple[str, bool]:
        """How the rank, which is gone, ended, as the end of a sentence; whether something outside ended it."""

    def close(self, timeout: float) -> None:
        """End the rank, after `timeout` seconds by force."""


class StepWriter(Protocol):
    """Tells all ranks of steps."""

    def write(self, message: bytes) -> None:
        """Raises `ConnectionError`, a sentence, where one of them cannot be told."""


class EndTaker(Protocol):
    """Hears of the ends of steps; ranks behind the first are numbered from 0."""

    def take(self, rank: int) -> str:
        """Wait until a rank has ended the step; its failure, "" for none."""

    def take_within(self, rank: int, seconds: float) -> str | None:
        """As `take`; None where the rank has not ended the step after so many seconds."""


class RankPlaces(Protocol):
    """The ranks behind the first, started."""

    shard: Shard
    """What the caller itself is."""

    @property
    def links(self) -> Sequence[RankLink]:
        """By rank."""

    def open_steps(self, timeout: float) -> tuple[StepWriter, EndTaker]:
        """The way to all ranks, which wait for steps. Raises `RankError` where one cannot be reached in time."""

    def part(self, why: str) -> None:
        """Have hosts that would wait for another core end as well; returns once they have heard, or in a while.

        `why` is "" at an orderly end. Called by any thread, `close` may follow.
        """

    def close(self) -> None:
        """Free what the ranks, which are closed, were told by."""


class RankError(RuntimeError):
    """A rank cannot start, or the ranks cannot meet; one sentence for the user."""
