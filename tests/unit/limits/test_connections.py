"""Which connections are closed if there are too many, or if their clients are too slow.

The test moves the clock; sockets only record calls.
"""

import errno
import sys
from collections.abc import Callable
from typing import Any

import pytest

from engine.config.server import ServerConfig
from server.errors import ApiError, Overloaded
from server.http import uvicorn_settings
from server.limits.accounts import RESOURCES, Accounts
from server.limits.admission import KeyShares
from server.limits.connections import (
    Connection,
    ConnectionLimits,
    Connections,
    SlowRequest,
    TooManyConnections,
)
from server.limits.owners import Owner
from server.metrics import Metrics

LIMITS = ConnectionLimits(connections=8, per_address=4, body_bytes=1000)
A, B, C = "192.0.2.1", "192.0.2.2", "2001:db8::1"


class Peer:
    """A client's connection, as the table sees it: it records its events."""

    def __init__(self) -> None:
        self.is_aborted = False
        self.refusals: list[ApiError] = []
        self.unsent = 0
        self.tcp_state = 1
        self.has_socket = True
        self.taken = 0
        self.arrived = b""
        self.on_ask: Callable[[], object] = lambda: None
        self.connection: Connection

    def ask(self) -> None:
        self.on_ask()

    def close(self) -> None:
        self.is_aborted = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def fileno(self) -> int:
        return 3 if self.has_socket else -1

    def recv(self, *args: int) -> bytes:
        if not self.arrived:
            raise BlockingIOError
        return self.arrived

    def getsockopt(self, *args: int) -> bytes:
        if not self.has_socket:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return bytes([self.tcp_state, *[0] * 119]) + self.taken.to_bytes(8, sys.byteorder)

    def send(self, num_bytes: int = 1) -> None:
        """A part of a head."""
        self.connection.received()

    def request(
        self, *, is_uncounted: bool = False, whole: bool = True, key: str | None = None
    ) -> TooManyConnections | None:
        """A whole head, with its body unless that is to follow."""
        self.connection.received()
        refused = self.connection.begin_request(is_uncounted=is_uncounted, party=key)
        if refused is None and whole:
            self.connection.end_body()
        return refused

    def body(self, num_bytes: int) -> None:
        self.connection.received()
        self.connection.received_body(num_bytes)

    def answered(self, *, complete: bool = True) -> None:
        self.connection.end_answer(complete=complete)


class Edge:
    """A table of connections and its clock."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.now = 1000.0
        self.metrics = Metrics("test")
        self.accounts = Accounts()
        self.table = Connections(limits, self.accounts, self.metrics, lambda: self.now)

    def connect(self, host: str = A) -> Peer:
        peer = Peer()
        connection = self.table.open(peer, host)  # type: ignore[arg-type]
        assert connection is not None, "there was no room"
        peer.connection = connection
        connection.established(peer, peer.refusals.append, peer.abort, peer.ask)  # type: ignore[arg-type]
        return peer

    def wait(self, seconds: float, step: float = 0.5) -> None:
        for _ in range(int(seconds / step)):
            self.now += step
            self.table.sweep()

    def closed(self, reason: str) -> int:
        text = self.metrics.render().decode()
        (line,) = (line for line in text.splitlines() if f'closed_total{{reason="{reason}"}}' in line)
        return int(float(line.split()[-1]))


@pytest.fixture
def edge() -> Edge:
    return Edge()


# -- room ---------------------------------------------------------------------------------------------------------


def test_the_oldest_of_the_address_with_the_most_waiting_connections_makes_room() -> None:
    edge = Edge(LIMITS._replace(per_address=8))
    light = edge.connect(B)
    heavy = [edge.connect(A) for _ in range(7)]
    newcomers = [edge.connect(C), edge.connect(B), edge.connect(A)]
    assert [peer.is_aborted for peer in heavy] == [True] * 3 + [False] * 4
    assert not any(peer.is_aborted for peer in [light, *newcomers])
    assert (len(edge.table), edge.closed("evicted")) == (8, 3)


def test_one_whose_bytes_wait_to_be_parsed_makes_no_room(edge: Edge) -> None:
    late, *others = [edge.connect() for _ in range(4)]
    late.send()
    late.connection.hold_unparsed(1)
    edge.table.make_room(A)
    assert not late.is_aborted
    assert others[0].is_aborted


def test_one_whose_bytes_have_just_arrived_makes_no_room(edge: Edge) -> None:
    edge = Edge(LIMITS._replace(per_address=8))
    peers = [edge.connect(A) for _ in range(8)]
    for peer in peers[:3]:
        peer.arrived = b"G"
    edge.connect(B)
    assert [peer.is_aborted for peer in peers] == [False] * 3 + [True] + [False] * 4
    for peer in peers:
        peer.arrived = b"G"
    edge.connect(B)
    assert [peer.is_aborted for peer in peers].count(True) == 2


def test_new_ones_wait_until_those_that_make_room_had_a_moment_to_send(edge: Edge) -> None:
    edge = Edge(LIMITS._replace(per_address=8))
    for _ in range(8):
        assert edge.table.open_at < edge.now
        edge.connect(A)
    assert edge.now < edge.table.open_at < edge.now + 0.1
    edge.now += 0.1
    assert edge.table.open_at < edge.now


def test_where_more_may_be_open_they_have_longer_to_send(edge: Edge) -> None:
    edge = Edge(LIMITS._replace(connections=64, per_address=64))
    for _ in range(64):
        edge.connect(A)
    assert edge.table.open_at - edge.now == pytest.approx(0.02)


def test_where_few_of_them_make_room_they_have_a_shorter_time_to_send() -> None:
    """As many new connections as the limit per second are accepted: a probe waits no longer behind a flood."""
    edge = Edge(LIMITS._replace(connections=64, per_address=64))
    for _ in range(48):
        edge.connect(A).request()
    for _ in range(16):
        edge.connect(A)
    assert edge.table.open_at - edge.now == pytest.approx(0.01)


def test_new_ones_wait_while_the_next_to_make_room_is_about_to_be_read() -> None:
    """If a round of the event loop takes long, many connections are old before they are read for the first time."""
    edge = Edge(LIMITS._replace(per_address=8))
    peers = [edge.connect(A) for _ in range(8)]
    for peer in peers:
        peer.arrived = b"G"
    edge.now += 0.1
    assert edge.now < edge.table.open_at < edge.now + 0.01
    peers[0].send()
    assert edge.table.open_at < edge.now
    edge.connect(A)
    assert edge.now < edge.table.open_at
    edge.now += 0.2  # It is not read, for another reason: then it is closed all the same.
    assert edge.table.open_at < edge.now


def test_a_pipeline_of_probes_does_not_hold_up_new_ones() -> None:
    """The time for which a connection may be closed continues from request to request."""
    edge = Edge(LIMITS._replace(per_address=8))
    peers = [edge.connect(A) for _ in range(8)]
    for peer in peers:
        peer.request(is_uncounted=True)
    for _ in range(100):
        edge.now += 0.001
        for peer in peers:
            assert peer.request(is_uncounted=True) is None
            peer.answered()
    assert edge.table.open_at < edge.now
    peers[0].answered()
    assert edge.table.open_at < edge.now
    peers[0].send()
    edge.now += 0.001
    peers[0].request(is_uncounted=True)
    edge.connect(A)
    assert [peer.is_aborted for peer in peers] == [False, True, *[False] * 6]


def test_an_address_beyond_its_own_limit_makes_room_itself(edge: Edge) -> None:
    heavy = [edge.connect(A) for _ in range(20)]
    assert [peer.is_aborted for peer in heavy].count(False) == LIMITS.per_address + 1
    assert not heavy[-1].is_aborted
    assert len(edge.table) == LIMITS.per_address + 1


def test_addresses_of_one_ipv6_network_count_together(edge: Edge) -> None:
    peers = [edge.connect(f"2001:db8::{number:x}") for number in range(1, 20)]
    assert sum(not peer.is_aborted for peer in peers) == LIMITS.per_address + 1


@pytest.mark.parametrize("host", ["10.1.2.3", "::ffff:10.1.2.3", "::1", None])
def test_proxies_may_use_all_connections(host: str | None) -> None:
    settings = ServerConfig(max_connections=8, trusted_proxies=("10.0.0.0/8", "::1"))
    edge = Edge(ConnectionLimits.of(settings, 1000, 2**20))
    peers = [edge.connect(host) for _ in range(8)]
    assert not any(peer.is_aborted for peer in peers)
    assert sum(peer.request() is None for peer in peers) == edge.table.limits.serving == 6


@pytest.mark.parametrize(
    ("proxies", "host", "client"),
    [
        ((), "127.0.0.1", "127.0.0.1"),
        (("10.0.0.0/8",), "127.0.0.1", "127.0.0.1"),
        (("10.0.0.0/8",), "192.0.2.1", "192.0.2.1"),
        (("10.0.0.0/8",), "10.1.2.3", "198.51.100.7"),
        (("10.0.0.0/8", "198.51.100.0/24"), "10.1.2.3", "203.0.113.9"),
        (ServerConfig().trusted_proxies, "::1", "198.51.100.7"),
    ],
)
async def test_only_trusted_proxies_name_their_client_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, proxies: tuple[str, ...], host: str, client: str
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])

    settings = uvicorn_settings(application, ServerConfig(trusted_proxies=proxies))
    settings.load()
    headers = [
        (b"x-forwarded-for", b"203.0.113.9, 198.51.100.7, 10.9.9.9"[: None if "10.0.0.0/8" in proxies else -10])
    ]
    scope: Any = {"type": "http", "scheme": "http", "client": (host, 1), "headers": headers}
    await settings.loaded_app(scope, None, None)
    assert seen == [client]


def test_a_connection_that_serves_a_request_is_never_closed_for_others(edge: Edge) -> None:
    served = [edge.connect(host) for host in (A, A, A, B, B, B)]
    assert [peer.request() for peer in served] == [None] * 6
    silent = [edge.connect(C) for _ in range(50)]
    assert not any(peer.is_aborted for peer in served)
    assert sum(not peer.is_aborted for peer in silent) == 2


def test_a_request_beyond_those_served_is_refused_in_words_but_a_probe_is_answered(edge: Edge) -> None:
    for host in (A, A, A, B, B, B):
        assert edge.connect(host).request() is None
    refused = edge.connect(C).request()
    assert refused is not None
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    assert "6 connections are served" in str(refused)
    for _ in range(50):
        probe = edge.connect(C)
        assert probe.request(is_uncounted=True) is None
        probe.answered()
    assert edge.closed("connections") == 1


def test_an_address_beyond_its_limit_is_refused_in_words(edge: Edge) -> None:
    served = [edge.connect(A) for _ in range(5)]
    assert [peer.request() for peer in served[:4]] == [None] * 4
    refused = served[4].request()
    assert "max_connections_per_address" in str(refused)
    assert edge.connect(B).request() is None
    served[0].answered()
    assert served[4].request() is None


def test_probes_whose_answers_are_not_read_make_room_and_others_do_not(edge: Edge) -> None:
    peers = [edge.connect(f"192.0.2.{number}") for number in range(8)]
    for peer in peers:
        peer.request(is_uncounted=True)
    peers[3].unsent = 1000
    edge.connect(C)
    assert [peer.is_aborted for peer in peers] == [number == 3 for number in range(8)]


def test_a_request_pipelined_behind_a_probe_counts_as_one_that_is_served(edge: Edge) -> None:
    for number in range(7):
        peer = edge.connect(f"192.0.2.{number}")
        assert peer.request(is_uncounted=True) is None
        refused = peer.connection.begin_request(is_uncounted=False)
        assert (refused is None) == (number < LIMITS.serving)
    assert edge.connect(C).request() is not None


@pytest.mark.parametrize("is_whole", [True, False])
def test_pipelined_requests_count_one_by_one_and_those_without_an_accepted_key_never(
    edge: Edge, is_whole: bool
) -> None:
    """`is_whole`: whether the last one has arrived when its turn comes."""
    peer = edge.connect(A)
    kinds = [True, False, False, True, True]
    for number, is_uncounted in enumerate(kinds):
        assert peer.request(is_uncounted=is_uncounted, whole=is_whole or number < len(kinds) - 1) is None
    served = []
    for number in range(len(kinds)):
        served.append(edge.table._num_served)
        peer.answered(complete=is_whole or number == len(kinds) - 1)
        if not is_whole and number == len(kinds) - 2:
            assert peer.connection._phase == "body"
            peer.connection.end_body()
    # A slot is taken early for those that have arrived: once they begin, they cannot be refused.
    assert served == [1, 1, 1, 0, 0]
    assert edge.table._num_served == 0


def test_an_answer_before_one_whose_request_is_incomplete_may_take_its_time(edge: Edge) -> None:
    """Nothing more is read while a whole request waits, so that the time of the incomplete one has not begun."""
    peer = edge.connect(A)
    for is_whole in (True, True, False):
        peer.request(whole=is_whole)
    peer.answered(complete=False)
    assert edge.table._num_served == 1
    edge.wait(60)
    assert not peer.refusals
    peer.answered(complete=False)
    assert edge.table._num_served == 0
    edge.wait(11)
    assert [type(each) for each in peer.refusals] == [SlowRequest]


def test_a_connection_between_requests_makes_room_and_one_with_pipelined_requests_does_not(edge: Edge) -> None:
    busy, idle = edge.connect(A), edge.connect(A)
    for peer in (busy, idle):
        peer.request()
    busy.request()
    busy.answered()
    idle.answered()
    for host in (B, B, B, C, C, C, C):
        edge.connect(host)
    for _ in range(3):
        edge.connect(A)
    assert not busy.is_aborted
    assert idle.is_aborted


def test_nothing_is_left_of_connections_that_have_ended(edge: Edge) -> None:
    peers = [edge.connect(host) for host in (A, B, C) for _ in range(2)]
    peers[0].send()
    peers[1].request()
    peers[2].request(whole=False)
    peers[2].body(10)
    peers[3].request()
    peers[3].answered()
    for peer in peers:
        peer.connection.close()
        peer.connection.close()
    assert len(edge.table) == 0
    assert [edge.accounts.users(resource) for resource in RESOURCES] == [{}] * len(RESOURCES)
    assert edge.table._waiting._parties == edge.table._slow._parties == edge.table._served == {}
    assert edge.table._num_served == 0


# -- keys -----------------------------------------------------------------------------------------------------------


def takes(shares: KeyShares, owner: Owner) -> bool:
    """Whether a further request of a key is served."""
    try:
        shares.begin(owner)
    except Overloaded:
        return False
    return True


def test_next_to_a_key_that_takes_all_it_can_others_get_connections() -> None:
    shares = KeyShares(48, Accounts(), Metrics("test").connection_closed)
    heavy = Owner.of_key("heavy")
    held = sum(takes(shares, heavy) for _ in range(48))
    assert held == 28
    assert all(takes(shares, Owner.of_key(str(number))) for number in range(20))
    shares.end(heavy)
    assert not takes(shares, heavy)
    assert takes(shares, Owner.of_key("light"))


def test_few_of_many_connections_are_checked_at_once_and_all_in_a_pass() -> None:
    """Checking a thousand in one round of the event loop would delay probes."""
    edge = Edge(ConnectionLimits(connections=1000, per_address=1000))
    peers = [edge.connect() for _ in range(250)]
    edge.now += 11
    for ended, remain in ((100, True), (200, True), (250, False)):
        assert edge.table.sweep() is remain
        assert sum(peer.is_aborted for peer in peers) == ended
    assert edge.table.sweep() is False


def test_requests_beyond_a_keys_share_are_in_the_log_like_connections_that_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics, now = Metrics("test"), [100.0]
    connections = Connections(ConnectionLimits(connections=8, per_address=8), Accounts(), metrics, lambda: now[0])
    shares = KeyShares(connections.limits.serving, Accounts(), connections.note_closed)
    heavy = Owner.of_key("heavy")
    assert sum(takes(shares, heavy) for _ in range(8)) < 6
    connections.sweep()
    assert "connections or requests were refused" in caplog.text
    assert b'kaon_connections_closed_total{reason="key"}' in metrics.render()


@pytest.mark.parametrize("most", [16, 48, 5000])
def test_keys_that_take_all_they_can_hold_equal_parts_and_leave_some(most: int) -> None:
    accounts = Accounts()
    shares = KeyShares(most, accounts, Metrics("test").connection_closed)
    heavy = [Owner.of_key(str(number)) for number in range(10)]
    for _ in range(most):
        for owner in heavy:
            takes(shares, owner)
    held = [accounts.used(owner.party, "served_requests") for owner in heavy]
    assert max(held) - min(held) <= 1
    assert all(takes(shares, Owner.of_key(f"light {number}")) for number in range(most // 8))


# -- time -----------------------------------------------------------------------------------------------------------


def test_a_silent_connection_is_closed_and_a_part_of_a_head_is_answered(edge: Edge) -> None:
    silent, slow = edge.connect(), edge.connect()
    for _ in range(10):
        edge.wait(1)
        slow.send()
    assert not silent.is_aborted
    assert slow.refusals == []
    edge.wait(1)
    assert silent.is_aborted
    (error,) = slow.refusals
    assert isinstance(error, SlowRequest)
    assert "head was not complete after 10 s" in str(error)
    assert edge.closed("head") == 2


def test_the_time_of_the_next_head_counts_from_its_first_byte(edge: Edge) -> None:
    peer = edge.connect()
    peer.request()
    edge.wait(1000)
    peer.answered()
    edge.wait(60)
    peer.send()
    edge.wait(9)
    assert peer.refusals == []
    edge.wait(2)
    assert len(peer.refusals) == 1


def test_a_body_below_the_least_rate_is_refused_after_a_grace(edge: Edge) -> None:
    edge = Edge(LIMITS._replace(body_bytes=2**20))
    quick, slow = edge.connect(A), edge.connect(B)
    for peer in (quick, slow):
        peer.request(whole=False)
    for _ in range(20):
        quick.body(1100)
        slow.body(400)
        edge.wait(1)
    assert (quick.refusals, quick.is_aborted) == ([], False)
    (error,) = slow.refusals
    assert "less than 1024 bytes a second (min_body_rate)" in str(error)
    assert edge.closed("body") == 1


def test_bodies_that_arrive_keep_out_no_request_that_has_arrived(edge: Edge) -> None:
    bodies = [edge.connect(host) for host in (A, A, A, B, B, B)]
    assert [peer.request(whole=False) for peer in bodies] == [None] * 6
    whole = [edge.connect(host) for host in (A, A, B, B, C, C)]
    assert [peer.request() for peer in whole] == [None] * 6
    assert [peer.is_aborted for peer in bodies].count(False) == 2
    for peer in bodies:
        if peer.is_aborted:  # The parser may still have the end of its request.
            peer.connection.received_body(10)
            assert peer.connection.end_body() is None
    assert edge.accounts.total("body_bytes") == 0
    (late, *_) = (peer for peer in bodies if not peer.is_aborted)
    assert "6 connections are served" in str(late.connection.end_body())


def test_the_slowest_body_makes_room(edge: Edge) -> None:
    edge = Edge(LIMITS._replace(body_bytes=2**20, per_address=8))
    peers = [edge.connect(A) for _ in range(8)]
    for peer in peers:
        peer.request(whole=False)
    edge.wait(2)
    for number, peer in enumerate(peers):
        peer.body(3000 if number == 2 else 50_000 + number)
    edge.connect(A)
    assert [peer.is_aborted for peer in peers] == [number == 2 for number in range(8)]


def test_a_large_body_counts_as_far_as_it_is_held_in_memory(edge: Edge) -> None:
    edge = Edge(LIMITS._replace(request_bytes=300))
    peers = [edge.connect(host) for host in (A, B, C)]
    for peer in peers:
        peer.request(whole=False)
        for _ in range(10):
            peer.body(1000)
    assert edge.accounts.total("body_bytes") == 900
    assert not any(peer.is_aborted for peer in peers)
    for peer in peers:
        peer.connection.end_body()
    assert edge.accounts.total("body_bytes") == 0


def test_the_rest_of_a_body_that_was_answered_early_is_discarded_for_a_time(edge: Edge) -> None:
    ended, trickling = edge.connect(), edge.connect()
    for peer in (ended, trickling):
        peer.request(whole=False)
        peer.answered(complete=False)
    edge.wait(5)
    ended.connection.end_body()
    edge.wait(6)
    assert (ended.is_aborted, trickling.is_aborted) == (False, True)


def test_a_client_that_reads_nothing_is_closed_and_one_that_reads_slowly_is_not(edge: Edge) -> None:
    stalled, slow = edge.connect(), edge.connect()
    for peer in (stalled, slow):
        peer.request()
        peer.unsent = 100_000
    for _ in range(700):
        slow.unsent -= 1
        edge.wait(0.5)
    assert (stalled.is_aborted, slow.is_aborted) == (True, False)
    assert edge.closed("unread") == 1


def test_answers_that_are_hardly_read_make_room_for_other_requests(edge: Edge) -> None:
    served = [edge.connect(host) for host in (A, A, A, B, B, B)]
    for peer in served:
        peer.request()
        peer.unsent = 100_000
    quick, slow, keeps_up = served[0], served[1:5], served[5]
    keeps_up.unsent = 0
    for _ in range(6):
        quick.taken += 5_000
        for peer in slow:
            peer.taken += 100
        edge.wait(1)
    assert [edge.connect(C).request() is None for _ in range(4)] == [True] * 4
    assert [peer.is_aborted for peer in served] == [False, True, True, True, True, False]
    assert edge.connect(B).request() is not None


def test_a_client_that_reads_again_keeps_its_place(edge: Edge) -> None:
    served = [edge.connect(host) for host in (A, A, A, B, B, B)]
    for peer in served:
        peer.request()
        peer.unsent = 100_000
    edge.wait(6)
    for peer in served:
        peer.unsent = 0
    edge.wait(1)
    assert edge.connect(C).request() is not None
    assert not any(peer.is_aborted for peer in served)


@pytest.mark.parametrize("slow", [True, False])
def test_large_answers_beyond_what_may_wait_end_with_a_slow_reader_of_the_heaviest_owner(slow: bool) -> None:
    edge = Edge(LIMITS._replace(answer_bytes=1000))
    peers = {
        name: edge.connect(host)
        for name, host in zip(("light", "first", "second", "quick"), (A, A, A, B), strict=True)
    }
    for name, num_bytes in {"light": 200, "first": 300, "second": 400, "quick": 100}.items():
        peers[name].request()
        peers[name].unsent = 1
        peers[name].connection.hold_answer(num_bytes, "light" if name == "light" else "heavy")
    assert edge.accounts.users("answer_bytes") == {"light": 200, "heavy": 800}
    for _ in range(7):
        for name, peer in peers.items():
            peer.taken += 100 if slow and name in ("light", "second") else 5_000
        edge.wait(1)
    new = edge.connect(B)
    new.request()
    new.connection.hold_answer(300, "third")
    assert [peer.is_aborted for peer in peers.values()] == [False, False, slow, False]
    new.connection.hold_answer(1600, "third")
    assert [peer.is_aborted for peer in peers.values()] == [slow, False, slow, False]
    assert new.is_aborted is not slow, "beyond twice the bound the heaviest owner's answer ends although it is read"
    new.connection.hold_answer(10**9, "third")
    for peer in (*peers.values(), new):
        peer.connection.close()
    assert not edge.accounts.total("answer_bytes")


def test_an_answer_alone_may_be_larger_than_all_together() -> None:
    edge = Edge(LIMITS._replace(answer_bytes=1000))
    peer = edge.connect()
    peer.request()
    peer.connection.hold_answer(5000, "a")
    peer.connection.hold_answer(0, "a")
    assert (peer.is_aborted, edge.accounts.total("answer_bytes")) == (False, 0)


def test_bodies_beyond_what_may_be_held_end_with_the_largest_of_the_heaviest_address(edge: Edge) -> None:
    small, larger, other = edge.connect(A), edge.connect(A), edge.connect(B)
    for peer in (small, larger, other):
        peer.request(whole=False)
    small.body(200)
    larger.body(300)
    other.body(450)
    assert not any(peer.is_aborted for peer in (small, larger, other))
    other.body(100)
    assert [peer.is_aborted for peer in (small, larger, other)] == [False, False, True]
    small.body(200)
    larger.body(301)
    assert [peer.is_aborted for peer in (small, larger)] == [False, True]


def test_a_keys_bodies_do_not_end_that_of_another_key_behind_the_same_proxy() -> None:
    """66 slow bodies just below the largest ended 8 of 14 uploads of another key, which were a little larger."""
    edge = Edge(LIMITS._replace(per_address=8))
    heavy = [edge.connect(A) for _ in range(4)]
    light = edge.connect(A)
    for peer in heavy:
        peer.request(whole=False, key="heavy")
        peer.body(240)
    light.request(whole=False, key="light")
    light.body(250)
    assert [peer.is_aborted for peer in (*heavy, light)].count(True) == 1
    assert not light.is_aborted
    assert dict(edge.accounts.users("body_bytes")) == {"heavy": 720, "light": 250}
    light.connection.end_body()
    light.answered()
    light.request(whole=False)  # Without a key.
    light.body(10)
    assert edge.accounts.used(light.connection.party, "body_bytes") == 10
    for peer in (*heavy, light):
        peer.connection.close()
    assert not edge.accounts.users("body_bytes")


def test_unparsed_bytes_count_as_those_of_bodies_and_for_the_key_of_the_request(edge: Edge) -> None:
    edge = Edge(LIMITS._replace(per_address=8))
    served, other, light = (edge.connect(A) for _ in range(3))
    for peer, key in ((served, "heavy"), (other, "heavy"), (light, "light")):
        peer.connection.hold_unparsed(100)
        peer.request(key=key)
    assert dict(edge.accounts.users("body_bytes")) == {"heavy": 200, "light": 100}
    served.connection.hold_unparsed(500)
    light.connection.hold_unparsed(300)
    assert dict(edge.accounts.users("body_bytes")) == {"heavy": 600, "light": 300}
    light.connection.hold_unparsed(401)
    assert [peer.is_aborted for peer in (served, other, light)] == [True, False, False]
    assert edge.closed("evicted") == 1
    light.request(key="heavy")
    assert dict(edge.accounts.users("body_bytes")) == {"heavy": 501}
    light.connection.hold_unparsed(0)
    other.connection.close()
    assert not edge.accounts.users("body_bytes")


def test_as_many_connections_are_closed_as_new_bytes_need(edge: Edge) -> None:
    edge = Edge(LIMITS._replace(per_address=8))
    small, large = [edge.connect(A) for _ in range(6)], edge.connect(B)
    for peer in small:
        peer.connection.hold_unparsed(160)
    large.connection.hold_unparsed(400)
    assert [peer.is_aborted for peer in (*small, large)].count(True) == 3
    assert edge.accounts.total("body_bytes") == 880
    assert not large.is_aborted


def test_a_body_that_has_arrived_no_longer_counts(edge: Edge) -> None:
    peers = [edge.connect(A) for _ in range(3)]
    for peer in peers:
        peer.request(whole=False)
        peer.body(900)
        peer.connection.end_body()
    assert edge.accounts.total("body_bytes") == 0
    assert not any(peer.is_aborted for peer in peers)


# -- clients that have shut down their sending side -------------------------------------------------------------------


def test_a_half_closed_client_is_asked_ever_less_often_whether_it_reads(edge: Edge) -> None:
    peer = edge.connect()
    peer.request()
    asked: list[float] = []
    begin = edge.now
    peer.on_ask = lambda: asked.append(edge.now - begin)
    peer.connection.half_closed()
    edge.wait(60)
    assert asked == [2, 6, 14, 30, 46]
    assert not peer.is_aborted


def test_one_that_resets_the_connection_has_gone(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    peer = edge.connect()
    peer.request()
    peer.on_ask = lambda: setattr(peer, "tcp_state", 7)
    peer.connection.half_closed()
    edge.wait(2)
    assert not peer.is_aborted
    edge.wait(0.5)
    assert peer.is_aborted
    assert edge.closed("gone") == 1
    edge.table.sweep()
    assert not caplog.records  # A client may leave.


@pytest.mark.parametrize("is_uncounted", [False, True])
def test_a_served_one_that_is_reset_while_nothing_is_read_has_gone(edge: Edge, is_uncounted: bool) -> None:
    """The event loop does not report it: such connections were served for ever."""
    peer = edge.connect()
    peer.request(is_uncounted=is_uncounted)
    edge.wait(60)
    assert not peer.is_aborted
    peer.tcp_state = 7
    edge.wait(0.5)
    assert peer.is_aborted
    assert (len(edge.table), edge.table._num_served, edge.closed("gone")) == (0, 0, 1)
    assert {edge.accounts.total(each) for each in RESOURCES} == {0}


def test_one_whose_socket_is_closed_already_counts_as_reset(edge: Edge) -> None:
    """Under TLS, the protocol is notified of it in a later round of the event loop."""
    peer = edge.connect()
    peer.request()
    assert not peer.connection.was_reset
    peer.has_socket = False
    assert peer.connection.was_reset


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "num_free", "connections", "per_address", "serving", "files"),
    [
        ({}, 50, 14, 7, 11, 2),
        ({}, 10, 4, 2, 3, 2),
        ({}, 1024, 867, 433, 803, 123),
        ({}, 65536, 8192, 4096, 8128, 8187),
        ({"max_connections": 100}, 65536, 100, 50, 75, 8187),
        ({"max_connections": 100, "max_connections_per_address": 9}, 65536, 100, 9, 75, 8187),
    ],
)
def test_limits_follow_from_the_settings_and_from_the_descriptors(
    settings: dict[str, Any], num_free: int, connections: int, per_address: int, serving: int, files: int
) -> None:
    limits = ConnectionLimits.of(ServerConfig(**settings), num_free, 2**20)
    assert limits[:2] == (connections, per_address)
    assert (limits.serving, limits.files) == (serving, files)


def test_received_bytes_have_room_for_several_reads_although_bodies_must_be_small() -> None:
    for max_request_bytes, body_bytes in ((1000, 2**26), (2**22, 2**28)):
        assert ConnectionLimits.of(ServerConfig(), 1000, max_request_bytes).body_bytes == body_bytes


def test_a_limit_beyond_the_descriptors_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ConnectionLimits.of(ServerConfig(max_connections=100), 74, 2**20)
    assert "100 connections may be open, but the limit of open files leaves 35; raise it (ulimit -n)" in caplog.text


@pytest.mark.parametrize("network", ["10.0.0.1/8", "proxy.example", "10.0.0.0/33"])
def test_proxies_that_are_no_networks_are_refused(network: str) -> None:
    with pytest.raises(ValueError, match=r"trusted_proxies is .*; each item must be an address, or a network"):
        ServerConfig(trusted_proxies=("::1", network))
