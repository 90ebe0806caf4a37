"""What `CoreLink` needs of an engine core: `CoreHandle`, its process, and `CoreWire`, the way to it and back.

`CoreProcess` and `LocalWire`: a process of this host. `RemoteCore` and `RemoteWire`: one that another host runs.
"""

import socket
from collections.abc import Sequence
from typing import Protocol

import zmq

from engine.messages import Failed


class CoreWire(Protocol):
    """The front end's end of what it and a core say to each other. All calls come from one thread."""

    @property
    def descriptor(self) -> int:
        """Readable when something has happened: there may be messages."""

    @property
    def is_one_socket(self) -> bool:
        """Whether `send` may take the news from the descriptor that there are messages: who waits for it must look."""

    def register(self, poller: zmq.Poller) -> None:
        """Have `poller` wake when there is a message."""

    def poll(self, milliseconds: int) -> bool:
        """Block until there may be a message; False if none came in that time."""

    def receive(self) -> bytes | None:
        """The next message that has arrived; None if there is none."""

    def connected(self) -> None:
        """The core was ready, and can be sent something from now on."""

    def send(self, frames: Sequence[bytes]) -> None:
        """One multipart message. To a core that just died it goes nowhere. Never blocks."""

    def close(self) -> None:
        """No more is sent or received."""


class CoreHandle(Protocol):
    """One core's process, from its start to its end."""

    lifeline: socket.socket
    """Readable when the core is gone."""
    pid: int
    """The process id on its own host; -1 as long as it is not known."""

    @property
    def is_awaited(self) -> bool:
        """Whether its host has yet to join."""

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, or is about to."""

    def open_wire(self, context: "zmq.Context[zmq.Socket[bytes]]") -> CoreWire:
        """The way to it, before it is started; sockets of its own are of `context`."""

    def start(self) -> None:
        """Run it, and return at once. Raises `OSError` when it cannot be started."""

    def connected(self) -> None:
        """It is ready, and has connected all its sockets."""

    def wait(self) -> int:
        """Block until it, which is gone, has been ended by the system; its exit code, or minus a signal."""

    def why_gone(self) -> Failed | None:
        """What is known of its end besides the exit code."""

    def running_step(self) -> Sequence[int] | None:
        """Ids of the requests in the step that it died in; None where that is not known, or nobody's fault."""

    def stopped_process(self) -> int | None:
        """A process of its family that a signal has stopped, where that can be seen."""

    def dump_stacks(self) -> None:
        """Have it and its ranks write what each of their threads does to the log, even stuck or stopped ones."""

    def kill(self) -> None:
        """End it now. Nothing happens if it is gone."""

    def stop(self, timeout: float, why: str = "") -> None:
        """End it, after `timeout` seconds by force, and leave nothing of it behind.

        `why` is for hosts that have ranks of it: a sentence, or "" at an orderly end.
        """
