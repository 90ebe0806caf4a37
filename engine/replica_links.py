"""`ReplicaLinks`: a connection between every two engine cores that compute in lockstep. No torch here.

By them a core wakes the others, which sleep while nobody has work; and by their ends it learns at once, however that
came about, that another is gone, without which it cannot go on. Their thread is the only one that reads.
"""

import contextlib
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from select import POLLIN, poll
from threading import Event, Thread

from engine.seats import Seat

PEER_END_SECONDS = 1.0
"""Within which the end of another core is known, after something failed for it."""

_NUMBER = struct.Struct("=q")
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
