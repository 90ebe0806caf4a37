"""`HostRouter` and `HostAgent`: how they treat a peer that is silent, dead, of another kind, or of another version.

The peer is a bare socket here, which sends messages that no real host or core would send.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.config.config import Config, ParallelConfig
from engine.distributed import host_router
from engine.distributed.cluster import ClusterKeys, HostAgreement
from engine.distributed.curve import CurveAuthenticator, bind_curve, curve_client, endpoint
from engine.distributed.host_agent import HostAgent, HostError
from engine.distributed.host_messages import Hello, RankCommand, RankGone, RankReport, Refused, ShutdownMessage, ToHost
from engine.distributed.host_resources import Shard
from engine.distributed.host_router import HostRouter
from engine.distributed.rank_link import Join, RankLaunch, RankProc, RankServes, StepAddress
from engine.distributed.remote_ranks import RemoteRank
from models.demo import CHECKPOINT_DIR
from tests.ports import free_ports

WAIT_MS = 60_000
SILENCE_MS = 200
KEYS = ClusterKeys.of("correct-horse-battery-staple")
GROUND = HostAgreement.of(Config(), CHECKPOINT_DIR)

Caller = Callable[[str], "zmq.Socket[bytes]"]


@pytest.fixture
def address() -> str:
    return endpoint("127.0.0.1", free_ports())


@pytest.fixture
def ranks(address: str) -> list[RemoteRank]:
    return [RemoteRank(1, 1, address), RemoteRank(2, 2, address)]


@pytest.fixture
def router(context: "zmq.Context[zmq.Socket[bytes]]", address: str, ranks: list[RemoteRank]) -> Iterator[HostRouter]:
    """A router for two other hosts with a rank each. Its thread must not raise."""
    raised: list[object] = []
    before, threading.excepthook = threading.excepthook, lambda end: raised.append(end.exc_value)
    authenticator = CurveAuthenticator(context)
    authenticator.allow(KEYS.host.public)
    nodes = {link.node: [link] for link in ranks}
    made = HostRouter(context, address, KEYS.core, agreement=GROUND, nodes=nodes, timeout=WAIT_MS / 1e3)
    yield made
    made.close()
    authenticator.close()
    threading.excepthook = before
    assert raised == []


@pytest.fixture
def call(context: "zmq.Context[zmq.Socket[bytes]]", address: str, router: HostRouter) -> Iterator[Caller]:
    with ExitStack() as stack:

        def made(name: str) -> "zmq.Socket[bytes]":
            caller = stack.enter_context(curve_client(context, KEYS.host, KEYS.core.public, name.encode()))
            caller.connect(address)
            return caller

        yield made


def say(caller: "zmq.Socket[bytes]", message: Any) -> None:
    caller.send(msgspec.msgpack.encode(message))


def heard(caller: "zmq.Socket[bytes]", milliseconds: int = WAIT_MS) -> ToHost | None:
    """The router's next message other than its heartbeat; None if there is none in time."""
    while caller.poll(milliseconds):
        frame = caller.recv()
        if frame:
            message: ToHost = msgspec.msgpack.decode(frame, type=ToHost)
            return message
    return None


def wait_for_question(caller: "zmq.Socket[bytes]") -> None:
    """Until the router sends this one a heartbeat: another has connected with its number."""
    assert caller.poll(WAIT_MS)
    assert caller.recv() == b""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_MS / 1e3
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- the router -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "junk", [[b"\xff" * 40], [b"\x00"], [b"a", b"b", b"c"], [msgspec.msgpack.encode({"type": 1})]]
)
def test_a_peer_with_the_key_and_invalid_messages_is_refused_and_disturbs_no_other(
    junk: list[bytes], call: Caller, ranks: list[RemoteRank]
) -> None:
    """For example a host of another version, whose messages have other fields."""
    host, stranger = call("host"), call("stranger")
    say(host, Hello(1, "worker-1", GROUND))
    stranger.send_multipart(junk)
    answer = heard(stranger)
    assert isinstance(answer, Refused)
    assert f"the first host runs Kaon {GROUND.version}" in answer.why
    ranks[0].send(Join())
    assert heard(host) == RankCommand(1, Join())


def test_a_host_that_goes_on_in_words_of_another_version_loses_its_ranks(
    call: Caller, ranks: list[RemoteRank]
) -> None:
    host = call("host")
    say(host, Hello(1, "worker-1", GROUND))
    host.send(b"\xff")
    wait_for(lambda: ranks[0].receive() is None)
    assert ranks[0].exit_reason() == ("is gone: its host sent a message that this version of Kaon cannot read", False)


def test_a_host_speaks_for_its_own_ranks_only(call: Caller, ranks: list[RemoteRank]) -> None:
    host = call("host")
    say(host, Hello(1, "worker-1", GROUND))
    for rank in (0, 2, 77):
        say(host, RankGone(rank, "was killed by SIGKILL", True))
        say(host, RankReport(rank, RankServes()))
    say(host, RankReport(1, RankServes()))
    assert ranks[0].receive() == RankServes()
    assert ranks[1].far_descriptor >= 0


def call_twice_as_one_host(call: Caller, ranks: list[RemoteRank]) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
    """Let a host join and another one call with the same number. Returns both; the first was asked for an answer."""
    first, second = call("first"), call("second")
    say(first, Hello(1, "worker-1", GROUND))
    ranks[0].send(Join())
    assert heard(first) == RankCommand(1, Join())
    say(second, Hello(1, "worker-1", GROUND))
    wait_for_question(first)
    assert heard(second, SILENCE_MS) is None
    return first, second


def test_a_second_host_of_a_number_is_refused_once_the_first_has_answered(
    call: Caller, ranks: list[RemoteRank]
) -> None:
    """A silent host may have lost power, and be the second one."""
    first, second = call_twice_as_one_host(call, ranks)
    first.send(b"")
    answer = heard(second)
    assert isinstance(answer, Refused)
    assert answer.why == "node_rank is 1, but another host has already joined with this number"


def test_a_second_host_of_a_number_takes_the_place_of_one_that_went_without_a_word(
    call: Caller, router: HostRouter, ranks: list[RemoteRank]
) -> None:
    """A machine that restarts before its silence is noticed; it sends its first message only once."""
    first, second = call_twice_as_one_host(call, ranks)
    first.close(linger=0)
    wait_for(lambda: ranks[0].receive() is None)
    later = RemoteRank(1, 1, "")
    router.add(later)
    later.send(Join())
    assert heard(second) == RankCommand(1, Join())


def test_a_host_too_many_is_refused(call: Caller) -> None:
    third = call("third")
    say(third, Hello(3, "worker-3", GROUND))
    answer = heard(third)
    assert isinstance(answer, Refused)
    assert answer.why == "node_rank is 3, but the other hosts are 1 to 2"


def test_a_silent_or_invalid_peer_delays_no_other(address: str, call: Caller, ranks: list[RemoteRank]) -> None:
    where = ("127.0.0.1", int(address.rpartition(":")[2]))
    with socket.create_connection(where), socket.create_connection(where) as loud, ExitStack() as many:
        for _ in range(50):
            many.enter_context(socket.create_connection(where))
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(70_000))
        host = call("host")
        say(host, Hello(1, "worker-1", GROUND))
        ranks[0].send(Join())
        assert heard(host) == RankCommand(1, Join())


def test_a_shutdown_waits_until_hosts_that_joined_and_that_wait_have_its_message(
    call: Caller, router: HostRouter, ranks: list[RemoteRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends immediately loses its unsent messages."""
    monkeypatch.setattr(host_router, "_SHUTDOWN_MESSAGE_SECONDS", 600.0)
    first, second = call("first"), call("second")
    say(first, Hello(1, "worker-1", GROUND))
    ranks[0].send(Join())
    assert heard(first) == RankCommand(1, Join())
    say(second, Hello(1, "worker-1", GROUND))
    wait_for(lambda: set(router._waiting) == {b"second"})
    parting = threading.Thread(target=router.announce_shutdown, args=("the model is damaged",))
    parting.start()
    assert heard(first) == heard(second) == ShutdownMessage("the model is damaged")
    first.close(linger=0)
    assert parting.is_alive()
    second.close(linger=0)
    parting.join(WAIT_MS / 1e3)
    assert not parting.is_alive()


def test_a_host_that_is_silent_holds_up_who_parts_for_a_while_only(
    call: Caller, router: HostRouter, ranks: list[RemoteRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_router, "_SHUTDOWN_MESSAGE_SECONDS", 0.1)
    silent = call("silent")
    say(silent, Hello(1, "worker-1", GROUND))
    ranks[0].send(Join())
    assert heard(silent) == RankCommand(1, Join())
    router.announce_shutdown("")
    assert heard(silent) == ShutdownMessage()


# -- the host ---------------------------------------------------------------------------------------------------


class Core:
    """A bare socket in place of a core."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = CurveAuthenticator(self._context)
        self._authenticator.allow(KEYS.host.public)
        self._socket = bind_curve(self._context, zmq.ROUTER, address, KEYS.core)
        self.name = b""

    def hear(self) -> bytes:
        assert self._socket.poll(WAIT_MS)
        self.name, frame = self._socket.recv_multipart()
        return frame

    def say(self, frame: bytes) -> None:
        self._socket.send_multipart([self.name, frame])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._authenticator.close()
        self._context.destroy(linger=0)


@pytest.fixture
def core(address: str) -> Iterator[Core]:
    made = Core(address)
    yield made
    made.close()


def host_at(address: str, timeout: float = WAIT_MS / 1e3, cpu_threads: int | None = None) -> HostAgent:
    parallel = ParallelConfig(rank_start_timeout=timeout)
    parallel = parallel.model_copy(update={"cluster_interface": "wg0"})
    config = Config(cpu_threads=cpu_threads, parallel_config=parallel)
    return HostAgent(config, CHECKPOINT_DIR, node=1, address=address, keys=KEYS)


def served(host: HostAgent) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def serve() -> None:
        try:
            host.serve(rejoins=False)
        except HostError as error:
            raised.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread, raised


def test_a_host_answers_whether_it_is_there_and_ends_in_a_sentence_at_words_it_cannot_read(
    address: str, core: Core
) -> None:
    thread, raised = served(host_at(address))
    hello = msgspec.msgpack.decode(core.hear(), type=Hello)
    assert hello.node == 1
    core.say(b"")
    assert core.hear() == b""
    core.say(b"\xff")
    thread.join(WAIT_MS / 1e3)
    assert "sent a message that this version of Kaon cannot read" in str(raised[0])


def test_a_host_s_ranks_have_its_own_checkpoint_and_threads(
    address: str, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[RankLaunch] = []

    def launch(self: RankProc, message: RankLaunch, descriptors: object) -> None:
        launched.append(message)
        raise HostError("seen")

    monkeypatch.setattr(RankProc, "__init__", launch)
    thread, raised = served(host_at(address, cpu_threads=3))
    core.hear()
    steps = StepAddress(address, b"", b"", b"")
    config = Config(cpu_threads=64, max_num_seqs=7).model_dump_json()
    shard = Shard(rank=1, size=2, local_rank=0, local_size=1, store="tcp://a:1", memory=None, available_bytes=1)
    answer = RankLaunch(name="kaon-worker-0.1", shard=shard, config=config, path="/elsewhere", steps=steps)
    core.say(msgspec.msgpack.encode(RankCommand(1, answer)))
    thread.join(WAIT_MS / 1e3)
    assert [str(error) for error in raised] == ["seen"]
    [got] = launched
    assert got.path == str(CHECKPOINT_DIR)
    assert got.shard == shard._replace(available_bytes=got.shard.available_bytes)
    assert got.shard.available_bytes > 1
    settings = json.loads(got.config)
    assert settings["cpu_threads"] == 3
    assert settings["parallel_config"]["cluster_interface"] == "wg0"
    assert settings["max_num_seqs"] == 7


def test_a_name_may_have_no_address_yet_and_another_one_each_time(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a pod, which does not resolve before the pod exists, and resolves to a new address after a
    restart."""
    looked: list[str] = []
    real = socket.getaddrinfo

    def look(host: Any, *rest: Any, **named: Any) -> Any:
        if host != "first.example":
            return real(host, *rest, **named)
        looked.append(host)
        if len(looked) == 1:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [*real("127.0.0.9", *rest, **named), *real("127.0.0.1", *rest, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    core = Core(address)
    thread, raised = served(host_at(endpoint("first.example", int(address.rpartition(":")[2]))))
    assert msgspec.msgpack.decode(core.hear(), type=Hello).node == 1
    assert len(looked) == 2
    core.say(b"\xff")
    thread.join(WAIT_MS / 1e3)
    assert raised
    core.close()


@pytest.mark.parametrize(
    ("name", "why"), [("127.0.0.1", " 0.3 s"), ("nowhere.invalid", " 0.3 s: nowhere.invalid has no address")]
)
def test_a_host_says_where_it_waited_in_vain(name: str, why: str, address: str) -> None:
    where = endpoint(name, int(address.rpartition(":")[2]))
    with pytest.raises(HostError, match=f"no engine core came to {where} within rank_start_timeout{why}"):
        host_at(where, timeout=0.3).serve(rejoins=True)


def test_fifty_cores_leave_nothing_behind_on_a_host(address: str) -> None:
    def serve_one() -> None:
        core = Core(address)
        thread, _ = served(host_at(address))
        core.hear()
        core.close()
        thread.join(WAIT_MS / 1e3)
        assert not thread.is_alive()

    serve_one()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        serve_one()
    # ZMQ closes its descriptors in a thread of its own, a moment later.
    wait_for(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 4)
