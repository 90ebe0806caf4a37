"""The busy loop over a stub model: what it takes in, what it answers, and that it outlives what goes wrong."""

from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from engine import engine_core
from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.config import Config
from engine.engine_core import EngineCore
from engine.messages import AbortRequests, RequestOutput, Shutdown, StepOutputs, Stopped
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

BLOCK_SIZE = 16
NUM_BLOCKS = 8


class StubRunner:
    """Samples token 5 for every row; `on_step` sees the batch first, with the number of the step."""

    def __init__(self) -> None:
        self.batches: list[ScheduledBatch] = []
        self.on_step: Callable[[int, ScheduledBatch], None] = lambda step, batch: None
        self.errors: dict[int, str] = {}

    def forward(self, batch: ScheduledBatch, /) -> ScheduledBatchOutput:
        self.batches.append(batch)
        self.on_step(len(self.batches), batch)
        errors = {seq_id: error for seq_id, error in self.errors.items() if seq_id in batch.req_ids}
        return ScheduledBatchOutput(
            {seq_id: (5,) for seq_id in batch.req_ids if seq_id not in errors}, errors=errors or None
        )


class Bench:
    """An `EngineCore` over a `StubRunner`, and its queues."""

    def __init__(self) -> None:
        config = Config(num_kvcache_blocks=NUM_BLOCKS, max_num_seqs=8, eos_token_id=2)
        self.runner = StubRunner()
        self.core = EngineCore(config, self.runner, SimpleQueue(), SimpleQueue())

    def add(self, seq_id: int, num_prompt_tokens: int = 3, max_tokens: int = 4) -> None:
        prompt = [10 + seq_id] * num_prompt_tokens
        self.core.input_queue.put(Sequence(prompt, BLOCK_SIZE, SamplingParams(max_tokens=max_tokens), id=seq_id))

    def send(self, message: AbortRequests | Shutdown) -> None:
        self.core.input_queue.put(message)

    def run(self) -> list[StepOutputs]:
        """The messages of a busy loop that runs until it is shut down, without the closing `Stopped`."""
        self.core.busy_loop()
        messages = []
        while not self.core.output_queue.empty():
            messages.append(self.core.output_queue.get())
        assert messages.pop() == Stopped()
        assert self.core.scheduler.is_finished()
        self.core.scheduler.check_integrity()
        return messages

    def run_until_done(self, *seq_ids: int) -> list[StepOutputs]:
        """Shut down in the step after the last of these sequences has left the batch."""
        self.add(999, max_tokens=100)
        seen: set[int] = set()
        inner = self.runner.on_step

        def stop_when_done(step: int, batch: ScheduledBatch) -> None:
            inner(step, batch)
            seen.update(batch.req_ids)
            if seen >= set(seq_ids) and not set(seq_ids) & set(batch.req_ids):
                self.send(Shutdown())

        self.runner.on_step = stop_when_done
        return self.run()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def outputs_of(messages: list[StepOutputs], seq_id: int) -> list[RequestOutput]:
    return [output for message in messages for output in message.outputs if output.request_id == seq_id]


def ends(messages: list[StepOutputs]) -> dict[int, str | None]:
    """Finish reason by sequence; each must have ended exactly once, with its last output."""
    finished = [output for message in messages for output in message.outputs if output.finished]
    assert max(Counter(output.request_id for output in finished).values()) == 1
    for output in finished:
        assert outputs_of(messages, output.request_id)[-1] is output
    return {output.request_id: output.finish_reason for output in finished}


def test_every_sequence_gets_its_tokens_and_one_terminal_output(bench: Bench) -> None:
    for seq_id in range(3):
        bench.add(seq_id, max_tokens=2 + seq_id)
    messages = bench.run_until_done(0, 1, 2)
    assert ends(messages) == {0: "max_tokens", 1: "max_tokens", 2: "max_tokens", 999: "abort"}
    for seq_id in range(3):
        tokens = [token for output in outputs_of(messages, seq_id) for token in output.output_tokens]
        assert tokens == [5] * (2 + seq_id)


def test_each_step_is_told_in_one_message_with_its_kind_and_gauges(bench: Bench) -> None:
    bench.add(0)
    messages = bench.run_until_done(0)
    told = [message.stats.step_kind for message in messages if message.stats and message.stats.step_seconds > 0]
    assert told == [batch.kind for batch in bench.runner.batches]
    assert messages[0].stats is not None
    assert (messages[0].stats.num_running, messages[0].stats.kv_blocks_total) == (2, NUM_BLOCKS)


def test_abort_takes_effect_before_the_next_step(bench: Bench) -> None:
    bench.add(0, max_tokens=50)
    bench.runner.on_step = lambda step, batch: bench.send(AbortRequests([0])) if step == 3 else None
    messages = bench.run_until_done(0)
    assert [0 in batch.req_ids for batch in bench.runner.batches] == [True, True, True, False]
    assert ends(messages)[0] == "abort"


def test_abort_of_the_last_sequence_is_answered_though_no_step_follows(bench: Bench) -> None:
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


def test_step_that_raises_fails_its_sequences_and_frees_their_blocks(bench: Bench) -> None:
    def fail_first_step(step: int, batch: ScheduledBatch) -> None:
        if step == 1:
            bench.add(2)
            raise RuntimeError("division by cucumber")
        if step == 3:
            bench.send(Shutdown())

    bench.add(0)
    bench.add(1)
    bench.runner.on_step = fail_first_step
    messages = bench.run()
    assert ends(messages) == {0: "error", 1: "error", 2: "abort"}
    assert [output.output_tokens for output in outputs_of(messages, 2)] == [[5], [5], []]
    (output,) = outputs_of(messages, 0)
    assert output.error is not None
    assert "division by cucumber" in output.error
    assert messages[0].stats is not None
    assert messages[0].stats.kv_blocks_used == 0


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
    bench.core.scheduler._free_slots.pop()
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
