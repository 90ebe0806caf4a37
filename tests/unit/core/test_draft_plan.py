"""The number of drafts of sequences: as many as pay, by the measured costs of steps and the accepted drafts."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from engine.batch import DraftWork, ScheduledBatch
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.speculative.adaptive import KEPT_STEPS, DraftPlan, NetGain, StepCosts

K = 4
ROOM = 1000


class Simulation:
    """Rows that decode on a machine of given costs, with drafts that are accepted with a given probability."""

    def __init__(
        self,
        num_rows: int,
        chance: Callable[[int], float],
        *,
        step: Callable[[int], float],
        drafting: Callable[[int, int], float] = lambda rows, depth: 0.0,
        room: int = ROOM,
        by_model: bool = False,
    ) -> None:
        self.plan = DraftPlan(K, by_model=by_model)
        self._chance, self._step, self._drafting, self._room = chance, step, drafting, room
        self._random = random.Random(7)
        self.seqs = [Sequence([1], 16, SamplingParams(), id=i) for i in range(num_rows)]
        self._drafts = [0] * num_rows
        self.seconds = 0.0
        self.verified: list[int] = []

    def run(self, steps: int) -> float:
        """Ratio of the tokens per second of `steps` steps to those of plain steps."""
        tokens, self.seconds = 0, 0.0
        self.verified.clear()
        for _ in range(steps):
            self.plan.plan(self.seqs, self._room)
            drafts, num_rows = self._drafts, len(self.seqs)
            seconds = self._step(num_rows + sum(drafts))
            is_kept = self.plan.is_keeping and self.plan.is_idle
            self.plan.note_step(num_rows, num_rows + sum(drafts), seconds, is_kept=is_kept)
            self._drafts = [self.plan.limit(seq) for seq in self.seqs]
            for seq, count in zip(self.seqs, drafts, strict=True):
                accepted = 0
                while accepted < count and self._random.random() < self._chance(seq.id):
                    accepted += 1
                seq.token_ids += [1] * (1 + accepted)
                tokens += 1 + accepted
                if count:
                    self.plan.note(seq, count, accepted)
                self.verified.append(count)
            depth, drafting = max(self._drafts), 0.0
            if depth:
                rows = sum(map(bool, self._drafts))
                drafting = self._drafting(rows, depth)
                self.plan.costs.note_drafting(DraftWork(drafting, rows, depth))
            self.seconds += seconds + drafting
        return tokens / self.seconds / (len(self.seqs) / self._step(len(self.seqs)))


def memory_bound(tokens: int) -> float:
    """Seconds of a step that mostly reads weights."""
    return 0.060 + 0.002 * tokens


def compute_bound(tokens: int) -> float:
    return 0.001 + 0.010 * tokens


def test_right_drafts_are_all_made_where_they_cost_little() -> None:
    gain = Simulation(1, lambda _: 0.95, step=memory_bound).run(400)
    assert gain > 3.5
    assert Simulation(8, lambda _: 0.95, step=memory_bound).run(400) > 2.0


@pytest.mark.parametrize("num_rows", [1, 8, 32, 128])
@pytest.mark.parametrize("step", [memory_bound, compute_bound])
def test_wrong_drafts_cost_next_to_nothing(num_rows: int, step: Callable[[int], float]) -> None:
    """Each draft costs the drafter a fifth of a plain step."""
    simulation = Simulation(
        num_rows, lambda _: 0.02, step=step, drafting=lambda rows, depth: depth * 0.2 * step(num_rows)
    )
    simulation.run(100)
    assert simulation.run(1000) > 0.98


def test_right_drafts_that_cost_as_much_as_they_bring_are_not_made() -> None:
    simulation = Simulation(16, lambda _: 0.9, step=compute_bound)
    simulation.run(100)
    assert simulation.run(1000) > 0.98
    assert sum(simulation.verified) < 0.1 * len(simulation.verified)


def test_each_sequence_has_drafts_by_its_own_acceptance() -> None:
    simulation = Simulation(4, lambda seq_id: 0.95 if seq_id % 2 else 0.05, step=memory_bound)
    assert simulation.run(400) > 1.5
    by_row = [sum(simulation.verified[row::4]) / 400 for row in range(4)]
    assert min(by_row[1], by_row[3]) > 3
    assert max(by_row[0], by_row[2]) < 0.5


def test_a_sequence_that_becomes_predictable_gets_drafts_again() -> None:
    chance = 0.0
    simulation = Simulation(1, lambda _: chance, step=memory_bound)
    simulation.run(300)
    assert simulation.plan.limit(simulation.seqs[0]) <= 1
    chance = 1.0
    simulation.run(300)
    assert simulation.plan.limit(simulation.seqs[0]) == K


def test_drafts_are_made_again_where_fewer_rows_leave_them_cheap() -> None:
    """Each token beyond 16 costs as much as a step."""
    simulation = Simulation(16, lambda _: 0.9, step=lambda tokens: 0.05 + 0.05 * max(0, tokens - 16))
    simulation.run(200)
    assert sum(simulation.verified[-160:]) < 20
    simulation.seqs = simulation.seqs[:2]
    simulation._drafts = [0, 0]
    assert simulation.run(200) > 2.0


def test_where_there_is_not_room_the_likeliest_sequences_draft() -> None:
    simulation = Simulation(8, lambda seq_id: 0.9 if seq_id >= 4 else 0.5, step=memory_bound, room=4)
    simulation.run(400)
    drafting = [seq.id for seq in simulation.seqs if simulation.plan.limit(seq)]
    assert set(drafting) >= {4, 5, 6, 7}


def test_costs_between_known_sizes_are_on_a_line_and_unknown_ones_are_tried() -> None:
    costs = StepCosts()
    assert costs.step(3) == 0.0
    costs.note_step(2, 0.010)
    assert costs.step(9) == 0.010, "a larger step is not known to cost more"
    costs.note_step(6, 0.030)
    assert costs.step(4) == pytest.approx(0.020)
    assert costs.step(1) == 0.010
    for _ in range(200):
        costs.note_step(6, 1.0)
    assert costs.step(6) == pytest.approx(1.0, rel=0.01), "what has become slower is believed in the end"


def test_drafting_for_fewer_rows_costs_what_it_costs_for_so_many() -> None:
    """Costs of numbers of rows and depths that were not measured are interpolated between those that were."""
    costs = StepCosts()
    costs.note_step(1, 1.0)
    assert costs.drafting(3, 1) == 0.0
    for rows, depth, seconds in ((2, 1, 1.0), (2, 3, 2.0), (6, 1, 3.0)):
        costs.note_drafting(DraftWork(seconds, rows, depth))
    assert costs.drafting(1, 1) == costs.drafting(2, 1) == 1.0
    assert costs.drafting(2, 2) == 1.5
    assert costs.drafting(4, 1) == 2.0
    assert costs.drafting(8, 1) == costs.drafting(6, 2) == 3.0
    assert costs.drafting(0, 1) == costs.drafting(2, 0) == 0.0


def test_a_step_is_not_taken_to_cost_less_than_nothing() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.note_step(1, -1.0)
    assert costs.step(1) == 0.0


def test_a_sequence_that_ended_is_forgotten() -> None:
    simulation = Simulation(3, lambda _: 0.9, step=memory_bound)
    simulation.run(50)
    for seq in simulation.seqs:
        simulation.plan.forget(seq)
    assert not simulation.plan._records


def by_model(num_rows: int, chance: Callable[[int], float]) -> Simulation:
    return Simulation(
        num_rows, chance, step=memory_bound, drafting=lambda rows, depth: 0.001 * (rows + depth), by_model=True
    )


def test_a_model_keeps_nothing_until_a_few_sequences_are_about_to_try() -> None:
    simulation = by_model(32, lambda _: 0.0)
    simulation.run(300)
    kept, tried = [], []
    for _ in range(2000):
        simulation.run(1)
        kept.append(simulation.plan.is_keeping)
        tried.append(sum(map(bool, simulation._drafts)))
    tries = [step for step, rows in enumerate(tried) if rows]
    assert 2 <= len(tries) <= 20
    assert set(tried) == {0, 8}
    for step in tries:
        assert all(kept[max(0, step + 1 - KEPT_STEPS) : step + 1])
    assert sum(kept) <= len(tries) * (KEPT_STEPS + 1) + KEPT_STEPS


def test_a_model_drafts_again_after_tries_that_succeed() -> None:
    chance = 0.0
    simulation = by_model(4, lambda _: chance)
    simulation.run(300)
    assert simulation.plan.is_idle
    chance = 0.95
    simulation.run(2000)
    assert all(simulation.plan.limit(seq) == K for seq in simulation.seqs)
    assert simulation.run(100) > 2.0


def test_the_gain_of_a_sequence_is_not_the_loss_of_many() -> None:
    """Drafts of one row in sixteen would give a tenth more tokens, and take a fifth longer."""
    simulation = Simulation(16, lambda seq_id: float(seq_id == 0), step=lambda n: 0.016 if n <= 16 else 0.019)
    simulation.run(200)
    assert simulation.run(400) > 0.95
    assert sum(simulation.verified[::16]) < 400


def test_no_step_is_made_plain_to_measure_what_one_with_a_row_less_has_shown() -> None:
    """A prompt takes a row's slot for a step, and such a step does not measure decodes."""
    simulation = Simulation(8, lambda _: 0.9, step=memory_bound)
    simulation.run(100)
    assert not simulation.plan.is_idle
    simulation.plan.plan(simulation.seqs[:7], ROOM)
    assert not simulation.plan.is_idle


class Prompts:
    """Steps of which every few have a prompt, which a drafter computes unless it is stopped."""

    def __init__(self, every: int, drafting: float, accepted: int) -> None:
        """`drafting`: the drafter's seconds for a prompt. `accepted`: of three drafts in a step of decodes."""
        self.plan = DraftPlan(K, by_model=True)
        for num_tokens in (1, 4):
            self.plan.costs.note_step(num_tokens, 0.001)
        self._every, self._drafting, self._accepted = every, drafting, accepted
        self.num_stopped = self._num_steps = 0

    def run(self, steps: int) -> float:
        """Tokens per second as a multiple of those without a drafter."""
        tokens, seconds, plain_seconds = 0, 0.0, 0.0
        for _ in range(steps):
            self._num_steps += 1
            is_stopped = self.plan.net_gain.is_stopped
            self.num_stopped += is_stopped
            if self._num_steps % self._every == 0:
                drafting, accepted, plain, rows = 0.0 if is_stopped else self._drafting, 0, 0.010, 100
                batch = step_of(prefills=1, tokens=rows)
            else:
                drafting, accepted, plain = 0.0, 0 if is_stopped else self._accepted, 0.001
                batch = step_of(decodes=1, drafts=0 if is_stopped else 3)
            self.plan.note_gain(batch, plain + drafting, accepted, drafting)
            tokens += 1 + accepted
            seconds += plain + drafting
            # The rate of prompts is given; each accepted token saves a step of decodes.
            plain_seconds += plain + accepted * 0.001
        return plain_seconds / seconds


def step_of(prefills: int = 0, decodes: int = 0, drafts: int = 0, tokens: int = 0) -> ScheduledBatch:
    made = SimpleNamespace(
        total_seqs_num_prefill=prefills,
        total_seqs_num_decode=decodes,
        scheduled_spec_decode_tokens={0: [1] * drafts} if drafts else {},
        total_tokens_num=tokens or decodes + drafts,
    )
    return cast(ScheduledBatch, made)


def test_drafting_stops_where_the_drafter_computes_more_prompts_than_drafts_save() -> None:
    loses = Prompts(every=2, drafting=0.003, accepted=1)
    loses.run(200)
    assert loses.run(4000) > 0.99
    assert 0 < loses.num_stopped < 4200, "it is tried again"


def test_drafting_goes_on_where_drafts_save_more_than_prompts_cost() -> None:
    gains = Prompts(every=10, drafting=0.002, accepted=2)
    assert gains.run(4000) > 1.2
    assert not gains.num_stopped


def test_drafting_next_to_prompts_in_every_step_costs_next_to_nothing() -> None:
    loses = Prompts(every=1, drafting=0.002, accepted=0)
    loses.run(100)
    assert loses.run(10_000) > 0.995


def test_drafts_that_are_accepted_in_steps_with_prompts_save_their_share_of_later_steps() -> None:
    """Short prompts join eight streams every third step; each step is little longer for its drafts."""
    plan = DraftPlan(K, by_model=True)
    plan.note_step(8, 8, 0.0006)
    plan.note_step(8, 32, 0.0014)
    for step in range(1000):
        if step % 3:
            plan.note_gain(step_of(decodes=8, drafts=24), 0.0020, 20, 0.0005)
        else:
            plan.note_gain(step_of(prefills=1, decodes=7, drafts=21, tokens=48), 0.0022, 18, 0.0005)
        assert not plan.net_gain.is_stopped


def test_drafts_in_steps_that_prompts_fill_save_no_more_than_they_take() -> None:
    plan = DraftPlan(K, by_model=True)
    plan.note_step(8, 8, 0.0006)
    for _ in range(100):
        batch = step_of(prefills=1, decodes=7, drafts=21, tokens=528)
        plan.note_gain(batch, 0.0100, 18, 0.0005, are_prompts_left=True)
    assert plan.net_gain.is_stopped


def test_drafting_that_was_stopped_begins_again_when_prompts_end() -> None:
    changes = Prompts(every=2, drafting=0.003, accepted=2)
    changes.run(500)
    assert changes.num_stopped
    changes._every = 10**9
    changes.run(200_000)
    stopped = changes.num_stopped
    changes.run(1000)
    assert changes.num_stopped == stopped


def test_drafting_is_stopped_for_ten_minutes_at_most_however_long_steps_take() -> None:
    gain = NetGain()
    for _ in range(3):
        while not gain.is_stopped:
            gain.note(10.0, -10.0, has_prompts=True)
        seconds = 0.0
        while gain.is_stopped:
            gain.note(10.0, 0.0, has_prompts=True)
            seconds += 10.0
        assert seconds <= 600.0


def test_drafts_made_on_the_device_cost_time_before_any_is_verified() -> None:
    plan = DraftPlan(K, by_model=True)
    plan.note_step(1, 1, 0.010)
    for _ in range(8):
        plan.note_step(1, 1, 0.020, has_drafted=True)
    for _ in range(64):
        assert not plan.net_gain.is_stopped
        plan.note_gain(step_of(decodes=1), 0.020, 0, 0.0, has_drafted=True)
    assert plan.net_gain.is_stopped, "half of the time went to drafts of which none was verified"


def test_nothing_is_planned_or_kept_while_drafting_is_stopped_and_states_are_kept_before_the_next_drafts() -> None:
    simulation = by_model(4, lambda _: 0.95)
    simulation.run(100)
    gain = simulation.plan.net_gain
    while not gain.is_stopped:
        gain.note(0.01, -0.01, has_prompts=True)
    while gain.is_stopped:
        simulation.run(1)
        assert simulation.plan.is_idle or not gain.is_stopped
        gain.note(0.01, 0.0, has_prompts=True)
    kept, drafted = 0, 0
    while not drafted:
        simulation.run(1)
        drafted = sum(simulation._drafts)
        kept += simulation.plan.is_keeping
    assert kept >= KEPT_STEPS


def test_drafting_on_the_device_is_no_part_of_what_a_plain_step_costs() -> None:
    costs = StepCosts()
    costs.note_step(1, 0.010)
    for num_tokens in (4, 8):
        costs.note_drafting_step(num_tokens, 0.015)
    assert costs.with_drafting(4, 1, 3) == 0.015
    assert costs.step(4) == 0.010
    costs = StepCosts()
    costs.note_step(1, 0.010)
    costs.note_drafting(DraftWork(0.002, 1, 3))
    assert costs.with_drafting(4, 1, 3) == pytest.approx(0.012)


def tried(num_rows: int, num_rounds: int) -> DraftPlan:
    """A plan without drafts that has just begun a try, whose drafts the next step verifies."""
    plan, seqs = DraftPlan(K, by_model=True), [Sequence([1], 16, SamplingParams(), id=i) for i in range(num_rows)]
    for size, seconds in ((num_rows, 1.0), (num_rows * (1 + K), 2.0)):
        plan.costs.note_step(size, seconds)
    plan.costs.note_drafting(DraftWork(0.3, num_rows, K))
    plan._rate = 0.1
    for _ in range(10_000):
        plan.plan(seqs, ROOM, num_rounds=num_rounds)
        if any(map(plan.limit, seqs)):
            break
    assert plan._num_tries == 1
    plan.plan(seqs, ROOM, num_rounds=num_rounds)
    return plan


@pytest.mark.parametrize(("num_rows", "num_rounds", "goes_on"), [(2, 4, True), (2, 1, False), (16, 4, False)])
def test_a_try_of_all_rows_drafts_on_in_a_step_of_several_rounds(
    num_rows: int, num_rounds: int, goes_on: bool
) -> None:
    plan = tried(num_rows, num_rounds)
    assert plan.is_idle is not goes_on
    (seq,) = [Sequence([1], 16, SamplingParams(), id=0)]
    assert (plan.limit(seq) > 0) is goes_on
