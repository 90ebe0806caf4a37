"""`Bench`: an engine core's loop over a stub of the model, for unit and property tests."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.config.config import Config
from engine.core.engine_core import EngineCore
from engine.core.scheduler import Scheduler
from engine.distributed.flight_record import FlightRecord
from engine.full_collections import FullCollections
from engine.messages import AbortRequests, RequestOutput, Shutdown, StepOutputs, Stopped
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

BLOCK_SIZE = 16
NUM_BLOCKS = 8


class StubRunner:
    """Samples token 5 for every row; `on_step` first receives the batch and the number of the step."""

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

    generates = True
    may_replay = False

    def prepare_while_idle(self) -> bool:
        return False

    def device_memory(self) -> tuple[int, int]:
        return 0, 0

    def sentinel_counts(self) -> tuple[int, int]:
        return 0, 0

    def can_replay(self, batch: ScheduledBatch, /) -> bool:
        return not batch.total_seqs_num_prefill

    sees_at = "launch"
    """When `on_step` is called for a launched step: at its launch, at `sample`, or at `result`."""

    def launch(self, batch: ScheduledBatch, /) -> "StubStep":
        return StubStep(self, batch)


class StubStep:
    """A step of the stub."""

    drafts_on_device = False

    def __init__(self, runner: StubRunner, batch: ScheduledBatch) -> None:
        self._sees_at = runner.sees_at
        self._compute = partial(runner.forward, batch)
        self._see("launch")

    def sample(self) -> None:
        self._see("sample")

    def result(self) -> ScheduledBatchOutput:
        self._see("result")
        return self.output

    def wait(self) -> None:
        pass

    def _see(self, when: str) -> None:
        if self._sees_at == when:
            self.output = self._compute()


class Bench:
    """An `EngineCore` over a `StubRunner`, and its queues."""

    defaults: ClassVar[dict[str, Any]] = {"num_kvcache_blocks": NUM_BLOCKS, "max_num_seqs": 8, "eos_token_id": 2}

    def __init__(self, collections: FullCollections | None = None, **settings: Any) -> None:
        config = Config(**{**self.defaults, **settings})
        self.runner = StubRunner()
        self.record = FlightRecord.of_its_own(config.max_num_seqs)
        queues = SimpleQueue[Any](), SimpleQueue[Any]()
        self.core = EngineCore(
            config, Scheduler(config), self.runner, *queues, record=self.record, collections=collections
        )

    def add(self, seq_id: int, num_prompt_tokens: int = 3, max_tokens: int = 4, *, suspect: bool = False) -> None:
        prompt = [10 + seq_id] * num_prompt_tokens
        seq = Sequence(prompt, BLOCK_SIZE, SamplingParams(max_tokens=max_tokens), id=seq_id)
        seq.is_suspect = suspect
        self.core.input_queue.put(seq)

    def send(self, message: AbortRequests | Shutdown) -> None:
        self.core.input_queue.put(message)

    def run(self) -> list[StepOutputs]:
        """Run the busy loop until it is shut down. Returns its messages without the final `Stopped`."""
        self.core.busy_loop()
        messages = []
        while not self.core.output_queue.empty():
            messages.append(self.core.output_queue.get())
        assert messages.pop() == Stopped()
        assert self.core.scheduler.is_finished()
        self.core.scheduler.check_integrity()
        return messages

    def run_until_done(self, *seq_ids: int) -> list[StepOutputs]:
        """Shut down in the step after the last of these sequences has ended."""
        self.add(999, max_tokens=100)
        seen: set[int] = set()
        inner = self.runner.on_step

        def stop_when_done(step: int, batch: ScheduledBatch) -> None:
            seen.update(batch.req_ids)
            live = {seq.id for seq in (*self.core.scheduler.running, *self.core.scheduler.waiting)}
            if seen >= set(seq_ids) and live.isdisjoint(seq_ids):
                self.send(Shutdown())
            inner(step, batch)

        self.runner.on_step = stop_when_done
        return self.run()


def outputs_of(messages: list[StepOutputs], seq_id: int) -> list[RequestOutput]:
    return [output for message in messages for output in message.outputs if output.request_id == seq_id]


def ends(messages: list[StepOutputs]) -> dict[int, str | None]:
    """Finish reason by sequence; each must have ended exactly once, with its last output."""
    finished = [output for message in messages for output in message.outputs if output.finished]
    assert not finished or max(Counter(output.request_id for output in finished).values()) == 1
    for output in finished:
        assert outputs_of(messages, output.request_id)[-1] is output
    return {output.request_id: output.finish_reason for output in finished}
