"""The bounded queue: which requests are admitted, which must retry and when; no request is counted twice."""

import itertools
import math
import re
from contextlib import ExitStack

import pytest
from starlette.requests import ClientDisconnect

from engine.config.config import Config, ParallelConfig
from engine.config.server import ServerConfig
from engine.messages import ModelInfo
from engine.text.io_processor import InvalidRequest
from server.errors import BadRequest, NotReady, Overloaded, ShuttingDown
from server.limits.accounts import Accounts
from server.limits.admission import Admission, Limits, OpenFiles, counted_refusals
from server.limits.owners import ANYONE, Owner
from server.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Door:
    """An admission with a clock of its own; `enter` admits and submits a request."""

    def __init__(self, **limits: int) -> None:
        self.clock, self.metrics = Clock(), Metrics("1")
        self.admission = Admission(Limits(**limits), self.metrics, clock=self.clock)
        self._next = 0

    def enter(self, *prompt_tokens: int, owner: str = "local") -> list[int]:
        self.admission.admit(Owner(owner), prompt_tokens)
        ids = list(range(self._next, self._next + len(prompt_tokens)))
        self._next += len(ids)
        self.admission.queue(dict(zip(ids, prompt_tokens, strict=True)), owner)
        return ids

    def refused(self, *prompt_tokens: int, owner: str = "local") -> Overloaded:
        with pytest.raises(Overloaded) as caught:
            self.admission.admit(Owner(owner), prompt_tokens)
        return caught.value

    def count(self, sample: str) -> float:
        found = re.search(rf"^kaon_requests_{re.escape(sample)} (\S+)$", self.metrics.render().decode(), re.M)
        assert found
        return float(found[1])


def test_over_the_bound_by_requests_is_429_in_openais_form() -> None:
    door = Door(sequences=2)
    door.enter(5)
    door.enter(5)
    error = door.refused(5)
    assert (error.status, error.type, error.code) == (429, "requests", "rate_limit_exceeded")
    assert "2 requests are waiting" in str(error)
    assert "more than 2 would, the most that this server lets wait (max_queued_requests)" in str(error)
    assert door.count('rejected_total{reason="queue_requests"}') == 1
    assert door.count("received_total") == 3


def test_over_the_bound_by_tokens_is_of_type_tokens() -> None:
    door = Door(tokens=100)
    door.enter(60)
    error = door.refused(41)
    assert error.type == "tokens"
    assert "prompts of 60 tokens are waiting, and with the 41 of this one more than 100 would" in str(error)
    assert door.count('rejected_total{reason="queue_tokens"}') == 1
    door.enter(40)


def test_both_headers_and_the_sentence_report_the_same_time() -> None:
    door = Door(sequences=1)
    door.enter(5)
    error = door.refused(5)
    milliseconds = int(error.headers["retry-after-ms"])
    assert 0 < milliseconds <= 60_000
    assert int(error.headers["Retry-After"]) == max(1, math.ceil(milliseconds / 1000))
    assert str(error).endswith(f"please try again in {milliseconds / 1000:g}s")


@pytest.mark.parametrize("how", ["first_output", "remove"])
def test_a_sequence_leaves_the_queue_with_its_first_output_and_with_its_end(how: str) -> None:
    door = Door(sequences=1, tokens=10)
    (id,) = door.enter(10)
    door.refused(1)
    getattr(door.admission, how)(id)
    getattr(door.admission, how)(id)
    assert (door.admission.num_queued, door.admission.queued_tokens) == (0, 0)
    door.enter(10)


@pytest.mark.parametrize("prompt_tokens", [[1, 1, 1], [50]])
def test_a_request_larger_than_a_whole_bound_gets_in_when_nothing_waits(prompt_tokens: list[int]) -> None:
    door = Door(sequences=2, tokens=20)
    (id,) = door.enter(1)
    door.refused(*prompt_tokens)
    door.admission.first_output(id)
    door.enter(*prompt_tokens)
    door.refused(1)


def test_clients_that_retry_when_asked_are_admitted_one_after_the_other() -> None:
    """A queue of 4 that admits two per second; 12 simultaneous clients, which obey Retry-After."""
    door = Door(sequences=4)
    queue = [id for _ in range(4) for id in door.enter(5)]
    due = sorted(int(door.refused(5).headers["retry-after-ms"]) / 1000 for _ in range(12))
    attempts = 0
    while due:
        door.clock.now = round(door.clock.now + 0.5, 3)
        if queue:
            door.admission.first_output(queue.pop(0))
        for _ in [each for each in due if each <= door.clock.now]:
            due.pop(0)
            attempts += 1
            try:
                queue += door.enter(5)
            except Overloaded as error:
                due.append(door.clock.now + int(error.headers["retry-after-ms"]) / 1000)
        due.sort()
        assert door.clock.now < 60
    assert attempts <= 2 * 12 + 12


def test_after_an_overload_whose_clients_stay_away_times_are_short_again() -> None:
    """A queue of 4 that admits ten per second, and 600 clients, which ask once."""
    door = Door(sequences=4)
    queue = door.enter(5) + door.enter(5) + door.enter(5) + door.enter(5)
    for _ in range(100):
        door.clock.now += 0.1
        door.admission.first_output(queue.pop(0))
        queue += door.enter(5)
        for _ in range(6):
            last = seconds(door.refused(5))
    assert last > 30
    for id in queue:
        door.clock.now += 0.1
        door.admission.first_output(id)
    door.clock.now += 6
    for _ in range(4):
        door.enter(5)
    assert seconds(door.refused(5)) < 0.2


def test_clients_that_retry_when_asked_precede_later_ones() -> None:
    """A queue of 4 that admits ten per second; 200 simultaneous clients, which obey Retry-After."""
    door = Door(sequences=4)
    queue = [id for _ in range(4) for id in door.enter(5)]
    for _ in range(100):
        door.clock.now += 0.1
        door.admission.first_output(queue.pop(0))
        queue += door.enter(5)
    due = sorted(door.clock.now + seconds(door.refused(5)) for _ in range(200))
    turned_away, served_at = 0, door.clock.now
    while due[0] < 20:
        door.clock.now = due.pop(0)
        while queue and served_at + 0.1 <= door.clock.now:
            served_at += 0.1
            door.admission.first_output(queue.pop(0))
        served_at = served_at if queue else door.clock.now
        try:
            queue += door.enter(5)
        except Overloaded:
            turned_away += 1
    assert turned_away == 0
    while len(queue) < 4:
        queue += door.enter(5)
    assert seconds(door.refused(5)) > due[-1] - door.clock.now


def seconds(error: Overloaded) -> float:
    return int(error.headers["retry-after-ms"]) / 1000


def test_a_key_has_so_many_requests_at_a_time_and_others_do_not_mind() -> None:
    door = Door(requests_per_key=2)
    first = door.enter(5, 5, owner="a")
    door.enter(5, owner="a")
    error = door.refused(5, owner="a")
    assert (error.type, error.headers["Retry-After"]) == ("requests", "1")
    assert "2 requests of this key or address are running, and this server runs at most 2 at a time" in str(error)
    door.enter(5, owner="b")
    for id in first:
        door.admission.first_output(id)
    door.refused(5, owner="a")
    door.admission.release(Owner("a"))
    door.enter(5, owner="a")
    assert door.count('rejected_total{reason="key"}') == 2


def test_the_early_check_refuses_by_requests_and_keys_before_prompts_are_read() -> None:
    door = Door(sequences=2, tokens=20, requests_per_key=9)
    door.enter(5)
    door.admission.precheck(ANYONE, 1)
    with pytest.raises(Overloaded):
        door.admission.precheck(ANYONE, 2)
    assert (door.count("received_total"), door.count('rejected_total{reason="queue_requests"}')) == (3, 2)
    door.enter(15)
    with pytest.raises(Overloaded), counted_refusals(door.metrics):
        door.admission.precheck(ANYONE, 1)
    assert door.count("received_total") == 5


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BadRequest("n is 0"), "invalid"),
        (InvalidRequest("prompt is empty", "prompt"), "invalid"),
        (NotReady("loading"), "not_ready"),
        (ShuttingDown("bye"), "draining"),
        (ZeroDivisionError(), "error"),
    ],
)
def test_what_is_refused_before_admission_is_counted_once(error: Exception, reason: str) -> None:
    door = Door()
    with pytest.raises(type(error)), counted_refusals(door.metrics):
        raise error
    assert door.count(f'rejected_total{{reason="{reason}"}}') == door.count("received_total") == 1


def test_a_client_that_leaves_before_it_has_asked_is_not_counted() -> None:
    door = Door()
    with pytest.raises(ClientDisconnect), counted_refusals(door.metrics):
        raise ClientDisconnect
    assert door.count("received_total") == 0


def test_bounds_follow_from_the_number_of_sequences_and_from_the_cache_unless_flags_say_otherwise() -> None:
    model = ModelInfo("", "", "", "", 0, 1000, 100, [], 16, 10)
    by_default = Admission.of(Config(max_num_seqs=7), Metrics("1"))
    by_default.open(model)
    assert by_default._limits == Limits(7, 160, None)
    of_three = Config(max_num_seqs=7, parallel_config=ParallelConfig(data_parallel_size=3))
    by_replicas = Admission.of(of_three, Metrics("1"))
    by_replicas.open(model, 3)
    assert by_replicas._limits == Limits(21, 480, None)
    flags = ServerConfig(max_queued_requests=3, max_queued_tokens=50, max_requests_per_key=2)
    by_flags = Admission.of(Config(server_config=flags), Metrics("1"))
    by_flags.open(model)
    assert by_flags._limits == Limits(3, 50, 2)


def test_whoever_fills_the_queue_is_refused_first_and_another_owner_is_not() -> None:
    door = Door(sequences=8, tokens=1000)
    for _ in range(8):
        door.enter(100, owner="heavy")
    error = door.refused(100, owner="heavy")
    assert "8 requests are waiting" in str(error)
    assert "of this key" not in str(error)
    for _ in range(4):
        door.enter(10, owner="light")
    error = door.refused(100, owner="heavy")
    assert "8 of them are of this key or address, of 2 that share the queue" in str(error)
    assert door.refused(10, owner="light").type == "requests"
    assert door.admission.num_queued == 12


def test_eight_streams_of_a_light_key_are_admitted_at_once_after_ten_heavy_keys_filled_the_queue() -> None:
    door = Door(sequences=128, tokens=64_000)
    for number in itertools.cycle(range(10)):
        try:
            door.enter(500, owner=f"heavy{number}")
        except Overloaded:
            break
    for _ in range(8):
        door.admission.precheck(Owner("light"), 1)
    for _ in range(8):
        door.enter(500, owner="light")


def test_an_equal_part_is_one_of_tokens_too() -> None:
    door = Door(tokens=4000)
    door.enter(4000, owner="heavy")
    assert door.refused(1, owner="heavy").type == "tokens"
    door.enter(2000, owner="light")
    assert door.refused(100, owner="light").type == "tokens"
    door.enter(1333, owner="third")


def test_a_light_owner_is_always_admitted_while_ten_heavy_ones_take_all_they_get() -> None:
    """A queue of 32 that admits one per step; each heavy owner sends requests until it is refused, in each step."""
    door = Door(sequences=32)
    queue: list[int] = []
    longest = 0
    for _ in range(200):
        for number in range(10):
            while True:
                try:
                    queue += door.enter(5, owner=f"heavy{number}")
                except Overloaded:
                    break
        queue += door.enter(5, owner="light")
        longest = max(longest, door.admission.num_queued)
        # The engine serves owners in turn: the light owner's request is among the next.
        light = queue.pop()
        door.clock.now += 0.05
        door.admission.first_output(light)
        for id in queue[:2]:
            door.admission.first_output(id)
        del queue[:2]
    assert longest <= 32 * sum(1 / number for number in range(1, 12))
    assert door.count('rejected_total{reason="queue_requests"}') >= 1000


def test_an_owner_that_is_refused_often_waits_for_itself() -> None:
    door = Door(sequences=4)
    for _ in range(4):
        door.enter(5, owner="heavy")
    first = seconds(door.refused(5, owner="heavy"))
    for _ in range(50):
        last = seconds(door.refused(5, owner="heavy"))
    assert last > 10 * first
    door.enter(5, 5, owner="light")
    assert seconds(door.refused(5, owner="light")) < 10 * first


def test_what_is_queued_is_in_the_accounts_and_leaves_them() -> None:
    door = Door()
    ids = door.enter(5, 7, owner="a") + door.enter(11, owner="b")
    accounts = door.admission.accounts
    assert accounts.users("queued_sequences") == {"a": 2, "b": 1}
    assert accounts.users("queued_tokens") == {"a": 12, "b": 11}
    assert accounts.users("requests") == {"a": 1, "b": 1}
    for id in ids:
        door.admission.first_output(id)
    for owner in "ab":
        door.admission.release(Owner(owner))
    assert door.admission.is_empty
    assert not any(accounts.of_owner("a").values())


# -- files ----------------------------------------------------------------------------------------------------------


def test_an_owner_holds_at_most_as_many_files_as_are_free() -> None:
    accounts = Accounts()
    files = OpenFiles(8, accounts)
    heavy, light = Owner("heavy"), Owner("light")
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(files.hold(heavy))
        with pytest.raises(Overloaded, match="4 uploads and downloads of this key") as refused, files.hold(heavy):
            pass
        assert refused.value.headers["Retry-After"] == "1"
        for _ in range(2):
            held.enter_context(files.hold(light))
        with pytest.raises(Overloaded), files.hold(light):
            pass
        with pytest.raises(ZeroDivisionError), files.hold(Owner("third")):
            raise ZeroDivisionError
        assert accounts.total("open_files") == 6
    assert not accounts.users("open_files")
