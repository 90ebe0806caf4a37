"""`Seats`: where engine cores that compute in lockstep find each other, and who belongs together. No torch here.

Owned by `CoreManager`. Each core is given a `Seat` when it is started. One that takes the place of another cannot
join the cores that were there: all begin a new round of seats, in a directory of their own.
"""

import contextlib
import mmap
import os
import shutil
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from select import POLLIN, poll
from threading import Event, Thread

import msgspec

from engine.distributed.processes import anonymous_file

# [arrivals] `Arrivals`: how many meetings each replica in lockstep has come to, in memory that all of them and their
# parent map.
#
# Written by the ranks that have the same place in their replicas, by exchange.c or here; read by `Seats` when
# replicas have stalled: those that came to fewer are who the others wait for. No torch here.

_LINE = 64
"""Bytes of a replica's part; the first is nobody's. As in exchange.c."""
_NUMBER = struct.Struct("=q")


class Arrivals:
    """Of the replicas' ranks of one place."""

    def __init__(self, descriptor: int, num_replicas: int) -> None:
        """Map the file of that descriptor, which stays the caller's to close."""
        self._num_replicas = num_replicas
        self._memory = mmap.mmap(descriptor, _LINE * (1 + num_replicas))

    @staticmethod
    def create(num_replicas: int) -> int:
        """A descriptor of a file that no directory names, long enough for this. Ranks share more in it, behind."""
        return anonymous_file("kaon-replicas", _LINE * (1 + num_replicas))

    def note(self, replica: int) -> None:
        """It has come to a further one."""
        (number,) = _NUMBER.unpack_from(self._memory, _LINE * (1 + replica))
        _NUMBER.pack_into(self._memory, _LINE * (1 + replica), number + 1)

    def late(self) -> set[int]:
        """The replicas that others wait for."""
        numbers = [_NUMBER.unpack_from(self._memory, _LINE * (1 + each))[0] for each in range(self._num_replicas)]
        return {replica for replica, number in enumerate(numbers) if number < max(numbers)}

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()


class Seat(msgspec.Struct, frozen=True):
    """A replica among those that compute in lockstep."""

    replica: int
    num_replicas: int
    directory: str
    """Private to the user; gone, if these replicas will not meet."""
    memory: tuple[int, ...] = ()
    """By rank, a descriptor of what it shares with those of its place in the other replicas: see `Arrivals`."""


class Seats:
    """Gives them out. That of a core that has ended stays empty, and the others of its round end by themselves."""

    def __init__(self, num_replicas: int, num_ranks: int = 1) -> None:
        """`num_ranks`: of each replica."""
        self._num_replicas, self._num_ranks = num_replicas, num_ranks
        self._directories: list[str] = []
        self._memory: list[int] = []
        self._seated: set[int] = set()
        self._remove = weakref.finalize(self, _remove, self._directories, self._memory)

    def give(self, replica: int) -> Seat:
        """For a core that is about to be started, with descriptors that it is to inherit.

        Raises `OSError` where no directory can be made.
        """
        if not self._directories or replica in self._seated:
            # Who still waits for the one that has ended sees by this that it will not come.
            _remove(self._directories, self._memory)
            self._seated.clear()
            self._directories.append(tempfile.mkdtemp(prefix="kaon-"))
            self._memory += [Arrivals.create(self._num_replicas) for _ in range(self._num_ranks)]
        self._seated.add(replica)
        return Seat(replica, self._num_replicas, self._directories[-1], tuple(self._memory))

    def is_held_up(self, replica: int) -> bool:
        """Whether it waits for others and none for it; or for its own end, as another of its round has ended."""
        if replica not in self._seated:
            return True
        late: set[int] = set()
        for descriptor in self._memory:
            arrivals = Arrivals(descriptor, self._num_replicas)
            late |= arrivals.late()
            arrivals.close()
        return bool(late) and replica not in late

    def close(self) -> None:
        """There will be no more cores."""
        self._remove()


def _remove(directories: list[str], memory: list[int]) -> None:
    while memory:
        os.close(memory.pop())
    while directories:
        directory = directories.pop()
        # At once, whoever is making a file in it.
        with contextlib.suppress(FileNotFoundError):
            os.rename(directory, f"{directory}.over")
        shutil.rmtree(f"{directory}.over", ignore_errors=True)


# [replica_links] `ReplicaLinks`: a connection between every two engine cores that compute in lockstep. No torch
# here.
#
# By them a core wakes the others, which sleep while nobody has work; and by their ends it learns at once, however
# that came about, that another is gone, without which it cannot go on. Their thread is the only one that reads.

PEER_END_SECONDS = 1.0
"""Within which the end of another core is known, after something failed for it."""

_LOOK_SECONDS = 0.05
"""Between two looks for a core that is not there yet."""
_PART_SECONDS = 0.2
"""From another core's end to the news that all were to end."""


class MeetingError(RuntimeError):
    """The replicas did not meet; one sentence. `is_over`: they never will, as another has ended already."""

    def __init__(self, sentence: str, *, is_over: bool = False) -> None:
        super().__init__(sentence)
        self.is_over = is_over


class PeerGoneError(RuntimeError):
    """This core ends since that replica has ended."""

    def __init__(self, replica: int) -> None:
        super().__init__(f"replica {replica} is gone, with which this one computes in lockstep")


class ReplicaLinks:
    """This core's ends, from `meet` on."""

    def __init__(self, seat: Seat, on_ring: Callable[[int], object], on_gone: Callable[[int], object]) -> None:
        """A thread of their own calls `on_ring` with a ring's number, and `on_gone` with a replica that has gone."""
        self.seat = seat
        self._on_ring, self._on_gone = on_ring, on_gone
        self._peers: dict[int, socket.socket] = {}
        self._gone: SimpleQueue[int] = SimpleQueue()
        self._parts = Event()

    def meet(self, timeout: float) -> None:
        """Wait for all other cores. Raises `MeetingError` where one does not come within so many seconds."""
        deadline = time.monotonic() + timeout
        directory = Path(self.seat.directory)
        own = directory / str(self.seat.replica)
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            callers: list[socket.socket] = []
            stack.callback(_close_all, callers)
            try:
                # Nobody finds it before it listens.
                listener.bind(f"{own}.new")
                listener.listen(self.seat.num_replicas)
                os.rename(f"{own}.new", own)
            except OSError as error:
                self._raise_if_over(directory)
                raise MeetingError(f"the replicas cannot meet in {directory}: {error}") from error
            while missing := set(range(self.seat.num_replicas)) - {self.seat.replica} - self._peers.keys():
                self._raise_if_over(directory)
                if time.monotonic() >= deadline:
                    raise MeetingError(
                        f"replica {min(missing)} did not meet replica {self.seat.replica} within rank_start_timeout "
                        f"{timeout:g} s"
                    )
                # Each calls those before it, and is called by those behind it.
                for replica in sorted(missing):
                    if replica < self.seat.replica:
                        self._call(replica, directory / str(replica))
                if max(missing) > self.seat.replica:
                    self._hear(listener, callers)
                else:
                    time.sleep(_LOOK_SECONDS)
        with contextlib.suppress(FileNotFoundError):
            own.unlink()
        Thread(target=self._read, name="replicas", daemon=True).start()

    def ring(self, number: int) -> None:
        """Wake the other cores. One that is gone is told of by the link's end."""
        for peer in self._peers.values():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.send(_NUMBER.pack(number))

    def part(self) -> None:
        """The cores end together: from now on their ends are no news."""
        self._parts.set()

    def forget_place(self) -> None:
        """All have met, and computed: nothing needs the directory any more."""
        shutil.rmtree(self.seat.directory, ignore_errors=True)

    def wait_gone(self, timeout: float) -> int | None:
        """A replica whose core is gone, or will be within so many seconds; None where there is none."""
        with contextlib.suppress(Empty):
            return self._gone.get(timeout=timeout)
        return None

    def _call(self, replica: int, path: Path) -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            peer.connect(str(path))
            peer.send(_NUMBER.pack(self.seat.replica))
        except OSError:
            # Not there yet; should it be gone, the directory will be too.
            peer.close()
            return
        self._peers[replica] = peer

    def _hear(self, listener: socket.socket, callers: list[socket.socket]) -> None:
        """Wait a while for one that calls, or that has called before and now says who it is."""
        poller = poll()
        for each in (listener, *callers):
            poller.register(each, POLLIN)
        readable = {descriptor for descriptor, _ in poller.poll(1e3 * _LOOK_SECONDS)}
        for caller in [each for each in callers if each.fileno() in readable]:
            callers.remove(caller)
            self._answer(caller)
        if listener.fileno() in readable:
            callers.append(listener.accept()[0])

    def _answer(self, peer: socket.socket) -> None:
        """Take in what it says. One that is gone already, or is none of those that are to come, is left alone."""
        try:
            packet = peer.recv(_NUMBER.size)
        except ConnectionResetError:
            packet = b""
        replica = _NUMBER.unpack(packet)[0] if len(packet) == _NUMBER.size else -1
        if self.seat.replica < replica < self.seat.num_replicas and replica not in self._peers:
            self._peers[replica] = peer
        else:
            peer.close()

    def _raise_if_over(self, directory: Path) -> None:
        if not directory.exists():
            raise MeetingError("another replica ended before all had met", is_over=True)

    def _read(self) -> None:
        poller = poll()
        replicas = {peer.fileno(): replica for replica, peer in self._peers.items()}
        for descriptor in replicas:
            poller.register(descriptor, POLLIN)
        while replicas:
            for descriptor, _ in poller.poll():
                try:
                    packet = self._peers[replicas[descriptor]].recv(_NUMBER.size)
                except ConnectionResetError:
                    packet = b""
                if packet:
                    self._on_ring(_NUMBER.unpack(packet)[0])
                    continue
                poller.unregister(descriptor)
                replica = replicas.pop(descriptor)
                # This core may be about to hear that all end.
                if not self._parts.wait(_PART_SECONDS):
                    self._gone.put(replica)
                    self._on_gone(replica)


def _close_all(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()
