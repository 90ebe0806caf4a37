"""`EngineCore`: the busy loop that receives requests, runs the scheduler's steps, and sends their outputs.

`engine.core.main` runs it in a separate process, between the queues of `engine.core.sockets`.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from queue import Empty

from engine.batch import ScheduledBatch, StepOutOfMemory
from engine.config.config import Config
from engine.core.adapters import CoreAdapters
from engine.core.isolation import FailedStep, Isolation
from engine.core.kv_events import KVEventPublisher
from engine.core.scheduler import Scheduler
from engine.core.sockets import AdapterRead, Incoming, InputQueue, OutputQueue
from engine.core.step_pipeline import ModelRunnerInterface, OnRead, StepPipeline
from engine.distributed.flight_record import FlightRecord
from engine.full_collections import FullCollections
from engine.messages import (
    AbortRequests,
    CacheReleased,
    LoadAdapter,
    PoolingParams,
    ReleaseCache,
    RequestOutput,
    Shutdown,
    StepOutputs,
    Stopped,
    UnloadAdapter,
    terminal_output,
)
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

logger = logging.getLogger("engine.core.engine_core")

_CANARY_ID = -1
_CANARY_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
"""Parameters of the canary request, which tests at the start whether the engine works."""

_PREPARE_AFTER_IDLE_SECONDS = 0.05
"""Idle time after which a core calls `prepare_while_idle`: longer than between two requests of one client."""

_MEMORY_SECONDS = 5.0
"""Seconds between two queries of the device's memory, each of which is a call of the driver."""

_CHECK_AFTER_IDLE_SECONDS = 1.0
"""Idle time after which a core checks its own integrity: longer than between two requests of a busy core."""


class EngineCore:
    """Adds requests from `input_queue` to the scheduler, runs steps, and puts one `StepOutputs` per step on
    `output_queue`.

    Every received sequence ends in exactly one terminal output. `num_kvcache_blocks` of `config` must be set.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        runner: ModelRunnerInterface,
        input_queue: InputQueue,
        output_queue: OutputQueue,
        *,
        record: FlightRecord | None = None,
        kv_events: KVEventPublisher | None = None,
        collections: FullCollections | None = None,
    ) -> None:
        """`record` stores the ids of the sequences in running steps. `kv_events` publishes which blocks are cached.
        `collections` collects garbage between two steps; without it the interpreter does.
        """
        self.scheduler = scheduler
        self.adapters = CoreAdapters(config.lora_paths, runner, input_queue, output_queue)
        self._kv_events = kv_events
        if kv_events is not None:
            self.scheduler.block_manager.record_changes()
        self._canary_pooling = None if runner.generates else PoolingParams()
        self.runner = runner
        self.input_queue = input_queue
        self.output_queue = output_queue
        self._block_size = config.kv_cache_block_size
        self._outputs: list[RequestOutput] = []
        """Outputs that did not come from a step. They are sent with those of the next step."""
        self._record = record or FlightRecord.of_its_own(config.max_num_seqs)
        self._isolation = Isolation(self.scheduler)
        depth = 2 if config.async_scheduling == "on" else 1
        on_pause = self._add_received if scheduler.interposes else None
        self._steps = StepPipeline(self.scheduler, runner, self._record, depth, on_pause)
        self._deferred: deque[Incoming] = deque()
        """Messages that were received during a step, to be processed after it."""
        self._suspects: deque[Sequence] = deque()
        """Sequences in whose step an earlier core died. Each is first computed alone."""
        self._stopping = False
        self._collections = collections
        self._memory = (0, 0)
        self._next_memory_time = 0.0

    def busy_loop(self) -> None:
        """Serve until a `Shutdown` message; then abort all sequences, send `Stopped`, and return."""
        self._serve()
        self._drain()
        live = (*self.scheduler.running, *self.scheduler.waiting)
        self._outputs += self.scheduler.abort([seq.id for seq in live])
        self._send([])
        self.output_queue.put(Stopped())

    def _serve(self) -> None:
        self.pull_and_process_input_queue()
        while not self._stopping:
            self._process_engine_step()
            if self._collections is not None:
                self._collections.collect_if_due()
            self.pull_and_process_input_queue()

    def produce_token(self) -> None:
        """Run a request of one token through scheduler and model. Raises `RuntimeError` if it fails."""
        error = self._try_canary()
        if error is not None:
            what = "token" if self._canary_pooling is None else "vector"
            raise RuntimeError(f"the model produced no {what}: {error}")

    def pull_and_process_input_queue(self) -> None:
        """Process all received messages. If there is nothing to compute, send pending outputs and wait for a
        message."""
        while True:
            self._process(self._arrived())
            if self._stopping or self._steps or self.scheduler.has_requests():
                return
            self._send_rest()
            self._process([self._wait_idle()])
            self._steps.note_wait()

    def interrupt_for(self, seq: Sequence) -> None:
        """Pause the running step if a new sequence on the input queue is to be interposed.

        Called from another thread than the busy loop's.
        """
        if self._steps.may_pause and self.scheduler.would_interpose(seq):
            self.runner.interrupt()

    def _add_received(self) -> None:
        """Add the received sequences to the scheduler. Other messages wait until the end of the step.

        Sequences after a message that releases the cache wait too, because it would release their cached blocks.
        """
        is_releasing = any(isinstance(each, ReleaseCache) for each in self._deferred)
        while not self.input_queue.empty():
            message = self.input_queue.get_nowait()
            if isinstance(message, Sequence) and not message.adapter and not is_releasing:
                self._add_sequence(message)
            else:
                self._deferred.append(message)
                is_releasing = is_releasing or isinstance(message, ReleaseCache)

    def _arrived(self) -> Iterator[Incoming]:
        while self._deferred:
            yield self._deferred.popleft()
        while not self.input_queue.empty():
            yield self.input_queue.get_nowait()

    def _wait_idle(self) -> Incoming:
        with contextlib.suppress(Empty):
            return self.input_queue.get(timeout=_PREPARE_AFTER_IDLE_SECONDS)
        while self.input_queue.empty() and self.runner.prepare_while_idle():
            pass
        with contextlib.suppress(Empty):
            return self.input_queue.get(timeout=_CHECK_AFTER_IDLE_SECONDS)
        self.scheduler.check_integrity()
        return self.input_queue.get()

    def _process(self, messages: Iterable[Incoming]) -> None:
        """Process messages. Aborts are collected to one call at the end, since each call scans all live sequences."""
        aborted: list[int] = []
        releases_cache = False
        for message in messages:
            match message:
                case Sequence():
                    self._add_sequence(message)
                case AbortRequests():
                    aborted += message.request_ids
                case LoadAdapter() | UnloadAdapter() | AdapterRead():
                    # Adapters may change only between steps.
                    self._drain()
                    self.adapters.change(message)
                case ReleaseCache():
                    releases_cache = True
                case Shutdown():
                    self._stopping = True
        if aborted:
            self._outputs += self.scheduler.abort(aborted)
        if releases_cache:
            self._drain()
            self.scheduler.block_manager.forget_all()
            self.runner.release_cache()
            self.output_queue.put(CacheReleased())

    def _add_sequence(self, seq: Sequence) -> None:
        # If adding it crashes this process, the record has its id.
        self._record.begin([seq.id])
        try:
            if seq.pooling is None and not self.runner.generates:
                raise ValueError("the model pools prompts, and generates nothing")
            self.adapters.check(seq.adapter)
            self.scheduler.add(seq)
        except ValueError as error:
            self._outputs.append(terminal_output(seq.id, "error", str(error)))
        else:
            if seq.is_suspect:
                self._suspects.append(seq)
        self._steps.restore_record()

    def _process_engine_step(self) -> None:
        """Run a step (with `async_scheduling`: submit one and read an earlier one), and send the outputs."""
        if self._suspects:
            self._drain()
            # Computed alone: if it crashes this process again, the record has only its id.
            failed = self._isolation.run([self._suspects.popleft()], self._compute)
        else:
            failed = self._advance()
        if failed is not None:
            self._fail_step(failed)
            self._send_rest()

    def _advance(self) -> FailedStep | None:
        """Schedule and submit the next step. Returns a step that raised, or None."""
        return self._steps.advance(self._send)

    def _compute(
        self, batch: ScheduledBatch, seqs: dict[int, Sequence], on_read: OnRead | None = None
    ) -> FailedStep | None:
        """Compute a scheduled step, read it, and send its outputs at once, so that no client waits for several
        steps."""
        on_read = on_read or self._send
        return self._steps.submit(batch, seqs, on_read) or self._steps.drain(on_read)

    def _drain(self) -> None:
        """Read all running steps."""
        failed = self._steps.drain(self._send)
        if failed is not None:
            self._fail_step(failed)

    def _fail_step(self, failed: FailedStep) -> None:
        """End the sequences that make the step raise; others continue. Raises `RuntimeError` if every step raises.

        If the step ran out of memory, smaller steps are tried first.
        """
        if isinstance(failed.error, StepOutOfMemory) and self.scheduler.shrink_steps(
            failed.num_tokens, len(failed.seqs)
        ):
            # Reset the front end's watchdog: it measures the time without a message, and must not count this step
            # twice.
            self._send([])
            return
        for seq, error in self._isolation.failing_sequences(failed, self._compute):
            canary_error = self._try_canary()
            if canary_error is not None:
                # Record for the supervisor the sequences that this core failed on.
                self._record.begin([each.id for each in failed.seqs])
                raise RuntimeError(f"every step fails, whichever requests it computes: {canary_error}") from error
            sentence = f"the step that computed this request failed: {str(error) or type(error).__name__}"
            outputs = self.scheduler.fail([seq], sentence)
            for output in outputs:
                output.is_poison = True
            self._outputs += outputs

    def _try_canary(self) -> str | None:
        """Compute an internal request of one token, whose outputs are not sent. Returns its error, or None."""
        outputs: list[RequestOutput] = []

        def compute(batch: ScheduledBatch, seqs: dict[int, Sequence]) -> FailedStep | None:
            return self._compute(batch, seqs, lambda read, kind, seconds: outputs.extend(read))

        canary = Sequence([0], self._block_size, _CANARY_PARAMS, id=_CANARY_ID, pooling=self._canary_pooling)
        self.scheduler.add(canary)
        failed = self._isolation.run([canary], compute)
        if failed is not None:
            self.scheduler.abort([_CANARY_ID])
            return str(failed.error) or type(failed.error).__name__
        (output,) = outputs
        return output.error

    def _send_rest(self) -> None:
        """Send the outputs that did not come from a step, if there are any."""
        if self._outputs:
            self._send([])

    def _send(self, outputs: list[RequestOutput], step_kind: str = "idle", step_seconds: float = 0.0) -> None:
        """Send the outputs of a step, preceded by those that did not come from a step. Default: of no step."""
        if self._outputs:
            outputs, self._outputs = self._outputs + outputs, []
        stats = self.scheduler.stats(step_kind, step_seconds)
        if (now := time.monotonic()) >= self._next_memory_time:
            self._memory, self._next_memory_time = self.runner.device_memory(), now + _MEMORY_SECONDS
        stats.device_memory, stats.device_memory_total = self._memory
        stats.sentinel_checks, stats.sentinel_mismatches = self.runner.sentinel_counts()
        message = StepOutputs(outputs, stats)
        if preempted := self.scheduler.take_preempted():
            message.preempted = preempted
        self.output_queue.put(message)
        if self._kv_events is not None:
            self._kv_events.publish(self.scheduler.block_manager.take_changes(), self.adapters.names)
