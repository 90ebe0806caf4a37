"""Trust and agreement between several hosts: the key, the shared settings, and the sockets."""

import os
import socket
from pathlib import Path

import pytest
import zmq

from engine.config.config import CLUSTER_KEY_ENV, Config, ParallelConfig
from engine.config.server import ServerConfig
from engine.distributed.cluster import ClusterKeys, CurvePair, HostAgreement, read_cluster_key, spread_evenly
from engine.distributed.curve import CurveAuthenticator, bind_curve, curve_client, endpoint, resolve
from engine.distributed.rank_link import RankLoaded, RankServes
from engine.distributed.remote_ranks import RemoteRank
from engine.distributed.step_transport import StepsLost, TcpSteps, TcpStepSource
from models.demo import CHECKPOINT_DIR
from tests.ports import free_ports

WAIT_SECONDS = 60.0
LONG_KEY = "correct-horse-battery-staple"


# -- the key ----------------------------------------------------------------------------------------------------


def test_equal_keys_give_equal_pairs_and_others_do_not() -> None:
    keys = ClusterKeys.of(LONG_KEY)
    assert keys == ClusterKeys.of(LONG_KEY)
    others = ClusterKeys.of(LONG_KEY + ".")
    assert len({pair.secret for pair in (*keys, *others)}) == 4
    assert zmq.curve_public(keys.core.secret) == keys.core.public


def test_the_key_is_of_the_file_or_else_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CLUSTER_KEY_ENV, LONG_KEY)
    assert read_cluster_key(None, "10.0.0.1") == LONG_KEY
    (tmp_path / "key").write_text("  of-a-file-and-long-enough\n")
    assert read_cluster_key(str(tmp_path / "key"), "10.0.0.1") == "of-a-file-and-long-enough"


@pytest.mark.parametrize("written", [LONG_KEY + "\n", LONG_KEY + "\r\n", f" {LONG_KEY}\t\n"])
def test_a_key_is_the_same_however_it_was_carried(
    written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A secret that an orchestrator reads from a file keeps the file's final newline in the environment."""
    monkeypatch.setenv(CLUSTER_KEY_ENV, written)
    (tmp_path / "key").write_bytes(written.encode())
    assert read_cluster_key(None, "10.0.0.1") == read_cluster_key(str(tmp_path / "key"), "10.0.0.1") == LONG_KEY


def test_a_key_that_other_users_can_read_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "key"
    file.write_text(LONG_KEY)
    for mode, warnings in ((0o600, 0), (0o640, 0), (0o644, 1)):
        file.chmod(mode)
        caplog.clear()
        assert read_cluster_key(str(file), "10.0.0.1") == LONG_KEY
        assert caplog.text.count("which every user of this machine can read") == warnings
        assert LONG_KEY not in caplog.text


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_without_a_key_only_this_machine_is_served(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_KEY_ENV, raising=False)
    assert read_cluster_key(None, address) == ""
    for reachable in ("10.0.0.1", "0.0.0.0", "kaon-0.kaon"):
        with pytest.raises(ValueError, match=f"master_addr is {reachable}, which other machines can reach"):
            read_cluster_key(None, reachable)


def test_a_short_or_unreadable_key_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CLUSTER_KEY_ENV, "hunter2")
    with pytest.raises(ValueError, match=r"KAON_CLUSTER_KEY holds 7 characters; .* at least 16") as raised:
        read_cluster_key(None, "127.0.0.1")
    assert "hunter2" not in str(raised.value)
    with pytest.raises(ValueError, match=r"cluster_key_file is .*none, which cannot be read: No such file"):
        read_cluster_key(str(tmp_path / "none"), "127.0.0.1")


# -- settings ---------------------------------------------------------------------------------------------------


def agreement(**fields: object) -> HostAgreement:
    return HostAgreement.of(Config.model_validate(fields), CHECKPOINT_DIR)


def test_hosts_may_differ_in_what_is_their_own() -> None:
    first = agreement(num_kvcache_blocks=64, server_config=ServerConfig(port=1))
    parallel = ParallelConfig(nnodes=2, node_rank=1, tensor_parallel_size=2)
    first_parallel = ParallelConfig(nnodes=2, tensor_parallel_size=2)
    assert first.difference(agreement(model="elsewhere", cpu_threads=3)) is None
    assert agreement(parallel_config=first_parallel).difference(agreement(parallel_config=parallel)) is None


def test_the_first_difference_is_named_with_both_values() -> None:
    first = agreement(dtype="float32")
    assert "has dtype bfloat16, and the first host float32" in str(first.difference(agreement(dtype="bfloat16")))
    other = HostAgreement("0.0.1", first.settings, first.checkpoint)
    assert "runs Kaon 0.0.1, and the first host" in str(first.difference(other))
    other = HostAgreement(first.version, first.settings, "another")
    assert "another model" in str(first.difference(other))
    newer = HostAgreement(first.version, {**first.settings, "new": "1"}, first.checkpoint)
    assert "has new 1, and the first host missing" in str(first.difference(newer))


def test_replicas_are_dealt_out_as_neighbours_with_as_many_on_each_host() -> None:
    assert spread_evenly(4, 2) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert spread_evenly(2, 2) == [(0, 0, 1), (1, 0, 1)]
    assert spread_evenly(3, 1) == [(0, 0, 3), (0, 1, 3), (0, 2, 3)]
    ParallelConfig(nnodes=2, data_parallel_size=4, tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"node_rank": 1}, "node_rank is 1, but there are 1 hosts"),
        ({"nnodes": 2}, "nnodes is 2, which does not divide the 1 ranks"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "leave nnodes out"),
        ({"nnodes": 2, "data_parallel_size": 3}, "nnodes is 2, which does not divide the 3 replicas"),
        ({"nnodes": 4, "data_parallel_size": 2, "tensor_parallel_size": 4}, "does not divide the 2 replicas"),
        (
            {"nnodes": 2, "data_parallel_size": 8, "master_port": 65527, "enable_expert_parallel": True},
            "and two more to exchange tokens .*; set it to at most 65526",
        ),
        (
            {"distributed_executor_backend": "ray", "data_parallel_size": 2, "enable_expert_parallel": True},
            "distributed_executor_backend is ray, but with enable_expert_parallel the 2 replicas",
        ),
        ({"nnodes": 2, "data_parallel_size": 8, "master_port": 65530}, "set it to at most 65528"),
        ({"master_port": 65534}, "master_port"),
        ({"master_addr": "0.0.0.0"}, r"master_addr is 0\.0\.0\.0; name the one address"),
        ({"master_addr": "kaon..example"}, r"master_addr is kaon\.\.example, which is not a host name"),
        ({"master_addr": "::"}, "master_addr is ::; name the one address"),
    ],
)
def test_hosts_that_cannot_be_are_refused_in_a_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ParallelConfig.model_validate(fields)


# -- sockets ----------------------------------------------------------------------------------------------------


def free_address() -> str:
    return endpoint("127.0.0.1", free_ports())


def test_only_clients_whose_key_the_authenticator_has_are_admitted(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    server, friend, stranger = CurvePair.new(), CurvePair.new(), CurvePair.new()
    authenticator = CurveAuthenticator(context)
    authenticator.allow(friend.public)
    address = free_address()
    with bind_curve(context, zmq.ROUTER, address, server) as listener:
        for pair, server_public, heard in (
            (stranger, server.public, False),
            (friend, CurvePair.new().public, False),
            (friend, server.public, True),
        ):
            with curve_client(context, pair, server_public, b"x") as caller:
                caller.connect(address)
                caller.send(b"hello")
                assert bool(listener.poll(1e3 * WAIT_SECONDS if heard else 300)) == heard
        assert listener.recv_multipart() == [b"x", b"hello"]
        with context.socket(zmq.DEALER) as plain:
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(address)
            plain.send(b"hello")
            assert not listener.poll(300)
    authenticator.close()


def test_an_address_that_cannot_be_had_is_reported_in_a_sentence(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    address = free_address()
    with (
        bind_curve(context, zmq.ROUTER, address, CurvePair.new()),
        pytest.raises(OSError, match="is taken; stop what"),
    ):
        bind_curve(context, zmq.ROUTER, address, CurvePair.new())
    with pytest.raises(ValueError, match=r"master_addr is nowhere\.invalid, which has no address"):
        resolve("nowhere.invalid")


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Names resolve to these addresses until the test ends."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_of_several_addresses_the_one_of_this_machine_is_listened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "203.0.113.9", "127.0.0.3")
    assert resolve("localhost") == "127.0.0.3"


def test_a_name_may_have_no_address_yet(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    looked: list[str] = []

    def look(host: str, *_: object, **__: object) -> list[object]:
        looked.append(host)
        if len(looked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.3", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr("engine.distributed.curve.is_loopback", lambda _: True)
    assert resolve("pod-0.example", patience=WAIT_SECONDS) == "127.0.0.3"
    assert caplog.text.count("master_addr is pod-0.example, which has no address yet") == 1


def test_a_name_that_leads_nowhere_but_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems resolve their own name to 127.0.1.1."""
    named(monkeypatch, "127.0.1.1")
    with pytest.raises(ValueError, match=r"master_addr is box, which on this machine is 127\.0\.1\.1, where no other"):
        resolve("box")
    named(monkeypatch, "127.0.1.1", "203.0.113.9")
    assert resolve("box") == "203.0.113.9"


def test_a_listening_socket_accepts_no_message_without_bounds(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    server, friend = CurvePair.new(), CurvePair.new()
    authenticator = CurveAuthenticator(context)
    authenticator.allow(friend.public)
    address = free_address()
    with (
        bind_curve(context, zmq.ROUTER, address, server, longest=1000) as listener,
        curve_client(context, friend, server.public, b"x") as caller,
    ):
        caller.connect(address)
        ends = caller.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        caller.send(bytes(1001))
        assert ends.poll(1e3 * WAIT_SECONDS)
        assert not listener.poll(300)
        caller.send(b"short")
        assert listener.poll(1e3 * WAIT_SECONDS)
        caller.disable_monitor()
        ends.close(linger=0)
        assert listener.recv_multipart() == [b"x", b"short"]
    authenticator.close()


def steps_over_tcp(context: "zmq.Context[zmq.Socket[bytes]]", size: int) -> tuple[TcpSteps, CurveAuthenticator]:
    """Rank 0's side of `size` ranks, whose address it accepts."""
    authenticator = CurveAuthenticator(context)
    host, _, port = free_address().removeprefix("tcp://").rpartition(":")
    steps = TcpSteps(context, host, int(port), size)
    authenticator.allow(steps.address.public)
    return steps, authenticator


def test_a_failure_of_any_length_arrives_by_its_ends(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    steps, authenticator = steps_over_tcp(context, 2)
    source = TcpStepSource(steps.address, 1)
    assert steps.missing_rank(WAIT_SECONDS) is None
    source.report("it broke\n" + "x" * (3 << 20) + "\nthe last line")
    failure = steps.take_within(1, WAIT_SECONDS)
    assert failure is not None
    assert failure.startswith("it broke\n")
    assert failure.endswith("\nthe last line")
    assert len(failure) < 1 << 20
    steps.close()
    authenticator.close()


def test_steps_reach_every_rank_and_their_reports_come_back(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    steps, authenticator = steps_over_tcp(context, 3)
    first = TcpStepSource(steps.address, 1)
    while (missing := steps.missing_rank(0.1)) == 1:
        pass
    assert missing == 2
    with pytest.raises(StepsLost, match="the connection to tensor-parallel rank 2 is lost"):
        steps.write(b"too early")
    second = TcpStepSource(steps.address, 2)
    assert steps.missing_rank(WAIT_SECONDS) is None
    long = os.urandom(1 << 20)
    steps.write(long)
    assert first.read() == b"too early"
    assert first.read() == second.read() == long
    second.report("it broke\nTraceback")
    first.report()
    assert steps.take(1) == ""
    assert steps.take_within(2, WAIT_SECONDS) == "it broke\nTraceback"
    assert steps.take_within(1, 0.05) is None
    steps.close()
    authenticator.close()


def test_a_rank_elsewhere_is_named_by_its_host_and_keeps_no_processor_of_this_one() -> None:
    link = RemoteRank(3, 1, "tcp://10.0.0.1:29500")
    assert link.title == "tensor-parallel rank 3 on node 1"
    assert link.missing_step == "join at tcp://10.0.0.1:29500"
    link.on_joined("worker-7")
    assert link.title == "tensor-parallel rank 3 on node 1 (worker-7)"
    assert link.missing_step is None
    link.deliver(RankLoaded([4, 5], 10))
    assert link.receive() == RankLoaded([], 10)
    link.on_lost("was killed by SIGKILL", True)
    assert link.receive() is None
    assert link.exit_reason() == ("was killed by SIGKILL", True)
    link.close(0.0)


def test_a_rank_elsewhere_may_speak_and_be_silent_after_the_manager_has_closed() -> None:
    """The heartbeat thread continues for a moment, and would end the engine if it raised."""
    link = RemoteRank(1, 1, "tcp://10.0.0.1:29500")
    link.deliver(RankServes())
    link.close(0.0)
    assert link.next_message() is None
    link.deliver(RankServes())
    link.on_lost("is gone", True)
