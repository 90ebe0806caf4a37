"""Cores that compute in lockstep: their connections, wake-ups, and notifications of another's end."""

import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace

import pytest

from engine.distributed import lockstep as replica_links
from engine.distributed.lockstep import (
    BarrierCounters,
    LockstepMember,
    LockstepRendezvous,
    RendezvousError,
    ReplicaLinks,
)
from tests.ports import free_ports

WAIT_SECONDS = 60.0


class Core:
    """One end, and its received messages."""

    def __init__(self, lockstep_member: LockstepMember) -> None:
        self.rings: SimpleQueue[int] = SimpleQueue()
        self.gone: SimpleQueue[int] = SimpleQueue()
        self.links = ReplicaLinks(lockstep_member, self.rings.put, self.gone.put)

    def end(self) -> None:
        """As the kernel does for a process that ends."""
        for peer in self.links._peers.values():
            peer.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def rendezvous() -> Iterator[LockstepRendezvous]:
    made = LockstepRendezvous(3)
    yield made
    made.close()


def met(rendezvous: list[LockstepMember]) -> list[Core]:
    cores = [Core(lockstep_member) for lockstep_member in rendezvous]
    with ThreadPoolExecutor(len(cores)) as threads:
        list(threads.map(lambda core: core.links.connect(WAIT_SECONDS), cores))
    return cores


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def assert_each_wakes_all_others(cores: list[Core]) -> None:
    for number, core in enumerate(cores):
        core.links.ring(number)
        for other in cores:
            if other is not core:
                assert other.rings.get(timeout=WAIT_SECONDS) == number
    assert all(core.rings.empty() for core in cores)


def test_each_core_meets_all_others_and_wakes_them(rendezvous: LockstepRendezvous) -> None:
    cores = met([rendezvous.new_member(replica) for replica in range(3)])
    assert_each_wakes_all_others(cores)


def test_the_end_of_one_is_reported_to_all_others(rendezvous: LockstepRendezvous) -> None:
    cores = met([rendezvous.new_member(replica) for replica in range(3)])
    cores[1].end()
    for other in (cores[0], cores[2]):
        assert other.gone.get(timeout=WAIT_SECONDS) == 1
        assert other.links.wait_gone(WAIT_SECONDS) == 1
    cores[0].links.ring(5)  # A message to a core that has ended is discarded.
    assert cores[2].rings.get(timeout=WAIT_SECONDS) == 5


def test_ends_that_are_expected_are_no_news(rendezvous: LockstepRendezvous) -> None:
    cores = met([rendezvous.new_member(replica) for replica in range(3)])
    for core in cores:
        core.links.announce_shutdown()
    cores[1].end()
    assert cores[0].links.wait_gone(0.5) is None
    with pytest.raises(Empty):
        cores[0].gone.get_nowait()


def test_one_that_does_not_come_is_named(rendezvous: LockstepRendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [Core(rendezvous.new_member(replica)) for replica in range(2)]

    def now() -> float:
        """No time passes before the two that have started are connected."""
        return 1.0 if all(core.links._peers for core in cores) else 0.0

    monkeypatch.setattr(replica_links, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    with ThreadPoolExecutor(2) as threads:
        tries = [threads.submit(core.links.connect, 0.3) for core in cores]
        errors = [each.exception(WAIT_SECONDS) for each in tries]
    for replica, error in enumerate(errors):
        assert str(error) == f"replica 2 did not meet replica {replica} within rank_start_timeout 0.3 s"
        assert isinstance(error, RendezvousError)
        assert not error.is_over


@pytest.mark.parametrize("said", [None, b"", b"\x01", struct.pack("=q", 0), struct.pack("=q", 7)])
def test_a_connection_that_does_not_identify_itself_delays_no_other(
    rendezvous: LockstepRendezvous, said: bytes | None
) -> None:
    """It sends nothing, ends, or sends a message that no replica would send."""
    first = Core(rendezvous.new_member(0))
    with ThreadPoolExecutor(3) as threads, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        meets = [threads.submit(first.links.connect, WAIT_SECONDS)]
        wait_until((Path(first.links.member.directory) / "0").exists)
        stranger.connect(f"{first.links.member.directory}/0")
        if said is not None:
            stranger.send(said) if said else stranger.shutdown(socket.SHUT_RDWR)
        others = [Core(rendezvous.new_member(replica)) for replica in (1, 2)]
        meets += [threads.submit(core.links.connect, WAIT_SECONDS) for core in others]
        for each in meets:
            each.result(WAIT_SECONDS)
    others[1].links.ring(3)
    assert first.rings.get(timeout=WAIT_SECONDS) == 3


def test_a_replica_is_held_up_while_another_has_come_to_fewer_meetings() -> None:
    """A replica is killed if another waits for one of its ranks, unless it waits itself or all wait at the same
    barrier."""
    ranks = LockstepRendezvous(3, 2)
    rendezvous = [ranks.new_member(replica) for replica in range(3)]
    columns = [BarrierCounters(descriptor, 3) for descriptor in rendezvous[0].memory]
    assert len(columns) == 2
    assert [ranks.waits_for_peers(replica) for replica in range(3)] == [False] * 3
    for replica in (0, 2):
        columns[1].count(replica)
    assert [ranks.waits_for_peers(replica) for replica in range(3)] == [True, False, True]
    columns[0].count(1)
    columns[0].count(2)
    assert [ranks.waits_for_peers(replica) for replica in range(3)] == [False, False, True]
    columns[0].count(0)
    columns[1].count(1)
    assert [ranks.waits_for_peers(replica) for replica in range(3)] == [False] * 3
    ranks.new_member(1)  # Its core has ended, and those of the others will end.
    assert [ranks.waits_for_peers(replica) for replica in range(3)] == [True, False, True]
    ranks.close()


def test_who_waits_for_one_that_has_ended_learns_that_it_will_not_come(rendezvous: LockstepRendezvous) -> None:
    waiting = Core(rendezvous.new_member(0))
    rendezvous.new_member(1)
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(waiting.links.connect, WAIT_SECONDS)
        rendezvous.new_member(1)  # Another one replaces it.
        error = future.exception(WAIT_SECONDS)
    assert isinstance(error, RendezvousError)
    assert error.is_over


def test_each_seat_is_given_once_and_a_replacement_begins_a_new_round(rendezvous: LockstepRendezvous) -> None:
    first = [rendezvous.new_member(replica) for replica in range(3)]
    assert len({lockstep_member.directory for lockstep_member in first}) == 1
    again = rendezvous.new_member(1)
    assert again.directory != first[1].directory
    assert [rendezvous.new_member(0).directory, rendezvous.new_member(2).directory] == [again.directory] * 2
    assert rendezvous.new_member(2).directory != again.directory


def test_directories_are_private_and_are_gone_in_the_end(rendezvous: LockstepRendezvous) -> None:
    directories = [Path(rendezvous.new_member(0).directory) for _ in range(2)]
    assert not directories[0].exists()
    assert os.stat(directories[1]).st_mode & 0o777 == 0o700
    rendezvous.close()
    assert not directories[1].exists()


def test_who_has_met_leaves_no_names_behind(rendezvous: LockstepRendezvous) -> None:
    cores = met([rendezvous.new_member(replica) for replica in range(3)])
    assert os.listdir(cores[0].links.member.directory) == []
    cores[0].links.remove_directory()
    assert not Path(cores[0].links.member.directory).exists()


# -- several hosts ----------------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> LockstepRendezvous:
    """The rendezvous of replicas that share no directory."""
    return LockstepRendezvous(3, hub=("127.0.0.1", free_ports("127.0.0.1", 1)))


def address_of(rendezvous: LockstepRendezvous) -> tuple[str, int]:
    assert rendezvous._hub is not None
    return rendezvous._hub


def test_the_hub_forwards_what_wakes_the_others(hub: LockstepRendezvous) -> None:
    cores = met([hub.new_member(replica) for replica in range(3)])
    assert_each_wakes_all_others(cores)


@pytest.mark.parametrize(("ended", "informed"), [(0, (1, 2)), (1, (0,))])
def test_an_end_is_reported_by_way_of_the_hub(hub: LockstepRendezvous, ended: int, informed: tuple[int, ...]) -> None:
    """The hub itself ends with any other core, which ends the rest."""
    cores = met([hub.new_member(replica) for replica in range(3)])
    cores[ended].end()
    for replica in informed:
        assert cores[replica].gone.get(timeout=WAIT_SECONDS) == ended
        assert cores[replica].links.wait_gone(WAIT_SECONDS) == ended


def test_a_host_that_is_lost_is_detected_also_while_a_message_to_it_is_on_its_way(hub: LockstepRendezvous) -> None:
    """While data are not acknowledged the kernel sends no keep-alive probes, and gives up after 15 minutes."""
    for core in met([hub.new_member(replica) for replica in range(3)]):
        for peer in core.links._peers.values():
            idle, interval, count = (
                peer.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            unacknowledged = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert 0 < unacknowledged <= 1000 * (idle + interval * count) <= 11_000


GREETING = struct.Struct("=qq32s")


@pytest.mark.parametrize("said", [None, b"", b"\x01", GREETING.pack(1, 1, bytes(32)), GREETING.pack(1, 9, bytes(32))])
def test_a_connection_without_the_key_is_no_core_and_delays_none(hub: LockstepRendezvous, said: bytes | None) -> None:
    """It sends nothing, ends, or claims to be a core of this round or a later one."""
    cores = [Core(hub.new_member(replica)) for replica in range(3)]
    with ThreadPoolExecutor(3) as threads, socket.socket() as stranger:
        meets = [threads.submit(cores[0].links.connect, WAIT_SECONDS)]
        wait_until(lambda: stranger.connect_ex(address_of(hub)) in {0, errno.EISCONN})
        assert len(stranger.recv(16, socket.MSG_WAITALL)) == 16
        if said is not None:
            stranger.send(said) if said else stranger.shutdown(socket.SHUT_RDWR)
        meets += [threads.submit(core.links.connect, WAIT_SECONDS) for core in cores[1:]]
        for each in meets:
            each.result(WAIT_SECONDS)
        if said:
            assert stranger.recv(1) == b"", "it is not answered"
    cores[1].links.ring(3)
    assert [core.rings.get(timeout=WAIT_SECONDS) for core in (cores[0], cores[2])] == [3, 3]


def test_many_silent_connections_delay_no_core(hub: LockstepRendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_links, "_MOST_CALLERS", 4)
    cores = [Core(hub.new_member(replica)) for replica in range(3)]
    with ThreadPoolExecutor(3) as threads, ExitStack() as strangers:
        meets = [threads.submit(cores[0].links.connect, WAIT_SECONDS)]
        wait_until(lambda: not _refuses(address_of(hub)))
        for _ in range(12):
            strangers.enter_context(socket.create_connection(address_of(hub)))
        meets += [threads.submit(core.links.connect, WAIT_SECONDS) for core in cores[1:]]
        for each in meets:
            each.result(WAIT_SECONDS)


def _refuses(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address) != 0


@pytest.mark.parametrize("waits", [0, 1])
def test_a_core_of_an_earlier_round_learns_from_one_of_a_later_that_it_is_over(
    hub: LockstepRendezvous, waits: int
) -> None:
    """Either may be the hub."""
    waiting = Core(hub.new_member(waits))
    hub.new_member(1 - waits)
    later = Core(hub.new_member(1 - waits))  # It replaces one that has ended.
    with ThreadPoolExecutor(2) as threads:
        future = threads.submit(waiting.links.connect, WAIT_SECONDS)
        if waits == 0:
            wait_until(lambda: not _refuses(address_of(hub)))
        other = threads.submit(later.links.connect, WAIT_SECONDS)
        error = future.exception(WAIT_SECONDS)
        assert isinstance(error, RendezvousError)
        assert error.is_over
        # The core that replaces it meets the later one, and a third.
        others = [Core(hub.new_member(replica)) for replica in (waits, 2)]
        list(threads.map(lambda core: core.links.connect(WAIT_SECONDS), others))
        other.result(WAIT_SECONDS)


def test_a_port_of_the_hub_that_is_taken_is_named(hub: LockstepRendezvous) -> None:
    host, port = address_of(hub)
    with (
        socket.create_server((host, port)),
        pytest.raises(RendezvousError, match=f"at port {port} of {host}, .* in use") as raised,
    ):
        Core(hub.new_member(0)).links.connect(WAIT_SECONDS)
    assert not raised.value.is_over
