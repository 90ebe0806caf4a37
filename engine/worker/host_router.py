"""`HostRouter`: the thread that other hosts join at, and that passes on what is said to and by those who run there.

Made by the engine core's `RemoteRanks`, and by the front end's `CoreHosts`. A host that is gone is noticed at once
where its system closes the connection, else by its silence.
"""

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

import msgspec
import zmq

from engine.cluster_key import CurvePair
from engine.cluster_settings import CommonGround
from engine.release import release
from engine.worker.host_member import Member
from engine.worker.host_messages import (
    CoreEnded,
    CoreStarted,
    Farewell,
    FromHost,
    Hello,
    RankGone,
    RankSaid,
    Refused,
    ToHost,
)
from engine.worker.host_socket import ALIVE, HostSocket
from engine.worker.waiting_hosts import WaitingHosts

_log = logging.getLogger(__name__)

_decoder = msgspec.msgpack.Decoder(FromHost)


class _TurnedAway(NamedTuple):
    node: int
    why: str


class HostRouter:
    """Talks to the hosts of `nodes`, which are numbered from 1, until `close`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        keys: CurvePair,
        *,
        ground: CommonGround | None,
        nodes: Mapping[int, Sequence[Member]],
        timeout: float,
    ) -> None:
        """Listen at `tcp://` an address. Raises `OSError`, a sentence, when it cannot be had.

        Without a `ground` hosts wait for `compare_with`. `timeout`: seconds that `Member.join_by` allows, and from
        `compare_with` on.
        """
        self._socket = HostSocket(context, address, keys)
        self._ground = ground
        self._timeout = timeout
        self._compares_since = math.inf if ground is None else -math.inf
        """When the ground was known, on the monotonic clock: no host is late before the first has its checkpoint."""
        self._nodes = {node: list(members) for node, members in nodes.items()}
        self._waiting = WaitingHosts()
        self._new: SimpleQueue[Member | CommonGround | _TurnedAway] = SimpleQueue()
        self._joined: dict[bytes, int] = {}
        """Node by the name of its connection."""
        self._hosts: dict[int, str] = {}
        """Name of the host by node, of those that have joined."""
        self._farewell: Farewell | None = None
        self._closing, self._wake = os.pipe()
        self._wake_lock = Lock()
        self._is_closed = False
        self._thread = Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def add(self, member: Member) -> None:
        """From now on, talk of another one too."""
        self._tell_thread(member)

    def compare_with(self, ground: CommonGround) -> None:
        """What hosts must have in common with the first. Called by any thread."""
        self._tell_thread(ground)

    def part(self, why: str) -> None:
        """As `close`, once the hosts have heard that no other core will come; `why` as in `Farewell`."""
        self._farewell = Farewell(why)
        self.close()

    def close(self) -> None:
        """End all connections; the second time, nothing. Called by any thread."""
        with self._wake_lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._wake)
        self._thread.join()

    def turn_away(self, node: int, why: str) -> None:
        """A host will not come, for that reason; nothing where it has joined. Called by any thread."""
        self._tell_thread(_TurnedAway(node, why))

    def _tell_thread(self, news: "Member | CommonGround | _TurnedAway") -> None:
        with self._wake_lock:
            if not self._is_closed:
                self._new.put(news)
                os.write(self._wake, b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        self._socket.register(poller)
        poller.register(self._closing, zmq.POLLIN)
        while True:
            reachable = {link.far_descriptor: link for link in self._reachable()}
            for descriptor in reachable:
                poller.register(descriptor, zmq.POLLIN)
            due = min([self._socket.next_ask, *map(self._late_at, self._awaited())])
            timeout = None if due == math.inf else math.ceil(1e3 * max(0.0, due - time.monotonic()))
            readable = dict(poller.poll(timeout))
            for descriptor in reachable:
                poller.unregister(descriptor)
            if self._closing in readable:
                if not os.read(self._closing, 1):
                    return self._end()
                self._hear_news(self._new.get())
            for member in self._awaited():
                if time.monotonic() >= self._late_at(member):
                    member.be_late(self._timeout)
            if self._socket.is_time_to_ask():
                self._ask(list(self._joined))
            if (heard := self._socket.receive()) is not None:
                self._hear(*heard)
            for descriptor, link in reachable.items():
                # A rank that was lost in this round has closed it.
                if descriptor in readable and link.far_descriptor == descriptor:
                    self._pass_on(link)

    def _reachable(self) -> list[Member]:
        """Those that can be told something."""
        joined = (link for node in self._joined.values() for link in self._nodes[node])
        return [link for link in joined if link.far_descriptor >= 0]

    def _hear(self, name: bytes, frames: list[bytes]) -> None:
        """One message of somebody who knows the key; that does not make it one of this version's."""
        if frames == [ALIVE]:
            self._refuse_doubles(name)
            return
        try:
            message = _decoder.decode(b"".join(frames))
        except msgspec.DecodeError as error:
            _log.error("a host says what this version of Kaon cannot read: %s", error)
            self._send(name, Refused(f"the first host runs Kaon {release()} and cannot read this; install the same"))
            self._lose(name, "is gone: its host says what this version of Kaon cannot read", False)
        else:
            self._take_in(name, message)

    def _awaited(self) -> Iterator[Member]:
        """Those whose hosts have yet to come."""
        absent = (link for node in self._nodes.keys() - self._joined.values() for link in self._nodes[node])
        return (link for link in absent if link.far_descriptor >= 0)

    def _late_at(self, member: Member) -> float:
        return max(member.join_by, self._compares_since + self._timeout)

    def _hear_news(self, news: "Member | CommonGround | _TurnedAway") -> None:
        if isinstance(news, CommonGround):
            self._ground, self._compares_since = news, time.monotonic()
            self._welcome_again(self._waiting.take_for_ground())
        elif isinstance(news, _TurnedAway):
            for member in list(self._awaited()):
                if member.node == news.node:
                    member.differ("", f"cannot join: {news.why}")
        else:
            self._admit(news)

    def _admit(self, member: Member) -> None:
        there = self._nodes[member.node]
        # Those that were lost before are of no more use.
        there[:] = [other for other in there if other.far_descriptor >= 0]
        there.append(member)
        if member.node in self._joined.values():
            member.joined(self._hosts[member.node])
        elif member.join_by == math.inf:
            _log.warning("node %d has to join again before it runs what it did", member.node)

    def _take_in(self, name: bytes, message: FromHost) -> None:
        match message:
            case Hello():
                self._welcome(name, message)
            case RankSaid() | RankGone():
                self._pass_back(name, message.rank, message)
            case CoreStarted() | CoreEnded():
                self._pass_back(name, message.core, message)

    def _pass_back(self, name: bytes, number: int, message: FromHost) -> None:
        """What a host says of one of its members, which may be lost by now, as the host may be."""
        for member in self._nodes.get(self._joined.get(name, -1), ()):
            if member.number == number and member.far_descriptor >= 0:
                member.hear(message)

    def _welcome(self, name: bytes, hello: Hello) -> None:
        if self._ground is None:
            self._waiting.wait_for_ground(name, hello)
        elif hello.node not in self._nodes:
            self._send(name, Refused(f"node_rank is {hello.node}, but the other hosts are 1 to {len(self._nodes)}"))
        elif hello.node in self._joined.values():
            # That one may have vanished without a word, and be this very one: it is asked first. A silent one counts
            # as gone in a while, and this one takes its place.
            self._waiting.wait_for_place(name, hello)
            self._ask([each for each, node in self._joined.items() if node == hello.node])
        elif (difference := self._ground.difference(hello.ground)) is not None:
            _log.warning("node %d (%s) was turned away: it %s", hello.node, hello.host, difference)
            self._send(name, Refused(f"this host {difference}"))
            for link in self._nodes[hello.node]:
                link.differ(hello.host, difference)
        else:
            self._joined[name], self._hosts[hello.node] = hello.node, hello.host
            _log.info("node %d has joined: %s", hello.node, hello.host)
            for link in self._nodes[hello.node]:
                link.joined(hello.host)

    def _welcome_again(self, hellos: Mapping[bytes, Hello]) -> None:
        """Those that had to wait, and may have gone since."""
        for name, hello in hellos.items():
            if self._socket.ask(name):
                self._welcome(name, hello)

    def _refuse_doubles(self, name: bytes) -> None:
        """A host that has joined is still there: no other can be of its number."""
        node = self._joined.get(name)
        for double in self._waiting.take_for_place(node):
            self._send(double, Refused(f"node_rank is {node}, and another host has joined as that already"))

    def _pass_on(self, link: Member) -> None:
        message = link.take()
        if message is None:
            link.lose("was closed", False)
            return
        self._send(next(name for name, node in self._joined.items() if node == link.node), message)

    def _ask(self, names: Iterable[bytes]) -> None:
        """Ask hosts that have joined whether they are there."""
        for name in names:
            if not self._socket.ask(name):
                self._lose_connection(name)

    def _send(self, name: bytes, message: ToHost) -> None:
        if not self._socket.send(name, message):
            self._lose_connection(name)

    def _lose_connection(self, name: bytes) -> None:
        self._lose(name, "is gone: the connection to its host has ended", True)

    def _lose(self, name: bytes, how: str, killed: bool) -> None:
        """A host that may have joined is as good as gone; another may wait for its place."""
        node = self._joined.pop(name, None)
        if node is not None:
            for link in self._nodes[node]:
                link.lose(how, killed)
            self._welcome_again(self._waiting.take_for_place(node))

    def _end(self) -> None:
        os.close(self._closing)
        if self._farewell is None:
            self._socket.close()
        else:
            self._socket.part(self._farewell, [*self._joined, *self._waiting])
