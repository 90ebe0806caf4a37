"""`EngineCore`: the busy loop that takes in requests, runs the scheduler's steps, and sends their outputs.

`engine.core.main` runs it in a process of its own, between the queues of `engine.core.sockets`.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
from models.config.rope import RopeContext

logger = logging.getLogger("engine.core.engine_core")

_CANARY_ID = -1
_CANARY_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
"""Parameters of the request that shows at the start whether the engine works."""

_PREPARE_AFTER_IDLE_SECONDS = 0.05
"""An idle core calls `prepare_ahead` after this long: not between two requests of one client."""

_MEMORY_SECONDS = 5.0
"""Between two looks at the device's memory, which take a call of the driver each."""

_CHECK_AFTER_IDLE_SECONDS = 1.0
"""An idle core checks its own integrity after this long: never between two requests of a busy one."""


class EngineCore:
    """Feeds the scheduler from `input_queue`, runs its steps, and puts one `StepOutputs` a step on `output_queue`.

    Every sequence taken in ends in exactly one terminal output. `config` has its `num_kvcache_blocks` filled in.
    """

    def __init__(
        self,
        config: Config,
        runner: ModelRunnerInterface,
        input_queue: InputQueue,
        output_queue: OutputQueue,
        *,
        window: int | None = None,
        rope: RopeContext | None = None,
        blocks_at_first: int | None = None,
        splits_prompts: bool = True,
        generates: bool = True,
        default_step_seconds: float = 0.0,
        max_interposed_tokens: int = 0,
        prepare_ahead: Callable[[], bool] | None = None,
        device_memory: Callable[[], tuple[int, int]] | None = None,
        sentinel_counts: Callable[[], tuple[int, int]] | None = None,
        record: FlightRecord | None = None,
        kv_events: KVEventPublisher | None = None,
    ) -> None:
        """The parameters before `prepare_ahead` are the scheduler's, except `generates`: False if the model only pools
        prompts. `record` names the sequences in the steps that run. `kv_events` publishes which blocks are
        cached.

        `device_memory` returns the bytes of a GPU that this process holds, and all of its bytes; None: on a CPU.

        `sentinel_counts` returns how many served results were compared with torch, and how many were wrong.

        `prepare_ahead`, called while the core is idle, makes later steps faster, and returns whether to call it again.
        """
        self.scheduler = Scheduler(
            config,
            window=window,
            rope=rope,
            blocks_at_first=blocks_at_first,
            splits_prompts=splits_prompts,
            default_step_seconds=default_step_seconds,
            max_interposed_tokens=max_interposed_tokens,
        )
        self.adapters = CoreAdapters(config.lora_paths, runner, input_queue, output_queue)
        self._kv_events = kv_events
        if kv_events is not None:
            self.scheduler.block_manager.record_changes()
        self._generates = generates
        self._canary_pooling = None if generates else PoolingParams()
        self.runner = runner
        self.input_queue = input_queue
        self.output_queue = output_queue
        self._block_size = config.kv_cache_block_size
        self._outputs: list[RequestOutput] = []
        """Outputs that no step brought, which are sent with the next step's."""
        self._record = record or FlightRecord.of_its_own(config.max_num_seqs)
        self._isolation = Isolation(self.scheduler)
        depth = 2 if config.async_scheduling == "on" else 1
        on_pause = self._take_in_during_step if max_interposed_tokens else None
        self._steps = StepPipeline(self.scheduler, runner, self._record, depth, on_pause)
        self._deferred: deque[Incoming] = deque()
        """Messages that arrived during a step and are taken in after it."""
        self._suspects: deque[Sequence] = deque()
        """Sequences that an earlier core died on; each is computed alone first."""
        self._stopping = False
        self._prepare_ahead = prepare_ahead
        self._device_memory = device_memory
        self._sentinel_counts = sentinel_counts
        self._memory = (0, 0)
        self._next_memory_time = 0.0

    def busy_loop(self) -> None:
        """Serve until a `Shutdown` arrives; then abort all sequences, send `Stopped`, and return."""
        self._serve()
        self._drain()
        live = (*self.scheduler.running, *self.scheduler.waiting)
        self._outputs += self.scheduler.abort([seq.id for seq in live])
        self._send([], "idle", 0.0)
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
            what = "token" if self._canary_pooling is None else "vector"
            raise RuntimeError(f"the model produced no {what}: {error}")

    def pull_and_process_input_queue(self) -> None:
        """Take in all messages that have arrived. With nothing to compute, answer them and wait for another."""
        while True:
            self._take_in(self._arrived())
            if self._stopping or self._steps or self.scheduler.has_requests():
                return
            self._send_rest()
            self._take_in([self._wait_idle()])

    def interrupt_for(self, seq: Sequence) -> None:
        """Pause the running step if a sequence that was put on the input queue is to be interposed.

        Called in another thread than the busy loop's.
        """
        if self.scheduler.would_interpose(seq.owner):
            self.runner.interrupt()

    def _take_in_during_step(self) -> None:
        """Take in the sequences that have arrived; other messages wait for the step's end.

        Sequences after a release of the cache wait, too: it would release what they have cached.
        """
        is_releasing = any(isinstance(each, ReleaseCache) for each in self._deferred)
        while not self.input_queue.empty():
            message = self.input_queue.get_nowait()
            if isinstance(message, Sequence) and not message.adapter and not is_releasing:
                self._take_in_sequence(message)
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
        while self._prepare_ahead is not None and self.input_queue.empty() and self._prepare_ahead():
            pass
        with contextlib.suppress(Empty):
            return self.input_queue.get(timeout=_CHECK_AFTER_IDLE_SECONDS)
        self.scheduler.check_integrity()
        return self.input_queue.get()

    def _take_in(self, messages: Iterable[Incoming]) -> None:
        """Aborts come last and together, because the scheduler goes through all live sequences for any number."""
        aborted: list[int] = []
        releases_cache = False
        for message in messages:
            match message:
                case Sequence():
                    self._take_in_sequence(message)
                case AbortRequests():
                    aborted += message.request_ids
                case LoadAdapter() | UnloadAdapter() | AdapterRead():
                    # Adapters change between steps only.
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

    def _take_in_sequence(self, seq: Sequence) -> None:
        # Should taking it in end this process, the record names it.
        self._record.begin([seq.id])
        try:
            if seq.pooling is None and not self._generates:
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
        """Run a step, or with steps ahead submit one and read another, and send the outputs."""
        if self._suspects:
            self._drain()
            # One alone: should it end this process too, the record names it.
            failed = self._isolation.run([self._suspects.popleft()], self._compute)
        else:
            failed = self._advance()
        if failed is not None:
            self._fail_step(failed)
            self._send_rest()

    def _advance(self) -> FailedStep | None:
        """Schedule and submit the next step; the step that raised, if one did."""
        return self._steps.advance(self._send)

    def _compute(
        self, batch: ScheduledBatch, seqs: dict[int, Sequence], on_read: OnRead | None = None
    ) -> FailedStep | None:
        """Compute a scheduled step and read it; outputs are sent, so that no client waits for several steps."""
        on_read = on_read or self._send
        return self._steps.submit(batch, seqs, on_read) or self._steps.drain(on_read)

    def _drain(self) -> None:
        """Read the steps that run."""
        failed = self._steps.drain(self._send)
        if failed is not None:
            self._fail_step(failed)

    def _fail_step(self, failed: FailedStep) -> None:
        """End the sequences that made a step raise; the others continue. Raises `RuntimeError` if every step raises.

        Where the step ran out of memory, smaller ones are tried first.
        """
        if isinstance(failed.error, StepOutOfMemory) and self.scheduler.shrink_steps(
            failed.num_tokens, len(failed.seqs)
        ):
            # The front end's watchdog counts the time without a word from here: this step's must not count twice.
            self._send([], "idle", 0.0)
            return
        for seq, error in self._isolation.failing_sequences(failed, self._compute):
            canary_error = self._try_canary()
            if canary_error is not None:
                # The supervisor needs to know with which sequences this core broke.
                self._record.begin([each.id for each in failed.seqs])
                raise RuntimeError(f"steps fail whatever they compute: {canary_error}") from error
            sentence = f"the step that computed this request failed: {str(error) or type(error).__name__}"
            outputs = self.scheduler.fail([seq], sentence)
            for output in outputs:
                output.is_poison = True
            self._outputs += outputs

    def _try_canary(self) -> str | None:
        """Compute a request of one token, which is no client's and whose outputs are not sent; its error, if any."""
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
        """Send the outputs that no step brought, if there are any."""
        if self._outputs:
            self._send([], "idle", 0.0)

    def _send(self, outputs: list[RequestOutput], step_kind: str, step_seconds: float) -> None:
        """Send the outputs of a step, after those that no step brought."""
        if self._outputs:
            outputs, self._outputs = self._outputs + outputs, []
        stats = self.scheduler.stats(step_kind, step_seconds)
        if self._device_memory is not None:
            if (now := time.monotonic()) >= self._next_memory_time:
                self._memory, self._next_memory_time = self._device_memory(), now + _MEMORY_SECONDS
            stats.device_memory, stats.device_memory_total = self._memory
        if self._sentinel_counts is not None:
            stats.sentinel_checks, stats.sentinel_mismatches = self._sentinel_counts()
        message = StepOutputs(outputs, stats)
        if self.scheduler.preempted:
            message.preempted, self.scheduler.preempted = self.scheduler.preempted, []
        self.output_queue.put(message)
        if self._kv_events is not None:
            self._kv_events.publish(self.scheduler.block_manager.take_changes(), self.adapters.names)
