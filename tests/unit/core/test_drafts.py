"""The number of drafts that a step verifies, and which sequences have any."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.config.config import Config, SpeculativeConfig
from engine.core.scheduler import Scheduler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.speculative.drafts import Drafts

CYCLE = [1, 2, 3, 4] * 3


def drafts(max_num_seqs: int = 4, **fields: Any) -> Drafts:
    return Drafts(SimpleNamespace(speculative_config=SpeculativeConfig(**fields)), max_num_seqs)


def running(count: int, token_ids: list[int] = CYCLE, limit: int = 100) -> list[Sequence]:
    seqs = [Sequence(list(token_ids), 16, SamplingParams(), id=i) for i in range(count)]
    for seq in seqs:
        seq.token_limit = limit
    return seqs


def proposed(drafts: Drafts, seqs: list[Sequence], budget: int = 1000) -> list[list[int]]:
    drafts.propose(seqs, budget)
    return [seq.spec_token_ids for seq in seqs]


def test_each_row_drafts_what_its_own_tokens_say() -> None:
    seqs = [*running(1), *running(1, [5, 6, 7, 8])]
    assert proposed(drafts(), seqs) == [[1, 2, 3, 4], []]


def test_long_prompts_are_indexed_a_part_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices of a long prompt began together, and indexing it for all of them held up every stream for seconds."""
    monkeypatch.setattr("engine.speculative.drafts._MOST_INDEXED", 8000)
    mine, seqs = drafts(64), [*running(7, CYCLE * 500, 10_000), *running(1, CYCLE * 50, 10_000)]
    seqs[-1].id = 7
    ready = [sum(map(bool, proposed(mine, seqs)[:7])) for _ in range(7)]
    assert ready == [1, 2, 3, 5, 6, 7, 7], "8000 of 42,600 tokens before each step, and the short prompt first"
    assert seqs[7].spec_token_ids
    seqs[0].token_ids += CYCLE
    assert len(proposed(mine, seqs)[0]) == 4


def test_an_index_that_begins_again_to_grow_is_filled_a_part_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.speculative.drafts._MOST_INDEXED", 300)
    mine, (seq,) = drafts(), running(1, CYCLE * 85, 10_000)
    assert [len(proposed(mine, [seq])[0]) for _ in range(4)] == [0, 0, 0, 4], "1020 tokens, of which 1024 have room"
    seq.token_ids += CYCLE
    assert [len(proposed(mine, [seq])[0]) for _ in range(4)] == [0, 0, 0, 4]


def test_no_draft_is_behind_what_a_sequence_may_become() -> None:
    assert proposed(drafts(), running(1, limit=15)) == [[1, 2]]
    assert proposed(drafts(), running(1, limit=13)) == [[]]
    (late,) = running(1, limit=16)
    late.num_placeholder = 1
    assert proposed(drafts(), [late]) == [[2, 3]], "behind the token that is not known"


@pytest.mark.parametrize(
    ("rows", "max_num_seqs", "budget", "each"),
    [(12, 4, 1000, 4), (13, 4, 1000, 3), (13, 64, 1000, 3), (13, 65, 1000, 4), (4, 4, 20, 4), (4, 4, 19, 3)],
)
def test_many_rows_draft_less(rows: int, max_num_seqs: int, budget: int, each: int) -> None:
    found = proposed(drafts(max_num_seqs), running(rows), budget)
    assert {len(tokens) for tokens in found} == {each}


def test_some_rows_draft_where_there_is_not_room_for_all() -> None:
    assert sorted(len(tokens) for tokens in proposed(drafts(), running(40))) == [0] * 16 + [1] * 24
    assert [len(tokens) for tokens in proposed(drafts(), running(64))] == [0] * 64


def test_a_grammar_ends_drafts_where_it_refuses_one_and_until_it_knows_the_last_token() -> None:
    (seq,) = running(1)
    seq.matcher = SimpleNamespace(count_allowed=lambda token_ids: token_ids.index(3))  # type: ignore[assignment]
    assert proposed(drafts(), [seq]) == [[1, 2]]
    seq.num_placeholder = 1
    assert proposed(drafts(), [seq]) == [[]]


def test_what_was_rejected_is_counted_and_remembered() -> None:
    mine, (seq,) = drafts(), running(1)
    proposed(mine, [seq])
    verified = {seq.id: [1, 2, 3, 4]}
    seq.token_ids += [1, 2, 9]
    mine.take([seq], ScheduledBatchOutput({seq.id: (1, 2, 9)}), verified)
    assert (mine.num_proposed, mine.num_accepted) == (4, 2)
    mine.take([seq], ScheduledBatchOutput({seq.id: (9,)}), verified)
    assert (mine.num_proposed, mine.num_accepted) == (8, 2)
    seq.token_ids = [*CYCLE]
    mine._lookups[seq.id].note(len(CYCLE), 4, 0)
    assert proposed(mine, [seq]) == [[]], "a pause"


def test_while_drafts_do_not_pay_a_change_of_rows_ends_a_pause_without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, seqs = drafts(speculative_method="eagle"), running(2)
    for num_tokens, seconds in ((1, 1.0), (2, 1.0), (3, 9.0)):
        mine.plan.costs.note_step(num_tokens, seconds)
    mine.plan.gate.reject()
    planned: list[int] = []
    plan = mine.plan.plan

    def counted(rows: list[Sequence], room: int, num_steps: int) -> None:
        planned.append(num_steps)
        plan(rows, room, num_steps)

    monkeypatch.setattr(mine.plan, "plan", counted)
    for step in range(1, 301):
        assert proposed(mine, seqs) == [[], []]
        assert mine.is_idle(seqs)
        assert mine.num_next(seqs, 2) == []
        assert sum(planned) <= step
    assert len(planned) < 15
    num_plans, num_paused = len(planned), 300 - sum(planned)
    assert num_paused > 0, "the last pause goes on"
    proposed(mine, seqs[:1])
    assert planned[num_plans:] == [1 + num_paused], "the steps of the pause count"


def test_the_first_of_many_rows_to_draft_are_those_that_have_tokens_left() -> None:
    mine, seqs = drafts(128, speculative_method="eagle", num_speculative_tokens=3), running(128)
    seqs[0].token_limit = len(CYCLE) + 1
    assert mine.num_next(seqs, 128) == [0] + [3] * 16 + [0] * 111


def test_paused_steps_count_although_few_are_measured() -> None:
    mine, seqs = drafts(speculative_method="eagle"), running(2)
    plan = mine.plan
    plan.gate.reject()
    batch = ScheduledBatch({seq.id: seq for seq in seqs}, [1, 1], 2, 0, 2, 2, 0, 2, num_next_drafts=[])
    for _ in range(9):
        mine.begin_step()
        assert proposed(mine, seqs) == [[], []]
        assert mine.num_next(seqs, 2) == []
        mine.note_duration(batch, 0.01)
    assert mine.pause_left > 0
    assert plan.gate._block.seconds == pytest.approx(9 * 0.01)
    for _ in range(80):
        proposed(mine, seqs)
        mine.note_duration(batch, 0.1)
    assert not plan.is_stopped
    assert not mine.pause_left


def test_paused_steps_are_measured_although_the_number_of_rows_keeps_changing() -> None:
    """Else the gate would never open again where answers are short."""
    mine, seqs = drafts(speculative_method="eagle"), running(8)
    mine.plan.gate.reject()
    for step in range(400):
        rows = seqs[: 5 + step // 2 % 4]
        mine.begin_step()
        mine.propose(rows, 1000)
        mine.num_next(rows, len(rows))
        size = len(rows)
        batch = ScheduledBatch(
            {seq.id: seq for seq in rows}, [1] * size, size, 0, size, size, 0, size, num_next_drafts=[]
        )
        mine.note_duration(batch, 0.01)
        if not mine.plan.is_stopped:
            return
    pytest.fail("no try in 4 s")


def test_a_paused_step_has_no_accepted_drafts_of_the_step_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a pause begins while a step that verifies drafts is still unread."""
    mine, seqs = drafts(speculative_method="eagle"), running(2)
    mine.plan.gate.reject()
    mine.propose(seqs, 1000)
    mine.take(seqs, ScheduledBatchOutput({0: (1, 2, 3), 1: (1, 2, 3)}, draft_token_ids={}), {0: [1, 2], 1: [1, 2]})
    generated: list[int] = []
    monkeypatch.setattr(mine.plan, "note_step", lambda batch, seconds, tokens, **_: generated.append(tokens))
    batch = ScheduledBatch({seq.id: seq for seq in seqs}, [1, 1], 2, 0, 2, 2, 0, 2)
    for _ in range(8):
        mine.note_duration(batch, 0.01)
    assert generated == [2] * 8, "plain steps of two rows have no pace yet, so that each is measured"
    mine.plan.gate.needs_plain_steps = False
    for _ in range(8):
        mine.note_duration(batch, 0.01)
    assert generated == [2] * 9


def scheduler(**fields: Any) -> Scheduler:
    config = Config(
        num_kvcache_blocks=fields.pop("num_blocks", 16),
        max_model_len=64,
        max_num_seqs=4,
        speculative_config=SpeculativeConfig(prompt_lookup_min=2),
        **fields,
    )
    return Scheduler(config)


def begin(scheduler: Scheduler) -> ScheduledBatch | None:
    scheduled = scheduler.schedule()
    if scheduled is None:
        return None
    scheduler.begin_step(scheduled[0])
    return scheduled[0]


def test_a_step_that_verifies_drafts_is_read_before_the_next_one() -> None:
    mine = scheduler()
    seq = Sequence([*CYCLE], 16, SamplingParams(temperature=0.0, max_tokens=40), id=3)
    mine.add(seq)
    assert begin(mine) is not None
    ahead = begin(mine)
    assert ahead is not None
    assert ahead.scheduled_spec_decode_tokens == {3: [2, 3, 4, 1]}, "1 is guessed to be the one that is not known"
    assert ahead.draft_tokens == [2, 3, 4, 1]
    mine.read_step(ScheduledBatchOutput({3: (1,)}))
    assert begin(mine) is None, "who knows how many are accepted"
    mine.read_step(ScheduledBatchOutput({3: (2, 3, 9)}))
    assert seq.completion_token_ids == [1, 2, 3, 9]
    assert (mine.total_draft_tokens, mine.total_accepted_tokens) == (4, 2)
    assert begin(mine).scheduled_tokens == [[9]]  # type: ignore[union-attr]


def test_drafts_neither_preempt_sequences_nor_delay_them() -> None:
    """Three rows that reach the end of their blocks in turn, while a single block is free."""
    mine = scheduler(num_blocks=4)
    seqs = [Sequence([1, 2] * 6 + [3] * i, 16, SamplingParams(max_tokens=40), id=i) for i in range(3)]
    mine.extend(seqs)
    scheduled = mine.schedule()
    assert scheduled is not None
    mine.postprocess(seqs, ScheduledBatchOutput(dict.fromkeys(range(3), (1,))))
    for token in (2, 1):
        batch, rows = mine.schedule()  # type: ignore[misc]
        assert len(rows) == 3
        mine.postprocess(seqs, ScheduledBatchOutput(dict.fromkeys(range(3), (token,))))
    assert mine.stats("decode", 0.0).preemptions == 0
    # The longest sequence has 17 tokens now, and takes the last block for its mandatory token.
    batch, rows = mine.schedule()  # type: ignore[misc]
    assert len(rows) == 3
    assert batch.scheduled_spec_decode_tokens == {}


@pytest.mark.parametrize("num_rounds", [1, 8])
@pytest.mark.parametrize("num_right", [0, 3, 7])
@pytest.mark.parametrize("is_read_late", [False, True])
@pytest.mark.parametrize("num_drafts", [2, 7])
@pytest.mark.parametrize("limit", [64, 49])
def test_drafts_and_rounds_get_no_blocks_beyond_the_end(
    limit: int, num_drafts: int, is_read_late: bool, num_right: int, num_rounds: int
) -> None:
    """The runner's block tables are as wide as the longest sequence."""
    speculative = SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=num_drafts)
    config = Config(num_kvcache_blocks=16, max_model_len=limit, max_num_seqs=4, speculative_config=speculative)
    mine = Scheduler(config, max_rounds=num_rounds)
    mine.drafts._round_seconds = 0.0
    seq = Sequence([5] * 12, 16, SamplingParams(max_tokens=100, ignore_eos=True), id=0)
    mine.add(seq)
    unread: list[ScheduledBatch] = []
    while not seq.is_finished:
        scheduled = mine.schedule()
        if scheduled is not None:
            batch = scheduled[0]
            for gained in batch.appended_blocks:
                assert gained.start + len(gained.block_ids) <= -(-limit // 16)
            on_device = is_read_late and not batch.total_seqs_num_prefill and any(batch.num_next_drafts)
            mine.begin_step(batch, drafts_on_device=on_device)
            unread.append(batch)
        if scheduled is None or len(unread) > is_read_late:
            batch = unread.pop(0)
            verified = len(batch.scheduled_spec_decode_tokens.get(0, ()))
            tokens = (5,) * (1 + min(verified, num_right))
            made = {0: [5] * batch.num_next_drafts[0]} if batch.num_next_drafts else None
            mine.read_step(ScheduledBatchOutput({0: tokens}, draft_token_ids=made))
    assert (len(seq.token_ids), seq.leave_reason) == (limit, "max_tokens")
    assert mine.total_draft_tokens


def test_a_prompt_without_memory_costs_no_drafts() -> None:
    mine = scheduler(max_num_batched_tokens=64)
    seq = Sequence([*CYCLE], 16, SamplingParams(max_tokens=40), id=0)
    mine.add(seq)
    for token in (1, 2):
        mine.schedule()
        mine.postprocess([seq], ScheduledBatchOutput({0: (token,)}))
    mine.add(Sequence([7] * 40, 16, SamplingParams(), id=1))
    batch, rows = mine.schedule()  # type: ignore[misc]
    assert batch.kind == "prefill"
    mine.retract(rows.values())
    assert mine.shrink_steps(batch.total_tokens_num, len(rows))
    assert mine.limits.num_tokens < 64


def test_the_drafts_of_all_rounds_of_a_step_are_counted() -> None:
    mine, seqs = drafts(speculative_method="eagle"), running(3)
    output = ScheduledBatchOutput(
        {0: (1, 2, 3, 9, 8), 1: (4,), 2: ()},
        draft_token_ids={0: [5], 1: [], 2: []},
        num_rounds=3,
        verified_drafts={0: [(2, 1), (4, 2), (0, 0)], 1: [(0, 0)], 2: [(1, -1)]},
    )
    assert mine.take(seqs, output, {0: [1, 7], 2: [6]}) == [seqs[2]]
    assert (mine.num_verifications, mine.num_proposed, mine.num_accepted) == (2, 6, 3)
    assert mine.accepted_by_position[:2] == [2, 1]
    assert [seq.spec_token_ids for seq in seqs] == [[5], [], []]


@pytest.mark.parametrize("stop", [None, 5])
def test_a_row_whose_drafts_left_no_token_in_a_later_round_is_computed_again(stop: int | None) -> None:
    """They may have left NaN in its blocks, which a step without drafts would read and report as an error."""
    config = Config(
        num_kvcache_blocks=16,
        max_model_len=64,
        max_num_seqs=4,
        speculative_config=SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=3),
    )
    mine = Scheduler(config, max_rounds=8)
    stops = None if stop is None else [[stop]]
    seq = Sequence([*CYCLE], 16, SamplingParams(max_tokens=40, stop_token_sequences=stops), id=0)
    mine.add(seq)
    mine.schedule()
    mine.postprocess([seq], ScheduledBatchOutput({0: (1,)}, draft_token_ids={0: [2, 3]}))
    mine.drafts._round_seconds = 1e-9
    mine.schedule()
    rounds = {0: [(2, 1), (3, -1)]}
    mine.postprocess([seq], ScheduledBatchOutput({0: (2, 5)}, num_rounds=2, verified_drafts=rounds))
    mine.check_integrity()
    assert seq.completion_token_ids == [1, 2, 5]
    assert (mine.total_draft_tokens, mine.total_accepted_tokens) == (2, 1)
    assert list(mine.waiting) == ([seq] if stop is None else [])
    assert seq.is_finished == (stop is not None)


@pytest.mark.parametrize(
    ("rounds", "further"), [([(2, 0)], 0), ([(2, 2), (3, 0), (1, 1)], 6)], ids=["one round", "three rounds"]
)
def test_an_owner_is_charged_for_the_rounds_that_a_step_had(rounds: list[tuple[int, int]], further: int) -> None:
    """A step may have fewer than were scheduled, as where a row's parameters are not those of the operators."""
    config = Config(
        num_kvcache_blocks=16,
        max_model_len=64,
        max_num_seqs=4,
        speculative_config=SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=3),
    )
    mine = Scheduler(config, max_rounds=8)
    seq = Sequence([*CYCLE], 16, SamplingParams(max_tokens=40), id=0)
    mine.add(seq)
    mine.schedule()
    mine.postprocess([seq], ScheduledBatchOutput({0: (1,)}, draft_token_ids={0: [2, 3]}))
    mine.drafts._round_seconds = 1e-9
    served = mine._shares.served(seq.owner)
    batch, _ = mine.schedule()  # type: ignore[misc]
    assert (batch.num_rounds, batch.scheduled_spec_decode_tokens) == (8, {0: [2, 3]})
    tokens = tuple(range(5, 5 + sum(1 + accepted for _, accepted in rounds)))
    verified = {0: rounds} if len(rounds) > 1 else None
    mine.postprocess([seq], ScheduledBatchOutput({0: tokens}, num_rounds=len(rounds), verified_drafts=verified))
    assert mine._shares.served(seq.owner) - served == 3 + further


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 8), (0.0005, 8), (0.0025, 2), (0.1, 1)])
def test_a_step_has_as_many_rounds_as_keep_it_short(seconds: float, rounds: int) -> None:
    config = SimpleNamespace(
        speculative_config=SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=3)
    )
    mine, seqs = Drafts(config, 4, max_rounds=8), running(2)
    assert mine.num_rounds == 1, "the duration of a step is not known"
    mine.note_duration(ScheduledBatch({seq.id: seq for seq in seqs}, [1, 1], 2, 0, 2, 2, 0, 2), seconds)
    assert mine.num_rounds == rounds
    assert mine.num_lookahead_tokens == 3 + 4 * (rounds - 1)


def test_the_seconds_of_a_step_count_for_each_of_its_rounds() -> None:
    mine, seqs = drafts(speculative_method="eagle"), running(2)
    output = ScheduledBatchOutput(
        {0: (1, 2), 1: (1, 2)}, num_rounds=2, verified_drafts={0: [(0, 0), (0, 0)], 1: [(0, 0), (0, 0)]}
    )
    mine.take(seqs, output, {})
    batch = ScheduledBatch({seq.id: seq for seq in seqs}, [2, 2], 4, 0, 4, 2, 0, 2, num_spec_step=3)
    batch.scheduled_spec_decode_tokens = {0: [1], 1: [1]}
    mine.note_duration(batch, 0.5)
    assert mine.plan.costs.step(4) == pytest.approx(0.25)
