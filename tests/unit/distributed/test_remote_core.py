"""An engine core on another host, as the front end sees it: its messages, and its end."""

import math
import os
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from engine.client.supervisor import CoreLink
from engine.config.config import Config, ParallelConfig
from engine.distributed import remote_core as core_call
from engine.distributed.cluster import Cluster, ClusterKeys, CurvePair, HostAgreement, spread_evenly
from engine.distributed.core_hosts import CoreHosts
from engine.distributed.core_process import LOST_FRONT_END, RemoteTransport, connection_names
from engine.distributed.curve import CurveAuthenticator, bind_curve, curve_client, endpoint
from engine.distributed.host_messages import (
    CoreAddress,
    CoreEnded,
    CoreServes,
    CoreStarted,
    DumpStacks,
    Hello,
    KillCore,
    LaunchCore,
    ShutdownMessage,
    StopCore,
    ToHost,
)
from engine.distributed.host_resources import HostShare
from engine.distributed.remote_core import FrontEndConnection, RemoteCore, ReplicaEndpoint
from engine.messages import Failed
from models.demo import CHECKPOINT_DIR
from tests.ports import free_ports

WAIT_SECONDS = 60
ADDRESS = CoreAddress("tcp://10.0.0.1:29501", "a-name", b"", b"", b"")
LAUNCH = LaunchCore(core=7, share=HostShare(1), num_kvcache_blocks=64, is_first=True, front_end=ADDRESS)


@pytest.fixture
def core(context: "zmq.Context[zmq.Socket[bytes]]") -> RemoteCore:
    place = ReplicaEndpoint(1, "tcp://10.0.0.1:29500", ADDRESS.address, context.socket(zmq.ROUTER))
    return RemoteCore(LAUNCH, place, "engine core 1", time.monotonic() + 60.0)


# -- its life ---------------------------------------------------------------------------------------------------


def test_messages_to_it_wait_for_its_host_in_order(core: RemoteCore) -> None:
    core.start()
    core.connected()
    core.dump_stacks()
    core.kill()
    assert core.waits_for_host
    core.on_joined("worker-7")
    assert not core.waits_for_host
    assert core.join_by == math.inf
    assert [core.next_message() for _ in range(4)] == [LAUNCH, CoreServes(7), DumpStacks(7), KillCore(7)]
    core.stop(0.0)
    assert core.next_message() == StopCore(7)
    assert core.far_descriptor == -1


def test_its_process_and_its_end_are_known_by_what_its_host_says(core: RemoteCore) -> None:
    core.start()
    core.on_joined("worker-7")
    core.on_message(CoreStarted(7, 4711))
    assert core.pid == 4711
    assert not core.is_gone
    core.on_message(CoreEnded(7, -9, [3, 5]))
    assert core.is_gone
    assert (core.wait(), core.why_gone(), core.running_step()) == (-9, None, [3, 5])
    # If no host is connected to receive the message, that is no error.
    core.kill()


def test_who_kills_it_a_moment_after_it_was_stopped_hears_of_no_error(core: RemoteCore) -> None:
    """As the stall watchdog does, once the stacks have been written."""
    core.on_joined("worker-7")
    core.on_message(CoreEnded(7, 0, []))
    core.stop(0.0)
    core.dump_stacks()
    core.kill()


def test_who_knows_why_it_ended_does_not_wait_for_its_last_words(
    core: RemoteCore, context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other answers would wait meanwhile."""
    link = CoreLink(core, context, "engine core 1")
    core.on_joined("worker-7")
    core.on_message(CoreEnded(7, LOST_FRONT_END, []))
    monkeypatch.setattr(RemoteTransport, "poll", lambda *_: pytest.fail("waits"))
    assert link.is_gone
    assert not link.awaits_message(link.wait_end())
    link.close()


def test_the_end_of_a_connection_is_no_request_s_fault(core: RemoteCore) -> None:
    core.on_joined("worker-7")
    core.on_lost("is gone: the connection to its host has ended", True)
    assert core.is_gone
    sentence = "engine core 1 on node 1 (worker-7) is gone: the connection to its host has ended"
    assert core.why_gone() == Failed(sentence, killed=True)
    assert core.running_step() is None


def test_a_core_that_does_not_reach_its_port_says_which(core: RemoteCore) -> None:
    core.on_joined("worker-7")
    core.on_message(CoreEnded(7, LOST_FRONT_END, [3]))
    sentence = "engine core 1 on node 1 (worker-7) does not reach 10.0.0.1:29501; open that port to the hosts"
    assert core.why_gone() == Failed(sentence, usage=True)
    assert core.running_step() is None


def test_a_first_core_fails_with_its_host_and_a_later_one_waits_for_the_right_host(
    core: RemoteCore, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    core.on_mismatch("worker-7", "has dtype float16, and the first host float32")
    why = core.why_gone()
    assert why is not None
    assert why.error == "engine core 1 on node 1 (worker-7): its host has dtype float16, and the first host float32"
    assert why.usage
    place = ReplicaEndpoint(1, "", "", context.socket(zmq.ROUTER))
    later = RemoteCore(LAUNCH, place, "engine core 1", math.inf)
    later.on_mismatch("worker-7", "has dtype float16, and the first host float32")
    assert not later.is_gone
    assert later.waits_for_host


# -- the way to it ----------------------------------------------------------------------------------------------


@pytest.fixture
def called(context: "zmq.Context[zmq.Socket[bytes]]") -> Iterator[tuple["zmq.Socket[bytes]", CoreAddress]]:
    """A front end's socket, and the address to which a core connects."""
    address = endpoint("127.0.0.1", free_ports())
    own, theirs = CurvePair.new(), CurvePair.new()
    authenticator = CurveAuthenticator(context)
    authenticator.allow(theirs.public)
    listener = bind_curve(context, zmq.ROUTER, address, own)
    yield listener, CoreAddress(address, "second", own.public, *theirs)
    listener.close(linger=0)
    authenticator.close()


def receive(wire: RemoteTransport) -> bytes:
    while True:
        frame = wire.receive()
        if frame is not None:
            return frame
        assert wire.poll(WAIT_SECONDS * 1000)


def test_messages_of_any_length_go_both_ways_and_what_an_earlier_core_left_is_dropped(
    called: tuple["zmq.Socket[bytes]", CoreAddress],
) -> None:
    listener, to = called
    there: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    wire = RemoteTransport(listener, to.name)
    with curve_client(
        there, CurvePair(to.public, to.secret), to.front_end_public, connection_names("first")[1].encode()
    ) as old:
        old.connect(to.address)
        old.send(b"of another core")
        assert listener.poll(WAIT_SECONDS * 1000)
        assert wire.receive() is None
        assert not wire.has_called
        call = FrontEndConnection(there, to, WAIT_SECONDS)
        long = os.urandom(5 << 20)
        call.output.send(b"before the other connection was used")
        assert not wire.poll(300) or wire.receive() is None
        call.input.send(b"")
        assert receive(wire) == b"before the other connection was used"
        old.send(b"of another core")
        call.output.send(long)
        assert receive(wire) == long
        wire.send(long)
        assert call.input.recv() == long
    call.close()
    there.destroy(linger=0)


def test_a_core_hears_that_its_front_end_is_gone_and_that_it_was_never_there(
    called: tuple["zmq.Socket[bytes]", CoreAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, to = called
    there: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    call = FrontEndConnection(there, to, WAIT_SECONDS)
    lost, said = threading.Event(), []
    call.watch(lambda sentence: (said.append(sentence), lost.set()))
    listener.close(linger=0)
    assert lost.wait(WAIT_SECONDS)
    assert said == [f"the connection to the front end at {to.address} has ended"]
    for connection in (call.input, call.output):
        connection.close(linger=0)
    stranger = CurvePair.new()
    monkeypatch.setattr(core_call, "_TRY_SECONDS", 0.2)
    with pytest.raises(ConnectionError, match="was not reached within 0 s"):
        FrontEndConnection(there, CoreAddress(to.address, to.name, to.front_end_public, *stranger), 0.0)
    there.destroy(linger=0)


# -- its hosts --------------------------------------------------------------------------------------------------


def reported(host: "zmq.Socket[bytes]") -> ToHost:
    """The next message to a host; an empty message is only a heartbeat."""
    while not (frame := host.recv()):
        pass
    message: ToHost = msgspec.msgpack.decode(frame, type=ToHost)
    return message


def parted(hosts: CoreHosts, why: str, host: "zmq.Socket[bytes]") -> ToHost:
    """The shutdown message to a host, which then closes its connection, as hosts do."""
    parting = threading.Thread(target=hosts.announce_shutdown, args=(why,))
    parting.start()
    assert host.poll(WAIT_SECONDS * 1000)
    heard = reported(host)
    host.close(linger=0)
    parting.join()
    return heard


def test_a_host_that_joins_before_the_checkpoint_is_found_waits_for_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(parallel_config=ParallelConfig(nnodes=2, data_parallel_size=2, master_port=free_ports(count=4)))
    keys, agreement, found = ClusterKeys.of("k" * 16), HostAgreement.of(config, CHECKPOINT_DIR), threading.Event()

    def of_in_time(*_: object) -> HostAgreement:
        assert found.wait(WAIT_SECONDS)
        return agreement

    monkeypatch.setattr(HostAgreement, "of", of_in_time)
    hosts = CoreHosts(config, Cluster(spread_evenly(2, 2), "127.0.0.1", keys))
    there: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with curve_client(there, keys.host, keys.core.public, b"gone") as gone:
        gone.connect(hosts.joining)
        gone.send(msgspec.msgpack.encode(Hello(1, "worker-6", agreement)))
        while set(hosts._router._waiting) != {b"gone"}:
            time.sleep(0.01)
    with curve_client(there, keys.host, keys.core.public, b"host") as host:
        host.connect(hosts.joining)
        host.send(msgspec.msgpack.encode(Hello(1, "worker-7", agreement)))
        core = hosts.core(1, "engine core 1", None)
        core.start()
        while set(hosts._router._waiting) != {b"gone", b"host"}:
            time.sleep(0.01)
        assert not host.poll(300)
        found.set()
        launch = reported(host)
        assert isinstance(launch, LaunchCore)
        assert (launch.share, launch.is_first) == (HostShare(replica=1, local_index=0, num_local=1), True)
        assert not core.waits_for_host
        later = hosts.core(1, "engine core 1", 64)
        assert core.join_by == later.join_by == math.inf
        host.send(msgspec.msgpack.encode(CoreStarted(launch.core, 4711)))
        host.send(msgspec.msgpack.encode(CoreEnded(launch.core, 1, [], "it cannot be started: no room")))
        assert core.lifeline.recv(1) == b""
        assert core.why_gone() == Failed(
            "engine core 1 on node 1 (worker-7): it cannot be started: no room", usage=True
        )
        assert parted(hosts, "", host) == ShutdownMessage()
        hosts.close()
        hosts.close()
    there.destroy(linger=0)


def test_no_host_is_late_before_the_first_has_its_checkpoint_which_may_take_long_to_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parallel = ParallelConfig(nnodes=2, data_parallel_size=2, master_port=free_ports(count=4), rank_start_timeout=0.1)
    config = Config(parallel_config=parallel)
    agreement, found = HostAgreement.of(config, CHECKPOINT_DIR), threading.Event()

    def of_in_time(*_: object) -> HostAgreement:
        assert found.wait(WAIT_SECONDS)
        return agreement

    monkeypatch.setattr(HostAgreement, "of", of_in_time)
    hosts = CoreHosts(config, Cluster(spread_evenly(2, 2), "127.0.0.1", ClusterKeys.of("k" * 16)))
    core = hosts.core(1, "engine core 1", None)
    time.sleep(0.4)
    was_gone = core.is_gone
    found.set()
    assert core.lifeline.recv(1) == b""
    hosts.close()
    assert not was_gone
    sentence = f"engine core 1 on node 1 did not join at {hosts.joining} within rank_start_timeout 0.1 s"
    assert core.why_gone() == Failed(sentence, usage=True)


def test_a_host_that_waits_for_the_checkpoint_hears_that_there_will_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(parallel_config=ParallelConfig(nnodes=2, data_parallel_size=2, master_port=free_ports(count=4)))
    keys, agreement = ClusterKeys.of("k" * 16), HostAgreement.of(config, CHECKPOINT_DIR)

    def of_none(*_: object) -> HostAgreement:
        raise ValueError("no such checkpoint")

    monkeypatch.setattr(HostAgreement, "of", of_none)
    hosts = CoreHosts(config, Cluster(spread_evenly(2, 2), "127.0.0.1", keys))
    there: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with curve_client(there, keys.host, keys.core.public, b"host") as host:
        host.connect(hosts.joining)
        host.send(msgspec.msgpack.encode(Hello(1, "worker-7", agreement)))
        while not set(hosts._router._waiting):
            time.sleep(0.01)
        assert parted(hosts, "no such checkpoint", host) == ShutdownMessage("no such checkpoint")
        hosts.close()
    there.destroy(linger=0)


def test_only_the_last_core_of_a_replica_is_let_in() -> None:
    config = Config(parallel_config=ParallelConfig(nnodes=2, data_parallel_size=4, master_port=free_ports(count=4)))
    hosts = CoreHosts(config, Cluster(spread_evenly(4, 2), "127.0.0.1", ClusterKeys.of("k" * 16)))
    assert [hosts.runs(replica) for replica in range(4)] == [False, False, True, True]
    first, other, second = (hosts.core(replica, "an engine core", None)._launch.front_end for replica in (2, 3, 2))
    let_in = [hosts._authenticator.callback("", each.public) for each in (first, other, second)]
    hosts.close()
    assert let_in == [False, True, True]
    assert [each.address.rpartition(":")[2] for each in (first, other)] == [
        str(config.parallel_config.master_port + replica) for replica in (2, 3)
    ]
