"""`Semaphore`: the C library's counting semaphore in memory that processes share. Used by the ranks' step ring.

It is the one primitive that every Linux brings without a compiler, orders memory on any processor, and sleeps in the
kernel: what was written before a `post` is seen after the `wait` that takes it.
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
from engine.distributed.curve import dial, listen, name_of
from engine.distributed.processes import anonymous_file
from engine.distributed.rank_link import SharedMemory, StepAddress

_library = ctypes.CDLL(None, use_errno=True)
_init, _post, _wait, _try = (getattr(_library, f"sem_{name}") for name in ("init", "post", "wait", "trywait"))
_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
for _function in (_post, _wait, _try):
    _function.argtypes = [ctypes.c_void_p]

_SPIN_NS = 500_000
"""Before a waiter sleeps: what lies between two steps of a busy engine. A sleeper takes 100 microseconds to wake."""
_NAP_SECONDS = 0.0005


class Semaphore:
    """A semaphore at an address."""

    BYTES = 64
    """Of memory that each takes: a line of the processor's cache."""

    def __init__(self, address: int) -> None:
        """Use the one that is there. Its memory is the caller's, and must outlive it."""
        self._address = ctypes.c_void_p(address)

    def initialise(self, value: int) -> None:
        """Make it, before any other process uses it."""
        if _init(self._address, 1, value):
            raise OSError(ctypes.get_errno(), "sem_init failed")

    def post(self) -> None:
        """Let one waiter on. Never blocks."""
        if _post(self._address):
            raise OSError(ctypes.get_errno(), "sem_post failed")

    def wait(self) -> None:
        """Take one post: at once, within microseconds while yielding the processor, or asleep."""
        address = self._address
        if not _try(address):
            return
        end = time.perf_counter_ns() + _SPIN_NS
        while time.perf_counter_ns() < end:
            os.sched_yield()
            if not _try(address):
                return
        while _wait(address):  # Interrupted by a signal.
            pass

    def wait_for(self, seconds: float) -> bool:
        """Take one post, if there is one within so many seconds; whether there was."""
        end = time.monotonic() + seconds
        while _try(self._address):
            if time.monotonic() >= end:
                return False
            time.sleep(_NAP_SECONDS)
        return True


# [step_ring] `StepRing`: how rank 0 tells the other ranks of each step: written once into memory that all of them
# map.
#
# A rank with nothing to do sleeps. The memory is an anonymous file, passed on by its descriptor: it has no name, and
# nothing is left of it when its processes are gone.

SLOTS = 8
SLOT_BYTES = 64 << 10
"""Of a message; longer ones go piece by piece."""
_HEADER = struct.Struct("qq")
"""Bytes of this piece, and bytes of the message behind it."""
_SLOT = Semaphore.BYTES + SLOT_BYTES
_PER_READER = 2
"""Semaphores: pieces that it may read, and slots that it has left."""


class StepRing:
    """Messages from one writer to every reader, in order."""

    def __init__(self, descriptor: int, num_readers: int) -> None:
        """Map the file of that descriptor, which stays the caller's to close."""
        self._memory = mmap.mmap(descriptor, _num_bytes(num_readers))
        self._view = memoryview(self._memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        semaphores = [Semaphore(address + at * Semaphore.BYTES) for at in range(_PER_READER * num_readers)]
        self._filled, self._free = semaphores[:num_readers], semaphores[num_readers:]
        self._slots = len(semaphores) * Semaphore.BYTES
        self._next = 0

    @classmethod
    def create(cls, num_readers: int) -> tuple[int, Self]:
        """A new ring, and the descriptor that readers map it by."""
        descriptor = anonymous_file("kaon-steps", _num_bytes(num_readers))
        ring = cls(descriptor, num_readers)
        for filled, free in zip(ring._filled, ring._free, strict=True):
            filled.initialise(0)
            free.initialise(SLOTS)
        return descriptor, ring

    def write(self, message: bytes) -> None:
        """Give every reader a message. Blocks while one of them has all slots still to read."""
        left = len(message)
        while True:
            begin = len(message) - left
            piece = message if left <= SLOT_BYTES and not begin else message[begin : begin + SLOT_BYTES]
            left -= len(piece)
            for free in self._free:
                free.wait()
            at = self._take_slot()
            _HEADER.pack_into(self._view, at, len(piece), left)
            self._view[at + Semaphore.BYTES : at + Semaphore.BYTES + len(piece)] = piece
            for filled in self._filled:
                filled.post()
            if left == 0:
                return

    def read(self, reader: int) -> bytes:
        """The next message, once there is one. Each reader is one thread."""
        pieces = []
        while True:
            self._filled[reader].wait()
            at = self._take_slot()
            size, left = _HEADER.unpack_from(self._view, at)
            pieces.append(bytes(self._view[at + Semaphore.BYTES : at + Semaphore.BYTES + size]))
            self._free[reader].post()
            if left == 0:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _take_slot(self) -> int:
        at = self._slots + self._next * _SLOT
        self._next = (self._next + 1) % SLOTS
        return at


def _num_bytes(num_readers: int) -> int:
    return _PER_READER * num_readers * Semaphore.BYTES + SLOTS * _SLOT


# [step_ends] `StepEnds`: each rank's word that it has ended a step, and what went wrong if anything did, in shared
# memory.
#
# Rank 0 takes them all before the next step begins. An anonymous file, as the step ring is.

_LENGTH = struct.Struct("q")
_TEXT_BYTES = (16 << 10) - Semaphore.BYTES - _LENGTH.size
"""Of a failure: a sentence and the end of its traceback."""
_ENTRY = Semaphore.BYTES + _LENGTH.size + _TEXT_BYTES


class StepEnds:
    """One entry a rank behind the first, numbered from 0."""

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        """Map the file of that descriptor, which stays the caller's to close."""
        self._memory = mmap.mmap(descriptor, num_ranks * _ENTRY)
        self._view = memoryview(self._memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._ended = [Semaphore(address + rank * _ENTRY) for rank in range(num_ranks)]

    @classmethod
    def create(cls, num_ranks: int) -> tuple[int, Self]:
        """New ones, and the descriptor that the ranks map them by."""
        descriptor = anonymous_file("kaon-step-ends", num_ranks * _ENTRY)
        ends = cls(descriptor, num_ranks)
        for ended in ends._ended:
            ended.initialise(0)
        return descriptor, ends

    def tell(self, rank: int, failure: str = "") -> None:
        """A rank has ended the step; `failure` says why it could not compute it."""
        text = shortened(failure.encode(), _TEXT_BYTES)
        begin = rank * _ENTRY + Semaphore.BYTES
        _LENGTH.pack_into(self._view, begin, len(text))
        self._view[begin + _LENGTH.size : begin + _LENGTH.size + len(text)] = text
        self._ended[rank].post()

    def take(self, rank: int) -> str:
        """Wait until a rank has ended the step; its failure, "" for none."""
        self._ended[rank].wait()
        return self._failure(rank)

    def take_within(self, rank: int, seconds: float) -> str | None:
        """As `take`; None where the rank has not ended the step after so many seconds."""
        return self._failure(rank) if self._ended[rank].wait_for(seconds) else None

    def _failure(self, rank: int) -> str:
        begin = rank * _ENTRY + Semaphore.BYTES
        (length,) = _LENGTH.unpack_from(self._view, begin)
        if length == 0:
            return ""
        text = bytes(self._view[begin + _LENGTH.size : begin + _LENGTH.size + length])
        return text.decode(errors="replace")


def shortened(text: bytes, most: int) -> bytes:
    """A failure in at most so many bytes: the sentence comes first, what raised comes last."""
    half = most // 2 - 8
    return text if len(text) <= most else text[:half] + b"\n...\n" + text[-half:]


# [step_socket] `StepSocket` and `RankSocket`: steps and their ends over TCP, where ranks share no memory with rank
# 0.
#
# In place of `StepRing` and `StepEnds`; one message a step to each rank. Both ends are known to each other by CURVE
# keys that were made for this start, and came over the connection by which the host joined.

_HERE = b""
"""A rank's first message: a ROUTER sends only to whom it has heard."""


_FAILURE_BYTES = 64 << 10
"""Of a failure: a sentence and the ends of its traceback."""


class StepsLost(ConnectionError):
    """A rank cannot be told of a step."""


class StepSocket:
    """Rank 0's end. One thread calls it."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: CurvePair, num_ranks: int
    ) -> None:
        """Listen for ranks 1 to `num_ranks`. Raises `OSError`, a sentence, when the address cannot be had."""
        self._socket = listen(context, zmq.ROUTER, address, keys)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._names = [name_of(rank) for rank in range(1, num_ranks + 1)]
        self._missing = set(self._names)
        self._told: dict[bytes, deque[str]] = {name: deque() for name in self._names}

    def wait_for_ranks(self, seconds: float) -> int | None:
        """Wait until every rank has connected; the first that has not within so many seconds, None for none."""
        deadline = time.monotonic() + seconds
        while self._missing and self._socket.poll(max(0, round(1e3 * (deadline - time.monotonic())))):
            name, _ = self._socket.recv_multipart()
            self._missing.discard(name)
        return min((self._names.index(name) + 1 for name in self._missing), default=None)

    def write(self, message: bytes) -> None:
        """Tell every rank of a step. Raises `StepsLost` where the connection to one of them is gone."""
        for rank, name in enumerate(self._names, 1):
            try:
                self._socket.send_multipart([name, message], copy=False)
            except zmq.ZMQError as error:
                raise StepsLost(f"the connection to tensor-parallel rank {rank} is lost ({error.strerror})") from error

    def take(self, rank: int) -> str:
        """Wait until a rank, numbered from 0, has ended the step; its failure, "" for none."""
        told = self._told[self._names[rank]]
        while not told:
            self._receive()
        return told.popleft()

    def take_within(self, rank: int, seconds: float) -> str | None:
        """As `take`; None where the rank has not ended the step after so many seconds."""
        deadline = time.monotonic() + seconds
        told = self._told[self._names[rank]]
        while not told:
            if not self._socket.poll(max(0, round(1e3 * (deadline - time.monotonic())))):
                return None
            self._receive()
        return told.popleft()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close(linger=0)

    def _receive(self) -> None:
        name, end = self._socket.recv_multipart()
        self._told[name].append(end.decode(errors="replace"))


class RankSocket:
    """A rank's end. One thread calls it."""

    def __init__(self, steps: StepAddress, rank: int) -> None:
        own = CurvePair(steps.public, steps.secret)
        self._socket = dial(zmq.Context.instance(), own, steps.core_public, name_of(rank))
        self._socket.connect(steps.address)
        self._socket.send(_HERE)

    def read(self) -> bytes:
        """The next message, once there is one."""
        return self._socket.recv()

    def tell(self, failure: str = "") -> None:
        """This rank has ended the step; `failure` says why it could not compute it."""
        self._socket.send(shortened(failure.encode(), _FAILURE_BYTES))


# [told_steps] How the process of a rank hears of steps: through shared memory, or over TCP. Used by `rank_process`.


class ToldSteps(Protocol):
    """A rank's end of what tells it of steps."""

    def read(self) -> bytes:
        """The next message, once there is one."""

    def tell(self, failure: str = "") -> None:
        """This rank has ended the step; `failure` says why it could not compute it."""


def open_steps(steps: SharedMemory | StepAddress, rank: int, size: int) -> ToldSteps:
    """The end of that one of so many ranks."""
    if isinstance(steps, SharedMemory):
        return _SharedSteps(steps, rank, size)

    return RankSocket(steps, rank)


class _SharedSteps:
    def __init__(self, shared: SharedMemory, rank: int, size: int) -> None:
        others = size - 1
        self._index = rank - 1
        self._ring, self._ends = StepRing(shared.ring, others), StepEnds(shared.ends, others)

    def read(self) -> bytes:
        return self._ring.read(self._index)

    def tell(self, failure: str = "") -> None:
        self._ends.tell(self._index, failure)
