"""How engine cores that compute in lockstep find each other, wake each other, and notice that one has ended.

`LockstepRendezvous`, owned by `CoreManager`, gives each core that it starts a `LockstepMember`: its number, a
directory to meet in, and shared memory. A core that replaces another cannot join the cores of the round before: all
begin a new round, in a directory of its own. `BarrierCounters`, in the shared memory, show which replicas the others
wait for. `ReplicaLinks` connects every two cores: a core wakes the others, which sleep while there is no work, and
learns at once when another has ended, without which it cannot continue. No torch here.
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

_LINE = 64
"""Bytes of a replica's counter; the first line is not a replica's. As in exchange.c."""
_NUMBER = struct.Struct("=q")


class BarrierCounters:
    """How many barriers each replica has reached: a counter for each, in memory that all of them and their parent map.

    The ranks of one number in their replicas share one such memory. They write it, by exchange.c or here; the parent
    reads it when replicas have stalled.
    """

    def __init__(self, descriptor: int, num_replicas: int) -> None:
        """Map the file of that descriptor, which stays the caller's to close."""
        self._num_replicas = num_replicas
        self._memory = mmap.mmap(descriptor, _LINE * (1 + num_replicas))

    @staticmethod
    def create(num_replicas: int) -> int:
        """A descriptor of an anonymous file that holds the counters. Ranks extend it by what else they share."""
        return anonymous_file("kaon-replicas", _LINE * (1 + num_replicas))

    def count(self, replica: int) -> None:
        """The replica has reached another barrier."""
        (number,) = _NUMBER.unpack_from(self._memory, _LINE * (1 + replica))
        _NUMBER.pack_into(self._memory, _LINE * (1 + replica), number + 1)

    def stragglers(self) -> set[int]:
        """The replicas that have reached fewer barriers than others, which wait for them."""
        numbers = [_NUMBER.unpack_from(self._memory, _LINE * (1 + each))[0] for each in range(self._num_replicas)]
        return {replica for replica, number in enumerate(numbers) if number < max(numbers)}

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()


class LockstepMember(msgspec.Struct, frozen=True):
    """A replica among those that compute in lockstep."""

    replica: int
    num_replicas: int
    directory: str
    """Private to the user; removed when the replicas of this round cannot all meet any more."""
    memory: tuple[int, ...] = ()
    """By rank, a descriptor of what it shares with the same rank of the other replicas: see `BarrierCounters`."""


class LockstepRendezvous:
    """The rounds in which cores meet. When a core has ended, the others of its round end by themselves."""

    def __init__(self, num_replicas: int, num_ranks: int = 1) -> None:
        """`num_ranks`: ranks of each replica."""
        self._num_replicas, self._num_ranks = num_replicas, num_ranks
        self._directories: list[str] = []
        self._memory: list[int] = []
        self._members: set[int] = set()
        self._remove = weakref.finalize(self, _remove, self._directories, self._memory)

    def new_member(self, replica: int) -> LockstepMember:
        """What a core is started with that is about to be started; it inherits the descriptors.

        Raises `OSError` where no directory can be made.
        """
        if not self._directories or replica in self._members:
            # A core that still waits for the one that has ended sees by this that it will not come.
            _remove(self._directories, self._memory)
            self._members.clear()
            self._directories.append(tempfile.mkdtemp(prefix="kaon-"))
            self._memory += [BarrierCounters.create(self._num_replicas) for _ in range(self._num_ranks)]
        self._members.add(replica)
        return LockstepMember(replica, self._num_replicas, self._directories[-1], tuple(self._memory))

    def waits_for_peers(self, replica: int) -> bool:
        """Whether it waits for others and none waits for it, or another core of its round has ended."""
        if replica not in self._members:
            return True
        late: set[int] = set()
        for descriptor in self._memory:
            arrivals = BarrierCounters(descriptor, self._num_replicas)
            late |= arrivals.stragglers()
            arrivals.close()
        return bool(late) and replica not in late

    def close(self) -> None:
        """Remove the directory: there will be no more cores."""
        self._remove()


def _remove(directories: list[str], memory: list[int]) -> None:
    while memory:
        os.close(memory.pop())
    while directories:
        directory = directories.pop()
        # Renamed first: the directory is gone at once, even while a core makes a file in it.
        with contextlib.suppress(FileNotFoundError):
            os.rename(directory, f"{directory}.over")
        shutil.rmtree(f"{directory}.over", ignore_errors=True)


PEER_END_SECONDS = 1.0
"""After a failure that another core's end has caused, this end is known within this time."""

_POLL_SECONDS = 0.05
"""Between two attempts to reach a core that does not listen yet."""
_SHUTDOWN_SECONDS = 0.2
"""From another core's end to the message that all were to end."""


class RendezvousError(RuntimeError):
    """Not all replicas have connected; one sentence. `is_over`: they never will, since one has ended already."""

    def __init__(self, sentence: str, *, is_over: bool = False) -> None:
        super().__init__(sentence)
        self.is_over = is_over


class PeerLostError(RuntimeError):
    """This core ends because another replica has ended."""

    def __init__(self, replica: int) -> None:
        super().__init__(f"replica {replica} is gone, with which this one computes in lockstep")


class ReplicaLinks:
    """This core's connections to the others, after `connect`. A thread of its own is the only one that reads."""

    def __init__(
        self, lockstep_member: LockstepMember, on_ring: Callable[[int], object], on_gone: Callable[[int], object]
    ) -> None:
        """A thread calls `on_ring` with the number of each `ring`, and `on_gone` with a replica that has ended."""
        self.member = lockstep_member
        self._on_ring, self._on_gone = on_ring, on_gone
        self._peers: dict[int, socket.socket] = {}
        self._gone: SimpleQueue[int] = SimpleQueue()
        self._ends_together = Event()

    def connect(self, timeout: float) -> None:
        """Wait for all other cores, `timeout` seconds. Raises `RendezvousError` where one does not come."""
        deadline = time.monotonic() + timeout
        directory = Path(self.member.directory)
        own = directory / str(self.member.replica)
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            callers: list[socket.socket] = []
            stack.callback(_close_all, callers)
            try:
                # Renamed when it listens, so that no core finds it before.
                listener.bind(f"{own}.new")
                listener.listen(self.member.num_replicas)
                os.rename(f"{own}.new", own)
            except OSError as error:
                self._raise_if_over(directory)
                raise RendezvousError(f"the replicas cannot meet in {directory}: {error}") from error
            while missing := set(range(self.member.num_replicas)) - {self.member.replica} - self._peers.keys():
                self._raise_if_over(directory)
                if time.monotonic() >= deadline:
                    raise RendezvousError(
                        f"replica {min(missing)} did not meet replica {self.member.replica} within rank_start_timeout "
                        f"{timeout:g} s"
                    )
                # Each connects to those of lower numbers, and accepts those of higher ones.
                for replica in sorted(missing):
                    if replica < self.member.replica:
                        self._connect_to(replica, directory / str(replica))
                if max(missing) > self.member.replica:
                    self._accept(listener, callers)
                else:
                    time.sleep(_POLL_SECONDS)
        with contextlib.suppress(FileNotFoundError):
            own.unlink()
        Thread(target=self._read, name="replicas", daemon=True).start()

    def ring(self, number: int) -> None:
        """Wake the other cores. The end of the connection reports one that is gone."""
        for peer in self._peers.values():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.send(_NUMBER.pack(number))

    def announce_shutdown(self) -> None:
        """All cores end together: from now on the end of one is no failure."""
        self._ends_together.set()

    def remove_directory(self) -> None:
        """Remove the directory, which nothing needs once all have connected and computed."""
        shutil.rmtree(self.member.directory, ignore_errors=True)

    def wait_gone(self, timeout: float) -> int | None:
        """A replica whose core has ended, or ends within `timeout` seconds; None where there is none."""
        with contextlib.suppress(Empty):
            return self._gone.get(timeout=timeout)
        return None

    def _connect_to(self, replica: int, path: Path) -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            peer.connect(str(path))
            peer.send(_NUMBER.pack(self.member.replica))
        except OSError:
            # It does not listen yet; if it has ended, the directory is removed.
            peer.close()
            return
        self._peers[replica] = peer

    def _accept(self, listener: socket.socket, callers: list[socket.socket]) -> None:
        """Wait a while for one that connects, or that has connected and sends its number."""
        poller = poll()
        for each in (listener, *callers):
            poller.register(each, POLLIN)
        readable = {descriptor for descriptor, _ in poller.poll(1e3 * _POLL_SECONDS)}
        for caller in [each for each in callers if each.fileno() in readable]:
            callers.remove(caller)
            self._identify(caller)
        if listener.fileno() in readable:
            callers.append(listener.accept()[0])

    def _identify(self, peer: socket.socket) -> None:
        """Take the number that it sends. One that is gone already, or that is not expected, is disconnected."""
        try:
            packet = peer.recv(_NUMBER.size)
        except ConnectionResetError:
            packet = b""
        replica = _NUMBER.unpack(packet)[0] if len(packet) == _NUMBER.size else -1
        if self.member.replica < replica < self.member.num_replicas and replica not in self._peers:
            self._peers[replica] = peer
        else:
            peer.close()

    def _raise_if_over(self, directory: Path) -> None:
        if not directory.exists():
            raise RendezvousError("another replica ended before all had met", is_over=True)

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
                # This core may be about to learn that all end.
                if not self._ends_together.wait(_SHUTDOWN_SECONDS):
                    self._gone.put(replica)
                    self._on_gone(replica)


def _close_all(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()
