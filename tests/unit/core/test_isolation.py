"""Steps that raise: the sequence that causes it is found and fails; all others continue."""

import pytest

from engine.batch import ScheduledBatch
from engine.messages import Shutdown, StepOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.unit.core_bench import BLOCK_SIZE, NUM_BLOCKS, Bench, StubRunner, ends, outputs_of


@pytest.fixture(params=["waiting", "launch", "sample", "result"], autouse=True)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a step raises: in a synchronous loop, or at one of the three calls of an asynchronous one."""
    if request.param != "waiting":
        monkeypatch.setitem(Bench.defaults, "async_scheduling", "on")
        monkeypatch.setattr(StubRunner, "sees_at", request.param)
    return str(request.param)


def poison(bench: Bench, *seq_ids: int, at_length: int = 0) -> None:
    """Raise in steps that compute one of these sequences, once it has `length` tokens."""
    inner = bench.runner.on_step

    def on_step(step: int, batch: ScheduledBatch) -> None:
        inner(step, batch)
        for seq_id, length in zip(batch.req_ids, batch.context_lens, strict=True):
            if seq_id in seq_ids and length >= at_length:
                raise RuntimeError(f"division by cucumber {seq_id}")

    bench.runner.on_step = on_step


def tokens_of(messages: list[StepOutputs], seq_id: int) -> list[int]:
    return [token for output in outputs_of(messages, seq_id) for token in output.output_tokens]


@pytest.mark.parametrize("guilty", [(0,), (6,), (1, 2), (0, 3, 6), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("at_length", [0, 5])
def test_only_the_guilty_fail(guilty: tuple[int, ...], at_length: int) -> None:
    bench = Bench()
    for seq_id in range(7):
        bench.add(seq_id, max_tokens=6)
    poison(bench, *guilty, at_length=at_length)
    messages = bench.run_until_done(*range(7))
    expected = {seq_id: "error" if seq_id in guilty else "max_tokens" for seq_id in range(7)}
    assert ends(messages) == expected | {999: "abort"}
    for seq_id in range(7):
        if seq_id in guilty:
            error = outputs_of(messages, seq_id)[-1].error
            assert error == f"the step that computed this request failed: division by cucumber {seq_id}"
            assert len(tokens_of(messages, seq_id)) == max(0, at_length - 3)
        else:
            assert tokens_of(messages, seq_id) == [5] * 6


def test_a_transient_fault_fails_no_sequence() -> None:
    bench = Bench()

    def fail_once(step: int, batch: ScheduledBatch) -> None:
        if step == 2:
            raise MemoryError

    for seq_id in range(4):
        bench.add(seq_id)
    bench.runner.on_step = fail_once
    messages = bench.run_until_done(*range(4))
    assert ends(messages) == dict.fromkeys(range(4), "max_tokens") | {999: "abort"}
    assert all(tokens_of(messages, seq_id) == [5] * 4 for seq_id in range(4))


def test_a_fault_of_one_step_does_not_fail_who_is_alone_in_it() -> None:
    bench = Bench()

    def fail_once(step: int, batch: ScheduledBatch) -> None:
        if step == 1:
            raise MemoryError

    bench.core.input_queue.put(Sequence([7] * 3, BLOCK_SIZE, SamplingParams(max_tokens=4), id=0))
    bench.runner.on_step = fail_once
    inner = bench.runner.on_step

    def stop_at_last(step: int, batch: ScheduledBatch) -> None:
        inner(step, batch)
        if step == 5:
            bench.send(Shutdown())

    bench.runner.on_step = stop_at_last
    assert ends(bench.run()) == {0: "max_tokens"}


def test_a_step_whose_halves_fit_into_memory_fails_no_sequence() -> None:
    bench = Bench()

    def run_out_of_memory(step: int, batch: ScheduledBatch) -> None:
        if batch.total_tokens_num > 6:
            raise MemoryError

    for seq_id in range(5):
        bench.add(seq_id)
    bench.runner.on_step = run_out_of_memory
    assert ends(bench.run_until_done(*range(5))) == dict.fromkeys(range(5), "max_tokens") | {999: "abort"}


def test_guilt_is_found_where_the_cache_is_full_of_others() -> None:
    bench = Bench(enable_prefix_caching=False)
    for seq_id in range(3):
        bench.add(seq_id, num_prompt_tokens=2 * BLOCK_SIZE - 1, max_tokens=8)

    def join(step: int, batch: ScheduledBatch) -> None:
        if step == 2:
            bench.add(3, num_prompt_tokens=2 * BLOCK_SIZE - 1)

    bench.runner.on_step = join
    poison(bench, 3)
    messages = bench.run_until_done(*range(4))
    assert ends(messages) == {0: "max_tokens", 1: "max_tokens", 2: "max_tokens", 3: "error", 999: "abort"}
    assert tokens_of(messages, 0) == [5] * 8


def test_a_model_that_fails_whatever_it_computes_ends_the_core_and_reports_the_step() -> None:
    bench = Bench()

    def fail(step: int, batch: ScheduledBatch) -> None:
        raise RuntimeError("the device is gone")

    for seq_id in range(3):
        bench.add(seq_id)
    bench.runner.on_step = fail
    with pytest.raises(RuntimeError, match="fails, whichever requests it computes: the device is gone"):
        bench.core.busy_loop()
    assert sorted(bench.record.read()) == [0, 1, 2]
    while not bench.core.output_queue.empty():
        assert bench.core.output_queue.get().outputs == []


def test_the_record_names_the_running_step_and_nothing_between_steps(mode: str) -> None:
    bench = Bench()
    seen = []

    def note(step: int, batch: ScheduledBatch) -> None:
        seen.append((batch.req_ids, bench.record.read()))
        if step == 3:
            bench.send(Shutdown())

    for seq_id in range(3):
        bench.add(seq_id)
    bench.runner.on_step = note
    bench.run()
    # An asynchronous step is launched before the third is read.
    assert len(seen) == 3 + (mode == "result")
    assert all(ids == recorded for ids, recorded in seen)
    assert bench.record.read() == []


def test_suspects_are_computed_alone_before_anything_else() -> None:
    bench = Bench()
    bench.add(0)
    for seq_id in (1, 2):
        bench.add(seq_id, num_prompt_tokens=2 * BLOCK_SIZE, suspect=True)
    bench.add(3)
    messages = bench.run_until_done(*range(4))
    assert [batch.req_ids for batch in bench.runner.batches[:3]] == [[1], [2], [0, 3, 999]]
    assert ends(messages) == dict.fromkeys(range(4), "max_tokens") | {999: "abort"}


def test_a_suspect_that_raises_fails_alone() -> None:
    bench = Bench()
    for seq_id in range(3):
        bench.add(seq_id, suspect=True)
    poison(bench, 1)
    assert ends(bench.run_until_done(*range(3))) == {0: "max_tokens", 1: "error", 2: "max_tokens", 999: "abort"}


def test_the_cache_holds_nothing_of_a_step_that_raised() -> None:
    bench = Bench()

    def fail_once(step: int, batch: ScheduledBatch) -> None:
        if step == 1:
            raise RuntimeError

    bench.add(0, num_prompt_tokens=(NUM_BLOCKS - 2) * BLOCK_SIZE)
    bench.runner.on_step = fail_once
    messages = bench.run_until_done(0)
    assert messages[-1].stats is not None
    assert messages[-1].stats.prefix_hit_tokens == 0
