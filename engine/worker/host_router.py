"""`HostRouter`: the thread of the engine core that other hosts join at, and that passes on what their ranks say.

Made by `RemoteRanks`. A host that is gone is noticed at once where its system closes the connection, else by its
silence.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from threading import Thread

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.cluster_key import CurvePair
from engine.cluster_settings import CommonGround
from engine.worker.curve import listen
from engine.worker.host_messages import Farewell, FromHost, Hello, RankSaid, Refused, TellRank, ToHost
from engine.worker.rank_messages import RankFailed
from engine.worker.remote_rank import RemoteRank

_log = logging.getLogger(__name__)

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_PROBE_SECONDS = (0.0, 0.02, 1.0)
"""After the end of some connection: the socket does not say whose, and knows it a moment later itself."""
_LINGER_MS = 2000
"""For a farewell to leave."""
_PROBE = b""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromHost)


class HostRouter:
    """Talks to the hosts of `nodes`, which are numbered from 1, until `close`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        keys: CurvePair,
        ground: CommonGround,
        nodes: Mapping[int, Sequence[RemoteRank]],
    ) -> None:
        """Listen at `tcp://` an address. Raises `OSError`, a sentence, when it cannot be had."""
        self._socket = listen(context, zmq.ROUTER, address, keys)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _FAILED)
        self._ground = ground
        self._nodes = nodes
        self._ranks = {link.rank: link for links in nodes.values() for link in links}
        self._joined: dict[bytes, int] = {}
        """Node by the name of its connection."""
        self._doubles: dict[bytes, int] = {}
        """Node by the name of a connection whose host claims to be one that has joined."""
        self._probes: list[float] = []
        """When to look who is still there, on the monotonic clock, the last first."""
        self._has_warned = False
        self._farewell: Farewell | None = None
        self._closing, self._wake = os.pipe()
        self._thread = Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def part(self, why: str) -> None:
        """Tell the hosts at `close` that no other core will come."""
        self._farewell = Farewell(why)

    def close(self) -> None:
        """End all connections."""
        os.close(self._wake)
        self._thread.join()
        os.close(self._closing)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._closing):
            poller.register(source, zmq.POLLIN)
        while True:
            waiting = {link.far_descriptor: link for link in self._waiting()}
            for descriptor in waiting:
                poller.register(descriptor, zmq.POLLIN)
            timeout = None if not self._probes else max(0.0, self._probes[-1] - time.monotonic())
            readable = dict(poller.poll(None if timeout is None else round(1e3 * timeout)))
            for descriptor in waiting:
                poller.unregister(descriptor)
            if self._closing in readable:
                return self._end()
            if self._monitor in readable:
                self._watch()
            if self._probes and time.monotonic() >= self._probes[-1]:
                self._probes.pop()
                self._probe()
            if self._socket in readable:
                self._hear(*self._socket.recv_multipart())
            for descriptor, link in waiting.items():
                # A rank that was lost in this round has closed it.
                if descriptor in readable and link.far_descriptor == descriptor:
                    self._pass_on(link)

    def _waiting(self) -> list[RemoteRank]:
        """The ranks that can be told something."""
        joined = (link for node in self._joined.values() for link in self._nodes[node])
        return [link for link in joined if link.far_descriptor >= 0]

    def _hear(self, name: bytes, *frames: bytes) -> None:
        """One message of somebody who knows the key; that does not make it one of this version's."""
        if frames == (_PROBE,):
            self._refuse_doubles(name)
            return
        try:
            message = _decoder.decode(b"".join(frames))
        except msgspec.DecodeError as error:
            _log.error("a host says what this version of Kaon cannot read: %s", error)
            self._send(
                name,
                Refused(f"the first host runs Kaon {self._ground.version} and cannot read this; install the same"),
            )
            self._lose(name, "is gone: its host says what this version of Kaon cannot read", False)
        else:
            self._take_in(name, message)

    def _take_in(self, name: bytes, message: FromHost) -> None:
        if isinstance(message, Hello):
            self._welcome(name, message)
            return
        link = self._ranks.get(message.rank)
        if link is None or self._joined.get(name) != link.node:
            return  # Its host was refused, or lost.
        if isinstance(message, RankSaid):
            link.give(message.message)
        else:
            link.lose(message.how, message.killed)

    def _welcome(self, name: bytes, hello: Hello) -> None:
        if hello.node not in self._nodes:
            self._send(name, Refused(f"node_rank is {hello.node}, but the other hosts are 1 to {len(self._nodes)}"))
        elif hello.node in self._joined.values():
            # That one may have vanished without a word, and be this very one: it is asked first. A silent one counts
            # as gone in a while, which ends this core; the host joins the next.
            self._doubles[name] = hello.node
            for other in [each for each, node in self._joined.items() if node == hello.node]:
                self._send_frame(other, _PROBE)
        elif (difference := self._ground.difference(hello.ground)) is not None:
            self._send(name, Refused(f"this host {difference}"))
            for link in self._nodes[hello.node]:
                link.joined(hello.host)
                link.give(RankFailed(f"its host {difference}", usage=True))
        else:
            self._joined[name] = hello.node
            _log.info("node %d has joined: %s", hello.node, hello.host)
            for link in self._nodes[hello.node]:
                link.joined(hello.host)

    def _refuse_doubles(self, name: bytes) -> None:
        """A host that has joined is still there: no other can be of its number."""
        for double, node in list(self._doubles.items()):
            if node == self._joined.get(name):
                del self._doubles[double]
                self._send(double, Refused(f"node_rank is {node}, and another host has joined as that already"))

    def _pass_on(self, link: RemoteRank) -> None:
        message = link.take()
        if message is None:
            link.lose("was closed", False)
            return
        self._send(
            next(name for name, node in self._joined.items() if node == link.node), TellRank(link.rank, message)
        )

    def _watch(self) -> None:
        """Note what connections end."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                now = time.monotonic()
                self._probes = sorted((now + seconds for seconds in _PROBE_SECONDS), reverse=True)
            elif not self._has_warned:
                self._has_warned = True
                _log.warning("somebody who does not know this server's cluster key was turned away")

    def _probe(self) -> None:
        for name in list(self._joined):
            self._send_frame(name, _PROBE)

    def _send(self, name: bytes, message: ToHost) -> None:
        self._send_frame(name, _encoder.encode(message))

    def _send_frame(self, name: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart([name, frame])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(name, "is gone: the connection to its host has ended", True)

    def _lose(self, name: bytes, how: str, killed: bool) -> None:
        """A host that may have joined is as good as gone."""
        node = self._joined.pop(name, None)
        for link in () if node is None else self._nodes[node]:
            link.lose(how, killed)

    def _end(self) -> None:
        if self._farewell is not None:
            for name in list(self._joined):
                self._send(name, self._farewell)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
