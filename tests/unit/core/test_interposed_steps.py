"""Short prompts of owners with little recent service are computed while a long step of others is paused.

The scheduler is tested on a simulated device, and the busy loop over a stub of the model.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ScheduledBatch, ScheduledBatchOutput, StepBuilder
from engine.config.config import Config
from engine.core import step_pipeline
from engine.core.engine_core import EngineCore
from engine.core.scheduler import Scheduler
from engine.core.step_budget import StepBudget
from engine.messages import AbortRequests, PoolingParams, ReleaseCache, Shutdown, StepOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceStatus
from tests.simulated_engine import SimulatedEngine, device
from tests.unit.core_bench import BLOCK_SIZE, Bench, StubRunner, ends

FIXED, TOKEN = 0.018, 0.0004
DEVICE = device(FIXED, TOKEN, decode=0.002)
INTERPOSED_SHARE = 0.022
"""Share of the time that interposed steps may cost beyond their tokens."""


def loaded_engine(**settings: object) -> SimulatedEngine:
    """A scheduler that has measured its device, and on which ten owners compute long prompts and answers."""
    options = {"max_interposed_tokens": 512, "default_step_seconds": 0.5, "max_step_seconds": None}
    made = SimulatedEngine(DEVICE, **options | settings)
    made.add(3000, 20)
    made.run()
    made.now += 100
    for number in range(40):
        made.add(8000 if number % 10 < 5 else 40, 3000, owner=f"heavy {number % 10}", at=made.now)
    made.run(lambda: made.now > 104)
    made.steps.clear()
    made.interposed.clear()
    return made


def rounds(made: SimulatedEngine, count: int, owner: str = "light") -> list[Sequence]:
    """Short requests of an owner, each of which arrives a while after the previous one has ended."""
    seqs = []
    for number in range(count):
        seqs.append(made.add(20, 1, owner=owner, at=made.now + 5.0 + 0.037 * number))
        made.run(lambda: seqs[-1].is_finished)
    return seqs


def test_a_light_owner_has_its_first_token_before_a_long_step_ends() -> None:
    made = loaded_engine()
    seqs = rounds(made, 6)
    alone = FIXED + 20 * TOKEN
    assert max(seconds for _, seconds in made.steps) > 4 * alone, "steps of the others are long"
    assert max(map(made.ttft, seqs)) <= 3 * alone
    made.scheduler.check_integrity()


def test_without_it_the_light_owner_waits_for_that_step() -> None:
    made = loaded_engine(max_interposed_tokens=0)
    assert max(map(made.ttft, rounds(made, 6))) > 4 * (FIXED + 20 * TOKEN)
    assert not made.interposed


def test_what_interposed_steps_cost_is_bounded_however_many_light_owners_come() -> None:
    made = loaded_engine()
    start = made.now
    for number in range(400):
        made.add(20, 1, owner=f"light {number}", at=start + 0.05 * number)
    made.run(lambda: made.now > start + 20)
    assert len(made.interposed) * FIXED <= INTERPOSED_SHARE * (made.now - start) + 13 * FIXED
    assert made.interposed
    assert made.num_pauses <= len(made.interposed), "no step pauses for a prompt that is not interposed"


@given(
    owners=st.lists(
        st.tuples(st.sampled_from([20, 900, 4000]), st.sampled_from([1, 40]), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    ),
    arrivals=st.lists(
        st.tuples(st.floats(0.001, 0.4), st.integers(0, 20), st.integers(1, 600), st.integers(1, 3)), max_size=20
    ),
)
@settings(max_examples=settings.default.max_examples // 5, deadline=None)
def test_interposed_steps_cost_little_whoever_sends_what(
    owners: list[tuple[int, int, int]], arrivals: list[tuple[float, int, int, int]]
) -> None:
    made = SimulatedEngine(DEVICE, max_interposed_tokens=512, default_step_seconds=0.5, max_step_seconds=None)
    made.add(3000, 20)
    made.run()
    start = made.now = made.now + 100
    for number, (num_tokens, max_tokens, count) in enumerate(owners):
        for _ in range(count):
            made.add(num_tokens, max_tokens, owner=f"steady {number}", at=start)
    at = start
    for wait, owner, num_tokens, max_tokens in arrivals:
        at += wait
        made.add(num_tokens, max_tokens, owner=f"owner {owner}", at=at)
    made.run()
    beyond_their_tokens = FIXED * len(made.interposed)
    assert beyond_their_tokens <= INTERPOSED_SHARE * (made.now - start) + 13 * FIXED
    made.scheduler.check_integrity()


def test_no_step_pauses_and_nothing_is_interposed_while_all_owners_are_alike() -> None:
    made = SimulatedEngine(DEVICE, max_interposed_tokens=512, default_step_seconds=0.5, max_step_seconds=None)
    made.add(3000, 20)
    made.run()
    start = made.now = made.now + 100
    for number in range(600):
        # They arrive during all steps, and for most of the time none has less service than another.
        made.add(60, 20, owner=f"owner {number % 10}", at=start + 0.011 * number)
    made.run(lambda: made.now > start + 2)
    made.interposed.clear()
    made.num_pauses = 0
    made.run()
    assert made.scheduler.is_finished()
    assert (made.num_pauses, len(made.interposed)) == (0, 0)


def engine_of_ten_owners(seconds_per_prompt_token: float) -> SimulatedEngine:
    """An engine of a small model whose ten owners decode for two seconds, and which interposes no steps."""
    settings = {"max_interposed_tokens": 512, "default_step_seconds": 0.05, "max_step_seconds": None}
    made = SimulatedEngine(device(0.0008, seconds_per_prompt_token, decode=0.00012), **settings)
    made.add(3000, 20)
    made.run()
    for number in range(40):
        made.add(20, 3000, owner=f"heavy {number % 10}", at=made.now)
    end = made.now + 2
    made.run(lambda: made.now > end)
    budget = made.scheduler.step_budget
    assert budget is not None
    budget.note_failed_interposed()
    return made


@pytest.mark.parametrize(("service", "is_whole"), [(0.9, True), (1.2, False)])
def test_a_short_prompt_of_an_owner_served_no_more_than_the_mean_is_added_whole_to_a_short_step(
    service: float, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decodes of others leave only the time of a chunk in each step of a small model."""
    made = engine_of_ten_owners(0.00006)
    monkeypatch.setattr(made.scheduler._shares, "recent", lambda owner: service if owner == "light" else 0.5)
    made.steps.clear()
    made.interposed.clear()
    light = made.add(120, 1, owner="light", at=made.now)
    made.run(lambda: light.is_finished)
    computing = [seconds for batch, seconds in made.steps if light in batch.sequences]
    assert (len(computing) == 1) is is_whole
    assert max(seconds for _, seconds in made.steps) <= 0.01 + 0.5 * 0.02
    assert not made.interposed


def test_steps_of_a_few_milliseconds_are_paused_for_a_light_owner() -> None:
    """A small model's first token would otherwise wait for longer than its own step takes."""
    made = SimulatedEngine(
        device(0.0008, 0.00003, decode=0.00012),
        max_interposed_tokens=512,
        default_step_seconds=0.05,
        max_step_seconds=None,
    )
    made.add(3000, 20)
    made.run()
    for number in range(40):
        made.add(20, 3000, owner=f"heavy {number % 10}", at=made.now + 100)
    made.run(lambda: made.now > 104)
    lights = [made.add(20, 1, owner="light", at=made.now + 0.2137 * number) for number in range(20)]
    made.run(lambda: lights[-1].is_finished)
    assert made.num_pauses >= 15, "others arrive while a step begins"
    assert max(map(made.ttft, lights)) <= 2 * (0.0008 + 20 * 0.00003)


def test_chunks_of_a_small_model_do_not_shrink_while_other_work_delays_its_steps() -> None:
    """Ten owners' prompts in turn would otherwise wait for hundreds of steps of 16 tokens each."""
    made = engine_of_ten_owners(0.0001)
    assert made.scheduler.step_budget is not None
    made.scheduler.step_budget._model.excess = 3.0
    long = made.add(640, 1, owner="long", at=made.now)
    made.steps.clear()
    made.run(lambda: long.is_finished)
    chunks = [batch.total_tokens_num_prefill for batch, _ in made.steps if batch.total_tokens_num_prefill]
    assert len(chunks) <= 640 / 32 + 1


def test_a_prompt_that_was_started_proceeds_next_to_short_prompts_that_are_added_to_each_step() -> None:
    made = engine_of_ten_owners(0.0001)
    long = made.add(640, 1, owner="long", at=made.now)
    made.step()
    made.steps.clear()
    for number in range(100):
        made.add(40, 1, owner=f"light {number % 12}", at=made.now + 0.012 * number)
    made.run(lambda: long.is_finished)
    assert len(made.steps) <= 30, "a step has room for 32 of its tokens"
    assert sum(batch.total_seqs_num_prefill > 1 for batch, _ in made.steps) > 10


def seconds_to_interpose(budget: StepBudget, service: float) -> float:
    """The time of an interposed step for an owner with this recent service, where others were served less."""
    return budget.interposed_step(512, service, least=0.0).seconds


def test_prompts_that_are_added_to_a_step_and_those_interposed_in_it_share_its_time() -> None:
    made = loaded_engine(max_step_seconds=0.008)
    budget = made.scheduler.step_budget
    assert budget is not None
    budget.begin_step(["heavy", "light"], made.now, has_slot=True)
    free, most = seconds_to_interpose(budget, 0.0), budget.seconds_to_add(0.0)
    budget.note_added(0.75 * most)
    assert seconds_to_interpose(budget, 0.0) == pytest.approx(free - 0.75 * most)
    assert budget.seconds_to_add(0.0) == pytest.approx(0.25 * most)


@pytest.mark.parametrize("service", [0.0, 0.9])
def test_prompts_that_are_added_to_a_step_leave_time_for_interposed_ones(service: float) -> None:
    """Otherwise each step of a small model had no time for interposed ones next to owners with many short prompts."""
    made = engine_of_ten_owners(0.00003)
    budget = made.scheduler.step_budget
    assert budget is not None
    budget.begin_step(["heavy", "light"], made.now, has_slot=True)
    budget.note_added(budget.seconds_to_add(service))
    assert budget.seconds_to_add(service) == pytest.approx(0.0, abs=1e-9)
    assert seconds_to_interpose(budget, 0.2) >= 45 * 0.00003


@pytest.fixture(scope="module")
def measured_budget() -> StepBudget:
    budget = loaded_engine(max_step_seconds=0.008).scheduler.step_budget
    assert budget is not None
    return budget


def test_an_owner_leaves_time_of_interposed_steps_to_lighter_ones_by_its_service() -> None:
    """A prompt of 300 tokens took all of it, so that a light owner's prompt waited for two steps."""
    made = engine_of_ten_owners(0.00003)
    budget = made.scheduler.step_budget
    assert budget is not None
    budget.begin_step(["heavy", "light"], made.now, has_slot=True)
    whole = seconds_to_interpose(budget, 0.0)
    assert 0.4 * whole < seconds_to_interpose(budget, 0.5) < 0.5 * whole
    assert seconds_to_interpose(budget, 0.8) < 0.2 * whole
    assert 0.7 * whole < budget.interposed_step(512, 0.8, least=0.8).seconds < 0.75 * whole


def test_the_lightest_of_those_served_lately_leaves_time_to_an_owner_that_was_not() -> None:
    """A client whose requests are minutes apart waited for the rest of a step and for a whole one."""
    made = engine_of_ten_owners(0.00003)
    budget = made.scheduler.step_budget
    assert budget is not None
    budget._allowance = 1.0
    budget.begin_step(["heavy", "frequent"], made.now, has_slot=True)
    step = budget.interposed_step(512, 0.85, least=0.85)
    budget.note_interposed(step.batch()[0], step.seconds + budget._fixed)
    assert not budget.may_interpose("frequent", 0.85, least=0.85)
    assert budget.may_interpose("rare", 0.0, least=0.85)
    assert seconds_to_interpose(budget, 0.0) >= 60 * 0.00003


def test_steps_interposed_before_a_step_and_in_it_share_its_time() -> None:
    """A stream waits for both."""
    made = engine_of_ten_owners(0.00003)
    budget = made.scheduler.step_budget
    assert budget is not None
    step = made.steps[-1][0]
    budget.note(step, 0.01)
    budget.begin_step(["heavy", "light"], made.now, has_slot=True)
    whole = seconds_to_interpose(budget, 0.0)
    budget.note(step, 0.01)
    budget.note_interposed(step, 0.004)
    budget.begin_step(["heavy", "light"], made.now, has_slot=True)
    assert seconds_to_interpose(budget, 0.0) == pytest.approx(whole - 0.004)
    budget.note(step, 0.01)
    assert seconds_to_interpose(budget, 0.0) == pytest.approx(whole), "before the next step there is time again"


def test_a_long_prompt_of_a_lighter_owner_keeps_no_short_one_waiting() -> None:
    made = loaded_engine()
    long = made.add(8000, 1, owner="long", at=made.now)
    short = made.add(20, 1, owner="light", at=made.now)
    made._take_in()
    made.scheduler._shares.charge("light", 10.0)
    scheduled = made.scheduler.interpose()
    assert scheduled is not None
    assert scheduled[0].req_ids == [short.id]
    assert long.status is SequenceStatus.WAITING


def test_many_owners_with_long_prompts_cost_an_interposed_step_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is chosen before each step and in each pause. The prompts begin with the same cached text."""
    made = loaded_engine()
    start = [5] * 2000
    first = Sequence(start, BLOCK_SIZE, SamplingParams(max_tokens=1), id=9000, owner="first")
    made.token_times[first.id] = []
    made.scheduler.add(first)
    made.run(lambda: first.is_finished)
    for number in range(1, 41):
        prompt = start + [number] * 2000
        params = SamplingParams(max_tokens=1)
        made.scheduler.add(Sequence(prompt, BLOCK_SIZE, params, id=9000 + number, owner=f"long {number}"))
    for _ in range(6):
        assert made.scheduler.interpose() is None
    find, found = made.scheduler.block_manager.pool.find, []
    monkeypatch.setattr(made.scheduler.block_manager.pool, "find", lambda *args: found.append(args) or find(*args))
    made.add(20, 1, owner="light", at=made.now)
    made._take_in()
    made.scheduler._shares.charge("light", 10.0)
    scheduled = made.scheduler.interpose()
    assert scheduled is not None
    assert [seq.owner for seq in scheduled[1].values()] == ["light"]
    assert len(found) < 10


def test_sequences_are_preempted_for_one_owner_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that frees too little for it, no others lose their blocks for the next owner."""
    made = loaded_engine()
    scheduler, preempted = made.scheduler, []

    def preempt(seq: Sequence, now: float, num_reserved: int) -> bool:
        preempted.append(seq.owner)
        scheduler.preempt(scheduler.running[-1])
        return True

    monkeypatch.setattr(scheduler, "_preempt_for", preempt)
    monkeypatch.setattr(scheduler.block_manager, "can_allocate", lambda seq: False)
    for number in range(4):
        made.add(20, 1, owner=f"light {number}", at=made.now)
    made._take_in()
    assert scheduler.interpose() is None
    assert len(preempted) == 1


def test_an_owner_at_half_of_the_mean_is_interposed_on_a_slow_machine() -> None:
    """Its prompt takes a third of a shared step. Owners left three tenths of the time for each tenth of service beyond
    0.3, and so none of its prompts fitted."""
    settings = {"max_interposed_tokens": 512, "default_step_seconds": 0.05, "max_step_seconds": None}
    made = SimulatedEngine(device(0.001, 0.00014, decode=0.00025), **settings)
    made.add(3000, 20)
    made.run()
    made.now += 60
    running = [made.add(20, 50, owner=f"heavy {number % 10}", at=made.now) for number in range(160)]
    lights = [made.add(60, 5, owner="light", at=made.now + 3)]
    while len(lights) <= 30:
        made.step()
        for number, seq in enumerate(running):
            if seq.is_finished:
                running[number] = made.add(20, 50, owner=seq.owner, at=made.now)
        if lights[-1].is_finished:
            lights.append(made.add(60, 5, owner="light", at=made.now + 0.2))
    assert made.scheduler._shares.recent("light") > 0.3
    assert sorted(map(made.ttft, lights[:30]))[-2] <= 3 * (0.001 + 60 * 0.00014)


@given(steps=st.lists(st.tuples(st.floats(0.0, 0.01), st.floats(0.0, 1.0)), min_size=50, max_size=200))
@settings(max_examples=20, deadline=None)
def test_prompts_that_are_added_to_steps_take_a_quarter_of_the_time_whoever_sends_them(
    measured_budget: StepBudget, steps: list[tuple[float, float]]
) -> None:
    budget = copy.deepcopy(measured_budget)
    now = start = 1000.0
    budget.begin_step(["heavy", "light"], now, has_slot=True)
    most, added = budget.seconds_to_add(0.0), 0.0
    for seconds, part in steps:
        seconds_added = part * budget.seconds_to_add(0.0)
        budget.note_added(seconds_added)
        added += seconds_added
        now += seconds + seconds_added
        budget.begin_step(["heavy", "light"], now, has_slot=True)
    # A step leaves half of its time beyond its bound; four steps' whole times may be saved up.
    assert added <= 0.25 * (now - start) + 4 * most / 0.5 + 1e-9


def test_steps_of_several_owners_are_long_while_a_light_one_could_interrupt_them() -> None:
    made = SimulatedEngine(DEVICE, max_interposed_tokens=512, default_step_seconds=0.5, max_step_seconds=None)
    made.add(3000, 20)
    made.run()
    made.now += 100
    heavy = [made.add(3000, 2, owner=f"heavy {number % 5}", at=made.now) for number in range(10)]

    def longest_step(seconds: float) -> int:
        made.steps.clear()
        end = made.now + seconds
        while made.now < end:
            made.step()
            for number, seq in enumerate(heavy):
                if seq.is_finished:
                    heavy[number] = made.add(3000, 2, owner=seq.owner, at=made.now)
        return max(batch.total_tokens_num for batch, _ in made.steps)

    longest_step(20)
    long = longest_step(10)
    light = made.add(20, 1, owner="light", at=made.now + 1.0)
    longest_step(5)
    assert made.ttft(light) <= 2 * (FIXED + 20 * TOKEN), "it is computed in a pause"
    budget = made.scheduler.step_budget
    assert budget is not None
    budget.note_failed_interposed()
    assert longest_step(5) < 0.6 * long, "no step is interposed for ten seconds"
    longest_step(20)
    assert longest_step(10) == pytest.approx(long, rel=0.1)


def test_a_short_step_is_not_paused() -> None:
    made = loaded_engine()
    scheduled = made.scheduler.schedule()
    assert scheduled is not None
    assert made.scheduler.may_pause(scheduled[0]), "the step of ten owners is long"
    alone = StepBuilder(512, 0)
    assert not made.scheduler.may_pause(alone.batch()[0])


def test_owners_that_use_more_leave_interposed_steps_to_those_that_use_less() -> None:
    made = loaded_engine()
    start = made.now
    for number in range(200):
        made.add(60, 12, owner="frequent", at=start + 0.1 * number)
    seqs = rounds(made, 6)
    assert max(map(made.ttft, seqs)) <= 3 * (FIXED + 20 * TOKEN)


def test_nothing_is_interposed_while_one_owner_is_alone() -> None:
    made = SimulatedEngine(DEVICE, max_interposed_tokens=512, max_step_seconds=0.5)
    for number in range(20):
        made.add(900, 30, at=0.1 * number)
    made.run()
    assert not made.interposed


def test_the_first_prompt_of_an_owner_next_to_one_that_was_alone_is_interposed() -> None:
    made = SimulatedEngine(DEVICE, max_interposed_tokens=512, default_step_seconds=0.5, max_step_seconds=None)
    for number in range(20):
        made.add(8000, 100, owner="alone", at=0.1 * number)
    made.run(lambda: made.now > 40)
    seq = made.add(20, 1, owner="light", at=made.now + 0.05)
    made.run(lambda: seq.is_finished)
    assert max(seconds for _, seconds in made.steps) > 20 * FIXED, "an owner that is alone has long steps"
    assert made.ttft(seq) <= 3 * (FIXED + 20 * TOKEN)
    assert [batch.req_ids for batch in made.interposed] == [[seq.id]]


def test_a_short_prompt_waits_for_no_further_step_where_heavy_owners_hold_all_slots() -> None:
    """The heavy owners' choices end at different times, so that some of them hold fewer slots than others and have
    less service, and the light owner's earlier requests often still run."""
    made = loaded_engine(max_num_seqs=32)
    source, start = random.Random(0), made.now

    def choices(number: int) -> list[Sequence]:
        length = source.choice([30, 200, 400])
        return [made.add(20, length, owner=f"heavy {number % 10}", at=made.now) for _ in range(4)]

    heavy = [choices(number) for number in range(20)]
    arrivals = [start + 4 + 5.0 * (number // 2) + 0.05 * number for number in range(30)]
    lights = [made.add(20, 4, owner="light", at=at) for at in arrivals]
    while not all(seq.is_finished for seq in lights):
        made.step()
        heavy = [choices(n) if all(seq.is_finished for seq in each) else each for n, each in enumerate(heavy)]
    assert made.scheduler.stats("", 0.0).num_waiting > 20
    # Two prompts that arrive during one step are computed after it.
    longest = max(seconds for _, seconds in made.steps)
    assert max(map(made.ttft, lights)) <= longest + 2 * (FIXED + 20 * TOKEN) + 1e-9
    made.scheduler.check_integrity()


def test_no_slot_is_freed_before_an_interposed_step_for_a_prompt_that_is_too_long_for_it() -> None:
    """Such slots are freed after a check every 50 ms: steps of a few milliseconds would preempt as often."""
    made = loaded_engine(max_num_seqs=20)
    before = made.scheduler.stats("", 0.0).preemptions
    seq = made.add(3000, 1, owner="light", at=made.now)
    made._take_in()
    assert made.scheduler.interpose() is None
    assert made.scheduler.stats("", 0.0).preemptions == before
    made.run(lambda: seq.is_finished)
    assert made.scheduler.stats("", 0.0).preemptions > before


def test_a_short_prompt_of_a_heavier_weight_that_holds_less_than_its_share_is_interposed() -> None:
    made = loaded_engine(max_num_seqs=20)
    made.add(20, 3000, owner="light", at=made.now, weight=4.0)
    made.run(lambda: made.now > 120)
    late = [made.add(20, 3000, owner="light", at=made.now, weight=4.0) for _ in range(3)]
    made._take_in()
    made._interpose(None)
    assert all(seq.id in {id for batch in made.interposed for id in batch.req_ids} for seq in late)


def test_no_owner_is_preempted_for_one_that_holds_its_share() -> None:
    made = loaded_engine(max_num_seqs=20)
    before = made.scheduler.stats("", 0.0).preemptions
    light = [made.add(20, 3000, owner="light", at=made.now + number) for number in range(10)]
    made.run(lambda: made.now > light[-1].arrive_time + 5)
    running = Counter(seq.owner for seq in made.scheduler.running)
    assert running["light"] == 1, "20 slots of 11 owners"
    assert made.scheduler.stats("", 0.0).preemptions - before <= 4, "the light owner has ten sequences"


def test_an_interposed_prompt_takes_no_slot_for_which_an_owner_that_is_as_light_waits() -> None:
    made = SimulatedEngine(DEVICE, max_interposed_tokens=512, max_step_seconds=0.5, max_num_seqs=10)
    running = [made.add(40, 3000, owner=f"heavy {number}") for number in range(10)]
    made.run(lambda: made.now > 20)
    long = made.add(3000, 1, owner="long", at=made.now)
    made.step()
    assert long.status is SequenceStatus.WAITING, "there is no slot"
    made.scheduler.abort([running[0].id])
    made.add(20, 1, owner="short", at=made.now)
    made.step()
    assert long.status is SequenceStatus.RUNNING
    assert not made.interposed


@pytest.mark.parametrize(
    "fields",
    [{}, {"is_suspect": True}, {"adapter": 1}, {"pooling": PoolingParams()}],
    ids=lambda each: str(list(each)),
)
def test_a_pause_is_asked_for_only_for_what_can_be_interposed(fields: dict[str, Any]) -> None:
    made = loaded_engine()
    params = SamplingParams(max_tokens=1)
    seq = Sequence([5] * 20, BLOCK_SIZE, params, id=9000, owner="light", **fields)
    assert made.scheduler.would_interpose(seq) is (not fields)


def test_a_slot_is_kept_for_interposed_steps_while_several_owners_fill_all_others() -> None:
    made = loaded_engine(max_num_seqs=64)
    for number in range(80):
        made.add(20, 3000, owner=f"heavy {number % 10}", at=made.now)
    made.run(lambda: made.now > 110)
    assert len(made.scheduler.running) == 63
    pauses = made.num_pauses
    seq = made.add(20, 1, owner="light", at=made.now + 0.07)
    made.run(lambda: seq.is_finished)
    assert made.num_pauses == pauses + 1
    assert made.ttft(seq) <= 2 * (FIXED + 20 * TOKEN)


def test_an_owner_whose_prompt_is_too_long_to_be_interposed_does_not_wait_for_the_kept_slot() -> None:
    made = loaded_engine(max_num_seqs=64)
    for number in range(80):
        made.add(20, 3000, owner=f"heavy {number % 10}", at=made.now)
    made.run(lambda: made.now > 110)
    seq = made.add(3000, 1, owner="light", at=made.now)
    made.run(lambda: seq.is_finished or made.now > 140)
    assert seq.is_finished, "a sequence of an owner with more than its share is preempted"


def test_a_single_owner_uses_all_slots() -> None:
    made = SimulatedEngine(DEVICE, max_interposed_tokens=512, max_step_seconds=0.5, max_num_seqs=64)
    for _ in range(80):
        made.add(20, 3000)
    made.run(lambda: made.now > 10)
    assert len(made.scheduler.running) == 64


def test_no_pause_is_asked_for_without_a_free_slot() -> None:
    made = loaded_engine(max_num_seqs=10)
    seq = Sequence([5] * 20, BLOCK_SIZE, SamplingParams(max_tokens=1), id=9000, owner="light")
    assert not made.scheduler.would_interpose(seq)


def test_pauses_in_which_nothing_is_interposed_are_counted() -> None:
    made = loaded_engine()
    seq = Sequence([5] * 20, BLOCK_SIZE, SamplingParams(max_tokens=1), id=9000, owner="light")
    pauses = 0
    while made.scheduler.would_interpose(seq):
        made.scheduler.note_idle_pause()
        pauses += 1
    assert pauses <= 12 * FIXED / 0.0005


@pytest.mark.parametrize("fields", [{"is_suspect": True}, {"adapter": 1}], ids=["suspect", "adapter"])
def test_what_may_not_be_interposed_waits_for_the_next_step(fields: dict[str, object]) -> None:
    made = loaded_engine()
    seq = made.add(60, 2, owner="light", at=made.now + 0.01, **fields)
    made.run(lambda: seq.is_finished)
    assert not made.interposed


def test_a_prompt_does_not_read_blocks_that_the_paused_step_writes() -> None:
    made = loaded_engine()
    seqs = []
    for number in range(2):
        seq = Sequence([5] * 64, BLOCK_SIZE, SamplingParams(max_tokens=1), id=9000 + number, owner=f"twin {number}")
        made.token_times[seq.id] = [made.now]
        seqs.append(seq)
    made.scheduler.add(seqs[0])
    scheduled = made.scheduler.schedule()
    assert scheduled is not None
    assert seqs[0].id in scheduled[0].req_ids, "the step computes the first of two equal prompts"
    made.scheduler.add(seqs[1])
    assert made.scheduler.block_manager.count_cached_tokens(seqs[1]) > 0, "its blocks are published already"
    assert made.scheduler.interpose(scheduled[0]) is None


class PausingRunner(StubRunner):
    """Calls `during` in each step that may pause, and pauses if that interrupts it."""

    def __init__(self) -> None:
        super().__init__()
        self.during: Callable[[ScheduledBatch], None] = lambda batch: None
        self.interposed: list[ScheduledBatch] = []
        self.interposed_before_release: int | None = None
        self.fails = False
        self.num_pauses = 0
        self._is_interrupted = False

    def interrupt(self) -> None:
        self._is_interrupted = True

    def withdraw_interruption(self) -> None:
        self._is_interrupted = False

    def release_cache(self) -> None:
        self.interposed_before_release = len(self.interposed)

    def forward_with_pauses(self, batch: ScheduledBatch, on_pause: Callable[[], object], /) -> ScheduledBatchOutput:
        self.during(batch)
        if self._is_interrupted:
            self._is_interrupted = False
            self.num_pauses += 1
            on_pause()
        return self.forward(batch)

    def forward_interposed(self, batch: ScheduledBatch, /) -> ScheduledBatchOutput:
        self.interposed.append(batch)
        if self.fails:
            raise RuntimeError("an interposed step failed")
        return ScheduledBatchOutput(dict.fromkeys(batch.req_ids, (5,)))


class PausingBench(Bench):
    """A bench each of whose steps may pause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(num_kvcache_blocks=256, max_num_seqs=32, max_step_seconds=0.5)
        self.runner: PausingRunner = PausingRunner()
        config = Config(**{**self.defaults, "num_kvcache_blocks": 256, "max_num_seqs": 32, "max_step_seconds": 0.5})
        scheduler = Scheduler(config, max_interposed_tokens=64)
        self.core = EngineCore(config, scheduler, self.runner, SimpleQueue(), SimpleQueue(), record=self.record)
        budget = self.core.scheduler.step_budget
        assert budget is not None
        monkeypatch.setattr(budget, "may_pause", lambda batch: True)
        monkeypatch.setattr(budget, "_allowance", 1e9)
        self._is_sent = False

    def owned(self, seq_id: int, owner: str, max_tokens: int = 4) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Sequence([10 + seq_id] * 3, BLOCK_SIZE, params, id=seq_id, owner=owner)

    def during_step_of(self, seq_id: int, *messages: object) -> None:
        """Send these during the second step that computes a sequence."""
        seen: list[ScheduledBatch] = []

        def send(batch: ScheduledBatch) -> None:
            if seq_id in batch.req_ids and batch not in seen:
                seen.append(batch)
                if len(seen) == 2:
                    for message in messages:
                        self.core.input_queue.put(message)  # type: ignore[arg-type]
                        if isinstance(message, Sequence):
                            self.core.interrupt_for(message)

        self.runner.during = send


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> PausingBench:
    return PausingBench(monkeypatch)


def test_a_step_is_paused_for_a_light_owner_only(bench: PausingBench) -> None:
    """Sequences of the owner with the most service arrive in each step, and one of another owner arrives once."""
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=30))
    steps = 0

    def send(batch: ScheduledBatch) -> None:
        nonlocal steps
        steps += 1
        if 2 < steps < 20:
            seq = bench.owned(100 + steps, "light" if steps == 10 else "heavy")
            bench.core.input_queue.put(seq)
            bench.core.interrupt_for(seq)

    bench.runner.during = send
    bench.run_until_done(0, *range(103, 120))
    assert bench.runner.num_pauses == 1
    assert [batch.req_ids for batch in bench.runner.interposed] == [[110]]


@pytest.mark.parametrize("pauses", [True, False])
def test_an_interposed_step_is_no_part_of_the_duration_of_another_step(
    bench: PausingBench, monkeypatch: pytest.MonkeyPatch, *, pauses: bool
) -> None:
    """A step takes 1 s, and one that is interposed in it or before the next one takes 100."""
    now, durations = 0.0, list[tuple[float, float]]()

    def taking(seconds: float, result: ScheduledBatchOutput | None = None) -> Any:
        nonlocal now
        now += seconds
        return result

    monkeypatch.setattr(step_pipeline, "time", SimpleNamespace(perf_counter=lambda: now))
    interpose = bench.runner.forward_interposed
    monkeypatch.setattr(bench.runner, "forward_interposed", lambda batch: taking(100.0, interpose(batch)))
    monkeypatch.setattr(
        bench.core.scheduler,
        "note_duration",
        lambda batch, seconds, *, host_seconds, **_: durations.append((seconds, host_seconds)),
    )
    bench.core._steps.note_wait()
    bench.runner.on_step = lambda step, batch: taking(1.0)
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=6))
    if not pauses:
        monkeypatch.setattr(bench.core, "interrupt_for", lambda seq: None)
    bench.during_step_of(0, bench.owned(1, "light"))
    bench.run_until_done(0, 1)
    assert len(bench.runner.interposed) == 1
    assert bench.runner.num_pauses == pauses
    assert set(durations) == {(1.0, 0.0)}


def order(messages: list[StepOutputs]) -> list[int]:
    """The ids of outputs in the order of their messages."""
    return [output.request_id for message in messages for output in message.outputs if output.output_tokens]


def test_what_arrives_during_a_step_is_answered_before_its_end(bench: PausingBench) -> None:
    light = bench.owned(1, "light")
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=6))
    bench.during_step_of(0, light)
    messages = bench.run_until_done(0, 1)
    assert [batch.req_ids for batch in bench.runner.interposed] == [[1]]
    assert order(messages).index(1) == order(messages).index(0) + 2, "its token precedes the second step's"
    assert {seq_id: reason for seq_id, reason in ends(messages).items() if seq_id < 2} == dict.fromkeys(
        (0, 1), "max_tokens"
    )


def test_aborts_that_arrive_during_a_step_wait_for_its_end(bench: PausingBench) -> None:
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=50))
    bench.during_step_of(0, AbortRequests([0]), bench.owned(1, "light"))
    messages = bench.run_until_done(0, 1)
    assert len(bench.runner.interposed) == 1
    assert ends(messages)[0] == "abort"
    assert order(messages).count(0) == 2, "the step that was paused counts"


def test_what_follows_a_release_of_the_cache_waits_for_the_steps_end(bench: PausingBench) -> None:
    """As if a server were put to sleep and woken during a step."""
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=50))
    bench.during_step_of(0, AbortRequests([0]), ReleaseCache(), bench.owned(1, "light"))
    ended = ends([message for message in bench.run_until_done(0, 1) if isinstance(message, StepOutputs)])
    assert bench.runner.interposed_before_release == 0
    assert [ended[0], ended[1]] == ["abort", "max_tokens"]


def test_a_sequence_that_ends_in_an_interposed_step_leaves_its_slot_and_blocks(bench: PausingBench) -> None:
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=6))
    bench.during_step_of(0, bench.owned(1, "light", max_tokens=1), bench.owned(2, "other", max_tokens=3))
    messages = bench.run_until_done(0, 2)
    assert sorted(seq_id for batch in bench.runner.interposed for seq_id in batch.req_ids) == [1, 2]
    assert [ends(messages)[seq_id] for seq_id in (0, 1, 2)] == ["max_tokens"] * 3


def test_an_interposed_step_that_raises_is_computed_again_with_others(bench: PausingBench) -> None:
    bench.runner.fails = True
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=6))
    bench.during_step_of(0, bench.owned(1, "light"))
    messages = bench.run_until_done(0, 1)
    assert len(bench.runner.interposed) == 1, "and not tried again at once"
    assert [ends(messages)[seq_id] for seq_id in (0, 1)] == ["max_tokens"] * 2
    assert order(messages).count(0) == 6
    assert order(messages).count(1) == 4


def test_what_a_pause_raises_ends_the_core_and_is_no_fault_of_the_paused_steps_sequences(
    bench: PausingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = bench.core.scheduler.interpose

    def interpose(paused: ScheduledBatch | None = None) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        if bench.core.scheduler.waiting and paused is not None:
            raise RuntimeError("a defect")
        return inner(paused)

    monkeypatch.setattr(bench.core.scheduler, "interpose", interpose)
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=6))
    bench.during_step_of(0, bench.owned(1, "light"))
    with pytest.raises(RuntimeError, match="a defect"):
        bench.core.busy_loop()
    assert not bench.record.read(), "no sequence is suspected"
    assert [batch.req_ids for batch in bench.runner.batches].count([0]) == 2, "and none is computed alone"


def test_a_sequence_that_cannot_be_taken_in_during_a_step_is_suspected(
    bench: PausingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = bench.core.scheduler.add

    def add(seq: Sequence) -> None:
        if seq.id == 1:
            raise RuntimeError("a defect")
        inner(seq)

    monkeypatch.setattr(bench.core.scheduler, "add", add)
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=6))
    bench.during_step_of(0, bench.owned(1, "light"))
    with pytest.raises(RuntimeError, match="a defect"):
        bench.core.busy_loop()
    assert list(bench.record.read()) == [1]


def test_the_step_of_a_suspect_alone_is_not_paused(bench: PausingBench) -> None:
    suspect = bench.owned(7, "suspect", max_tokens=3)
    suspect.is_suspect = True
    pausable: list[list[int]] = []
    bench.runner.during = lambda batch: pausable.append(batch.req_ids)
    bench.core.input_queue.put(suspect)
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=6))
    bench.run_until_done(0, 7)
    alone = [batch.req_ids for batch in bench.runner.batches].index([7])
    assert alone == 0, "a suspect is computed alone first"
    assert len(pausable) == len(bench.runner.batches) - 1
    assert [7] not in pausable


def test_a_pause_is_asked_for_only_while_a_step_can_pause(bench: PausingBench) -> None:
    light = bench.owned(1, "light")
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=6))
    asked: list[bool] = []

    def send(step: int, batch: ScheduledBatch) -> None:
        if step == 3:
            # Between two steps: the sequence is in the queue, which is read before the next step.
            bench.core.input_queue.put(light)

    bench.runner.on_step = send
    bench.runner.interrupt = lambda: asked.append(True)  # type: ignore[method-assign]
    bench.core.interrupt_for(light)
    bench.run_until_done(0, 1)
    assert not asked
    assert bench.runner.num_pauses == 0


def test_a_step_does_not_pause_for_what_was_taken_in_before_it(bench: PausingBench) -> None:
    """It arrives while a step samples, after the last operator at which the step could pause."""
    light = bench.owned(1, "light")
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=6))

    def sample(step: int, batch: ScheduledBatch) -> None:
        if step == 3:
            bench.core.input_queue.put(light)
            bench.core.interrupt_for(light)

    bench.runner.on_step = sample
    bench.run_until_done(0, 1)
    assert [batch.req_ids for batch in bench.runner.interposed] == [[1]]
    assert bench.runner.num_pauses == 0


def test_the_record_names_the_paused_step_and_the_interposed_one(bench: PausingBench) -> None:
    seen: list[list[int]] = []
    inner = bench.runner.forward_interposed

    def look(batch: ScheduledBatch, /) -> ScheduledBatchOutput:
        seen.append(sorted(bench.record.read()))
        return inner(batch)

    bench.runner.forward_interposed = look  # type: ignore[method-assign]
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=6))
    bench.during_step_of(0, bench.owned(1, "light"))
    bench.run_until_done(0, 1)
    assert seen == [[0, 1, 999]]


def test_a_shutdown_during_a_step_ends_all_sequences_once(bench: PausingBench) -> None:
    bench.core.input_queue.put(bench.owned(0, "heavy", max_tokens=100))
    bench.core.input_queue.put(bench.owned(3, "other", max_tokens=100))
    bench.during_step_of(0, bench.owned(1, "light"), Shutdown())
    assert ends(bench.run()) == dict.fromkeys((0, 1, 3), "abort")
