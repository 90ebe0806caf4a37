"""What `CoreLink` needs of an engine core: `CoreHandle`, its process, and `CoreWire`, the way to it and back.

`CoreProcess` and `LocalWire`: a process of this host. `RemoteCore` and `RemoteWire`: one that another host runs.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
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
from engine.distributed.lockstep import Seat
from engine.distributed.processes import ENDED, REMOVED, family, stopped_process, wait_or_kill
from engine.messages import Failed
from models.child_environment import code_environment


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


# [core_wires] `LocalWire` and `RemoteWire`: the front end's sockets to an engine core, here or on another host. See
# `CoreWire`.


class LocalWire:
    """Two sockets of this core's own, with a name each in a private directory."""

    is_one_socket = False

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", input_address: str, output_address: str) -> None:
        self._identity = b""
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._input = self._bind(context, zmq.ROUTER, input_address)
            self._output = self._bind(context, zmq.PULL, output_address)
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """See `CoreWire`."""
        return self._output.fileno()

    def register(self, poller: zmq.Poller) -> None:
        """See `CoreWire`."""
        poller.register(self._output, zmq.POLLIN)

    def poll(self, milliseconds: int) -> bool:
        """See `CoreWire`."""
        return bool(self._output.poll(milliseconds))

    def receive(self) -> bytes | None:
        """See `CoreWire`."""
        # Not `poll`, which makes a poller at each call.
        if not cast(int, self._output.get(zmq.EVENTS)) & zmq.POLLIN:
            return None
        return self._output.recv(zmq.NOBLOCK)

    def connected(self) -> None:
        """See `CoreWire`."""
        self._identity = self._input.recv_multipart()[0]

    def send(self, frames: Sequence[bytes]) -> None:
        """See `CoreWire`."""
        self._input.send_multipart([self._identity, *frames])

    def close(self) -> None:
        """See `CoreWire`."""
        for each in self._sockets:
            each.close(linger=0)

    def _bind(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str) -> "zmq.Socket[bytes]":
        """A socket without high-water mark: it never blocks the front end and never drops."""
        socket = context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(0)
        socket.bind(address)
        return socket


class RemoteWire:
    """One socket for all cores of a replica, one after the other: a port cannot be had again at once.

    A core calls by two connections, since it hears by one thread and speaks by others. Their names, of this core
    alone, part what it says from what its predecessor left.
    """

    is_one_socket = True

    def __init__(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        """`socket` is a ROUTER; `name` is what the core was given for its connections."""
        self._socket = socket
        self._input, self._output = (own.encode() for own in connection_names(name))
        self._is_heard = False
        """Whether it has called by the connection that it hears by."""
        self._frames: deque[bytes] = deque()
        """That came before that."""

    @property
    def has_called(self) -> bool:
        """Whether anything has come from it."""
        return self._is_heard or bool(self._frames)

    @property
    def descriptor(self) -> int:
        """See `CoreWire`."""
        return self._socket.fileno()

    def register(self, poller: zmq.Poller) -> None:
        """See `CoreWire`."""
        poller.register(self._socket, zmq.POLLIN)

    def poll(self, milliseconds: int) -> bool:
        """See `CoreWire`."""
        return bool(self._socket.poll(milliseconds))

    def receive(self) -> bytes | None:
        """See `CoreWire`."""
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
        """See `CoreWire`: nothing was received before."""

    def send(self, frames: Sequence[bytes]) -> None:
        """See `CoreWire`."""
        self._socket.send_multipart([self._input, *frames])

    def close(self) -> None:
        """See `CoreWire`; the socket is the next core's."""


def connection_names(name: str) -> tuple[str, str]:
    """Of the connections by which a core of that name hears, and speaks."""
    return f"{name}.in", f"{name}.out"


# [core_process] `CoreProcess`: one engine-core process as its parent sees it, and `Launch`, what it is started with.
#
# Made by `Replica`, and on other hosts by `HostedCores`; the core reads its `Launch` and answers over the sockets
# named there.

CORE_MODULE = "engine.core.main"
"""What the process runs."""

LOST_FRONT_END = 69
"""Exit code of a core that did not reach its front end, or lost it; sysexits.h has it for a missing service."""

_FAREWELL_SECONDS = 3.0
"""For a core to part from hosts that have ranks of it, also while what it imports keeps Python from running."""

_MAX_SOCKET_PATH = 107
"""Bytes that a unix socket's address holds."""


class Launch(msgspec.Struct, frozen=True):
    """First line on the lifeline, as JSON. `config` is `Config.model_dump_json()`."""

    name: str
    config: str
    directory: str
    started: float
    """When the core was started, on `time.monotonic`'s clock."""
    flight_record: int
    """Descriptor of its `FlightRecord`."""
    cpus: list[int]
    """Those that the process may use. Its parent keeps off the ones that the first core took."""
    share: HostShare = HostShare()
    """Its replica's."""
    seat: Seat | None = None
    """Among replicas that compute in lockstep."""
    front_end: CoreAddress | None = None
    """Where the core calls; None: at the two addresses below, on this host."""

    @property
    def input_address(self) -> str:
        """Where the core's DEALER connects."""
        return f"ipc://{self.directory}/{self.name}.in"

    @property
    def output_address(self) -> str:
        """Where the core's PUSH connects."""
        return f"ipc://{self.directory}/{self.name}.out"


class CoreProcess:
    """A core's process, its socket directory (0700, of a unique name) and its lifeline.

    The lifeline is a socket pair. The launch goes over it; after that, its end of file tells either side that the
    other process is gone, however it ended.
    """

    def __init__(
        self,
        config: Config,
        share: HostShare = HostShare(),  # noqa: B008, immutable
        *,
        cpus: Collection[int] | None = None,
        seat: Seat | None = None,
        front_end: CoreAddress | None = None,
    ) -> None:
        """Make the directory; nothing runs before `start`. Raises `ValueError` when TMPDIR is too long a path.

        See `Launch` for the arguments; it may use the `cpus` of its parent if there are none.
        """
        self._record_descriptor = FlightRecord.create(config.max_num_seqs)
        self._has_remote_ranks = config.parallel_config.has_remote_ranks
        self.flight_record = FlightRecord(self._record_descriptor)
        """Stays readable when the process is gone."""
        self.launch = Launch(
            name=f"kaon-engine-{share.replica}",
            config=config.model_dump_json(),
            directory=tempfile.mkdtemp(prefix="kaon-"),
            started=time.monotonic(),
            flight_record=self._record_descriptor,
            cpus=sorted(os.sched_getaffinity(0) if cpus is None else cpus),
            share=share,
            seat=seat,
            front_end=front_end,
        )
        longest = self.launch.output_address.removeprefix("ipc://")
        if len(os.fsencode(longest)) > _MAX_SOCKET_PATH:
            self._remove_directory()
            os.close(self._record_descriptor)
            raise ValueError(f"TMPDIR is too long: {longest} has over {_MAX_SOCKET_PATH} bytes; set a shorter TMPDIR")
        self.lifeline, self._theirs = socket.socketpair()
        self._lifeline_poll = select.poll()
        self._lifeline_poll.register(self.lifeline, select.POLLIN)
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = -1

    def open_wire(self, context: "zmq.Context[zmq.Socket[bytes]]") -> LocalWire:
        """See `CoreHandle`."""
        return LocalWire(context, self.launch.input_address, self.launch.output_address)

    def start(self) -> None:
        """See `CoreHandle`. A process group of its own keeps the terminal's Ctrl-C from it."""
        # The kernel takes the starting thread's end for its process'.
        self._starter_lives_on = threading.current_thread() is threading.main_thread()
        # The name is for people who read `ps`.
        seat = self.launch.seat
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", CORE_MODULE, self.launch.name],
            stdin=self._theirs.fileno(),
            pass_fds=(self._record_descriptor, *(() if seat is None else seat.memory)),
            env=code_environment(),
            process_group=0,
        )
        self._close_theirs()
        # One that is dead already is told of by the lifeline's end.
        with contextlib.suppress(BrokenPipeError):
            self.lifeline.sendall(msgspec.json.encode(self.launch) + b"\n")
        self.pid = self._process.pid

    def wait(self) -> int:
        """See `CoreHandle`."""
        return 0 if self._process is None else self._process.wait()

    def connected(self) -> None:
        """Both sockets are connected, and stay so without their names: from now on not even SIGKILL leaves a trace."""
        self._remove_directory()
        if self._starter_lives_on:
            with contextlib.suppress(BrokenPipeError):
                self.lifeline.sendall(REMOVED)

    @property
    def is_gone(self) -> bool:
        """See `CoreHandle`: whether the process has let go of the lifeline."""
        return bool(self._lifeline_poll.poll(0))

    @property
    def is_awaited(self) -> bool:
        """See `CoreHandle`."""
        return False

    def why_gone(self) -> Failed | None:
        """See `CoreHandle`."""
        return None

    def running_step(self) -> list[int]:
        """See `CoreHandle`; of one that lives, in the step that it computes."""
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
                # They end with the core.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, number)

    def kill(self) -> None:
        """See `CoreHandle`."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self, timeout: float, why: str = "") -> None:
        """End the process, by its lifeline and after `timeout` seconds by SIGKILL, and leave nothing of it behind.

        One that has ranks on other hosts is given the time to tell them, `why` too.
        """
        self._close_theirs()
        if self._has_remote_ranks:
            timeout = max(timeout, _FAREWELL_SECONDS)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.lifeline.sendall(ENDED + why.encode())
        self.lifeline.close()
        if self._process is not None:
            wait_or_kill(self._process, timeout)
        self._remove_directory()

    def _close_theirs(self) -> None:
        self._theirs.close()
        if self._record_descriptor >= 0:
            os.close(self._record_descriptor)
            self._record_descriptor = -1

    def _remove_directory(self) -> None:
        shutil.rmtree(self.launch.directory, ignore_errors=True)
