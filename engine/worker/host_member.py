"""`Member`: what `HostRouter` needs of a rank or a core on another host. `RemoteRank` and `RemoteCore` are such."""

from typing import Protocol

from engine.worker.host_messages import FromHost, ToHost


class Member(Protocol):
    """Its methods are the router's thread's."""

    @property
    def number(self) -> int:
        """By which its host speaks of it."""

    @property
    def node(self) -> int:
        """Its host's number."""

    @property
    def join_by(self) -> float:
        """Until when its host must have joined, on the monotonic clock."""

    @property
    def far_descriptor(self) -> int:
        """Readable when there is something to pass on, or who made it has closed it; -1 once it is lost."""

    def joined(self, host: str) -> None:
        """Its host, of that name, is there."""

    def take(self) -> ToHost | None:
        """What is to be passed on next; None when it is closed."""

    def hear(self, message: FromHost) -> None:
        """What its host says of it."""

    def differ(self, host: str, difference: str) -> None:
        """Its host, of that name, has come, and cannot join."""

    def be_late(self, timeout: float) -> None:
        """Its host has not come in so many seconds."""

    def lose(self, how: str, killed: bool) -> None:
        """It is gone, `how` as the end of a sentence; `killed` by something outside."""
