"""Owners take turns by tokens, where one would otherwise wait for another's prompts or sequences."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.core.waiting_queue import CREDIT_TOKENS, WaitingQueue
from engine.fair_shares import FairShares
from engine.sequence import Sequence, SequenceStatus
from tests.simulated_engine import SimulatedEngine, device

DEVICE = device(0.01, 0.001, decode=0.001)


def engine(**settings: object) -> SimulatedEngine:
    made = SimulatedEngine(DEVICE, **settings)
    made.add(1500, 20)
    made.run()
    made.now += 100
    made.steps.clear()
    return made


@pytest.mark.parametrize("settings", [{}, {"scheduling_policy": "mixed"}, {"max_step_seconds": None}])
def test_a_short_prompt_does_not_wait_behind_a_hundred_long_ones_of_another_owner(settings: dict[str, object]) -> None:
    made = engine(max_num_batched_tokens=2000, **settings)
    for _ in range(100):
        made.add(3000, owner="many", at=made.now)
    made.step()
    made.step()
    short = made.add(10, owner="one", at=made.now)
    made.steps.clear()
    made.run(lambda: short.is_finished)
    assert len(made.steps) == 1, "it is in the first step after its arrival"
    assert 10 in made.steps[0][0].num_scheduled_tokens
    if settings.get("max_step_seconds", 0.5):
        assert made.steps[0][0].total_seqs_num_prefill > 1, "a long prompt that was started goes on in the same step"


def test_long_prompts_of_two_owners_advance_together_and_by_weight() -> None:
    made = engine()
    equal = [made.add(8000, owner=owner, at=made.now) for owner in "ab"]
    weighty = made.add(8000, owner="c", at=made.now, weight=2.0)
    made.run(lambda: made.now > 110)
    a, b, c = (seq.num_computed_tokens for seq in (*equal, weighty))
    assert abs(a - b) <= 600
    assert c == pytest.approx(2 * a, abs=1200)


def choices_of(first: Sequence, made: SimulatedEngine, count: int, num_cached: int = 8192) -> list[Sequence]:
    """New sequences with the cached prompt of one that has finished, which generate 20 tokens each."""
    choices = [made.add(num_cached, 20, owner=first.owner, at=made.now) for _ in range(count)]
    for each in choices:
        each.token_ids[:] = first.token_ids[:num_cached]
    return choices


@pytest.mark.parametrize("others", [0, 1])
def test_choices_of_a_cached_prompt_start_a_few_in_each_step_of_several_owners(others: int) -> None:
    """All 128 choices of a prompt of 131,072 tokens started before one step: all streams waited for 9 s."""
    made = engine(default_step_seconds=0.5, max_step_seconds=None)
    streams = [made.add(16, 400, owner="other", at=made.now) for _ in range(others)]
    first = made.add(8192, 1, owner="many", at=made.now)
    made.run(lambda: first.is_finished)
    choices = choices_of(first, made, 64)
    begin = len(made.steps)
    made.run(lambda: all(each.is_finished for each in choices))
    new = [len(batch.new_seqs) for batch, _ in made.steps[begin:]]
    assert (sum(new), max(new)) == (64, 4 if others else 64)
    assert all(each.num_completion_tokens for each in streams)


def test_choices_of_a_cached_prompt_start_a_few_in_each_interposed_step() -> None:
    made = engine(default_step_seconds=0.5, max_step_seconds=None, max_interposed_tokens=512)
    first = made.add(8192, 1, owner="many", at=made.now)
    made.run()
    for _ in range(3):
        made.add(16, 4000, owner="streams", at=made.now)
    for _ in range(60):
        made.add(500, 20, owner="heavy", at=made.now)
    for _ in range(100):
        made.step()
    choices = choices_of(first, made, 64)
    begin = len(made.interposed)
    made.run(lambda: all(each.num_completion_tokens for each in choices))
    assert max(len(batch.new_seqs) for batch in made.interposed[begin:]) == 4


def test_a_short_prompt_is_interposed_though_the_most_cached_tokens_were_found() -> None:
    """It waited for the end of the step in which they were found: 0.7 s instead of 14 ms."""
    made = SimulatedEngine(
        device(0.01, 0.0002, decode=0.001), max_interposed_tokens=512, default_step_seconds=0.5, max_step_seconds=None
    )
    cached = made.add(40_000, 1, owner="many")
    made.run()
    made.add(16, 4000, owner="stream", at=made.now)
    for _ in range(100):
        made.step()
    long = made.add(44_000, 1, owner="many", at=made.now)
    long.token_ids[:40_000] = cached.token_ids[:40_000]
    short = made.add(20, 5, owner="one", at=made.now + 0.02)
    made.run(lambda: short.is_finished)
    assert made.ttft(short) < 0.05


def test_nothing_is_preempted_for_a_cached_prompt_that_is_not_interposed_since_the_most_were_found() -> None:
    made = engine(default_step_seconds=0.5, max_step_seconds=None, max_interposed_tokens=512, max_num_seqs=8)
    first = made.add(8192, 1, owner="one", at=made.now)
    cached = made.add(40_000, 1, owner="many", at=made.now)
    made.run()
    for owner in ("stream", *["many"] * 6):
        made.add(16, 4000, owner=owner, at=made.now)
    for _ in range(100):
        made.step()
    made.add(40_000, 4000, owner="many", at=made.now).token_ids[:] = cached.token_ids[:40_000]
    made.step()
    assert made.scheduler.get_request_counts() == (8, 0)
    choices_of(first, made, 1)
    made._take_in()
    assert made.scheduler.interpose() is None
    assert made.scheduler.stats("", 0.0).preemptions == 0


def test_with_one_owner_the_order_is_that_of_arrival() -> None:
    made = engine()
    seqs = [made.add(700, 3, at=made.now + 0.001 * number) for number in range(20)]
    made.run()
    ends = [made.token_times[seq.id][1] for seq in seqs]
    assert ends == sorted(ends)


def test_the_time_of_a_grammar_counts_as_the_tokens_that_would_take_it() -> None:
    made = engine(enable_prefix_caching=False)
    costly = SimpleNamespace(uncharged_seconds=6.0, error=None, is_complete=False, accept=lambda token_id: True)
    made.add(100, 1000, owner="other", at=made.now)
    seqs = [made.add(100, 3, owner=owner, at=made.now) for owner in ("grammar", "plain")]
    seqs[0].matcher = costly  # type: ignore[assignment]
    made.run(lambda: all(seq.is_finished for seq in seqs))
    assert costly.uncharged_seconds == 0.0
    prompts = {owner: made.add(3000, 1, owner=owner, at=made.now) for owner in ("grammar", "plain")}
    made.run(lambda: prompts["plain"].is_finished)
    assert prompts["grammar"].status is SequenceStatus.WAITING


def test_the_time_of_a_grammar_counts_where_its_sequence_is_aborted_before_it_has_a_token() -> None:
    made = engine(enable_prefix_caching=False)
    made.add(100, 1000, owner="other", at=made.now)
    seqs = [made.add(100, 3, owner=owner, at=made.now) for owner in ("grammar", "plain")]
    seqs[0].matcher = SimpleNamespace(uncharged_seconds=6.0)  # type: ignore[assignment]
    made._take_in()
    made.scheduler.abort([seq.id for seq in seqs])
    prompts = {owner: made.add(3000, 1, owner=owner, at=made.now) for owner in ("grammar", "plain")}
    made.run(lambda: prompts["plain"].is_finished)
    assert prompts["grammar"].status is SequenceStatus.WAITING


def test_recent_service_counts_after_a_moment_without_sequences() -> None:
    """Owners whose requests came in bursts were the lightest at the start of each."""
    made = SimulatedEngine(device(0.001, 0.0001), max_interposed_tokens=512)
    for _ in range(8):
        made.add(500, 20, owner="bursts", at=made.now)
        made.run()
        for _ in range(3):
            made.add(30, 5, owner="steady", at=made.now)
            made.run()
        made.now += 1.0
    shares = made.scheduler._shares
    assert shares.recent("bursts") > 1.5 > 0.5 > shares.recent("steady")
    made.now += 11.0
    made.add(60, 1, owner="steady", at=made.now)
    made.run()
    assert shares.recent("bursts") == 0.0


def test_what_an_owner_used_of_an_idle_engine_does_not_count() -> None:
    made = SimulatedEngine(device(0.001, 0.0001), max_interposed_tokens=512)
    for _ in range(100):
        made.add(60, 5, owner="steady", at=made.now)
        made.run()
    heavy = [made.add(180, 5, owner=f"heavy {number % 10}", at=made.now) for number in range(40)]
    seq = made.add(60, 5, owner="steady", at=made.now)
    made.run(lambda: seq.is_finished)
    assert sum(each.is_finished for each in heavy) < 20
    assert made.scheduler._shares.recent("steady") < 0.5


@pytest.mark.parametrize("max_step_seconds", [0.5, None])
def test_owners_that_came_once_are_forgotten(max_step_seconds: float | None) -> None:
    """Without a bound of a step's time, too: a client has any number of addresses."""
    made = SimulatedEngine(device(0.001, 0.0001), max_step_seconds=max_step_seconds)
    for number in range(200):
        made.add(30, 2, owner=f"address {number}", at=made.now)
        made.run()
        made.now += 0.5
    shares = made.scheduler._shares
    assert len(shares._recent) + len(shares._before) + len(shares) <= 64
    assert shares.recent("address 0") == 0.0


def test_choices_of_one_request_count_as_their_tokens() -> None:
    made = engine(enable_prefix_caching=False)
    choices = [made.add(1500, 5, owner="many choices", at=made.now) for _ in range(30)]
    one = [made.add(1500, 5, owner="one choice", at=made.now + 1) for _ in range(2)]
    made.run(lambda: all(seq.is_finished for seq in one))
    assert sum(seq.is_finished for seq in choices) <= 8


def test_a_light_owner_gets_its_first_token_soon_beside_ten_heavy_ones() -> None:
    made = SimulatedEngine(device(0.05, 0.0012, decode=0.0016), max_step_seconds=0.5)
    made.add(3000, 20)
    made.run()
    alone = made.add(300, 10, owner="light", at=made.now)
    made.run()
    begin = made.now + 100
    lights = [made.add(300, 10, owner="light", at=begin + 8.37 * number) for number in range(1, 11)]
    heavy = [made.add(2000, 30, owner=f"heavy {number % 10}", at=begin) for number in range(20)]
    while not all(seq.is_finished for seq in lights):
        made.step()
        for number, seq in enumerate(heavy):
            if seq.is_finished:
                heavy[number] = made.add(2000, 30, owner=f"heavy {number % 10}", at=made.now)
    assert max(map(made.ttft, lights)) <= 3 * made.ttft(alone)
    assert max(map(made.longest_gap, lights)) <= 2 * 0.5


def test_a_light_owner_starts_soon_where_heavy_ones_hold_all_slots() -> None:
    made = SimulatedEngine(device(0.01, 0.0002, decode=0.0005), max_num_seqs=12)
    made.add(1500, 20)
    made.run()
    begin = made.now + 100
    lights = [made.add(300, 8, owner="light", at=begin + 5 + number) for number in range(15)]
    source = random.Random(0)

    def heavy(number: int) -> Sequence:
        owner, at = f"heavy {number % 10}", max(made.now, begin)
        return made.add(source.choice([20, 300, 1200]), source.choice([50, 200, 600]), owner=owner, at=at)

    heavies = [heavy(number) for number in range(200)]
    while not all(seq.is_finished for seq in lights):
        made.step()
        heavies = [heavy(number) if seq.is_finished else seq for number, seq in enumerate(heavies)]
    # A prompt of the heavy owners and its own take 0.3 s; a slot becomes free after seconds.
    assert max(map(made.ttft, lights)) <= 0.6


def test_owners_that_hold_less_than_their_share_do_not_make_one_wait_that_holds_nothing() -> None:
    made = SimulatedEngine(DEVICE, max_num_seqs=12, num_kvcache_blocks=100, enable_prefix_caching=False)
    for owner, tokens in (("a", 700), ("b", 200), ("b", 200)):
        made.add(tokens, 10_000, owner=owner, at=made.now)
    made.run(lambda: made.scheduler.get_request_counts() == (3, 0))
    light = made.add(50, 5, owner="light", at=made.now)
    # It is the next in turn, and no more blocks are free than it needs.
    made.scheduler._shares.charge("light", 20_000)
    large = made.add(1000, 5, owner="b", at=made.now)
    made.step()
    made.step()
    assert light.status is SequenceStatus.RUNNING
    assert large.status is SequenceStatus.WAITING


def generated_by_owner(made: SimulatedEngine, seconds: float) -> Counter[str]:
    """The number of rows with each owner's sequences in the following steps."""
    before, end = len(made.steps), made.now + seconds
    made.run(lambda: made.now >= end)
    return Counter(seq.owner for batch, _ in made.steps[before:] for seq in batch.sequences)


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("streams", [4, 8])
def test_a_few_long_streams_get_their_owners_share_beside_ten_heavy_owners(policy: str, streams: int) -> None:
    made = engine(scheduling_policy=policy)
    for number in range(200):
        made.add(50, 100_000, owner=f"heavy {number % 10}", at=made.now)
    for _ in range(100):
        made.add(3000, owner="heavy prompts", at=made.now)
    for _ in range(streams):
        made.add(50, 100_000, owner="light", at=made.now)
    made.run(lambda: made.scheduler.get_request_counts()[0] >= 200 + streams)
    before = len(made.steps)
    gained = generated_by_owner(made, 20.0)
    assert made.steps[-1][0].total_seqs_num_decode < 200, "not all decodes fit a step"
    # Few streams cannot use more than one token each of every step.
    assert gained["light"] >= 0.9 * min(gained.total() / 11, streams * (len(made.steps) - before))


def test_an_owner_of_like_work_gets_its_share_of_all_tokens() -> None:
    made = engine()
    live: dict[str, list[Sequence]] = {}
    for number in range(11):
        for _ in range(2 if number == 0 else 12):
            owner = "light" if number == 0 else f"heavy {number}"
            live.setdefault(owner, []).append(made.add(400, 20, owner=owner, at=made.now))
    computed, end = Counter[str](), made.now + 60
    while made.now < end:
        made.step()
        batch = made.steps[-1][0]
        for seq, count in zip(batch.sequences, batch.num_scheduled_tokens, strict=True):
            computed[seq.owner] += count
        for owner, seqs in live.items():
            live[owner] = [made.add(400, 20, owner=owner, at=made.now) if seq.is_finished else seq for seq in seqs]
    assert computed["light"] >= 0.9 * computed.total() / 11


class TestPreemption:
    @settings(max_examples=settings.default.max_examples * 2 // 5, deadline=None)
    @given(
        st.lists(st.tuples(st.floats(0, 5), st.integers(1, 1500), st.integers(1, 300)), min_size=1, max_size=12),
        st.lists(st.tuples(st.floats(0, 5), st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=2),
        st.integers(1, 6),
    )
    @example([(0.0, 1500, 300), (0.0, 1500, 300)], [(1.0, 100, 60)], 2)
    def test_an_owner_below_its_share_loses_no_blocks_to_others(
        self, heavy: list[tuple[float, int, int]], light: list[tuple[float, int, int]], others: int
    ) -> None:
        # The light owner's sequences need at most 20 of 200 blocks, and its share among seven owners is 28.
        made = SimulatedEngine(DEVICE, num_kvcache_blocks=200, max_num_seqs=64, enable_prefix_caching=False)
        seqs = [
            made.add(prompt, answer, owner=f"heavy {number % others}", at=at)
            for number, (at, prompt, answer) in enumerate(heavy)
        ]
        lights = [made.add(prompt, answer, owner="light", at=at) for at, prompt, answer in light]
        started = set[int]()
        while made.step():
            made.scheduler.check_integrity()
            started |= {seq.id for seq in lights if seq.slot >= 0}
            assert all(seq.slot >= 0 or seq.is_finished for seq in lights if seq.id in started)
        assert all(seq.is_finished for seq in (*seqs, *lights))

    def test_an_owner_of_all_slots_gives_some_to_the_first_requests_of_another(self) -> None:
        made = engine(max_num_seqs=8)
        many = [made.add(100, 3000, owner="many", at=made.now) for _ in range(20)]
        made.run(lambda: made.scheduler.get_request_counts()[0] == 8)
        first = [made.add(100, 10, owner="other", at=made.now) for _ in range(6)]
        made.run(lambda: all(seq.is_finished for seq in first))
        assert max(map(made.ttft, first[:3])) < 3.0
        assert not any(seq.is_finished for seq in many)
        made.scheduler.check_integrity()
        made.run()
        assert all(len(seq.token_ids) == 3100 for seq in many)

    @pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
    def test_the_newest_sequence_is_preempted_but_not_for_an_owner_that_has_its_share(self, policy: str) -> None:
        made = engine(max_num_seqs=8, scheduling_policy=policy)
        many = [made.add(100, 2000, owner="many", at=made.now) for _ in range(8)]
        made.run(lambda: made.scheduler.get_request_counts()[0] == 8)
        others = [made.add(100, 2000, owner="other", at=made.now) for _ in range(8)]
        for _ in range(200):
            made.step()
        running = [seq for seq in many if seq.slot >= 0]
        assert running == many[: len(running)]
        assert 4 <= len(running) <= 5
        assert sum(seq.slot >= 0 for seq in others) == 8 - len(running)
        assert made.scheduler.stats("", 0.0).preemptions == 8 - len(running)

    def test_short_requests_in_turn_do_not_have_the_same_sequence_computed_again_and_again(self) -> None:
        made = engine(max_num_seqs=4)
        for _ in range(6):
            made.add(1000, 20_000, owner="many", at=made.now)
        made.run(lambda: made.scheduler.get_request_counts()[0] == 4)
        begin = made.now
        while made.now < begin + 30:
            short = made.add(50, 3, owner="other", at=made.now)
            made.run(lambda seq=short: seq.is_finished)
            assert made.ttft(short) < 3.0
        assert made.scheduler.stats("", 0.0).preemptions <= 8

    def test_the_first_request_of_an_owner_starts_where_many_others_hold_little_more_than_their_shares(self) -> None:
        made = engine(max_num_seqs=22)
        for number in range(22):
            made.add(50, 20_000, owner=f"heavy {number % 10}", at=made.now)
        made.run(lambda: made.scheduler.get_request_counts()[0] == 22)
        first = made.add(50, 5, owner="light", at=made.now)
        made.run(lambda: first.is_finished)
        assert made.ttft(first) < 1.0
        assert made.scheduler.stats("", 0.0).preemptions == 1

    def test_owners_do_not_take_the_only_slot_from_each_other(self) -> None:
        made = engine(max_num_seqs=1)
        seqs = [made.add(50, 300, owner=owner, at=made.now) for owner in "ab"]
        made.run()
        assert all(len(seq.token_ids) == 350 for seq in seqs)
        assert made.scheduler.stats("", 0.0).preemptions == 0

    def test_an_owner_of_all_blocks_gives_some_back(self) -> None:
        made = engine(num_kvcache_blocks=1000)
        for _ in range(4):
            made.add(3500, 400, owner="many", at=made.now)
        made.run(lambda: made.scheduler.get_request_counts()[0] == 4)
        other = made.add(2000, 5, owner="other", at=made.now)
        made.run(lambda: other.is_finished)
        assert made.ttft(other) < 5.0
        made.scheduler.check_integrity()

    def test_growth_takes_blocks_from_the_owner_that_holds_most(self) -> None:
        made = engine(num_kvcache_blocks=100)
        many = [made.add(300, 400, owner="many", at=made.now) for _ in range(4)]
        one = made.add(200, 200, owner="one", at=made.now)
        made.run(lambda: one.is_finished)
        assert made.scheduler.stats("", 0.0).preemptions > 0
        assert len(made.token_times[one.id]) == 201
        assert made.longest_gap(one) < 1.0, "it was never preempted"
        made.run()
        assert all(len(seq.token_ids) == 700 for seq in many)


class TestShares:
    def test_an_owner_that_was_away_saves_up_one_prompt_and_not_more(self) -> None:
        shares = FairShares(CREDIT_TOKENS)
        for owner in ("a", "b"):
            shares.join(owner)
        for _ in range(100):
            shares.serve("a", 100)
        shares.join("b")
        shares.join("new")
        assert shares.served("a") - shares.served("b") == 4196
        assert shares.served("new") == shares.served("b")

    def test_owners_that_are_gone_cost_nothing_for_ever(self) -> None:
        made = engine()
        stays = made.add(10, 100_000, owner="stays", at=made.now)
        for number in range(1000):
            seq = made.add(20, 2, owner=f"party {number}", at=made.now)
            made.run(lambda seq=seq: seq.is_finished)
        assert len(made.scheduler.waiting.shares) <= 200
        assert not stays.is_finished

    def test_the_queue_serves_the_owner_that_was_served_least(self) -> None:
        queue = WaitingQueue(10.0)
        seqs = [Sequence([1], 16, owner=owner) for owner in "aabbc"]
        for seq in seqs:
            queue.append(seq)
        queue.shares.charge("a", 5.0)
        queue.shares.charge("c", 2.0)
        assert [queue.popleft().owner for _ in range(2)] == ["b", "b"]
        queue.check_integrity()
        assert queue.next_owner(passed_over=["c"]) == "a"
        assert [queue.popleft().owner for _ in range(3)] == ["c", "a", "a"]
        with pytest.raises(IndexError):
            queue.popleft()

    def test_a_preempted_sequence_comes_first_among_its_owner_alone(self) -> None:
        queue = WaitingQueue(10.0)
        waiting, preempted, other = (Sequence([1], 16, owner=owner) for owner in "aab")
        queue.append(waiting)
        queue.append(other)
        queue.shares.charge("a", 1.0)
        queue.appendleft(preempted)
        assert [queue.popleft() for _ in range(3)] == [other, preempted, waiting]
