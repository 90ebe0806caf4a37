"""Steps bounded by time: no stream waits longer than twice the bound, and no throughput is lost if no bound is
needed."""

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.config import SpeculativeConfig
from engine.core.step_time import StepWork
from tests.simulated_engine import SimulatedEngine, device

BOUND = 0.5
POLICIES = ["prefill_first", "mixed"]
DEVICE = device(0.05, 0.00125, decode=0.002, pair=2e-7, key=1e-6)


def engine(policy: str = "prefill_first", **settings: object) -> SimulatedEngine:
    """A scheduler that has measured its device."""
    made = SimulatedEngine(DEVICE, scheduling_policy=policy, **{"max_step_seconds": BOUND, **settings})
    made.add(6000, 20)
    made.run()
    made.now += 100
    made.steps.clear()
    return made


ARRIVALS = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 5000), st.integers(1, 30), st.sampled_from(["", "a", "b"])),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=8, deadline=None)
@given(ARRIVALS)
def test_no_stream_waits_longer_than_twice_the_bound_whatever_arrives(
    policy: str, arrivals: list[tuple[float, int, int, str]]
) -> None:
    made = engine(policy)
    seqs = [made.add(tokens, answer, owner=owner, at=made.now + at) for at, tokens, answer, owner in arrivals]
    made.run()
    assert max(map(made.longest_gap, seqs)) <= 2 * BOUND


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_alternates_with_decodes_at_little_cost(policy: str) -> None:
    made = engine(policy)
    alone = made.add(16_000, at=made.now)
    made.run()
    streams = [made.add(64, 200, at=made.now) for _ in range(8)]
    long = made.add(16_000, at=made.now + 2)
    made.run(lambda: len(made.token_times[long.id]) > 1)
    assert max(map(made.longest_gap, streams)) <= 2 * BOUND
    assert made.ttft(long) <= (1.15 if policy == "prefill_first" else 1.25) * made.ttft(alone)


def test_a_burst_of_prompts_gets_its_first_tokens_one_after_the_other() -> None:
    ends = []
    for bound in (None, 0.75):
        made = engine(max_step_seconds=bound)
        start = made.now
        seqs = [made.add(256, 64, at=start) for _ in range(32)]
        made.run()
        ends.append((statistics.median(map(made.ttft, seqs)), made.now - start))
    (first_before, total_before), (first, total) = ends
    assert first <= 0.6 * first_before
    assert total <= 1.03 * total_before


def test_prompts_of_one_owner_are_computed_in_large_chunks_while_nothing_decodes() -> None:
    made = engine()
    made.add(16_000, at=made.now)
    made.run()
    assert 1.0 < max(seconds for _, seconds in made.steps) <= 4.5 * BOUND
    made.add(16_000, owner="a", at=made.now)
    made.add(16_000, owner="b", at=made.now)
    made.steps.clear()
    made.run()
    contended = [seconds for _, seconds in made.steps]
    assert max(contended) <= 1.1 * BOUND


def test_shared_steps_do_not_grow_while_all_of_them_are_as_long_as_the_bound() -> None:
    source, small = random.Random(3), device(0.0007, 2e-5, decode=6e-5, pair=1e-8, key=1e-7)
    # Other work on the machine delays most steps.
    made = SimulatedEngine(lambda work: small(work) * (1 + source.expovariate(2)) + source.choice([0, 0.001]))
    made.add(500, 30)
    made.run()
    for number in range(90):
        made.add(30, 100_000, owner=f"heavy {number % 9}", at=made.now)
    for _ in range(2000):
        made.add(1000, owner="prompts", at=made.now)
    made.run(lambda: len(made.steps) == 400)
    # The fixed cost and the mean delay are 1.5 ms.
    assert statistics.median(seconds for _, seconds in made.steps[-100:]) < 20 * 0.0015


def test_decodes_of_several_owners_that_do_not_fit_a_step_take_turns() -> None:
    made = engine(max_num_seqs=512)
    many = [made.add(16, 150, owner="many", at=made.now) for _ in range(400)]
    made.run(lambda: all(len(made.token_times[seq.id]) > 1 for seq in many))
    assert made.steps[-1][0].total_seqs_num_decode > 300, "an owner that is alone has all its streams in each step"
    victim = made.add(16, 20, owner="victim", at=made.now)
    before = [len(seq.token_ids) for seq in many]
    made.run(lambda: victim.is_finished)
    assert made.longest_gap(victim) <= 2 * BOUND
    gained = [len(seq.token_ids) - length for seq, length in zip(many, before, strict=True)]
    assert max(gained) - min(gained) <= 2
    assert max(gained) < 20
    made.run()
    assert all(len(seq.token_ids) == 16 + 150 for seq in many)


def test_all_decodes_are_in_a_step_where_they_cost_nothing_by_the_model() -> None:
    """The fixed cost alone exceeds the bound of several owners' steps, and decodes add less than can be measured."""
    made = SimulatedEngine(
        device(0.0007, 0.00003, decode=0.00005),
        max_interposed_tokens=512,
        default_step_seconds=0.5,
        max_step_seconds=None,
        enable_prefix_caching=False,
    )
    made.add(3000, 20)
    made.run()
    made.now += 100
    seqs = [made.add(40, 200, owner=f"owner {number % 3}", at=made.now) for number in range(8)]
    made.run()
    assert all(seq.is_finished for seq in seqs)


@pytest.mark.parametrize("method", ["eagle", "ngram"])
def test_a_step_has_as_many_decodes_as_without_drafts_while_none_are_made(method: str) -> None:
    decodes = []
    for drafts in (None, SpeculativeConfig(speculative_method=method, num_speculative_tokens=3)):
        made = engine(max_num_seqs=512, speculative_config=drafts)
        if drafts is not None:
            # At these costs no drafts pay.
            for num_tokens in (1, 400, 512, 1600):
                made.scheduler.drafts.plan.costs.note_step(num_tokens, 0.01 * num_tokens)
        for owner in ("many", "others"):
            for _ in range(200):
                made.add(16, 40, owner=owner, at=made.now)
        made.run()
        decodes.append(statistics.median(batch.total_seqs_num_decode for batch, _ in made.steps))
    assert decodes[1] >= 0.9 * decodes[0]


def test_a_plain_configuration_has_no_bound() -> None:
    made = engine(max_step_seconds=None)
    made.add(16_000, at=made.now)
    made.run()
    assert [batch.total_tokens_num for batch, _ in made.steps] == [16_000]


def test_a_default_bound_grows_where_steps_have_large_fixed_costs() -> None:
    totals = []
    for default in (0.0, 0.75):
        slow = device(0.6, 0.04, decode=0.04)
        made = SimulatedEngine(slow, max_step_seconds=None, default_step_seconds=default)
        made.add(2000, 50)
        made.run()
        streams = [made.add(16, 400, at=made.now) for _ in range(2)]
        for _ in range(5):
            made.step()
        start = made.now
        long = made.add(3000, at=start)
        made.run(lambda seq=long: seq.is_finished)
        totals.append(made.now - start)
        if default:
            assert max(map(made.longest_gap, streams)) <= 2 * 8 * 0.75
    assert totals[1] <= 1.15 * totals[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_device_far_slower_than_the_bound_still_computes_everything(policy: str) -> None:
    made = SimulatedEngine(lambda work: 3.0 + work.prompt_tokens, scheduling_policy=policy)
    seqs = [made.add(100, 5, owner=str(number % 2)) for number in range(4)]
    made.run()
    assert all(len(seq.token_ids) == 105 for seq in seqs)


def test_steps_begin_small_on_an_unknown_device() -> None:
    made = SimulatedEngine(lambda work: 1e-5 * work.prompt_tokens + 1e-2)
    made.add(16_000)
    made.run()
    assert [batch.total_tokens_num for batch, _ in made.steps[:4]] == [64, 256, 1024, 4096]
    assert StepWork.of(made.steps[1][0]).prompt_pairs == 256 * (64 + 128)
