"""The front end's view of an engine core: `CoreHandle`, its process, and `CoreTransport`, which carries its messages.

`CoreProcess` and `LocalTransport` are for a core on this host, `RemoteCore` and `RemoteTransport` for a core on
another host, where that host's agent starts it as a `CoreProcess`.
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
from engine.distributed.processes import ENDED, REMOVED, family, starting_child, stopped_process, wait_or_kill
from engine.messages import Failed
from models.child_environment import code_environment, working_directory


class CoreTransport(Protocol):
    """The front end's end of the connection to one core. All calls come from one thread."""

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable when there may be messages."""

    @property
    def is_one_socket(self) -> bool:
        """Whether `send` may consume the descriptor's signal that there are messages, so that a waiter must poll."""

    def register(self, poller: zmq.Poller) -> None:
        """Register with `poller`, which wakes when there is a message."""

    def poll(self, milliseconds: int) -> bool:
        """Wait until there may be a message. Returns False after the time."""

    def receive(self) -> bytes | None:
        """Return the next received message; None if there is none."""

    def connected(self) -> None:
        """Note that the core is ready, so that messages can be sent."""

    def send(self, message: bytes) -> None:
        """Send one message. Never blocks. If the core has just ended, the message is lost."""

    def close(self) -> None:
        """Stop sending and receiving."""


class CoreHandle(Protocol):
    """One core's process, from its start to its end."""

    lifeline: socket.socket
    """Socket that is readable when the core has ended."""
    pid: int
    """The process id on its own host; -1 until it is known."""

    @property
    def waits_for_host(self) -> bool:
        """Whether its host has yet to join."""

    @property
    def is_gone(self) -> bool:
        """Return whether it has ended or is ending."""

    def open_transport(self, context: "zmq.Context[zmq.Socket[bytes]]") -> CoreTransport:
        """Open the transport, before the core starts. Sockets are created in `context`."""

    def start(self) -> None:
        """Start the core, and return at once. Raises `OSError` if it cannot be started."""

    def connected(self) -> None:
        """Note that the core is ready and has connected all its sockets."""

    def wait(self) -> int:
        """Wait until the process has exited. Returns its exit code, or the negative number of a signal."""

    def why_gone(self) -> Failed | None:
        """Return why the core has ended, if more is known than the exit code; else None."""

    def running_step(self) -> Sequence[int] | None:
        """Return the ids of the requests in the step in which it ended; None if unknown, or no request is the
        cause."""

    def stopped_process(self) -> int | None:
        """Return the id of one of its processes that a signal has stopped; None if none is known."""

    def dump_stacks(self) -> None:
        """Make the core and its ranks log the stacks of all threads, even of blocked or stopped ones."""

    def kill(self) -> None:
        """Kill the core. No effect if it has ended."""

    def stop(self, timeout: float, why: str = "") -> None:
        """End the core, after `timeout` seconds by force, and remove its files.

        `why` is sent to hosts that run its ranks: a sentence, or "" at an orderly end.
        """


class LocalTransport:
    """See `CoreTransport`. Messages to the core use a socket in a private directory, messages from it a stream."""

    is_one_socket = False

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", input_address: str, outputs: socket.socket) -> None:
        """Takes over `outputs`, the stream that the core writes to."""
        self._identity = b""
        self._outputs = MessageReader(outputs)
        # Without a high-water mark, the socket never blocks the front end and never drops messages.
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

    def send(self, message: bytes) -> None:
        """See `CoreTransport`."""
        self._input.send_multipart([self._identity, message])

    def close(self) -> None:
        """See `CoreTransport`."""
        self._input.close(linger=0)
        self._outputs.close()


class RemoteTransport:
    """See `CoreTransport`. Successive cores of a replica use the same socket, since a port cannot be reused at once.

    A core opens two connections, because it receives in one thread and sends in others. Their names are unique to the
    core, which distinguishes its messages from unread ones of its predecessor.
    """

    is_one_socket = True

    def __init__(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        """`socket` is a ROUTER; `name` is the core's; see `connection_names`."""
        self._socket = socket
        self._input, self._output = (own.encode() for own in connection_names(name))
        self._is_heard = False
        """Whether the connection by which the core receives is open."""
        self._frames: deque[bytes] = deque()
        """Messages that were received earlier and not returned yet."""

    @property
    def has_called(self) -> bool:
        """Whether any message was received from the core."""
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
        """See `CoreTransport`. No message is received before this call."""

    def send(self, message: bytes) -> None:
        """See `CoreTransport`."""
        self._socket.send_multipart([self._input, message])

    def close(self) -> None:
        """See `CoreTransport`; the socket stays open for the next core."""


def connection_names(name: str) -> tuple[str, str]:
    """Return the names of the two connections by which a core receives and sends."""
    return f"{name}.in", f"{name}.out"


CORE_MODULE = "engine.core.main"
"""Module that the process runs."""

LOST_FRONT_END = 69
"""Exit code of a core that did not reach its front end, or lost it (`EX_UNAVAILABLE` of sysexits.h)."""

_SHUTDOWN_MESSAGE_SECONDS = 3.0
"""Seconds that a core has to send a shutdown message to the hosts of its ranks, even while an import blocks Python."""

_MAX_SOCKET_PATH = 107
"""Largest length of a Unix socket's address, in bytes."""


class Launch(msgspec.Struct, frozen=True):
    """The parameters of a core's start: the first line on the lifeline, as JSON. `config` is
    `Config.model_dump_json()`."""

    name: str
    config: str
    directory: str
    started: float
    """Time at which the core was started, on `time.monotonic`'s clock."""
    flight_record: int
    """Descriptor of its `FlightRecord`."""
    cpus: list[int]
    """CPUs that the process may use; its parent avoids those that the first core computes on."""
    share: HostShare = HostShare()
    """Share of the host that its replica has."""
    lockstep_member: LockstepMember | None = None
    """Its replica among those that compute in lockstep."""
    front_end: CoreAddress | None = None
    """Address that the core connects to on another host; None: `input_address`, on this host."""
    outputs: int | None = None
    """Descriptor that a core on the front end's host writes its messages to, else None."""

    @property
    def input_address(self) -> str:
        """Address that the core's DEALER connects to."""
        return f"ipc://{self.directory}/{self.name}.in"


class CoreProcess:
    """A core's process, its socket directory (0700, of a unique name) and its lifeline.

    Created by `Replica`, and on other hosts by `HostedCores`. The lifeline is a socket pair. It carries the `Launch`;
    after that, its end of file reports to each process that the other one has ended, for whatever reason.
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
        """Create the directory. The process starts at `start`. Raises `ValueError` if TMPDIR is too long.

        See `Launch` for the arguments. Without `cpus`, the core may use the CPUs of its parent.
        """
        self._record_descriptor = FlightRecord.create(config.max_num_seqs)
        self._outputs, self._their_outputs = socket.socketpair()
        self._has_remote_ranks = config.parallel_config.has_remote_ranks
        self.flight_record = FlightRecord(self._record_descriptor)
        """The flight record, which can be read even after the process has ended."""
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
        """See `CoreHandle`. The process gets a new process group, so that Ctrl-C in the terminal does not reach it."""
        # To the kernel, the parent of a process ends with the thread that started the process.
        self._starter_lives_on = threading.current_thread() is threading.main_thread()
        lockstep_member = self.launch.lockstep_member
        with starting_child():
            self._process = subprocess.Popen(
                self.launch.share.command(CORE_MODULE, self.launch.name),
                stdin=self._theirs.fileno(),
                pass_fds=(
                    self._record_descriptor,
                    *(() if self.launch.outputs is None else (self.launch.outputs,)),
                    *(() if lockstep_member is None else lockstep_member.memory),
                ),
                env=code_environment(),
                cwd=working_directory(),
                process_group=0,
            )
        self._close_theirs()
        # If the process has already ended, the lifeline reports it.
        with contextlib.suppress(BrokenPipeError):
            self.lifeline.sendall(msgspec.json.encode(self.launch) + b"\n")
        self.pid = self._process.pid

    def wait(self) -> int:
        """See `CoreHandle`."""
        return 0 if self._process is None else self._process.wait()

    def connected(self) -> None:
        """See `CoreHandle`. Connected sockets need no path, so the directory is removed: then even SIGKILL leaves no
        file."""
        self._remove_directory()
        if self._starter_lives_on:
            with contextlib.suppress(BrokenPipeError):
                self.lifeline.sendall(REMOVED)

    @property
    def is_gone(self) -> bool:
        """See `CoreHandle`. Returns whether the process has closed the lifeline."""
        return bool(self._lifeline_poll.poll(0))

    @property
    def waits_for_host(self) -> bool:
        """See `CoreHandle`."""
        return False

    def why_gone(self) -> Failed | None:
        """See `CoreHandle`."""
        return None

    def running_step(self) -> list[int]:
        """See `CoreHandle`. While the core runs, these are the requests of the current step."""
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
        """End the process by closing its lifeline, after `timeout` seconds by SIGKILL, and remove its files.

        A core with ranks on other hosts first gets time to send them a shutdown message with `why`.
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
