"""Rendezvous, wake-up calls and failure detection between engine cores that compute in lockstep.

`LockstepRendezvous`, owned by `CoreManager`, creates a `LockstepMember` for each core: its number, a directory for the
rendezvous, and shared memory. A restarted core cannot join the cores of the previous round, so all cores begin a new
round with a new directory. `BarrierCounters`, in the shared memory, show which replicas the others wait for. Cores on
several hosts share neither: they meet at a TCP port of replica 0, the hub, which forwards wake-up calls.
`ReplicaLinks` connects every two cores, or each one with the hub: a core wakes the others, which sleep while there is
no work, and detects at once that another core has ended, without which it cannot continue. Imports no torch.
"""

import contextlib
import hmac
import mmap
import os
import secrets
import shutil
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from select import POLLIN, poll
from threading import Event, Thread
from typing import NamedTuple

import msgspec

from engine.distributed.processes import anonymous_file

_LINE = 64
"""Bytes per counter: a cache line. The first line belongs to no replica. As in exchange.c."""
_NUMBER = struct.Struct("=q")


class BarrierCounters:
    """The number of barriers that each replica has reached, in memory that all replicas and their parent map.

    Ranks with the same number in all replicas share one such memory. They write it, in exchange.c or here; the parent
    reads it when replicas stall.
    """

    def __init__(self, descriptor: int, num_replicas: int) -> None:
        """Map the file of `descriptor`, which the caller closes."""
        self._num_replicas = num_replicas
        self._memory = mmap.mmap(descriptor, _LINE * (1 + num_replicas))

    @staticmethod
    def create(num_replicas: int) -> int:
        """Create an anonymous file for the counters. Returns its descriptor. Ranks extend the file by other shared
        data."""
        return anonymous_file("kaon-replicas", _LINE * (1 + num_replicas))

    def count(self, replica: int) -> None:
        """Count another barrier of a replica."""
        (number,) = _NUMBER.unpack_from(self._memory, _LINE * (1 + replica))
        _NUMBER.pack_into(self._memory, _LINE * (1 + replica), number + 1)

    def stragglers(self) -> set[int]:
        """Return the replicas that have reached fewer barriers than others, so that the others wait for them."""
        numbers = [_NUMBER.unpack_from(self._memory, _LINE * (1 + each))[0] for each in range(self._num_replicas)]
        return {replica for replica, number in enumerate(numbers) if number < max(numbers)}

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()


class LockstepHub(msgspec.Struct, frozen=True):
    """The rendezvous of replicas on several hosts."""

    address: str
    """IP address of the first host, which runs replica 0."""
    port: int
    """Port at which replica 0 listens for the other cores; at the next one it serves the store of the ranks."""
    key: bytes
    """Secret by which cores prove that they belong to this server. They get it by an encrypted connection."""
    round: int


class LockstepMember(msgspec.Struct, frozen=True):
    """A replica among those that compute in lockstep."""

    replica: int
    num_replicas: int
    directory: str = ""
    """Directory of the rendezvous, private to the user. It is removed if not all replicas of this round can connect.
    Empty on several hosts."""
    memory: tuple[int, ...] = ()
    """By rank, the descriptor of the memory shared with the same rank of the other replicas: see `BarrierCounters`.
    Empty on several hosts."""
    hub: LockstepHub | None = None
    """The rendezvous on several hosts; None on one."""


class LockstepRendezvous:
    """Manages the rounds of rendezvous. When a core has ended, the other cores of its round end by themselves.

    A core that is lost with its host may not have ended: then its replica has the others ended.
    """

    def __init__(self, num_replicas: int, num_ranks: int = 1, hub: tuple[str, int] | None = None) -> None:
        """`num_ranks` is the number of ranks per replica. `hub`: address and port of the `LockstepHub`, if any."""
        self._num_replicas, self._num_ranks = num_replicas, num_ranks
        self._hub, self._key, self._round = hub, secrets.token_bytes(_KEY_BYTES), 0
        self._directories: list[str] = []
        self._memory: list[int] = []
        self._members: set[int] = set()
        self._remove = weakref.finalize(self, _remove, self._directories, self._memory)

    def new_member(self, replica: int) -> LockstepMember:
        """Create the member for a core that is about to start and inherits the descriptors.

        Raises `OSError` if no directory can be created.
        """
        if not self._members or replica in self._members:
            # A core that still waits for the ended one gives up when its directory is gone.
            _remove(self._directories, self._memory)
            self._members.clear()
            self._round += 1
            if self._hub is None:
                self._directories.append(tempfile.mkdtemp(prefix="kaon-"))
                self._memory += [BarrierCounters.create(self._num_replicas) for _ in range(self._num_ranks)]
        self._members.add(replica)
        if self._hub is not None:
            return LockstepMember(replica, self._num_replicas, hub=LockstepHub(*self._hub, self._key, self._round))
        return LockstepMember(replica, self._num_replicas, self._directories[-1], tuple(self._memory))

    def is_member(self, replica: int) -> bool:
        """Return whether the latest core of a replica belongs to the latest round."""
        return replica in self._members

    def waits_for_peers(self, replica: int) -> bool:
        """Return whether a replica waits for others and none waits for it, or another core of its round has ended.

        On several hosts nothing shows which replica the others wait for, so that each of them counts as late.
        """
        if replica not in self._members:
            return True
        late: set[int] = set()
        for descriptor in self._memory:
            counters = BarrierCounters(descriptor, self._num_replicas)
            late |= counters.stragglers()
            counters.close()
        return bool(late) and replica not in late

    def close(self) -> None:
        """Remove the directory, because no more cores will be started."""
        self._remove()


def _remove(directories: list[str], memory: list[int]) -> None:
    while memory:
        os.close(memory.pop())
    while directories:
        directory = directories.pop()
        # Renamed first, so that the directory is gone at once, even while a core creates a file in it.
        with contextlib.suppress(FileNotFoundError):
            os.rename(directory, f"{directory}.over")
        shutil.rmtree(f"{directory}.over", ignore_errors=True)


PEER_END_SECONDS = 1.0
"""Seconds within which the end of another core is detected, after a failure that it caused."""

_POLL_SECONDS = 0.05
"""Seconds between two attempts to connect to a core that does not listen yet."""
_SHUTDOWN_SECONDS = 0.2
"""Most seconds between another core's end and its announcement that all cores shut down."""
_CALL_SECONDS = 3.0
"""Seconds that one step of a handshake with the hub may take."""
_KEY_BYTES = 32
_NONCE_BYTES = 16
_GREETING = struct.Struct("=qq32s")
"""The first message to the hub: replica, round, and the HMAC of the hub's nonce with both."""
_ADMITTED, _IS_OVER = 0, -1
"""The hub's answers: the core is admitted, or a later round has begun."""
_MOST_CALLERS = 64
"""Connections at the hub that have not proved yet that they are cores. The oldest is ended for another one."""
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 11_000),
)
"""A host that vanishes without closing its connections is detected after about 11 seconds. The kernel sends no
keep-alive probes while data are not acknowledged; the last option bounds that time, in milliseconds."""


class RendezvousError(RuntimeError):
    """Not all replicas have connected. The message is a sentence. `is_over`: one has ended, so they never will."""

    def __init__(self, sentence: str, *, is_over: bool = False) -> None:
        super().__init__(sentence)
        self.is_over = is_over


class PeerLostError(RuntimeError):
    """This core must end because another replica has ended."""

    def __init__(self, replica: int) -> None:
        super().__init__(f"replica {replica}, with which this one computes in lockstep, is gone")


class ReplicaLinks:
    """This core's connections to the other cores, after `connect`. Only a thread of this object reads them."""

    def __init__(
        self, lockstep_member: LockstepMember, on_ring: Callable[[int], object], on_gone: Callable[[int], object]
    ) -> None:
        """A thread calls `on_ring` with the number of each `ring`, and `on_gone` with each replica that has ended."""
        self.member = lockstep_member
        self._on_ring, self._on_gone = on_ring, on_gone
        self._peers: dict[int, socket.socket] = {}
        self._gone: SimpleQueue[int] = SimpleQueue()
        self._ends_together = Event()

    def connect(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for all other cores. Raises `RendezvousError` if one does not connect."""
        hub, deadline = self.member.hub, time.monotonic() + timeout
        if hub is None:
            self._connect_in_directory(Path(self.member.directory), timeout, deadline)
        elif self.member.replica == 0:
            self._connect_as_hub(hub, timeout, deadline)
        else:
            self._peers[0] = self._connect_to_hub(hub, timeout, deadline)
        Thread(target=self._read, name="replicas", daemon=True).start()

    def _connect_in_directory(self, directory: Path, timeout: float, deadline: float) -> None:
        """Connect with each of the cores on this host."""
        own = directory / str(self.member.replica)
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            callers: list[socket.socket] = []
            stack.callback(_close_all, callers)
            try:
                # Renamed when it listens, so that no core finds it earlier.
                listener.bind(f"{own}.new")
                listener.listen(self.member.num_replicas)
                os.rename(f"{own}.new", own)
            except OSError as error:
                self._raise_if_over(directory)
                raise RendezvousError(f"the replicas cannot meet in {directory}: {error}") from error
            while missing := self._missing():
                self._raise_if_over(directory)
                self._raise_if_late(min(missing), timeout, deadline)
                # Each core connects to those with lower numbers, and accepts those with higher ones.
                for replica in sorted(missing):
                    if replica < self.member.replica:
                        self._connect_to(replica, directory / str(replica))
                if max(missing) > self.member.replica:
                    self._accept(listener, callers)
                else:
                    time.sleep(_POLL_SECONDS)
        with contextlib.suppress(FileNotFoundError):
            own.unlink()

    def ring(self, number: int) -> None:
        """Wake the other cores. A core that is gone is detected by the end of its connection."""
        _send_to(self._peers.values(), _NUMBER.pack(number))

    def announce_shutdown(self) -> None:
        """Note that all cores shut down, so that the end of one is no failure from now on."""
        self._ends_together.set()

    def remove_directory(self) -> None:
        """Remove the directory, which is not needed once all cores have connected and computed."""
        if self.member.directory:
            shutil.rmtree(self.member.directory, ignore_errors=True)

    def wait_gone(self, timeout: float) -> int | None:
        """Return a replica whose core has ended or ends within `timeout` seconds; None if there is none."""
        with contextlib.suppress(Empty):
            return self._gone.get(timeout=timeout)
        return None

    def _connect_to(self, replica: int, path: Path) -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            peer.connect(str(path))
            peer.send(_NUMBER.pack(self.member.replica))
        except OSError:
            # It does not listen yet. If it has ended, the directory is removed.
            peer.close()
            return
        self._peers[replica] = peer

    def _accept(self, listener: socket.socket, callers: list[socket.socket]) -> None:
        """Wait a moment for a core that connects, or that has connected and sends its number."""
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
        """Receive the number of a connected core. Disconnect it if it is gone or not expected."""
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

    def _missing(self) -> set[int]:
        return set(range(self.member.num_replicas)) - {self.member.replica} - self._peers.keys()

    def _raise_if_late(self, replica: int, timeout: float, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"replica {replica} did not meet replica {self.member.replica} within rank_start_timeout {timeout:g} s"
            )

    # -- several hosts ------------------------------------------------------------------------------------------

    def _connect_as_hub(self, hub: LockstepHub, timeout: float, deadline: float) -> None:
        """Accept all other cores."""
        family = socket.AF_INET6 if ":" in hub.address else socket.AF_INET
        with ExitStack() as stack:
            try:
                listener = stack.enter_context(socket.create_server((hub.address, hub.port), family=family))
            except OSError as error:
                raise RendezvousError(
                    f"the replicas cannot meet at port {hub.port} of {hub.address}, which follows the replicas' own "
                    f"ports from master_port on: {error.strerror}"
                ) from error
            callers: list[_Caller] = []
            stack.callback(lambda: _close_all([caller.peer for caller in callers]))
            while missing := self._missing():
                self._raise_if_late(min(missing), timeout, deadline)
                poller = poll()
                for each in (listener, *(caller.peer for caller in callers)):
                    poller.register(each, POLLIN)
                readable = {descriptor for descriptor, _ in poller.poll(1e3 * _POLL_SECONDS)}
                for caller in [each for each in callers if each.peer.fileno() in readable]:
                    callers.remove(caller)
                    self._admit(caller, hub)
                if listener.fileno() in readable:
                    if len(callers) == _MOST_CALLERS:
                        callers.pop(0).peer.close()
                    with contextlib.suppress(OSError):
                        callers.append(_Caller.greet(listener.accept()[0]))

    def _admit(self, caller: "_Caller", hub: LockstepHub) -> None:
        """Read a caller's greeting. Raises `RendezvousError` if it shows that a later round has begun."""
        peer = caller.peer
        try:
            replica, number, proof = _GREETING.unpack(peer.recv(_GREETING.size))
            is_core = hmac.compare_digest(proof, _prove(hub.key, caller.nonce, replica, number))
            if is_core and number > hub.round:
                raise RendezvousError("another replica ended before all had met", is_over=True)
            is_expected = is_core and number == hub.round and replica in self._missing()
            if is_core:
                peer.sendall(_NUMBER.pack(_ADMITTED if is_expected else _IS_OVER))
        except (OSError, struct.error):
            is_expected = False
        if is_expected:
            _keep_alive(peer)
            self._peers[replica] = peer
        else:
            peer.close()

    def _connect_to_hub(self, hub: LockstepHub, timeout: float, deadline: float) -> socket.socket:
        """Connect with replica 0, on this host or another."""
        while True:
            self._raise_if_late(0, timeout, deadline)
            with ExitStack() as stack:
                try:
                    peer = socket.create_connection((hub.address, hub.port), _CALL_SECONDS)
                    stack.callback(peer.close)
                    nonce = _receive(peer, _NONCE_BYTES)
                    proof = _prove(hub.key, nonce, self.member.replica, hub.round)
                    peer.sendall(_GREETING.pack(self.member.replica, hub.round, proof))
                    (answer,) = _NUMBER.unpack(_receive(peer, _NUMBER.size))
                except (OSError, struct.error):
                    time.sleep(_POLL_SECONDS)  # It does not listen yet, or is the one of another round.
                    continue
                if answer != _ADMITTED:
                    raise RendezvousError("another replica ended before all had met", is_over=True)
                _keep_alive(peer)
                stack.pop_all()
                return peer

    def _read(self) -> None:
        poller = poll()
        replicas = {peer.fileno(): replica for replica, peer in self._peers.items()}
        for descriptor in replicas:
            poller.register(descriptor, POLLIN)
        while replicas:
            for descriptor, _ in poller.poll():
                try:
                    packet = _receive(self._peers[replicas[descriptor]], _NUMBER.size)
                except OSError:
                    packet = b""
                if len(packet) == _NUMBER.size:
                    self._on_ring(_NUMBER.unpack(packet)[0])
                    if self.member.hub is not None:
                        others = (peer for peer in self._peers.values() if peer.fileno() != descriptor)
                        _send_to(others, packet)
                    continue
                poller.unregister(descriptor)
                replica = replicas.pop(descriptor)
                # The announcement that all cores shut down may be about to arrive.
                if not self._ends_together.wait(_SHUTDOWN_SECONDS):
                    self._gone.put(replica)
                    self._on_gone(replica)


class _Caller(NamedTuple):
    """A connection at the hub that has not proved yet that it is a core's."""

    peer: socket.socket
    nonce: bytes

    @classmethod
    def greet(cls, peer: socket.socket) -> "_Caller":
        """Send the nonce. Raises `OSError` if the caller is gone."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        peer.setblocking(False)
        peer.sendall(nonce)
        return cls(peer, nonce)


def _prove(key: bytes, nonce: bytes, replica: int, number: int) -> bytes:
    return hmac.digest(key, nonce + struct.pack("=qq", replica, number), "sha256")


def _receive(peer: socket.socket, size: int) -> bytes:
    """Receive one message; less only at the end of the connection."""
    return peer.recv(size, socket.MSG_WAITALL)


def _send_to(peers: Iterable[socket.socket], packet: bytes) -> None:
    """Send a packet to peers, of which some may be gone."""
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.send(packet)


def _keep_alive(peer: socket.socket) -> None:
    """Have a connection block, send at once, and end some seconds after its host is lost."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


def _close_all(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()
