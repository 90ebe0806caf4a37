"""`CoreProcess`: one engine-core process as its parent sees it, and `Launch`, what it is started with.

Made by `Replica`, and on other hosts by `HostedCores`; the core reads its `Launch` and answers over the sockets named
there.
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
from collections.abc import Collection

import msgspec
import zmq

from engine.config import Config
from engine.core_wires import LocalWire
from engine.flight_record import FlightRecord
from engine.lifetime import ENDED, REMOVED, family, stopped_process, wait_or_kill
from engine.messages import Failed
from engine.seats import Seat
from engine.worker.host_messages import CoreAddress
from engine.worker.shard import HostShare
from models.child_environment import own_code

CORE_MODULE = "engine.core_main"
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
            env=own_code(),
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
