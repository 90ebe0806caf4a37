"""`EngineCore`: the busy loop that schedules, computes and answers.

`engine.core.main` runs it in a process of its own. Sockets are `engine.core.sockets`'s room.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty
from typing import Protocol

from engine.batch import ScheduledBatch, ScheduledBatchOutput, StepOutOfMemory
from engine.config.config import Config
from engine.core.deferred_steps import DeferredSteps, LaunchingRunner
from engine.core.isolation import FailedStep, Isolation
from engine.core.scheduler import Scheduler
from engine.core.sockets import Incoming, InputQueue, OutputQueue
from engine.distributed.flight_record import FlightRecord
from engine.messages import (
    AbortRequests,
    RequestOutput,
    Shutdown,
    StepOutputs,
    Stopped,
    terminal_output,
)
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

logger = logging.getLogger("engine.core.engine_core")

_CANARY_ID = -1
_CANARY_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
"""The request that shows whether the engine works at all."""

_PREPARE_AFTER_IDLE_SECONDS = 0.05
"""An idle core makes later steps quicker after this long: not between two requests of one client."""

_CHECK_AFTER_IDLE_SECONDS = 1.0
"""An idle core checks its own integrity after this long: never between two requests of a busy one."""


class Runner(LaunchingRunner, Protocol):
    """What the loop needs of `ModelRunner`; `launch` where `async_scheduling` is on."""

    def forward(self, batch: ScheduledBatch, /) -> ScheduledBatchOutput: ...


class EngineCore:
    """Feeds the scheduler from `input_queue`, runs its steps, and puts one `StepOutputs` a step on `output_queue`.

    Every sequence taken in ends in exactly one terminal output. `config` has its `num_kvcache_blocks` filled in.
    """

    def __init__(
        self,
        config: Config,
        runner: Runner,
        input_queue: InputQueue,
        output_queue: OutputQueue,
        *,
        window: int | None = None,
        blocks_at_first: int | None = None,
        prepare_ahead: Callable[[], bool] | None = None,
        record: FlightRecord | None = None,
    ) -> None:
        """`window`: tokens that a query of the model sees, where all its layers have one. `blocks_at_first`: of the
        KV cache, where it grows with its use.

        `prepare_ahead`, called while the core is idle, makes later steps quicker and tells whether more would.
        `record` is told of each step.
        """
        self.scheduler = Scheduler(config, window=window, blocks_at_first=blocks_at_first)
        self.runner = runner
        self.input_queue = input_queue
        self.output_queue = output_queue
        self._block_size = config.kv_cache_block_size
        self._outputs = _Outputs()
        self._record = record or FlightRecord.of_its_own(config.max_num_seqs)
        self._isolation = Isolation(self.scheduler, self._compute_and_tell)
        self._in_silence = Isolation(self.scheduler, self._compute)
        self._deferred: DeferredSteps | None = None
        if config.async_scheduling == "on":
            self._deferred = DeferredSteps(self.scheduler, runner, self._record, self._outputs, self._send)
        self._suspects: deque[Sequence] = deque()
        """Sequences that an earlier core died on, each to be tried alone."""
        self._stopping = False
        self._prepare_ahead = prepare_ahead

    def busy_loop(self) -> None:
        """Serve until a `Shutdown` arrives; then end what runs, say `Stopped`, and return."""
        self._serve()
        self._drain()
        live = (*self.scheduler.running, *self.scheduler.waiting)
        self._outputs.put_nowait(self.scheduler.abort([seq.id for seq in live]))
        self._send("idle", 0.0)
        self.output_queue.put(Stopped())

    def _serve(self) -> None:
        self.pull_and_process_input_queue()
        while not self._stopping:
            self._process_engine_step()
            self.pull_and_process_input_queue()

    def produce_token(self) -> None:
        """Run one request of one token through scheduler and model. Raises `RuntimeError` if that does not work."""
        error = self._try_canary()
        if error is not None:
            raise RuntimeError(f"the model produced no token: {error}")

    def pull_and_process_input_queue(self) -> None:
        """Take in all that has arrived. With nothing to run, answer it and sleep until something has."""
        while True:
            self._take_in(self._arrived())
            if self._stopping or self._deferred or self.scheduler.has_requests():
                return
            if self._outputs:
                self._send("idle", 0.0)
            self._take_in([self._wait_idle()])

    def _arrived(self) -> Iterator[Incoming]:
        while not self.input_queue.empty():
            yield self.input_queue.get_nowait()

    def _wait_idle(self) -> Incoming:
        with contextlib.suppress(Empty):
            return self.input_queue.get(timeout=_PREPARE_AFTER_IDLE_SECONDS)
        while self._prepare_ahead is not None and self.input_queue.empty() and self._prepare_ahead():
            pass
        with contextlib.suppress(Empty):
            return self.input_queue.get(timeout=_CHECK_AFTER_IDLE_SECONDS)
        self.scheduler.check_integrity()
        return self.input_queue.get()

    def _take_in(self, messages: Iterable[Incoming]) -> None:
        """Aborts go last and together: the scheduler looks through all that is live, however few they are."""
        aborted: list[int] = []
        for message in messages:
            match message:
                case Sequence():
                    self._take_in_sequence(message)
                case AbortRequests():
                    aborted += message.request_ids
                case Shutdown():
                    self._stopping = True
        if aborted:
            self._outputs.put_nowait(self.scheduler.abort(aborted))

    def _take_in_sequence(self, seq: Sequence) -> None:
        # Should it end this process before any step, it is known whose fault that was.
        self._record.begin([seq.id])
        try:
            self.scheduler.add(seq)
        except ValueError as error:
            self._outputs.put_nowait([terminal_output(seq.id, "error", str(error))])
        else:
            if seq.is_suspect:
                self._suspects.append(seq)
        self._record.end()
        if self._deferred is not None:
            self._deferred.note_again()

    def _process_engine_step(self) -> None:
        """Run a step and send what came of it."""
        start = time.perf_counter()
        kind = self._step()
        if kind is not None:
            self._send(kind, time.perf_counter() - start)

    def _step(self) -> str | None:
        """Schedule, compute, postprocess; the step's kind, or None if there is nothing to tell of."""
        if self._suspects:
            self._drain()
            # One alone: should it end this process too, it is known whose fault that was.
            failed = self._isolation.run([self._suspects.popleft()])
            if failed is not None:
                self._fail_guilty(failed)
            return "idle" if self._outputs else None
        if self._deferred is not None:
            failed = self._deferred.advance()
            if failed is not None:
                self._fail_guilty(failed)
            return "idle" if failed is not None and self._outputs else None
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return None
        batch, seqs = scheduled
        error = self._compute(batch, seqs)
        if error is not None:
            self._fail_guilty(FailedStep(list(seqs.values()), error, batch.total_tokens_num))
        return batch.kind

    def _drain(self) -> None:
        """Read the steps that run."""
        failed = None if self._deferred is None else self._deferred.drain()
        if failed is not None:
            self._fail_guilty(failed)

    def _compute_and_tell(self, batch: ScheduledBatch, seqs: dict[int, Sequence]) -> BaseException | None:
        """As `_compute`, and send what came of it: whoever waits must not take many steps for none."""
        start = time.perf_counter()
        error = self._compute(batch, seqs)
        self._send(batch.kind, time.perf_counter() - start)
        return error

    def _compute(self, batch: ScheduledBatch, seqs: dict[int, Sequence]) -> BaseException | None:
        """Run a scheduled step and take its tokens back; what it raised, its sequences waiting again."""
        self._record.begin(batch.req_ids)
        try:
            output = self.runner.forward(batch)
        except BaseException as error:  # a panic of native code is no `Exception`
            logger.exception("a step of %d sequences failed", len(seqs))
            self.scheduler.retract(seqs.values())
            return error
        drafts = batch.scheduled_spec_decode_tokens
        self.scheduler.postprocess(list(seqs.values()), output, self._outputs, drafts)
        self._record.end()
        return None

    def _fail_guilty(self, failed: FailedStep) -> None:
        """End the sequences that made a step raise; the others go on. Raises `RuntimeError` if every step does.

        One that found no memory is nobody's fault as long as smaller ones can be tried.
        """
        if isinstance(failed.error, StepOutOfMemory) and self.scheduler.shrink_steps(
            failed.num_tokens, len(failed.seqs)
        ):
            return
        for seq, error in self._isolation.guilty(failed):
            canary_error = self._try_canary()
            if canary_error is not None:
                # Whoever starts this core again should know in what company it broke.
                self._record.begin([each.id for each in failed.seqs])
                raise RuntimeError(f"steps fail whatever they compute: {canary_error}") from error
            sentence = f"the step that computed this request failed: {str(error) or type(error).__name__}"
            outputs = self.scheduler.fail([seq], sentence)
            for output in outputs:
                output.is_poison = True
            self._outputs.put_nowait(outputs)

    def _try_canary(self) -> str | None:
        """Compute a request of one token, which nobody made; what went wrong."""
        canary = Sequence([0], self._block_size, _CANARY_PARAMS, id=_CANARY_ID)
        self.scheduler.add(canary)
        failed = self._in_silence.run([canary])
        if failed is not None:
            self.scheduler.abort([_CANARY_ID])
            return str(failed.error) or type(failed.error).__name__
        return self._outputs.take_one(_CANARY_ID).error

    def _send(self, step_kind: str, step_seconds: float) -> None:
        self.output_queue.put(StepOutputs(self._outputs.take(), self.scheduler.stats(step_kind, step_seconds)))


class _Outputs:
    """Collects request outputs until the step's message is sent."""

    def __init__(self) -> None:
        self._collected: list[RequestOutput] = []

    def __bool__(self) -> bool:
        return bool(self._collected)

    def put_nowait(self, outputs: list[RequestOutput], /) -> None:
        if self._collected:
            self._collected += outputs
        else:
            self._collected = outputs

    def take(self) -> list[RequestOutput]:
        taken, self._collected = self._collected, []
        return taken

    def take_one(self, seq_id: int) -> RequestOutput:
        """The one output of a sequence."""
        (taken,) = (output for output in self._collected if output.request_id == seq_id)
        self._collected = [output for output in self._collected if output is not taken]
        return taken
