"""The data that external routers read of a server: metrics under vLLM's names, load reports, events of the KV
cache."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from engine.config.config import KVEventsConfig
from engine.core.kv_events import KVEventPublisher
from engine.messages import ModelInfo, SchedulerStats
from engine.sequence import Sequence as EngineSequence
from kvcache.block import StoredBlock
from kvcache.block_manager import BlockManager
from kvcache.hashing import adapter_of, chain_salt
from server.metrics import Metrics
from server.middleware import RequestIdMiddleware
from tests import ports

MODEL = ModelInfo("Qwen3", "bfloat16", "cpu", "torch", 1, 100, 4096, [2], block_size=16, num_kvcache_blocks=500)


def loaded_metrics(num_replicas: int = 1, adapters: Sequence[str] = (), aliases_for: str | None = "m") -> Metrics:
    """Metrics after a step of each replica: 3 run and 2 wait in the first, 4 more of both in each further one."""
    metrics = Metrics("1", num_replicas, aliases_for)
    metrics.show_engine(model=lambda: MODEL, adapters=lambda: adapters)
    for replica in range(num_replicas):
        running, waiting = 3 + 4 * replica, 2 + 4 * replica
        metrics.step(SchedulerStats(running, waiting, 100, 400, 64, 32, 1, "decode", 0.01), 3, replica)
    return metrics


class EndpointPicker:
    """The Gateway API inference extension's view of a server, by the documented rules of its metrics extractor.

    It uses one sample of each metric: that of the latest time, or the first if there are no times. Labels of
    `vllm:cache_config_info` have the size of the cache. The sample of `vllm:lora_requests_info` with the largest
    value, which is a time, lists adapters, separated by commas.
    """

    def __init__(self, text: str) -> None:
        self._families = {family.name: family for family in text_string_to_metric_families(text)}
        self.waiting = self._gauge("vllm:num_requests_waiting")
        self.running = self._gauge("vllm:num_requests_running")
        self.kv_usage = self._gauge("vllm:kv_cache_usage_perc")
        cache = self._families["vllm:cache_config_info"].samples[0].labels
        self.cache_size = int(cache["block_size"]), int(cache["num_gpu_blocks"])
        self.adapters: list[str] = []
        self.max_adapters = 0
        if lora := self._families.get("vllm:lora_requests_info"):
            latest = max(lora.samples, key=lambda sample: sample.value)
            self.adapters = [each for each in latest.labels["running_lora_adapters"].split(",") if each]
            self.max_adapters = int(latest.labels["max_lora"])

    def _gauge(self, name: str) -> float:
        family = self._families[name]
        assert family.type == "gauge"
        return float(max(family.samples, key=lambda sample: sample.timestamp or 0).value)


def test_the_inference_extension_s_rules_find_load_and_cache() -> None:
    seen = EndpointPicker(loaded_metrics(adapters=("fast", "slow")).render().decode())
    assert (seen.waiting, seen.running, seen.kv_usage) == (2, 3, 0.25)
    assert seen.cache_size == (16, 500)
    assert (seen.adapters, seen.max_adapters) == (["fast", "slow"], 2)


def test_replicas_are_one_sample_because_routers_keep_one() -> None:
    seen = EndpointPicker(loaded_metrics(num_replicas=2).render().decode())
    assert (seen.waiting, seen.running, seen.kv_usage) == (2 + 6, 3 + 7, 0.25)
    assert seen.adapters == []


def test_every_alias_has_the_value_and_type_of_its_own_name() -> None:
    metrics = loaded_metrics()
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    counter = families["vllm:prefix_cache_queries"]
    assert counter.type == "counter"
    assert [(each.name, each.value, each.labels["model_name"]) for each in counter.samples] == [
        ("vllm:prefix_cache_queries_total", 64.0, "m")
    ]
    ours, theirs = families["kaon_time_to_first_token_seconds"], families["vllm:time_to_first_token_seconds"]
    assert theirs.type == "histogram"
    assert [each.labels.get("le") for each in theirs.samples] == [each.labels.get("le") for each in ours.samples]


def test_without_aliases_no_other_server_s_name_is_shown() -> None:
    text = loaded_metrics(aliases_for=None, adapters=("fast",)).render().decode()
    assert "vllm:" not in text
    assert 'kaon_lora_adapter_info{adapter="fast"} 1.0' in text
    assert "kaon_kv_cache_blocks 500.0" in text
    assert "kaon_kv_cache_block_tokens 16.0" in text


@pytest.mark.parametrize(
    ("headers", "status", "report"),
    [
        ([(b"endpoint-load-metrics-format", b"TEXT")], 200, "text"),
        ([(b"endpoint-load-metrics-format", b"json")], 200, "json"),
        ([(b"endpoint-load-metrics-format", b"json")], 401, None),
        ([(b"endpoint-load-metrics-format", b"bin")], 200, None),
        ([], 200, None),
    ],
)
async def test_an_answer_reports_the_load_where_the_request_asks_for_it(
    headers: list[tuple[bytes, bytes]], status: int, report: str | None
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await RequestIdMiddleware(app, None, loaded_metrics())(scope, receive, send)
    value = dict(sent[0]["headers"]).get(b"endpoint-load-metrics")
    named = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 2.0, "num_requests_running": 3.0}
    if report == "text":
        parts = dict(part.split("=") for part in value.decode().removeprefix("TEXT ").split(", "))
        assert {name.removeprefix("named_metrics."): float(each) for name, each in parts.items()} == named
    elif report == "json":
        assert json.loads(value.removeprefix(b"JSON ")) == {"named_metrics": named}
    else:
        assert value is None


# -- events of the KV cache -------------------------------------------------------------------------------------


class Router:
    """A router's index of the blocks that a server caches, maintained by its events as vLLM documents them."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        """The parent's hash and the tokens of each hash."""

    def read(self, payload: bytes) -> None:
        _, events, _ = msgspec.msgpack.decode(payload)
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                self.blocks.clear()
            elif kind == "BlockRemoved":
                for digest in fields[0]:
                    del self.blocks[digest]
            else:
                assert kind == "BlockStored"
                hashes, parent, tokens, size, _, medium, _ = fields
                assert medium == "GPU"
                assert len(tokens) == len(hashes) * size
                for index, digest in enumerate(hashes):
                    self.blocks[digest] = parent, tokens[index * size : (index + 1) * size]
                    parent = digest


@pytest.fixture
def open_publisher() -> Iterator[Callable[..., tuple[KVEventPublisher, int]]]:
    opened: list[KVEventPublisher] = []

    def start(replica: int = 0, **fields: Any) -> tuple[KVEventPublisher, int]:
        port = ports.free_ports()
        config = KVEventsConfig(kv_events_endpoint=f"tcp://*:{port - replica}", kv_events_topic="kv@pod@m", **fields)
        opened.append(KVEventPublisher(config, replica, 4))
        return opened[-1], port

    yield start
    for publisher in opened:
        publisher.close()


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscribe(
    context: "zmq.Context[zmq.Socket[bytes]]", port: int, publisher: KVEventPublisher
) -> "zmq.Socket[bytes]":
    """A subscriber that is connected: it has received a message."""
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
    socket.connect(f"tcp://127.0.0.1:{port}")
    while not socket.poll(20):
        publisher.publish([StoredBlock(1, None, [0, 0, 0, 0], 0)])
    return socket


def test_an_event_is_what_vllm_s_subscribers_decode(
    open_publisher: Callable[..., tuple[KVEventPublisher, int]], context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    publisher, port = open_publisher(replica=1)
    socket = subscribe(context, port, publisher)
    publisher.publish(
        [
            StoredBlock(11, None, [1, 2, 3, 4], 0),
            StoredBlock(2**64 - 1, 11, [5, 6, 7, 8], 0),
            7,
            8,
            StoredBlock(13, None, [1, 2, 3, 4], 2),
        ],
        {1: "first", 2: "second"},
    )
    while True:
        topic, number, payload = socket.recv_multipart()
        time, events, rank = msgspec.msgpack.decode(payload)
        if len(events) > 2:
            break
    assert topic == b"kv@pod@m"
    assert int.from_bytes(number, "big") > 0
    assert time > 1.7e9
    assert rank == 1
    assert events == [
        ["BlockStored", [11, 2**64 - 1], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None],
        ["BlockRemoved", [7, 8], "GPU"],
        ["BlockStored", [13], None, [1, 2, 3, 4], 4, 2, "GPU", "second"],
    ]


class BlockStored(msgspec.Struct, tag=True):
    """vLLM's event since June 2026: without a default for the first seven fields."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def test_events_in_the_form_of_maps_are_what_vllm_s_own_classes_decode(
    open_publisher: Callable[..., tuple[KVEventPublisher, int]], context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    publisher, port = open_publisher(kv_events_format="map")
    socket = subscribe(context, port, publisher)
    publisher.publish([StoredBlock(2**64 - 1, 1, [5, 6, 7, 8], 2), 7, 8], {2: "second"})
    batches = [msgspec.msgpack.decode(socket.recv_multipart()[2], type=Batch)]
    while len(batches[-1].events) < 2 or batches[-1].events[0] == AllBlocksCleared():
        batches.append(msgspec.msgpack.decode(socket.recv_multipart()[2], type=Batch))
    assert batches[-1].events == [
        BlockStored([2**64 - 1], 1, [5, 6, 7, 8], 4, 2, "GPU", "second"),
        BlockRemoved([7, 8], "GPU"),
    ]


def test_a_subscriber_that_missed_messages_gets_them_again(
    open_publisher: Callable[..., tuple[KVEventPublisher, int]], context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    port = ports.free_ports()
    publisher, _ = open_publisher(kv_events_replay_endpoint=f"tcp://*:{port}")
    for number in range(300):
        publisher.publish([StoredBlock(number, None, [number] * 4, 0)])
    replay = context.socket(zmq.DEALER)
    replay.connect(f"tcp://127.0.0.1:{port}")
    replay.send_multipart((b"", b"not a number"))
    replay.send_multipart((b"", (298).to_bytes(8, "big")))
    answers = [replay.recv_multipart()[1:] for _ in range(3)]
    assert [int.from_bytes(number, "big", signed=True) for number, _ in answers] == [298, 299, -1]
    assert [msgspec.msgpack.decode(payload)[1][0][1] for _, payload in answers[:2]] == [[298], [299]]
    # A core's first message reports an empty cache.
    replay.send_multipart((b"", bytes(8)))
    _, number, payload = replay.recv_multipart()
    assert number == bytes(8)
    assert msgspec.msgpack.decode(payload)[1][0] == ["AllBlocksCleared"]


def test_a_replay_is_whole_while_other_clients_do_not_read_theirs(
    open_publisher: Callable[..., tuple[KVEventPublisher, int]], context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    port = ports.free_ports()
    publisher, _ = open_publisher(kv_events_replay_endpoint=f"tcp://*:{port}")
    for number in range(3000):
        publisher.publish([StoredBlock(number, None, [number] * 400, 0)])
    for _ in range(20):
        unread = context.socket(zmq.DEALER)
        unread.setsockopt(zmq.RCVHWM, 1)
        unread.setsockopt(zmq.RCVBUF, 4096)
        unread.connect(f"tcp://127.0.0.1:{port}")
        unread.send_multipart((b"", bytes(8)))
        unread.send_multipart((b"not", b"a", b"request"))
    replay = context.socket(zmq.DEALER)
    replay.connect(f"tcp://127.0.0.1:{port}")
    replay.send_multipart((b"", bytes(8)))
    numbers = [int.from_bytes(replay.recv_multipart()[1], "big", signed=True) for _ in range(3001)]
    assert numbers == [*range(3000), -1]


@pytest.mark.timeout(60)
def test_a_publisher_closes_while_it_answers_a_replay(
    open_publisher: Callable[..., tuple[KVEventPublisher, int]], context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    port = ports.free_ports()
    publisher, _ = open_publisher(kv_events_replay_endpoint=f"tcp://*:{port}")
    for number in range(10_000):
        publisher.publish([StoredBlock(number, None, [number] * 4, 0)])
    replay = context.socket(zmq.DEALER)
    replay.connect(f"tcp://127.0.0.1:{port}")
    replay.send_multipart((b"", bytes(8)))
    replay.recv_multipart()
    publisher.close()


def test_an_address_that_is_taken_is_named(open_publisher: Callable[..., tuple[KVEventPublisher, int]]) -> None:
    _, port = open_publisher()
    config = KVEventsConfig(kv_events_endpoint=f"tcp://*:{port}")
    with pytest.raises(ValueError, match=f"kv_events_endpoint is tcp://\\*:{port}, which cannot be used"):
        KVEventPublisher(config, 0, 4)


@pytest.mark.parametrize("adapter", [0, 1, 7])
@pytest.mark.parametrize("salt", [None, 0, 2**64 - 1])
def test_a_chain_s_salt_names_its_adapter(salt: int | None, adapter: int) -> None:
    assert adapter_of(chain_salt(salt, adapter)) == adapter


@pytest.mark.parametrize("seed", range(8))
def test_a_router_that_reads_the_events_knows_exactly_the_cached_blocks(
    seed: int, open_publisher: Callable[..., tuple[KVEventPublisher, int]], context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    """Run a random history of starts, growths, ends and failed steps."""
    draw = random.Random(seed)
    settings = SimpleNamespace(kv_cache_block_size=4, num_kvcache_blocks=24, enable_prefix_caching=True)
    manager, router = BlockManager(settings), Router()
    manager.record_changes()
    publisher, port = open_publisher()
    socket = subscribe(context, port, publisher)
    router.read(socket.recv_multipart()[2])
    live: list[EngineSequence] = []
    sent = False
    for _ in range(200):
        action = draw.random()
        if action < 0.45:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 24))]
            seq = EngineSequence(tokens, 4, cache_salt=draw.choice([None, 5]), adapter=draw.choice([0, 0, 2]))
            if manager.can_allocate(seq):
                manager.allocate(seq)
                live.append(seq)
        elif live:
            seq = draw.choice(live)
            if action < 0.7 and manager.can_append(seq, 2):
                seq.append_token(draw.randrange(2))
                manager.may_append(seq)
            elif action < 0.75:
                manager.forget(seq)
            else:
                live.remove(seq)
                manager.deallocate(seq)
        changes = manager.take_changes()
        publisher.publish(changes)
        sent = sent or bool(changes)
    publisher.publish([StoredBlock(99, None, [9, 9, 9, 9], 0)])
    while 99 not in router.blocks:
        router.read(socket.recv_multipart()[2])
    assert sent
    pool = manager.pool
    cached = {digest: pool.blocks[block_id].token_ids for digest, block_id in pool.hash_to_block_id.items()}
    assert {digest: tokens for digest, (_, tokens) in router.blocks.items() if digest not in (1, 99)} == cached
