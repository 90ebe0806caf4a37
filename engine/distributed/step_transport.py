"""Sends steps from rank 0 to the other ranks, and their reports back to rank 0.

    rank 0                                          rank r
    SharedMemorySteps.write   -- slots of a ring --> SharedMemorySteps.read      all ranks on one host
    SharedMemorySteps.take    <-- reports ---------- SharedMemorySteps.report
    TcpSteps.write            -- TCP, CURVE -------> TcpStepSource.read          ranks on several hosts
    TcpSteps.take             <-- TCP, CURVE ------- TcpStepSource.report

Rank 0 receives the reports of all ranks in the order of steps, at most `REPORTS` steps later. Imports no torch.
"""

import ctypes
import mmap
import os
import struct
import time
from collections import deque
from typing import Protocol, Self

import zmq

from engine.distributed.cluster import CurvePair
from engine.distributed.curve import bind_curve, curve_client, endpoint
from engine.distributed.processes import anonymous_file
from engine.distributed.rank_link import SharedMemory, StepAddress


class StepTransport(Protocol):
    """Rank 0's end. One thread calls it. The other ranks are numbered from 1."""

    @property
    def address(self) -> SharedMemory | StepAddress:
        """Address by which the other ranks open it."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that the processes of the other ranks inherit."""

    @property
    def where(self) -> str:
        """The address as text for error messages."""

    def missing_rank(self, seconds: float) -> int | None:
        """Wait until every rank has connected. Returns the first one that has not within `seconds`, or None."""

    def write(self, message: bytes) -> None:
        """Send a step to every rank. Raises `ConnectionError` with a sentence if a rank cannot be reached."""

    def take(self, rank: int) -> str:
        """Wait until a rank has completed the step. Returns its failure, or ""."""

    def take_within(self, rank: int, seconds: float) -> str | None:
        """As `take`, but return None if the rank has not reported within `seconds`."""

    def close(self) -> None:
        """Free its memory or its port."""


class StepSource(Protocol):
    """The end of a rank other than 0. One thread calls it."""

    def read(self) -> bytes:
        """Wait for the next step and return it."""

    def report(self, failure: str = "") -> None:
        """Report that this rank has completed the step, or with `failure` why it could not compute it."""


def open_steps(steps: SharedMemory | StepAddress, rank: int, size: int) -> StepSource:
    """Open the end of rank `rank` of `size` ranks."""
    if isinstance(steps, SharedMemory):
        return SharedMemorySteps(steps.descriptor, size, rank)
    return TcpStepSource(steps, rank)


_library = ctypes.CDLL(None, use_errno=True)
_init, _post, _wait, _try = (getattr(_library, f"sem_{name}") for name in ("init", "post", "wait", "trywait"))
_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
for _function in (_post, _wait, _try):
    _function.argtypes = [ctypes.c_void_p]

_SPIN_NS = 500_000
"""Nanoseconds that a waiter spins before it sleeps: the time between two steps of a busy engine.

Waking a sleeping process takes 100 microseconds."""
_NAP_SECONDS = 0.0005


class Semaphore:
    """The C library's counting semaphore, at an address of memory that processes share.

    It is the only such primitive that every Linux has without a compiler. It orders memory on any processor (data
    written before a `post` are visible after the matching `wait`) and sleeps in the kernel.
    """

    BYTES = 64
    """Bytes of memory of a semaphore: one cache line."""

    def __init__(self, address: int) -> None:
        """Use the semaphore at `address`. The caller owns the memory, which must outlive this object."""
        self._address = ctypes.c_void_p(address)

    def initialise(self, value: int) -> None:
        """Initialise the memory, before any other process uses it."""
        if _init(self._address, 1, value):
            raise OSError(ctypes.get_errno(), "sem_init failed")

    def post(self) -> None:
        """Wake one waiter. Never blocks."""
        if _post(self._address):
            raise OSError(ctypes.get_errno(), "sem_post failed")

    def wait(self) -> None:
        """Take one post: at once, after a short spin that yields the processor, or after sleeping."""
        address = self._address
        if not _try(address):
            return
        end = time.perf_counter_ns() + _SPIN_NS
        while time.perf_counter_ns() < end:
            os.sched_yield()
            if not _try(address):
                return
        while _wait(address):  # A signal interrupted the wait.
            pass

    def wait_for(self, seconds: float) -> bool:
        """Take one post within `seconds`. Returns False if there was none."""
        end = time.monotonic() + seconds
        while _try(self._address):
            if time.monotonic() >= end:
                return False
            time.sleep(_NAP_SECONDS)
        return True


SLOTS = 8
SLOT_BYTES = 64 << 10
"""Bytes of a message in one slot; a longer message takes several successive slots."""
_HEADER = struct.Struct("qq")
"""Number of bytes in this slot, and number of bytes of the message in further slots."""
_SLOT = Semaphore.BYTES + SLOT_BYTES
_LENGTH = struct.Struct("q")
_FAILURE_BYTES = (16 << 10) - Semaphore.BYTES - _LENGTH.size
"""Most bytes of a failure: a sentence and the end of its traceback."""
_REPORT = _LENGTH.size + _FAILURE_BYTES
REPORTS = 4
"""Most pending reports of a rank: more than the steps that rank 0 has begun and not read."""
_RANK_REPORTS = Semaphore.BYTES + REPORTS * _REPORT


class SharedMemorySteps:
    """See `StepTransport` and `StepSource`. Both ends, in an anonymous file that every rank maps.

    With n = size - 1 reading ranks, the file contains in this order:

        n semaphores     of each rank: slots that it may read
        n semaphores     of each rank: slots that it has read, which rank 0 may fill again
        SLOTS slots      a header in its own cache line, then SLOT_BYTES of a message
        n reports        of each rank: a semaphore, and REPORTS times the length of a failure, and the failure

    A rank without work sleeps. The file disappears with its processes.
    """

    where = "shared memory"

    def __init__(self, descriptor: int, size: int, rank: int = 0) -> None:
        """Map the file of `descriptor` as rank `rank` of `size`. The creator closes the descriptor."""
        others = size - 1
        self._descriptor, self._index = descriptor, rank - 1
        self._memory = mmap.mmap(descriptor, _num_bytes(size))
        self._view = memoryview(self._memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        semaphores = [Semaphore(address + index * Semaphore.BYTES) for index in range(2 * others)]
        self._filled, self._free = semaphores[:others], semaphores[others:]
        self._slots = len(semaphores) * Semaphore.BYTES
        self._reports = self._slots + SLOTS * _SLOT
        self._reported = [Semaphore(address + self._reports + index * _RANK_REPORTS) for index in range(others)]
        self._next_slot = 0
        self._next_report = [0] * others

    @classmethod
    def create(cls, size: int) -> Self:
        """Create the memory for `size` ranks, for use by rank 0."""
        steps = cls(anonymous_file("kaon-steps", _num_bytes(size)), size)
        for semaphore in (*steps._filled, *steps._reported):
            semaphore.initialise(0)
        for semaphore in steps._free:
            semaphore.initialise(SLOTS)
        return steps

    # -- rank 0 --------------------------------------------------------------------------------------------------

    @property
    def address(self) -> SharedMemory:
        """See `StepTransport`."""
        return SharedMemory(self._descriptor)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """See `StepTransport`."""
        return (self._descriptor,)

    def missing_rank(self, seconds: float) -> None:
        """See `StepTransport`. Every rank maps the memory from its start."""

    def write(self, message: bytes) -> None:
        """See `StepTransport`. Blocks while a rank has not read any of the slots."""
        left = len(message)
        while True:
            begin = len(message) - left
            piece = message if left <= SLOT_BYTES and not begin else message[begin : begin + SLOT_BYTES]
            left -= len(piece)
            for free in self._free:
                free.wait()
            offset = self._take_slot()
            _HEADER.pack_into(self._view, offset, len(piece), left)
            self._view[offset + Semaphore.BYTES : offset + Semaphore.BYTES + len(piece)] = piece
            for filled in self._filled:
                filled.post()
            if left == 0:
                return

    def take(self, rank: int) -> str:
        """See `StepTransport`."""
        self._reported[rank - 1].wait()
        return self._failure(rank)

    def take_within(self, rank: int, seconds: float) -> str | None:
        """See `StepTransport`."""
        return self._failure(rank) if self._reported[rank - 1].wait_for(seconds) else None

    def close(self) -> None:
        """See `StepTransport`. The ranks' mappings stay valid."""
        os.close(self._descriptor)

    def _failure(self, rank: int) -> str:
        begin = self._take_report(rank - 1)
        (length,) = _LENGTH.unpack_from(self._view, begin)
        if length == 0:
            return ""
        text = bytes(self._view[begin + _LENGTH.size : begin + _LENGTH.size + length])
        return text.decode(errors="replace")

    # -- the other ranks -----------------------------------------------------------------------------------------

    def read(self) -> bytes:
        """See `StepSource`."""
        pieces = []
        while True:
            self._filled[self._index].wait()
            offset = self._take_slot()
            size, left = _HEADER.unpack_from(self._view, offset)
            pieces.append(bytes(self._view[offset + Semaphore.BYTES : offset + Semaphore.BYTES + size]))
            self._free[self._index].post()
            if left == 0:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def report(self, failure: str = "") -> None:
        """See `StepSource`."""
        text = _shortened(failure.encode(), _FAILURE_BYTES)
        begin = self._take_report(self._index)
        _LENGTH.pack_into(self._view, begin, len(text))
        self._view[begin + _LENGTH.size : begin + _LENGTH.size + len(text)] = text
        self._reported[self._index].post()

    def _take_report(self, index: int) -> int:
        """Advance to the next report of a rank, and return its offset in the memory."""
        number = self._next_report[index]
        self._next_report[index] = (number + 1) % REPORTS
        return self._reports + index * _RANK_REPORTS + Semaphore.BYTES + number * _REPORT

    def _take_slot(self) -> int:
        offset = self._slots + self._next_slot * _SLOT
        self._next_slot = (self._next_slot + 1) % SLOTS
        return offset


def _num_bytes(size: int) -> int:
    others = size - 1
    return 2 * others * Semaphore.BYTES + SLOTS * _SLOT + others * _RANK_REPORTS


def _shortened(text: bytes, limit: int) -> bytes:
    """Shorten a failure to `limit` bytes. Its beginning is the sentence, its end is the line that raised."""
    half = limit // 2 - 8
    return text if len(text) <= limit else text[:half] + b"\n...\n" + text[-half:]


_HELLO = b""
"""First message of a rank: a ROUTER can send only to peers that it has received from."""
_TCP_FAILURE_BYTES = 64 << 10
"""Most bytes of a failure: a sentence, and beginning and end of its traceback."""


class StepsLost(ConnectionError):
    """A step cannot be sent to a rank."""


class TcpSteps:
    """See `StepTransport`. Sends one message per step to each rank.

    Both ends authenticate each other by CURVE keys that are created for this start. The ranks receive theirs over the
    connection by which their host joined.
    """

    descriptors: tuple[int, ...] = ()

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", host: str, port: int, size: int) -> None:
        """Listen for ranks 1 to `size` - 1. Raises `OSError` with a sentence if the address cannot be used."""
        own, theirs = CurvePair.new(), CurvePair.new()
        self.address = StepAddress(endpoint(host, port), own.public, theirs.public, theirs.secret)
        self.where = f"port {port} on {host}"
        self._socket = bind_curve(context, zmq.ROUTER, self.address.address, own)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._names = {rank: _connection_name(rank) for rank in range(1, size)}
        self._missing = set(self._names.values())
        self._reports: dict[bytes, deque[str]] = {name: deque() for name in self._names.values()}

    def missing_rank(self, seconds: float) -> int | None:
        """See `StepTransport`."""
        deadline = time.monotonic() + seconds
        while self._missing and self._socket.poll(max(0, round(1e3 * (deadline - time.monotonic())))):
            name, _ = self._socket.recv_multipart()
            self._missing.discard(name)
        return next((rank for rank, name in self._names.items() if name in self._missing), None)

    def write(self, message: bytes) -> None:
        """See `StepTransport`. Raises `StepsLost` if the connection to a rank is gone."""
        for rank, name in self._names.items():
            try:
                self._socket.send_multipart([name, message], copy=False)
            except zmq.ZMQError as error:
                raise StepsLost(f"the connection to tensor-parallel rank {rank} is lost ({error.strerror})") from error

    def take(self, rank: int) -> str:
        """See `StepTransport`."""
        reports = self._reports[self._names[rank]]
        while not reports:
            self._receive()
        return reports.popleft()

    def take_within(self, rank: int, seconds: float) -> str | None:
        """See `StepTransport`."""
        deadline = time.monotonic() + seconds
        reports = self._reports[self._names[rank]]
        while not reports:
            if not self._socket.poll(max(0, round(1e3 * (deadline - time.monotonic())))):
                return None
            self._receive()
        return reports.popleft()

    def close(self) -> None:
        """See `StepTransport`."""
        self._socket.close(linger=0)

    def _receive(self) -> None:
        name, failure = self._socket.recv_multipart()
        self._reports[name].append(failure.decode(errors="replace"))


class TcpStepSource:
    """See `StepSource`. A rank's end of `TcpSteps`."""

    def __init__(self, steps: StepAddress, rank: int) -> None:
        own = CurvePair(steps.public, steps.secret)
        self._socket = curve_client(zmq.Context.instance(), own, steps.core_public, _connection_name(rank))
        self._socket.connect(steps.address)
        self._socket.send(_HELLO)

    def read(self) -> bytes:
        """See `StepSource`."""
        return self._socket.recv()

    def report(self, failure: str = "") -> None:
        """See `StepSource`."""
        self._socket.send(_shortened(failure.encode(), _TCP_FAILURE_BYTES))


def _connection_name(rank: int) -> bytes:
    return f"rank-{rank}".encode()
