"""The number of drafts of sequences: as many as pay, by the measured costs of steps and the accepted drafts."""

import math
import random
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import cast

import pytest

from engine.batch import DraftWork, ScheduledBatch
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.speculative.adaptive import DraftGate, DraftPlan, StepCosts

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

    def add(self, num_rows: int) -> None:
        self.seqs += [Sequence([1], 16, SamplingParams(), id=len(self.seqs) + row) for row in range(num_rows)]
        self._drafts += [0] * num_rows

    def run(self, steps: int) -> float:
        """Ratio of the tokens per second of `steps` steps to those of plain steps."""
        tokens, self.seconds = 0, 0.0
        self.verified.clear()
        for _ in range(steps):
            self.plan.plan(self.seqs, self._room)
            drafts, num_rows, generated = self._drafts, len(self.seqs), 0
            seconds = self._step(num_rows + sum(drafts))
            for seq, count in zip(self.seqs, drafts, strict=True):
                accepted = 0
                while accepted < count and self._random.random() < self._chance(seq.id):
                    accepted += 1
                seq.token_ids += [1] * (1 + accepted)
                generated += 1 + accepted
                if count:
                    self.plan.note(seq, count, accepted)
                self.verified.append(count)
            self._drafts = [self.plan.limit(seq) for seq in self.seqs]
            depth, drafting = max(self._drafts), 0.0
            if depth:
                rows = sum(map(bool, self._drafts))
                drafting = self._drafting(rows, depth)
                self.plan.costs.note_drafting(DraftWork(drafting, rows, depth))
            batch = step_of(num_rows, drafts, [] if self.plan.is_stopped else self._drafts)
            self.plan.note_step(batch, seconds + drafting, generated, draft_seconds=drafting)
            tokens += generated
            self.seconds += seconds + drafting
        return tokens / self.seconds / (len(self.seqs) / self._step(len(self.seqs)))


def step_of(
    decodes: int, drafts: Collection[int] = (), num_next: Collection[int] = (), *, prefills: int = 0, prompts: int = 0
) -> ScheduledBatch:
    made = SimpleNamespace(
        total_seqs_num=decodes + prefills,
        total_seqs_num_prefill=prefills,
        total_seqs_num_decode=decodes,
        scheduled_spec_decode_tokens={row: [1] * count for row, count in enumerate(drafts) if count},
        total_tokens_num=decodes + sum(drafts) + prompts,
        num_next_drafts=list(num_next),
    )
    return cast(ScheduledBatch, made)


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


def test_where_there_is_not_room_the_sequences_of_highest_acceptance_draft() -> None:
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


def test_an_interruption_is_no_cost_of_a_size_that_was_not_measured_yet() -> None:
    costs = StepCosts()
    for num_tokens in (8, 16):
        costs.note_step(num_tokens, 0.001)
    costs.note_step(12, 0.050)
    assert costs.step(12) == pytest.approx(0.003)
    costs.note_step(12, 0.001)
    assert costs.step(12) == 0.001


def test_prompts_cost_what_steps_with_as_many_tokens_of_them_took() -> None:
    """A prefix hit leaves a few tokens, which take long for a token; by their rate many tokens seemed to take as long,
    so that drafts in a step with prompts seemed to gain what they had never cost."""
    costs = StepCosts()
    for _ in range(10):
        costs.note_prompts(4, 0.0004, is_plain=True)
    costs.note_prompts(4096, 0.02, is_plain=True)
    assert costs.plain_seconds(0, 0, 4) == pytest.approx(0.0004)
    assert costs.plain_seconds(0, 0, 4096) == pytest.approx(0.02)


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


def test_fewer_drafts_than_were_ever_made_cost_their_share() -> None:
    costs = StepCosts()
    costs.note_drafting(DraftWork(0.006, 8, 3))
    assert costs.drafting(8, 1) == pytest.approx(0.002)
    costs.note_drafting(DraftWork(0.003, 8, 1))
    assert costs.drafting(8, 1) == pytest.approx(0.003), "measured by now"
    assert costs.drafting(8, 2) == pytest.approx(0.0045)


def test_a_model_makes_one_draft_where_more_gain_less() -> None:
    """Several rounds of few drafts share the host's time, so that such a step takes less than one on the line between
    plain steps and those of many drafts."""
    simulation = Simulation(
        4,
        lambda _: 0.8,
        step=lambda tokens: 0.00075 if tokens <= 4 else 0.0001 + 0.00008 * tokens,
        drafting=lambda rows, depth: 0.000034 * rows * depth,
        by_model=True,
    )
    simulation.run(300)
    simulation.run(300)
    assert sum(count == 1 for count in simulation.verified) > 0.8 * len(simulation.verified)


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


def test_a_model_drafts_again_after_tries_that_succeed() -> None:
    chance = 0.0
    simulation = by_model(4, lambda _: chance)
    simulation.run(300)
    simulation.run(300)
    assert sum(map(bool, simulation.verified)) < 100
    chance = 0.95
    simulation.run(6000)
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


class Loads:
    """Steps of some decodes, of which every few also have a prompt, which a drafter computes too unless it is stopped.
    Its steps of decodes take `drafting` times as long as plain ones, and have `tokens` times their tokens."""

    def __init__(self, num_rows: int = 4) -> None:
        self.plan = DraftPlan(K, by_model=True)
        self.num_rows, self.drafting, self.tokens = num_rows, 2.0, 3.0
        self.every, self.prompt = 10**9, 0.0
        self.num_stopped = self._num_steps = 0

    def run(self, steps: int) -> float:
        """The pace relative to that of plain steps."""
        seconds, plain_seconds, rows = 0.0, 0.0, self.num_rows
        for _ in range(steps):
            self._num_steps += 1
            is_stopped = self.plan.is_stopped
            self.num_stopped += is_stopped
            num_next = [] if is_stopped else [3] * rows
            if self._num_steps % self.every == 0:
                took, plain = 0.011 + (0.0 if is_stopped else self.prompt), 0.011
                self.plan.note_step(step_of(rows, (), num_next, prefills=1, prompts=100), took, rows)
            elif is_stopped:
                took = plain = 0.001
                self.plan.note_step(step_of(rows), took, rows)
            else:
                took, plain = 0.001 * self.drafting, 0.001 * self.tokens
                self.plan.note_step(step_of(rows, [3] * rows, num_next), took, round(rows * self.tokens))
            seconds, plain_seconds = seconds + took, plain_seconds + plain
        return plain_seconds / seconds


def test_a_model_drafts_on_where_that_is_faster() -> None:
    gains = Loads()
    gains.run(200)
    assert gains.run(10_000) > 1.45
    assert 0 < gains.num_stopped < 400, "plain steps are measured again"


@pytest.mark.parametrize("tokens", [1.0, 1.5, 2.0])
def test_a_model_that_does_not_make_steps_faster_costs_less_than_two_percent(tokens: float) -> None:
    loses = Loads()
    loses.tokens = tokens
    loses.run(200)
    assert 0.99 < loses.run(50_000) <= 1.0


def test_prompts_that_cost_more_than_drafts_save_stop_a_model() -> None:
    loses = Loads()
    loses.every, loses.prompt = 3, 0.004
    loses.run(200)
    assert 0.99 < loses.run(50_000) < 1.0


def test_prompts_that_cost_less_than_drafts_save_do_not() -> None:
    gains = Loads()
    gains.every, gains.prompt = 5, 0.001
    gains.run(200)
    assert gains.run(10_000) > 1.1


def test_a_model_drafts_again_when_its_drafts_become_better_and_stops_when_they_become_worse() -> None:
    changes = Loads()
    changes.tokens = 1.5
    changes.run(5_000)
    changes.tokens = 3.0
    changes.run(20_000)
    assert changes.run(5_000) > 1.4
    changes.tokens = 1.5
    assert changes.run(10_000) > 0.98


def test_numbers_of_rows_are_judged_by_themselves() -> None:
    """One row gains and 64 lose: after a change the earlier verdict holds."""
    changes = Loads(1)
    changes.run(1_000)
    changes.num_rows, changes.tokens = 64, 1.0
    changes.run(5_000)
    assert changes.plan.is_stopped
    changes.num_rows, changes.tokens = 1, 3.0
    changes.run(64)
    assert not changes.plan.is_stopped
    assert changes.run(1_000) > 1.4


def test_a_try_is_not_made_where_drafts_would_not_pay_even_if_they_were_accepted() -> None:
    simulation = Simulation(16, lambda _: 0.9, step=compute_bound, by_model=True)
    simulation.run(100)
    assert simulation.plan.is_stopped
    simulation.run(2000)
    assert not any(simulation.verified)
    assert simulation.plan.num_unplanned > 0


def test_long_first_steps_do_not_keep_a_model_from_its_first_try() -> None:
    """The first calls of a new server run cold code and allocate."""
    num_calls = 0

    def drafting(rows: int, depth: int) -> float:
        nonlocal num_calls
        num_calls += 1
        return 0.0015 if num_calls <= 16 else 0.00001 * depth

    simulation = Simulation(1, lambda _: 0.9, step=lambda _: 0.0003, drafting=drafting, by_model=True)
    simulation.run(100)
    assert simulation.run(100) > 2.0


def test_rows_that_drafts_make_fewer_do_not_seem_to_have_gained() -> None:
    """Plain steps have 8 rows. Drafts leave 5, which gain only relative to plain steps of 5 rows."""
    plan, num_open = DraftPlan(K, by_model=True), 0
    for _ in range(3000):
        if plan.is_stopped:
            plan.costs.note_step(5, 0.0008)
            plan.note_step(step_of(8), 0.001, 8)
        else:
            plan.note_step(step_of(5, [3] * 5, [3] * 5), 0.0021, 15)
            num_open += 1
    assert num_open < 200


@pytest.mark.parametrize(
    ("num_rows", "chance", "answer", "least"),
    [(1, 0.3, (120, 120), 1.25), (8, 0.9, (120, 120), 1.25), (3, 0.9, (5, 15), 1.2)],
)
def test_interruptions_by_other_programs_do_not_stop_drafts_that_pay(
    num_rows: int, chance: float, answer: tuple[int, int], least: float
) -> None:
    """Half of the time is theirs. Steps of several rounds take longer than plain ones, so more are interrupted, and so
    do steps with prompts, which are most steps where answers are short."""
    with_drafts, without = (
        sum(
            Streams(num_rows, chance, seed, drafts=drafts, answer=answer, host=0.0003, interruptions=200.0).run(3.0)
            for seed in range(3)
        )
        for drafts in (True, False)
    )
    assert with_drafts / without > least


def run_gate(gate: DraftGate, blocks: int, with_drafts: float, *, seconds: float = 0.001, rows: int = 8) -> list[bool]:
    """Blocks of steps that take `with_drafts` times as long with drafts; returns in which the gate was open."""
    opened = []
    for _ in range(blocks):
        opened.append(gate.is_open)
        while True:
            gate.note(rows, seconds * (with_drafts if gate.is_open else 1.0), seconds)
            if not gate._num_steps:
                break
    return opened


def test_the_gate_lends_nothing_while_a_debt_is_left() -> None:
    gate = DraftGate()
    assert run_gate(gate, 3, 2.0, seconds=1.0, rows=1) == [True, False, True]
    seconds = 0
    while not gate.is_open:
        gate.note(1, 1.0, 1.0)
        seconds += 1
    assert seconds == pytest.approx(5 / 0.003, abs=32), "the try has lost 5 seconds in 5 steps"


def test_a_small_lost_try_does_not_delay_the_next_one() -> None:
    gate = DraftGate()
    assert run_gate(gate, 2, 1.3) == [True, False]
    assert run_gate(gate, 1, 1.3) == [True], "a try, which loses 4 ms"
    assert run_gate(gate, 2, 0.5) == [False, True]
    assert gate.is_open, "the second try gained"


def test_tries_that_lose_take_less_than_two_percent() -> None:
    gate = DraftGate()
    run_gate(gate, 2, 1.6)
    opened = run_gate(gate, 2000, 1.6)
    assert 2 < sum(opened) < 0.03 * len(opened), "each loses about an eighth of a block's time"


def test_a_lost_try_does_not_seem_to_have_gained_when_plain_steps_are_expected_to_be_shorter() -> None:
    """A new server expects plain steps to take 1.6 ms that take 1 ms, and learns it after its first try."""
    gate = DraftGate()
    blocks, opened = 0, 0
    while blocks < 100:
        seconds = 0.0011 if gate.is_open else 0.001
        was_open = gate.is_open and not gate.is_trying
        gate.note(8, seconds, 0.0016 if blocks < 3 else 0.001)
        blocks += not gate._num_steps
        opened += was_open and blocks > 1
    assert not opened


def test_a_size_that_was_never_tried_does_not_wait_for_what_others_lost() -> None:
    gate = DraftGate()
    run_gate(gate, 3, 4.0, rows=32)
    assert run_gate(gate, 20, 4.0, rows=32) == [False] * 20, "a debt"
    assert run_gate(gate, 2, 0.5, rows=1) == [False, True]
    assert gate.is_open
    assert run_gate(gate, 20, 4.0, rows=32) == [True] + [False] * 19


def test_a_size_above_one_with_which_drafts_lost_is_not_tried_on_credit() -> None:
    gate = DraftGate()
    run_gate(gate, 3, 8.0)
    assert run_gate(gate, 20, 8.0, rows=32) == [False] * 20
    assert run_gate(gate, 2, 0.5, rows=1) == [False, True], "a smaller size may gain"


@pytest.mark.parametrize(("seconds", "num_steps"), [(0.001, 7), (0.010, 6), (0.100, 6)])
def test_a_try_that_loses_ends_early(seconds: float, num_steps: int) -> None:
    """After a loss of 4 ms or of two steps, whichever is longer."""
    gate = DraftGate()
    run_gate(gate, 2, 1.6, seconds=seconds)
    for _ in range(num_steps):
        assert gate.is_open
        gate.note(8, 1.6 * seconds, seconds)
    assert not gate.is_open


def test_long_steps_whose_first_drafts_are_rejected_are_tried_for_long_enough() -> None:
    gate, num_open, num_steps_of_try = DraftGate(), 0, 0
    for step in range(4000):
        num_steps_of_try = num_steps_of_try + 1 if gate.is_open else 0
        num_open += gate.is_open
        cost = 1.0 if not gate.is_open else 1.4 if step < 200 else 1.1 if num_steps_of_try <= 4 else 0.7
        gate.note(1, 0.020 * cost, 0.020)
    assert num_open > 1000


def test_rows_that_drafts_make_fewer_are_judged_by_the_plain_steps_before() -> None:
    """Answers end sooner with drafts, so no plain step has as few rows, and lost tries would follow each other."""
    gate, num_open = DraftGate(), 0
    for _ in range(6000):
        num_open += gate.is_open
        gate.note(4 if gate.is_open else 6, 0.00065 if gate.is_open else 0.0005, 0.0005)
    assert num_open < 200


@pytest.mark.parametrize(("num_rows", "is_gain"), [(8, True), (4, False)])
def test_contexts_that_grow_are_not_taken_for_rows_that_drafts_have_ended(num_rows: int, is_gain: bool) -> None:
    """Since the last plain block, steps take 1.5 times as long. A step of 4 rows takes 0.9 times as long as one of 8,
    so that drafts of 4 rows seem to gain 1.25 of what plain steps of 4 rows had, but lose to those of 8."""
    plan, num_open = DraftPlan(K, by_model=True), 0
    plan.costs.note_step(8, 0.001)
    while not plan.is_stopped:
        plan.note_step(step_of(8, [3] * 8, [3] * 8), 0.002, 8)
    for _ in range(16):
        plan.note_step(step_of(8), 0.001, 8)
    plain = 0.0015 * (1.0 if num_rows == 8 else 0.9)
    for _ in range(200):
        plan.costs.note_step(num_rows, plain)
    while not plan.is_stopped and num_open < 200:
        plan.note_step(step_of(num_rows, [3] * num_rows, [3] * num_rows), plain / 1.25, num_rows)
        num_open += 1
    assert (num_open > 100) is is_gain


def test_drafts_that_could_not_pay_do_not_add_up_to_a_debt() -> None:
    once, often = DraftGate(), DraftGate()
    for gate, num_rejected in ((once, 1), (often, 100)):
        assert run_gate(gate, 2, 1.3) == [True, False]
        for _ in range(num_rejected):
            gate.reject()
    num_blocks = [next(count for count in range(1000) if any(run_gate(gate, 1, 1.3))) for gate in (once, often)]
    assert num_blocks[0] == num_blocks[1] > 50


def test_gains_with_few_rows_do_not_pay_for_tries_with_many() -> None:
    gate = DraftGate()
    opened = 0
    for _ in range(50):
        assert any(run_gate(gate, 2, 0.5, rows=1))
        while gate.is_open:
            run_gate(gate, 1, 0.5, rows=1)
        opened += sum(run_gate(gate, 4, 1.5, rows=128))
    assert opened < 10, "a try loses 4 ms, and 0.3 % of 6.4 s is 19 ms"


def test_a_long_interruption_does_not_end_drafts_that_pay() -> None:
    gate = DraftGate()
    run_gate(gate, 6, 0.5)
    assert gate.is_open
    gate.note(8, 45.0, 0.001, usual=0.0005)
    assert sum(run_gate(gate, 100, 0.5)) > 85


def test_an_interruption_of_the_first_step_of_more_tokens_does_not_end_drafts_that_pay() -> None:
    """Its duration was what such a step was expected to take, so drafts owed a second, which 280 s repay."""
    pause = 0.0

    def step(tokens: int) -> float:
        nonlocal pause
        paused, pause = (pause, 0.0) if tokens > 30 else (0.0, pause)
        return 0.001 + 0.00005 * tokens + paused

    simulation = Simulation(5, lambda _: 0.95, step=step, drafting=lambda rows, depth: 0.0001 * depth, by_model=True)
    simulation.run(600)
    pause = 1.0
    simulation.add(3)
    simulation.run(100)
    assert not pause
    assert simulation.run(1000) > 1.5


def test_a_step_whose_prompt_cost_nothing_counts_as_long_as_it_took() -> None:
    """A step with the few tokens that a prefix hit leaves may take less time than its decodes were expected to."""
    plan = DraftPlan(K, by_model=True)
    plan.costs.note_step(8, 0.001)
    plan.costs.note_step(32, 0.002)
    plan.costs.note_drafting(DraftWork(0.001, 8, 3))
    plan.note_step(step_of(8, [3] * 8, [3] * 8, prefills=1, prompts=1), 0.0025, 8)
    assert plan.costs.prompts(1, is_plain=False) == 0.0
    assert plan.gate._block.seconds == 0.0025


def test_a_long_interruption_of_plain_steps_does_not_keep_drafts_that_lose() -> None:
    gate = DraftGate()
    run_gate(gate, 3, 1.5)
    assert not gate.is_open
    gate.note(8, 45.0, 0.001)
    assert sum(run_gate(gate, 500, 1.5)) < 20


def test_an_interruption_of_the_first_plain_block_does_not_keep_drafts_that_lose() -> None:
    gate = DraftGate()
    run_gate(gate, 1, 1.25)
    assert gate.needs_plain_steps
    gate.note(8, 0.005, 0.001, num_steps=8)
    gate.note(8, 0.001, 0.001, num_steps=8)
    assert not gate._num_steps
    assert sum(run_gate(gate, 300, 1.25)) < 10
    assert not gate.needs_plain_steps


def test_a_size_above_one_with_a_small_gain_is_tried() -> None:
    """A gain of 3 % is less than drafting goes on for, but no loss."""
    gate = DraftGate()
    run_gate(gate, 10, 1 / 1.03)
    while gate.is_open:
        run_gate(gate, 1, 1 / 1.03)
    assert run_gate(gate, 2, 2.0, rows=32) == [False, True]


def test_a_single_slow_block_of_plain_steps_does_not_keep_drafts_that_lose_for_long() -> None:
    gate = DraftGate()
    run_gate(gate, 1, 1.2)
    for _ in range(16):
        gate.note(8, 0.002, 0.001)
    opened = run_gate(gate, 500, 1.2)
    assert opened[0], "seemingly faster than plain steps"
    assert sum(opened) < 60


def test_a_step_that_was_scheduled_before_the_gate_closed_is_no_plain_one() -> None:
    """It verifies the last drafts, perhaps in eight rounds, and may have three times the tokens of a plain one."""
    plan = DraftPlan(K, by_model=True)
    plan.gate.reject()
    plan.note_step(step_of(8, [3] * 8), 0.008, 200, num_rounds=8)
    plan.note_step(step_of(8), 0.001, 8)
    assert plan.gate._num_steps == 1


def test_drafting_on_the_device_is_no_part_of_what_a_plain_step_costs() -> None:
    costs = StepCosts()
    costs.note_step(1, 0.010)
    for num_tokens in (4, 8):
        costs.note_drafting_step(num_tokens, 1, 0.015)
    assert costs.with_drafting(4, 1, 3) == 0.015
    assert costs.step(4) == 0.010
    costs = StepCosts()
    costs.note_step(1, 0.010)
    costs.note_drafting(DraftWork(0.002, 1, 3))
    assert costs.with_drafting(4, 1, 3) == pytest.approx(0.012)


def test_a_try_costs_what_a_device_takes_to_draft() -> None:
    """The time that tries may take would otherwise be exceeded by the device's drafting."""
    plan = DraftPlan(3, by_model=True)
    plan.costs.note_step(8, 0.010)
    plan.costs.note_drafting_step(32, 8, 0.015)
    plan.plan([Sequence([1], 16, SamplingParams(), id=i) for i in range(8)], ROOM)
    assert plan._try_cost == pytest.approx(0.5)


def test_what_a_device_takes_for_larger_steps_is_not_expected_from_plain_ones() -> None:
    """Plain steps of few rows take longer with each row, and those of many rows that verify drafts hardly longer."""
    costs = StepCosts()
    for num_rows in (8, 16, 32, 48, 64):
        costs.note_step(num_rows, 0.0001 * num_rows)
    for num_tokens, seconds in ((64, 0.0080), (96, 0.0081), (128, 0.0082)):
        costs.note_drafting_step(num_tokens, 64, seconds)
    assert costs.beyond(128, 64, 1) == 0.0, "it was measured"
    assert costs.beyond(256, 64, 3) == pytest.approx(0.0004)


def test_after_a_device_has_drafted_for_few_rows_it_drafts_for_all() -> None:
    """Its drafting is measured with the whole step only."""
    plan = DraftPlan(3, by_model=True)
    plan.gate.reject()
    for _ in range(16):
        plan.note_step(step_of(64), 0.010, 64)
    assert plan.gate.is_trying
    limits = plan.limit_rows([3] * 64)
    assert limits == [3] * 8 + [0] * 56
    plan.note_step(step_of(64, (), limits), 0.012, 64, has_drafted=True)
    assert plan.limit_rows([3] * 64) == [3] * 64


def test_rows_that_draft_nothing_do_not_keep_others_from_drafting() -> None:
    """A grammar, or a low acceptance rate, may leave rows without drafts while they live."""
    plan, wanted = DraftPlan(3, by_model=True), [0, 3, 0, 1] * 32
    assert plan.limit_rows(wanted) == [0, 3, 0, 1] * 8 + [0] * 96
    plan.gate.needs_plain_steps = False
    plan.costs.note_drafting(DraftWork(0.001, 11, 3))
    assert plan.limit_rows(wanted) == [0, 3, 0, 1] * 8 + [0] * 96
    plan.costs.note_drafting(DraftWork(0.001, 12, 3))
    assert plan.limit_rows(wanted) == wanted, "of the 16, four had no drafts"


class Streams:
    """Streams on one thread, from a server's first step on; each that ends is followed by a prompt.

    Costs are about those of the embedded model. Steps differ by 10 %, and ten times a second in the mean one is
    interrupted for 5 ms, at the same times with drafts and without. As in `Drafts`, one step in eight is measured
    while drafting is stopped and the pace of plain steps is known.
    """

    def __init__(
        self,
        num_rows: int,
        chance: float,
        seed: int,
        *,
        drafts: bool,
        answer: tuple[int, int] = (120, 120),
        client: float = 0.0,
        host: float = 0.0,
        slower: float = 1.0,
        interruptions: float = 10.0,
        room: int = ROOM,
        on_device: bool = False,
        plan: DraftPlan | None = None,
    ) -> None:
        """`answer`: the least and most tokens of an answer. `client`: seconds between an answer's end and the next
        prompt, one after another. `host`: seconds between two steps, which `DraftPlan` sees too. `slower`: factor of
        what a device takes. `interruptions`: their number per second. `room`: as in `DraftPlan.plan`. `on_device`:
        a GPU drafts in the step, and its steps mostly read weights. `plan`: that of earlier streams."""
        self._plan = plan or DraftPlan(3, by_model=True) if drafts else None
        self._num_rows, self._chance, self._room = num_rows, chance, room
        self._answer, self._client, self._host = answer, client, host
        self._slower, self._arrivals = slower, [0.0] * num_rows
        self._on_device = on_device
        self._seconds, self._per_token = (0.005, 0.000005) if on_device else (0.0001, 0.000026)
        self._lengths: dict[int, int] = {}
        self._random, self._interruptions = random.Random(seed), random.Random(seed)
        self._num_per_second = interruptions
        self._until_interrupted = self._interruptions.expovariate(interruptions)
        self._num_begun = 0

    def run(self, seconds: float) -> float:
        """Tokens of so many seconds."""
        now, tokens, plan = 0.0, 0, self._plan
        running: list[Sequence] = []
        drafts: dict[int, int] = {}
        num_unmeasured = 0
        while now < seconds:
            if not running:
                now = max(now, min(self._arrivals))
            prompts = [self._begin() for at in self._arrivals if at <= now]
            self._arrivals = [at for at in self._arrivals if at > now]
            if plan is not None and running:
                plan.plan(running, self._room)
            is_stopped = plan is None or plan.is_stopped
            rows, generated, rounds = len(running), 0, 0
            took, drafting = 0.0, 0.0
            verified = [drafts.get(seq.id, 0) for seq in running] if running else []
            while True:
                counts = [drafts.get(seq.id, 0) for seq in running]
                took += self._noisy(self._seconds + self._per_token * (rows + sum(counts))) if rows else 0.0
                for seq, count in zip(running, counts, strict=True):
                    accepted = 0
                    while accepted < count and self._random.random() < self._chance:
                        accepted += 1
                    seq.token_ids += [1] * (1 + accepted)
                    generated += 1 + accepted
                    if count and plan is not None:
                        plan.note(seq, count, accepted)
                limits = [0] * (rows + len(prompts))
                if plan is not None and not is_stopped:
                    limits = plan.limit_rows([plan.limit(seq) for seq in running + prompts])
                drafts = {seq.id: limit for seq, limit in zip(running, limits, strict=False)}
                if depth := max(drafts.values(), default=0):
                    num_drafting = sum(map(bool, drafts.values()))
                    drafting += self._noisy(0.00005 + depth * (0.00002 + 0.000008 * num_drafting))
                rounds += 1
                if (
                    not any(counts)
                    or prompts
                    or self._on_device
                    or took + drafting > 0.004
                    or any(len(seq.token_ids) > self._lengths[seq.id] - 2 for seq in running)
                ):
                    break
            took += self._host + 0.00015
            took += sum(self._noisy(0.0005 if limit else 0.0004) for limit in limits[rows:])
            if plan is not None:
                if depth and not self._on_device:
                    plan.costs.note_drafting(DraftWork(drafting / rounds, num_drafting, depth))
                num_next = [] if is_stopped else [drafts.get(seq.id, 0) for seq in running + prompts]
                step = step_of(rows, verified, num_next, prefills=len(prompts), prompts=40 * len(prompts))
                num_unmeasured += 1
                if not is_stopped or plan.gate.needs_plain_steps or num_unmeasured == 8:
                    plan.note_step(
                        step,
                        took + drafting,
                        generated,
                        num_rounds=rounds,
                        num_steps=num_unmeasured,
                        draft_seconds=0.0 if self._on_device else drafting / rounds,
                        has_drafted=self._on_device and depth > 0,
                    )
                    num_unmeasured = 0
            now += took + drafting
            tokens += generated + len(prompts)
            for seq in [seq for seq in running if len(seq.token_ids) > self._lengths[seq.id]]:
                running.remove(seq)
                self._arrivals.append(max([now, *self._arrivals[-1:]]) + self._client)
                drafts.pop(seq.id, None)
                if plan is not None:
                    plan.forget(seq)
            running += prompts
        for seq in running:
            if plan is not None:
                plan.forget(seq)
        return tokens

    def _begin(self) -> Sequence:
        self._num_begun += 1
        self._lengths[self._num_begun] = self._random.randint(*self._answer)
        return Sequence([1], 16, SamplingParams(), id=self._num_begun)

    def _noisy(self, seconds: float) -> float:
        seconds *= self._slower * math.exp(self._random.gauss(0.0, 0.1))
        self._until_interrupted -= seconds
        if self._until_interrupted > 0.0:
            return seconds
        self._until_interrupted = self._interruptions.expovariate(self._num_per_second)
        return seconds + 0.005


@pytest.mark.parametrize(
    ("num_rows", "chance", "least"),
    [
        (1, 0.9, 2.0),
        (1, 0.3, 0.98),
        (8, 0.9, 1.1),
        (8, 0.3, 0.98),
        (32, 0.9, 0.98),
        (32, 0.3, 0.98),
        (128, 0.9, 0.98),
    ],
)
def test_a_model_never_loses_two_percent_from_the_first_second_on(num_rows: int, chance: float, least: float) -> None:
    with_drafts, without = (
        sum(Streams(num_rows, chance, seed, drafts=drafts).run(3.0) for seed in range(3)) for drafts in (True, False)
    )
    assert with_drafts / without > least


@pytest.mark.parametrize(("num_rows", "chance", "least"), [(64, 0.9, 1.5), (64, 0.1, 0.98)])
def test_a_device_drafts_for_many_rows_where_they_gain(num_rows: int, chance: float, least: float) -> None:
    with_drafts, without = (
        Streams(num_rows, chance, 0, drafts=drafts, on_device=True).run(5.0) for drafts in (True, False)
    )
    assert with_drafts / without > least


@pytest.mark.parametrize("num_rows", [32, 128])
@pytest.mark.parametrize("chance", [0.3, 0.9])
def test_a_new_server_of_long_steps_loses_less_than_two_percent(num_rows: int, chance: float) -> None:
    """A step that verifies three drafts of each of 128 rows takes 80 ms, and drafting after it 30 ms."""
    with_drafts, without = (
        sum(
            Streams(num_rows, chance, seed, drafts=drafts, host=0.0003, slower=6.0, room=512 - num_rows).run(5.0)
            for seed in range(3)
        )
        for drafts in (True, False)
    )
    assert with_drafts / without > 0.98


@pytest.mark.parametrize(
    ("num_rows", "chance", "client", "least"),
    [(8, 0.9, 0.0, 1.04), (8, 0.9, 0.001, 1.04), (8, 0.5, 0.0015, 0.98), (17, 0.5, 0.001, 0.98)],
)
def test_short_answers_gain_and_lose_less_than_two_percent(
    num_rows: int, chance: float, client: float, least: float
) -> None:
    """Rows begin and end all the time, and drafts change how many of them run."""
    with_drafts, without = (
        sum(
            Streams(num_rows, chance, seed, drafts=drafts, answer=(5, 15), client=client, host=0.0002).run(3.0)
            for seed in range(3)
        )
        for drafts in (True, False)
    )
    assert with_drafts / without > least


@pytest.mark.parametrize("num_rows", [32, 128])
def test_many_streams_after_few_that_gain_lose_less_than_two_percent(num_rows: int) -> None:
    """Predictable text of 1 and 8 streams and other text of `num_rows` streams take turns of 0.6 s each."""
    with_drafts = without = 0.0
    for seed in range(3):
        plan = DraftPlan(3, by_model=True)
        for turn in range(6):
            for rows in (1, 8):
                Streams(rows, 0.85, turn, drafts=True, plan=plan, host=0.0003).run(0.6)
            with_drafts += Streams(num_rows, 0.18, 10 * seed + turn, drafts=True, plan=plan, host=0.0003).run(0.6)
            without += Streams(num_rows, 0.18, 10 * seed + turn, drafts=False, host=0.0003).run(0.6)
    assert with_drafts / without > 0.98
