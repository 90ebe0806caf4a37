"""The busy loop over a stub of the model: its inputs, its outputs, and its survival of errors."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.batch import ScheduledBatch
from engine.core import engine_core, step_pipeline
from engine.messages import AbortRequests, Shutdown
from tests.unit.core_bench import BLOCK_SIZE, NUM_BLOCKS, Bench, ends, outputs_of


@pytest.fixture(params=["off", "on"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(async_scheduling=request.param)


def test_every_sequence_gets_its_tokens_and_one_terminal_output(bench: Bench) -> None:
    for seq_id in range(3):
        bench.add(seq_id, max_tokens=2 + seq_id)
    messages = bench.run_until_done(0, 1, 2)
    assert ends(messages) == {0: "max_tokens", 1: "max_tokens", 2: "max_tokens", 999: "abort"}
    for seq_id in range(3):
        tokens = [token for output in outputs_of(messages, seq_id) for token in output.output_tokens]
        assert tokens == [5] * (2 + seq_id)


def test_each_step_is_reported_in_one_message_with_its_kind_and_gauges(bench: Bench) -> None:
    bench.add(0)
    messages = bench.run_until_done(0)
    reported = [message.stats.step_kind for message in messages if message.stats and message.stats.step_seconds > 0]
    assert reported == [batch.kind for batch in bench.runner.batches]
    assert messages[0].stats is not None
    assert (messages[0].stats.num_running, messages[0].stats.kv_blocks_total) == (2, NUM_BLOCKS)


def test_memory_of_the_device_is_read_once_in_a_while_and_goes_with_every_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def look() -> tuple[int, int]:
        looks.append(1)
        return 3, 7

    monkeypatch.setattr(bench.runner, "device_memory", look)
    bench.add(0, max_tokens=4)
    messages = bench.run_until_done(0)
    assert {(each.stats.device_memory, each.stats.device_memory_total) for each in messages if each.stats} == {(3, 7)}
    assert len(messages) > len(looks) == 1


def test_the_host_part_of_a_step_is_what_follows_the_step_before_it_without_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step takes 1 s, sending its outputs 10, and taking in the first request after the wait 1000."""
    bench, now, durations = Bench(), 0.0, list[tuple[float, float]]()

    def taking(seconds: float, result: object = None) -> Any:
        nonlocal now
        now += seconds
        return result

    monkeypatch.setattr(step_pipeline, "time", SimpleNamespace(perf_counter=lambda: now))
    send, wait = bench.core._send, bench.core._wait_idle
    monkeypatch.setattr(bench.core, "_send", lambda *of_step: taking(10.0, send(*of_step)))
    monkeypatch.setattr(bench.core, "_wait_idle", lambda: taking(1000.0, bench.add(1) or wait()))
    monkeypatch.setattr(
        bench.core.scheduler,
        "note_duration",
        lambda batch, seconds, *, host_seconds, **_: durations.append((seconds, host_seconds)),
    )
    bench.runner.on_step = lambda step, batch: taking(1.0)
    for _ in range(2):
        bench.core.pull_and_process_input_queue()
        for _ in range(4):
            bench.core._process_engine_step()
    assert durations == [(1.0, 0.0), *[(1.0, 10.0)] * 3] * 2


def test_abort_takes_effect_before_the_next_step(bench: Bench) -> None:
    bench.add(0, max_tokens=50)
    bench.runner.on_step = lambda step, batch: bench.send(AbortRequests([0])) if step == 3 else None
    messages = bench.run_until_done(0)
    assert [0 in batch.req_ids for batch in bench.runner.batches] == [True, True, True, False]
    assert ends(messages)[0] == "abort"


def test_abort_of_the_last_sequence_is_answered_though_no_step_follows() -> None:
    bench = Bench()
    bench.add(0, max_tokens=50)
    bench.runner.on_step = lambda step, batch: bench.send(AbortRequests([0]))
    taken = bench.core.output_queue
    bench.core.pull_and_process_input_queue()
    bench.core._process_engine_step()
    assert taken.get().outputs[0].output_tokens == [5]
    bench.send(Shutdown())
    (answer,) = bench.run()
    assert ends([answer]) == {0: "abort"}
    assert answer.stats is not None
    assert (answer.stats.num_running, answer.stats.kv_blocks_used) == (0, 0)


def test_abort_of_unknown_ids_is_ignored(bench: Bench) -> None:
    bench.send(AbortRequests([17]))
    bench.add(0)
    assert ends(bench.run_until_done(0)) == {0: "max_tokens", 999: "abort"}


def test_aborts_that_arrive_together_are_one_pass_over_what_is_live(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[list[int]] = []
    abort = bench.core.scheduler.abort
    monkeypatch.setattr(bench.core.scheduler, "abort", lambda ids: passes.append(list(ids)) or abort(ids))
    for seq_id in range(20):
        bench.add(seq_id)
        bench.send(AbortRequests([seq_id]))
    bench.send(Shutdown())
    assert ends(bench.run()) == dict.fromkeys(range(20), "abort")
    assert passes == [list(range(20)), []]


def test_sequence_that_can_never_fit_is_answered_with_an_error_and_the_rest_goes_on(bench: Bench) -> None:
    bench.add(0, num_prompt_tokens=NUM_BLOCKS * BLOCK_SIZE + 1)
    bench.add(1)
    messages = bench.run_until_done(1)
    assert ends(messages) == {0: "error", 1: "max_tokens", 999: "abort"}
    (refusal,) = outputs_of(messages, 0)
    assert refusal.error is not None
    assert "129 tokens" in refusal.error


def test_row_that_the_model_could_not_compute_fails_alone(bench: Bench) -> None:
    bench.runner.errors = {0: "the logits are not finite"}
    bench.add(0)
    bench.add(1)
    messages = bench.run_until_done(0, 1)
    assert {key: ends(messages)[key] for key in (0, 1)} == {0: "error", 1: "max_tokens"}
    assert [output.error for output in outputs_of(messages, 0)] == ["the logits are not finite"]


def test_shutdown_ends_what_runs_and_waits_also_what_arrived_behind_it(bench: Bench) -> None:
    def shut_down(step: int, batch: ScheduledBatch) -> None:
        if step == 2:
            bench.send(Shutdown())
            bench.add(8)

    for seq_id in range(4):
        bench.add(seq_id, num_prompt_tokens=3 * BLOCK_SIZE, max_tokens=40)
    bench.runner.on_step = shut_down
    assert ends(bench.run()) == dict.fromkeys([0, 1, 2, 3, 8], "abort")


def test_corrupt_state_found_when_idle_ends_the_loop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "_CHECK_AFTER_IDLE_SECONDS", 0.001)
    bench.core.scheduler._pool._free_slots.pop()
    with pytest.raises(AssertionError, match="slots leak"):
        bench.core.busy_loop()


def test_produced_token_is_proof_of_life_and_leaves_nothing_behind(bench: Bench) -> None:
    bench.core.produce_token()
    assert len(bench.runner.batches) == 1
    assert bench.core.output_queue.empty()
    assert bench.core.scheduler.is_finished()
    bench.core.scheduler.check_integrity()


def test_model_that_produces_no_token_is_not_ready(bench: Bench) -> None:
    def fail(step: int, batch: ScheduledBatch) -> None:
        raise RuntimeError("no")

    bench.runner.on_step = fail
    with pytest.raises(RuntimeError, match="no token"):
        bench.core.produce_token()


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_death_while_a_request_is_taken_in_is_blamed_on_that_and_on_no_running_step(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    bench = Bench(async_scheduling=mode)
    running = [0] if mode == "on" else []
    bench.add(0, max_tokens=20)
    bench.core.pull_and_process_input_queue()
    bench.core._process_engine_step()
    assert bench.record.read() == running
    add, seen = bench.core.scheduler.add, []
    monkeypatch.setattr(bench.core.scheduler, "add", lambda seq: seen.append(bench.record.read()) or add(seq))
    bench.add(1)
    bench.core.pull_and_process_input_queue()
    assert seen == [[1]]
    assert bench.record.read() == running
    bench.core._process_engine_step()
    assert bench.record.read() == ([1] if mode == "on" else [])
