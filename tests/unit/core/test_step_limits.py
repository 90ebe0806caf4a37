"""A device that runs out of memory in a step: steps become smaller, and no request fails for lack of a smaller
step."""

import pytest

from engine.batch import ScheduledBatch, StepOutOfMemory
from engine.core import step_budget
from engine.core.step_budget import StepLimits
from engine.messages import StepOutputs
from tests.unit.core_bench import BLOCK_SIZE, Bench, StubRunner, ends, outputs_of


def test_prompts_shrink_in_tokens_and_decodes_in_rows_until_nothing_is_left_to_shrink() -> None:
    limits = StepLimits(1000, 16)
    assert limits.shrink(300, 4)
    assert (limits.num_tokens, limits.num_rows) == (150, 16)
    assert limits.shrink(12, 12)
    assert (limits.num_tokens, limits.num_rows) == (150, 6)
    assert limits.shrink(2, 2)
    assert (limits.num_tokens, limits.num_rows) == (150, 1)
    assert not limits.shrink(1, 1)


def test_larger_steps_are_tried_again_after_many_that_went_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_budget, "_STEPS_BEFORE_GROWTH", 3)
    limits = StepLimits(64, 8)
    limits.shrink(64, 8)
    limits.shrink(8, 8)
    found = []
    for _ in range(7):
        limits.note_step()
        found.append((limits.num_tokens, limits.num_rows))
    assert found == [(32, 4), (32, 4), (64, 8), (64, 8), (64, 8), (64, 8), (64, 8)]


@pytest.fixture(params=["waiting", "launch", "sample", "result"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    if request.param == "waiting":
        return Bench()
    monkeypatch.setattr(StubRunner, "sees_at", request.param)
    return Bench(async_scheduling="on")


@pytest.mark.parametrize("room", [1, 2, 9, 40])
def test_steps_out_of_memory_are_made_smaller_and_no_request_fails(bench: Bench, room: int) -> None:
    failed = []

    def run_out(step: int, batch: ScheduledBatch) -> None:
        if batch.total_tokens_num > room:
            failed.append(step)
            raise StepOutOfMemory("2.00 GiB more were asked for, and 1.00 GiB are free")

    bench.runner.on_step = run_out
    for seq_id in range(4):
        bench.add(seq_id, num_prompt_tokens=5 + seq_id * BLOCK_SIZE // 2, max_tokens=6)
    messages = bench.run_until_done(*range(4))
    assert ends(messages) == dict.fromkeys(range(4), "max_tokens") | {999: "abort"}
    for seq_id in range(4):
        assert [token for output in outputs_of(messages, seq_id) for token in output.output_tokens] == [5] * 6
    # Each is reported to the front end, whose watchdog would otherwise add the next step's time.
    reports = [message for message in messages if isinstance(message, StepOutputs) and not message.outputs]
    assert len(reports) >= len(failed)


def test_a_sequence_for_which_not_even_one_token_has_room_fails_in_words(bench: Bench) -> None:
    def run_out(step: int, batch: ScheduledBatch) -> None:
        if 0 in batch.req_ids:
            raise StepOutOfMemory("the GPU ran out of memory: 2.00 GiB more were asked for")

    bench.runner.on_step = run_out
    for seq_id in range(3):
        bench.add(seq_id)
    messages = bench.run_until_done(*range(3))
    assert ends(messages) == {0: "error", 1: "max_tokens", 2: "max_tokens", 999: "abort"}
    error = outputs_of(messages, 0)[-1].error
    assert error is not None
    assert error.endswith("the GPU ran out of memory: 2.00 GiB more were asked for")
