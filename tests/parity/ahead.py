"""Runs a model runner asynchronously, one step ahead, on a late device. For the tests of deferred output."""

from collections.abc import Iterable
from queue import SimpleQueue

from engine.core.engine_core import EngineCore
from engine.core.scheduler import Scheduler
from engine.core.step_pipeline import StepPipeline
from engine.distributed.flight_record import FlightRecord
from engine.messages import RequestOutput
from engine.runner.device_batch import DeviceBatch
from engine.runner.model_runner import ModelRunner
from engine.sequence import Sequence
from tests.parity.delayed_device import DelayedDevice


class Ahead:
    """A scheduler and a runner, with the unread steps between them."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.scheduler = Scheduler(runner.config)
        self.device = DelayedDevice()
        runner.device_batch = DeviceBatch(self.device, runner.config.max_num_seqs)
        self.outputs: list[RequestOutput] = []
        self.record = FlightRecord.of_its_own(runner.config.max_num_seqs)
        self.steps: list[str] = []
        self.pipeline = StepPipeline(self.scheduler, runner, self.record, depth=2)

    def on_read(self, outputs: list[RequestOutput], kind: str, seconds: float) -> None:
        """Process a step's outputs."""
        self.outputs += outputs
        self.steps.append(kind)

    def run(self, seqs: Iterable[Sequence]) -> list[RequestOutput]:
        """All outputs of these sequences, until they have ended."""
        self.scheduler.extend(seqs)
        while self.scheduler.has_requests() or self.pipeline:
            assert self.pipeline.advance(self.on_read) is None
            self.scheduler.check_integrity()
        assert self.record.read() == []
        reported, self.outputs = self.outputs, []
        return reported


def waiting(runner: ModelRunner, seqs: Iterable[Sequence]) -> list[RequestOutput]:
    """The same, with each step read before the next is scheduled."""
    scheduler, outputs = Scheduler(runner.config), list[RequestOutput]()

    class Queue:
        def put_nowait(self, reported: list[RequestOutput]) -> None:
            outputs.extend(reported)

    scheduler.extend(seqs)
    while (scheduled := scheduler.schedule()) is not None:
        batch, in_step = scheduled
        scheduler.postprocess(list(in_step.values()), runner.forward(batch), Queue())
    return outputs


class Near(float):
    """Equal up to `within`: sums, and ranks of close tokens, depend on how prompts are divided into steps."""

    within: float
    __hash__ = None  # type: ignore[assignment]

    def __new__(cls, value: float, within: float) -> "Near":
        made = super().__new__(cls, value)
        made.within = within
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) <= self.within


def by_core(runner: ModelRunner, seqs: Iterable[Sequence]) -> list[RequestOutput]:
    """The messages of an engine core that runs the sequences to their ends."""
    core = EngineCore(runner.config, Scheduler(runner.config), runner, SimpleQueue(), SimpleQueue())
    for seq in seqs:
        core.input_queue.put(seq)
    core.pull_and_process_input_queue()
    for _ in range(1000):
        if core.scheduler.is_finished():
            break
        core._process_engine_step()
    reported: list[RequestOutput] = []
    while not core.output_queue.empty():
        reported += core.output_queue.get().outputs
    core.scheduler.check_integrity()
    return reported


def answers(outputs: Iterable[RequestOutput]) -> dict[int, tuple[object, ...]]:
    """By sequence: tokens, end, log probabilities and errors."""
    reported: dict[int, tuple[list[int], list[object], list[object]]] = {}
    for output in outputs:
        tokens, logprobs, rest = reported.setdefault(output.request_id, ([], [], []))
        tokens += output.output_tokens
        for each in (*(output.logprobs or ()), *(output.prompt_logprobs or ())):
            logprobs.append((each.token_id, Near(each.logprob, 1e-3), each.top_ids, Near(each.rank, 1)))
        rest += [output.finish_reason, output.error] if output.finished else []
    return {seq_id: tuple(parts) for seq_id, parts in reported.items()}
