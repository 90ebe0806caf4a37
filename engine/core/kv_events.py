"""`KVEventPublisher`: publishes which blocks an engine core caches, for routers that choose servers by cached
prefixes.

The wire format is that of vLLM's KV events, which llm-d and others read. A PUB socket sends messages of three frames,

    topic | sequence number, 8 bytes big-endian | msgpack of [time, [event, ...], replica]

    event: ["BlockStored", hashes, parent hash, token ids, block size, adapter id, medium, adapter name]
           ["BlockRemoved", hashes, medium]   ["AllBlocksCleared"]
    or a map of its tag, as `type`, and its fields by name, as vLLM publishes since June 2026

and a ROUTER socket replays them: a request with a sequence number is answered with all stored messages from that
number, each as its number and payload, followed by the number -1. Numbers begin at 0 in each core. Its first message
begins with AllBlocksCleared, because a new core has an empty cache.

Only the busy loop's thread uses the PUB socket: another thread would wake up while a step computes.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import zmq

from engine.config.config import KVEventsConfig
from kvcache.block import Change, StoredBlock

logger = logging.getLogger(__name__)

NO_ADAPTERS: Mapping[int, str] = MappingProxyType({})

_HELD_MESSAGES = 10_000
_HIGH_WATER_MARK = 100_000
"""Most messages queued for a subscriber. Further ones are dropped, which it detects by the sequence numbers."""
_REPLAY_HIGH_WATER_MARK = 1000
"""Most messages of a replay queued for a client. The others follow as it reads."""
_MOST_REPLAYS = 64
"""Most replays at a time; further requests wait."""
_REQUESTS_PER_ROUND, _MESSAGES_PER_ROUND, _ROUND_SECONDS = 16, 128, 0.005
"""Most requests per round, most messages per client and round, and the pause after each round."""
_UNREAD_SECONDS = 30.0
"""Seconds without reading after which a client's replay ends."""
_WARNING_SECONDS = 10.0
"""Least seconds between two log lines about malformed requests."""
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_MEDIUM = "GPU"
"""vLLM's name of the cache that attention reads, even if it is in the host's memory on a CPU."""


class _BlockStored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class _BlockRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str


class _AllBlocksCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


_Event: TypeAlias = _BlockStored | _BlockRemoved | _AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Sequence[_Event | dict[str, Any]]
    data_parallel_rank: int


def _as_map(event: _Event) -> dict[str, Any]:
    """Return an event as a map of its tag and its fields by name."""
    return {"type": event.__struct_config__.tag, **msgspec.structs.asdict(event)}


class KVEventPublisher:
    """The sockets of one engine core. It calls `publish` with the changes of each step."""

    def __init__(self, config: KVEventsConfig, replica: int, block_size: int) -> None:
        """Open the sockets. Raises `ValueError` for an address that cannot be used."""
        assert config.kv_events_endpoint is not None
        self._topic = config.kv_events_topic.encode()
        self._as_maps = config.kv_events_format == "map"
        self._replica = replica
        self._block_size = block_size
        self._encoder = msgspec.msgpack.Encoder()
        self._next = 0
        self._held: deque[tuple[bytes, zmq.Frame]] = deque(maxlen=_HELD_MESSAGES)
        self._held_lock = threading.Lock()
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(_HIGH_WATER_MARK)
        _open(self._pub, "kv_events_endpoint", config.kv_events_endpoint, replica)
        if config.kv_events_replay_endpoint is not None:
            replay = self._context.socket(zmq.ROUTER)
            _open(replay, "kv_events_replay_endpoint", config.kv_events_replay_endpoint, replica, listens=True)
            threading.Thread(target=self._answer_replays, args=(replay,), name="kv-replay", daemon=True).start()

    def publish(self, changes: Sequence[Change], adapters: Mapping[int, str] = NO_ADAPTERS) -> None:
        """Publish changes of the cache as one message. Never blocks. `adapters` has names by number."""
        if not changes:
            return
        events = self._events(changes, adapters)
        if self._next == 0:
            events.insert(0, _AllBlocksCleared())
        encoded = [_as_map(event) for event in events] if self._as_maps else events
        payload = self._encoder.encode(_Batch(time.time(), encoded, self._replica))
        number = self._next.to_bytes(8, "big")
        self._next += 1
        with self._held_lock:
            self._held.append((number, zmq.Frame(payload)))
        self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets. Queued messages are dropped."""
        self._pub.close()
        self._context.term()

    def _events(self, changes: Sequence[Change], adapters: Mapping[int, str]) -> list[_Event]:
        """Convert changes to events. Consecutive blocks of one chain, and consecutive removals, become one event."""
        events: list[_Event] = []
        for change in changes:
            last = events[-1] if events else None
            if not isinstance(change, StoredBlock):
                if isinstance(last, _BlockRemoved):
                    last.block_hashes.append(change)
                else:
                    events.append(_BlockRemoved([change], _MEDIUM))
            elif (
                isinstance(last, _BlockStored)
                and last.block_hashes[-1] == change.parent_hash
                and last.lora_id == (change.adapter or None)
            ):
                last.block_hashes.append(change.hash)
                last.token_ids += change.token_ids
            else:
                events.append(self._stored(change, adapters.get(change.adapter)))
        return events

    def _stored(self, block: StoredBlock, name: str | None) -> _BlockStored:
        tokens, adapter = list(block.token_ids), block.adapter or None
        return _BlockStored([block.hash], block.parent_hash, tokens, self._block_size, adapter, _MEDIUM, name)

    def _answer_replays(self, socket: "zmq.Socket[bytes]") -> None:
        # The context ends only when all its sockets are closed, so this one is closed however the thread ends.
        with socket, contextlib.suppress(zmq.ContextTerminated):
            _Replays(socket, self._messages).run()

    def _messages(self) -> "list[tuple[bytes, zmq.Frame]]":
        with self._held_lock:
            return list(self._held)


class _Replay:
    """The messages that have not been sent to one client."""

    def __init__(self, messages: "Iterable[tuple[bytes, zmq.Frame]]") -> None:
        self.messages = deque(messages)
        self.progress_time = time.monotonic()
        """Time at which a message was last sent."""


class _Replays:
    """Answers requests for replays on a ROUTER socket. Clients are served in turn, each as fast as it reads.

    The socket's high-water mark bounds the messages queued for a client. No client loses a message of its replay or
    delays another client. The pause between two rounds leaves the interpreter lock to the busy loop's thread. Queues
    of several clients share the message objects.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", messages: "Callable[[], list[tuple[bytes, zmq.Frame]]]") -> None:
        """`messages` returns the stored messages in order, each with its number."""
        self._socket, self._messages = socket, messages
        # Make a send to a client that does not read, or is gone, fail instead of dropping the message.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.set_hwm(_REPLAY_HIGH_WATER_MARK)
        self._replays: dict[bytes, _Replay] = {}
        self._warn_from = 0.0

    def run(self) -> None:
        """Answer requests until the context ends, which raises `zmq.ContextTerminated`."""
        while True:
            if self._replays:
                time.sleep(_ROUND_SECONDS)
            else:
                self._socket.poll()
            for _ in range(_REQUESTS_PER_ROUND):
                if len(self._replays) >= _MOST_REPLAYS or not self._socket.poll(0):
                    break
                self._begin(self._socket.recv_multipart())
            for client, replay in list(self._replays.items()):
                if not self._go_on(client, replay):
                    del self._replays[client]

    def _begin(self, frames: list[bytes]) -> None:
        """Begin a replay. It replaces an unfinished replay for the same client."""
        if len(frames) != 3 or len(frames[2]) != 8:
            if time.monotonic() >= self._warn_from:
                self._warn_from = time.monotonic() + _WARNING_SECONDS
                logger.warning(
                    "a request for a replay of KV events was ignored: it must hold an event number of 8 bytes"
                )
            return
        client, _, first = frames
        # Big-endian byte strings of equal length compare like their numbers.
        messages = [(number, payload) for number, payload in self._messages() if number >= first]
        self._replays[client] = _Replay([*messages, (_END_OF_REPLAY, zmq.Frame())])

    def _go_on(self, client: bytes, replay: _Replay) -> bool:
        """Send a client as many messages as its queue accepts. Returns False if it has all, is gone, or reads too
        slowly."""
        for _ in range(_MESSAGES_PER_ROUND):
            number, payload = replay.messages[0]
            try:
                self._socket.send_multipart((client, b"", number, payload), zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return time.monotonic() < replay.progress_time + _UNREAD_SECONDS
            except zmq.ContextTerminated:
                raise
            except zmq.ZMQError:
                return False
            replay.messages.popleft()
            replay.progress_time = time.monotonic()
            if not replay.messages:
                return False
        return True


def _open(socket: "zmq.Socket[bytes]", field: str, address: str, replica: int, *, listens: bool = False) -> None:
    """Bind an address that contains `*`, or connect to any other, at the replica's port. Raises `ValueError`."""
    base, _, port = address.rpartition(":")
    address = f"{base}:{int(port) + replica}"
    try:
        (socket.bind if listens or "*" in base else socket.connect)(address)
    except zmq.ZMQError as error:
        raise ValueError(f"{field} is {address}, which cannot be used: {error.strerror}; name another port") from error
