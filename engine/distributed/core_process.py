"""An engine core as the front end sees it: `CoreHandle`, its process, and `CoreTransport`, the way of its messages.

`CoreProcess` and `LocalTransport` are those of a core on this host. Of a core on another host they are `RemoteCore`
and `RemoteTransport`; that host's agent starts it as a `CoreProcess` too.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol, cast

import msgspec
import zmq

from engine.config.config import Config
from engine.distributed.flight_record import FlightRecord
from engine.distributed.host_messages import CoreAddress
from engine.distributed.host_resources import HostShare
from engine.distributed.lockstep import LockstepMember
from engine.distributed.message_stream import MessageReader
from engine.distributed.processes import ENDED, REMOVED, family, stopped_process, wait_or_kill
from engine.messages import Failed
from models.child_environment import code_environment


class CoreTransport(Protocol):
    """The front end's side of the messages to and from one core. All calls come from one thread."""

    @property
    def descriptor(self) -> int:
        """Readable when something has happened: there may be messages."""

    @property
    def is_one_socket(self) -> bool:
        """Whether `send` may consume the descriptor's signal that there are messages, so that a waiter must poll."""

    def register(self, poller: zmq.Poller) -> None:
        """Have `poller` wake when there is a message."""

    def poll(self, milliseconds: int) -> bool:
        """Block until there may be a message; False if none came in that time."""

    def receive(self) -> bytes | None:
        """The next message that has arrived; None if there is none."""

    def connected(self) -> None:
        """The core is ready: messages can be sent to it from now on."""

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one multipart message. One to a core that has just ended is lost. Never blocks."""

    def close(self) -> None:
        """Stop sending and receiving."""


class CoreHandle(Protocol):
    """One core's process, from its start to its end."""

    lifeline: socket.socket
    """Readable when the core has ended."""
    pid: int
    """The process id on its own host; -1 until it is known."""

    @property
    def waits_for_host(self) -> bool:
        """Whether its host has yet to join."""

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, or is about to end."""

    def open_transport(self, context: "zmq.Context[zmq.Socket[bytes]]") -> CoreTransport:
        """The transport to it, to be opened before it starts; sockets are made of `context`."""

    def start(self) -> None:
        """Start it, and return at once. Raises `OSError` when it cannot be started."""

    def connected(self) -> None:
        """It is ready, and has connected all its sockets."""

    def wait(self) -> int:
        """Block until the process has exited; its exit code, or minus the number of a signal."""

    def why_gone(self) -> Failed | None:
        """Why it has ended, where more is known than the exit code."""

    def running_step(self) -> Sequence[int] | None:
        """Ids of the requests in the step in which it ended; None if that is not known, or no request is at fault."""

    def stopped_process(self) -> int | None:
        """One of its processes that a signal has stopped, where that can be seen."""

    def dump_stacks(self) -> None:
        """Have it and its ranks write the stacks of all threads to the log, even of stuck or stopped ones."""

    def kill(self) -> None:
        """Kill it. Nothing happens if it has ended."""

    def stop(self, timeout: float, why: str = "") -> None:
        """End it, after `timeout` seconds by force, and remove its files.

        `why` is for hosts that run ranks of it: a sentence, or "" at an orderly end.
        """


class LocalTransport:
    """See `CoreTransport`: to the core, a socket that is named in a private directory; from it, a stream."""

    is_one_socket = False

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", input_address: str, outputs: socket.socket) -> None:
        """Takes over `outputs`, the stream that the core writes to."""
        self._identity = b""
        self._outputs = MessageReader(outputs)
        # Without a high-water mark it never blocks the front end and never drops.
        self._input = context.socket(zmq.ROUTER)
        try:
            self._input.set_hwm(0)
            self._input.bind(input_address)
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """See `CoreTransport`."""
        return self._outputs.fileno()

    def register(self, poller: zmq.Poller) -> None:
        """See `CoreTransport`."""
        poller.register(self._outputs.fileno(), zmq.POLLIN)

    def poll(self, milliseconds: int) -> bool:
        """See `CoreTransport`."""
        return self._outputs.poll(milliseconds)

    def receive(self) -> bytes | None:
        """See `CoreTransport`."""
        return self._outputs.receive()

    def connected(self) -> None:
        """See `CoreTransport`."""
        self._identity = self._input.recv_multipart()[0]

    def send(self, frames: Sequence[bytes]) -> None:
        """See `CoreTransport`."""
        self._input.send_multipart([self._identity, *frames])

    def close(self) -> None:
        """See `CoreTransport`."""
        self._input.close(linger=0)
        self._outputs.close()


class RemoteTransport:
    """See `CoreTransport`: one socket for all cores of a replica in turn, since a port cannot be reused at once.

    A core makes two connections, since it receives by one thread and sends by others. Their names are this core's
    alone, which distinguishes its messages from those that its predecessor left.
    """

    is_one_socket = True

    def __init__(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        """`socket` is a ROUTER; `name` is the core's; see `connection_names`."""
        self._socket = socket
        self._input, self._output = (own.encode() for own in connection_names(name))
        self._is_heard = False
        """Whether the connection by which the core receives is there."""
        self._frames: deque[bytes] = deque()
        """Messages that have arrived before."""

    @property
    def has_called(self) -> bool:
        """Whether anything has arrived from it."""
        return self._is_heard or bool(self._frames)

    @property
    def descriptor(self) -> int:
        """See `CoreTransport`."""
        return self._socket.fileno()

    def register(self, poller: zmq.Poller) -> None:
        """See `CoreTransport`."""
        poller.register(self._socket, zmq.POLLIN)

    def poll(self, milliseconds: int) -> bool:
        """See `CoreTransport`."""
        return bool(self._socket.poll(milliseconds))

    def receive(self) -> bytes | None:
        """See `CoreTransport`."""
        while cast(int, self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if sender == self._input:
                self._is_heard = True
            elif sender == self._output:
                self._frames += frames
            if self._is_heard and self._frames:
                return self._frames.popleft()
        return self._frames.popleft() if self._is_heard and self._frames else None

    def connected(self) -> None:
        """See `CoreTransport`: nothing is received before that."""

    def send(self, frames: Sequence[bytes]) -> None:
        """See `CoreTransport`."""
        self._socket.send_multipart([self._input, *frames])

    def close(self) -> None:
        """See `CoreTransport`; the socket stays open for the next core."""


def connection_names(name: str) -> tuple[str, str]:
    """Names of the connections by which a core receives, and sends."""
    return f"{name}.in", f"{name}.out"


CORE_MODULE = "engine.core.main"
"""What the process runs."""

LOST_FRONT_END = 69
"""Exit code of a core that did not reach its front end, or lost it (`EX_UNAVAILABLE` of sysexits.h)."""

_SHUTDOWN_MESSAGE_SECONDS = 3.0
"""For a core to send a shutdown message to the hosts of its ranks, also while an import keeps Python from running."""

_MAX_SOCKET_PATH = 107
"""Largest length of a unix socket's address, in bytes."""


class Launch(msgspec.Struct, frozen=True):
    """What a core is started with: the first line on the lifeline, as JSON. `config` is `Config.model_dump_json()`."""

    name: str
    config: str
    directory: str
    started: float
    """When the core was started, on `time.monotonic`'s clock."""
    flight_record: int
    """Descriptor of its `FlightRecord`."""
    cpus: list[int]
    """CPUs that the process may use; its parent avoids those that the first core computes on."""
    share: HostShare = HostShare()
    """Share of the host that its replica has."""
    lockstep_member: LockstepMember | None = None
    """Its replica among those that compute in lockstep."""
    front_end: CoreAddress | None = None
    """Where the core connects; None: at the address below, on this host."""
    outputs: int | None = None
    """Descriptor that a core on the front end's host writes its messages to."""

    @property
    def input_address(self) -> str:
        """Where the core's DEALER connects."""
        return f"ipc://{self.directory}/{self.name}.in"


class CoreProcess:
    """A core's process, its socket directory (0700, of a unique name) and its lifeline.

    Made by `Replica`, and on other hosts by `HostedCores`. The lifeline is a socket pair. It carries the launch; after
    that, its end of file reports to each side that the other process has ended, for whatever reason.
    """

    def __init__(
        self,
        config: Config,
        share: HostShare = HostShare(),  # noqa: B008, immutable
        *,
        cpus: Collection[int] | None = None,
        lockstep_member: LockstepMember | None = None,
        front_end: CoreAddress | None = None,
    ) -> None:
        """Make the directory; nothing runs before `start`. Raises `ValueError` when TMPDIR is too long a path.

        See `Launch` for the arguments; without `cpus` it may use those of its parent.
        """
        self._record_descriptor = FlightRecord.create(config.max_num_seqs)
        self._outputs, self._their_outputs = socket.socketpair()
        self._has_remote_ranks = config.parallel_config.has_remote_ranks
        self.flight_record = FlightRecord(self._record_descriptor)
        """Readable also when the process has ended."""
        self.launch = Launch(
            name=f"kaon-engine-{share.replica}",
            config=config.model_dump_json(),
            directory=tempfile.mkdtemp(prefix="kaon-"),
            started=time.monotonic(),
            flight_record=self._record_descriptor,
            cpus=sorted(os.sched_getaffinity(0) if cpus is None else cpus),
            share=share,
            lockstep_member=lockstep_member,
            front_end=front_end,
            outputs=self._their_outputs.fileno() if front_end is None else None,
        )
        longest = self.launch.input_address.removeprefix("ipc://")
        if len(os.fsencode(longest)) > _MAX_SOCKET_PATH:
            self._remove_directory()
            os.close(self._record_descriptor)
            self._outputs.close()
            self._their_outputs.close()
            raise ValueError(f"TMPDIR is too long: {longest} has over {_MAX_SOCKET_PATH} bytes; set a shorter TMPDIR")
        self.lifeline, self._theirs = socket.socketpair()
        self._lifeline_poll = select.poll()
        self._lifeline_poll.register(self.lifeline, select.POLLIN)
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = -1

    def open_transport(self, context: "zmq.Context[zmq.Socket[bytes]]") -> LocalTransport:
        """See `CoreHandle`."""
        return LocalTransport(context, self.launch.input_address, self._outputs)

    def start(self) -> None:
        """See `CoreHandle`. It gets a process group of its own, so that the terminal's Ctrl-C does not reach it."""
        # The kernel takes the end of the thread that starts a process for the end of its parent.
        self._starter_lives_on = threading.current_thread() is threading.main_thread()
        lockstep_member = self.launch.lockstep_member
        self._process = subprocess.Popen(
            self.launch.share.command(CORE_MODULE, self.launch.name),
            stdin=self._theirs.fileno(),
            pass_fds=(
                self._record_descriptor,
                *(() if self.launch.outputs is None else (self.launch.outputs,)),
                *(() if lockstep_member is None else lockstep_member.memory),
            ),
            env=code_environment(),
            process_group=0,
        )
        self._close_theirs()
        # The end of the lifeline reports a process that has ended already.
        with contextlib.suppress(BrokenPipeError):
            self.lifeline.sendall(msgspec.json.encode(self.launch) + b"\n")
        self.pid = self._process.pid

    def wait(self) -> int:
        """See `CoreHandle`."""
        return 0 if self._process is None else self._process.wait()

    def connected(self) -> None:
        """See `CoreHandle`. Connected sockets need no names: without the directory not even SIGKILL leaves files."""
        self._remove_directory()
        if self._starter_lives_on:
            with contextlib.suppress(BrokenPipeError):
                self.lifeline.sendall(REMOVED)

    @property
    def is_gone(self) -> bool:
        """See `CoreHandle`: whether the process has closed the lifeline."""
        return bool(self._lifeline_poll.poll(0))

    @property
    def waits_for_host(self) -> bool:
        """See `CoreHandle`."""
        return False

    def why_gone(self) -> Failed | None:
        """See `CoreHandle`."""
        return None

    def running_step(self) -> list[int]:
        """See `CoreHandle`; while it runs, those of the current step."""
        return self.flight_record.read()

    def stopped_process(self) -> int | None:
        """See `CoreHandle`."""
        return stopped_process(self.pid)

    def dump_stacks(self) -> None:
        """See `CoreHandle`."""
        ranks = family(self.pid)[1:]
        for number in (signal.SIGUSR2, signal.SIGCONT):
            self._signal(number)
            for rank in ranks:
                # A rank may have ended with the core.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, number)

    def kill(self) -> None:
        """See `CoreHandle`."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self, timeout: float, why: str = "") -> None:
        """End the process, by its lifeline and after `timeout` seconds by SIGKILL, and remove its files.

        One that has ranks on other hosts is given the time to send them a shutdown message, with `why`.
        """
        self._close_theirs()
        if self._has_remote_ranks:
            timeout = max(timeout, _SHUTDOWN_MESSAGE_SECONDS)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.lifeline.sendall(ENDED + why.encode())
        self.lifeline.close()
        self._outputs.close()
        if self._process is not None:
            wait_or_kill(self._process, timeout)
        self._remove_directory()

    def _close_theirs(self) -> None:
        self._theirs.close()
        self._their_outputs.close()
        if self._record_descriptor >= 0:
            os.close(self._record_descriptor)
            self._record_descriptor = -1

    def _remove_directory(self) -> None:
        shutil.rmtree(self.launch.directory, ignore_errors=True)
