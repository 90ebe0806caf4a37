"""`StepPipeline`: submits scheduled steps to the model runner and reads them in order.

Its depth is the number of steps that may be submitted and not read. With a depth of 1, each step is read at once. With
a depth of 2 (`async_scheduling`), the device does not wait for the host: step N+1 is launched, step N is read, and
then step N+1 samples. Sampling must wait, because grammars, penalties and bad words depend on N's tokens; meanwhile
the device computes N+1's forward pass.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.core.isolation import FailedStep
from engine.core.scheduler import Scheduler
from engine.distributed.flight_record import FlightRecord
from engine.messages import RequestOutput
from engine.sequence import Sequence

logger = logging.getLogger(__name__)

OnRead: TypeAlias = Callable[[list[RequestOutput], str, float], object]
"""Called with the outputs of a read step, its kind, and its duration in seconds."""


class LaunchedStep(Protocol):
    """A running step."""

    @property
    def drafts_on_device(self) -> bool:
        """See `Scheduler.begin_step`."""

    def sample(self) -> None:
        """Make the device sample, if it has not. All earlier steps must have been read."""

    def result(self) -> ScheduledBatchOutput:
        """Wait for the step's end and return its output. Raises the step's error."""

    def wait(self) -> None:
        """Wait until the device has ended a step that will not be read. Raises the device's error."""


class ModelRunnerInterface(Protocol):
    """The interface of `ModelRunner` that the engine core uses: the boundary between the core and torch."""

    tokens_across_dp: tuple[int, ...]
    """Number of tokens of each replica in lockstep in the next pass; 0 for a replica with a dummy batch."""

    may_replay: bool
    """Whether all replicas in lockstep replay a graph in the next pass."""

    @property
    def generates(self) -> bool:
        """Whether the model generates tokens; otherwise it only pools prompts."""

    def can_replay(self, batch: ScheduledBatch, /) -> bool:
        """Return whether a graph can replay a step, if all replicas in lockstep replay graphs."""

    def forward(self, batch: ScheduledBatch, /) -> ScheduledBatchOutput:
        """Compute a step."""

    def forward_with_pauses(self, batch: ScheduledBatch, on_pause: Callable[[], object], /) -> ScheduledBatchOutput:
        """As `forward`, but pause after each `interrupt` and call `on_pause`."""

    def interrupt(self) -> None:
        """Pause the running `forward_with_pauses`, or the next one. Thread-safe."""

    def withdraw_interruption(self) -> None:
        """Do not pause the next `forward_with_pauses` for an `interrupt` after which nothing has paused."""

    def forward_interposed(self, batch: ScheduledBatch, /) -> ScheduledBatchOutput:
        """As `forward`, while `forward_with_pauses` is paused or between two steps."""

    def launch(self, batch: ScheduledBatch, /) -> LaunchedStep:
        """Begin a step. A row's last token may be sampled by a step that is not read yet."""

    def dummy_prefill(self) -> None:
        """Compute a forward pass over one padding token."""

    def prepare_while_idle(self) -> bool:
        """Do work that makes later steps faster. Returns whether more remains."""

    def device_memory(self) -> tuple[int, int]:
        """Return the GPU memory that this process uses and the total, in bytes; zeros on a CPU."""

    def sentinel_counts(self) -> tuple[int, int]:
        """Return the number of served results that were compared with torch, and of wrong ones."""

    def release_cache(self) -> None:
        """Free the KV cache's memory on the host until a step needs it. Its content is lost."""

    def read_adapter(self, path: str, /) -> Any:
        """Read a LoRA adapter's files, in any thread. Raises `ValueError` with a sentence."""

    def load_adapter(self, number: int, path: str, adapter: Any, /) -> None:
        """Attach the result of `read_adapter` between two steps. Raises `ValueError`, and then nothing has changed."""

    def unload_adapter(self, number: int, /) -> None:
        """Remove an adapter that no sequence uses, between two steps."""


class _ComputedStep(NamedTuple):
    """A step that was computed when it was submitted."""

    output: ScheduledBatchOutput
    drafts_on_device: bool = False

    def sample(self) -> None:
        """No effect: the step has sampled already."""

    def result(self) -> ScheduledBatchOutput:
        return self.output

    def wait(self) -> None:
        """No effect: the step has ended already."""


class _Flight(NamedTuple):
    batch: ScheduledBatch
    step: LaunchedStep
    launched: float
    """Time of the launch, on `time.perf_counter`'s clock."""


class StepPipeline:
    """Holds at most `depth` submitted steps, which the device computes in order.

    `record` always has the ids of the sequences in running steps. With a depth of 1, `on_pause` adds the sequences to
    the scheduler that were received during a paused step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunnerInterface,
        record: FlightRecord,
        depth: int = 1,
        on_pause: Callable[[], object] | None = None,
    ) -> None:
        self._scheduler, self._runner, self._record = scheduler, runner, record
        self._depth = depth
        self._flights: deque[_Flight] = deque()
        self._last_end = time.perf_counter()
        """Time of the end of the last step or wait, plus the duration of the steps interposed since."""
        self._on_pause = on_pause if depth == 1 else None
        self._computing: list[list[int]] = []
        """Ids of the sequences of the step that this thread computes, and of a step interposed in it."""
        self._interposed_seconds = 0.0
        """Seconds that the steps interposed in the current step have taken."""
        self._pause_error: BaseException | None = None
        """The error of a pause of the current step, after which the engine core ends."""
        self.may_pause = False
        """Whether a step runs, or is about to, that can be paused. Read in any thread."""
        self._recorded: list[int] = []

    def __bool__(self) -> bool:
        """Return whether any step is unread."""
        return bool(self._flights)

    def advance(self, on_read: OnRead) -> FailedStep | None:
        """Schedule and submit a step; if there is none to schedule, read one. Returns a step that raised, or None."""
        if self._on_pause is not None:
            # Sequences received while the last step sampled are in the scheduler, and need not pause this step.
            self._runner.withdraw_interruption()
        # Set before the step begins, so that it pauses for sequences that arrive until then.
        self.may_pause = self._on_pause is not None
        try:
            if self.may_pause:
                # Otherwise prompts received since the last pause would be computed in a long step of other owners.
                self._interpose(None, on_read)
            scheduled = self._scheduler.schedule()
            if scheduled is not None:
                self.may_pause = self.may_pause and self._scheduler.may_pause(scheduled[0])
                return self.submit(*scheduled, on_read, may_pause=self.may_pause)
            return self._read(on_read) if self._flights else None
        finally:
            self.may_pause = False

    def submit(
        self, batch: ScheduledBatch, seqs: dict[int, Sequence], on_read: OnRead, *, may_pause: bool = False
    ) -> FailedStep | None:
        """Launch a scheduled step, then read the oldest one where `depth` are unread. Returns a step that raised.

        With `may_pause`, sequences may be added to the scheduler, and steps interposed, while it runs. If adding a
        sequence fails, that error is raised here, since it is no fault of the step.
        """
        self._computing = [batch.req_ids]
        self._update_record()
        launched = time.perf_counter()
        try:
            if self._depth > 1:
                step = self._runner.launch(batch)
            else:
                step = _ComputedStep(self._forward(batch, on_read, may_pause=may_pause))
        except BaseException as error:  # a panic of native code is no `Exception`
            if self._pause_error is not None:
                raise self._pause_error from error
            logger.exception("a step of %d sequences failed", len(seqs))
            self._computing = []
            # Steps that were launched earlier are valid.
            failed = self.drain(on_read)
            self._scheduler.retract(seqs.values())
            self._update_record()
            live = [seq for seq in seqs.values() if not seq.is_finished]
            return failed or FailedStep(live, error, batch.total_tokens_num)
        if self._pause_error is not None:
            raise self._pause_error
        self._scheduler.begin_step(batch, drafts_on_device=step.drafts_on_device)
        self._computing = []
        self._flights.append(_Flight(batch, step, launched + self._interposed_seconds))
        if len(self._flights) == 1:
            failed = self._sample(step)
            return failed if failed is not None or self._depth > 1 else self._read(on_read)
        return self._read(on_read, following=step)

    def note_wait(self) -> None:
        """Record that there was nothing to compute until now, which is no part of the next step's duration."""
        self._last_end = time.perf_counter()

    def drain(self, on_read: OnRead) -> FailedStep | None:
        """Read all steps, up to the first one that raises. Returns that step, or None."""
        failed = None
        while self._flights and failed is None:
            failed = self._read(on_read)
        return failed

    def restore_record(self) -> None:
        """Write the record again after it was used while a sequence was added."""
        self._recorded = []
        self._record.end()
        self._update_record()

    def _forward(self, batch: ScheduledBatch, on_read: OnRead, *, may_pause: bool) -> ScheduledBatchOutput:
        """Compute a step and the steps interposed in it."""
        self._interposed_seconds = 0.0
        on_pause = self._on_pause
        if on_pause is None or not may_pause:
            return self._runner.forward(batch)

        def pause() -> None:
            if self._pause_error is not None:
                return
            before = self._interposed_seconds
            try:
                # If this raises, the record names the sequence that was being added.
                on_pause()
                try:
                    self._interpose(batch, on_read)
                except BaseException:
                    self._computing = []
                    self._update_record()
                    raise
            except BaseException as error:  # noqa: BLE001 - `submit` raises it
                self._pause_error = error
            if self._interposed_seconds == before:
                self._scheduler.note_idle_pause()

        try:
            return self._runner.forward_with_pauses(batch, pause)
        finally:
            self.may_pause = False

    def _interpose(self, paused: ScheduledBatch | None, on_read: OnRead) -> None:
        """Compute and read the steps that the scheduler interposes in a paused step, or before the next step."""
        while (scheduled := self._scheduler.interpose(paused)) is not None:
            batch, seqs = scheduled
            self._computing.append(batch.req_ids)
            self._update_record()
            start = time.perf_counter()
            try:
                output = self._runner.forward_interposed(batch)
            except BaseException:  # a panic of native code is no `Exception`
                logger.exception("an interposed step of %d sequences failed; they are computed again", len(seqs))
                self._scheduler.retract_interposed(seqs.values())
            else:
                seconds = time.perf_counter() - start
                on_read(self._scheduler.read_interposed(batch, output, seconds), batch.kind, seconds)
            seconds = time.perf_counter() - start
            self._interposed_seconds += seconds
            self._last_end += seconds
            self._computing.pop()
            self._update_record()

    def _read(self, on_read: OnRead, following: LaunchedStep | None = None) -> FailedStep | None:
        """Read the oldest step, and make the next one sample."""
        flight = self._flights.popleft()
        try:
            output = flight.step.result()
        except BaseException as error:  # noqa: BLE001 - it is reported to the clients of the step's sequences
            return self._give_up(flight, error)
        outputs = self._scheduler.read_step(output)
        now = time.perf_counter()
        host_seconds = max(0.0, flight.launched - self._last_end)
        seconds, self._last_end = now - max(flight.launched, self._last_end), now
        self._scheduler.note_duration(
            flight.batch, seconds, host_seconds=host_seconds, drafts_on_device=flight.step.drafts_on_device
        )
        self._update_record()
        failed = None if following is None else self._sample(following)
        on_read(outputs, flight.batch.kind, seconds)
        return failed

    def _sample(self, step: LaunchedStep) -> FailedStep | None:
        """Make the only unread step sample."""
        try:
            step.sample()
        except BaseException as error:  # noqa: BLE001 - it is reported to the clients of the step's sequences
            return self._give_up(self._flights.popleft(), error)
        return None

    def _give_up(self, flight: _Flight, error: BaseException) -> FailedStep:
        """Drop a step that raised, and the later steps, which computed on invalid keys and values."""
        logger.error("a step of %d sequences failed", len(flight.batch.req_ids), exc_info=error)
        for each in self._flights:
            try:
                each.step.wait()
            except BaseException:
                logger.exception("the step after it failed too")
        self._flights.clear()
        seqs = [seq for seq in flight.batch.sequences if not seq.is_finished]
        self._scheduler.drop_steps()
        self._update_record()
        return FailedStep(seqs, error, flight.batch.total_tokens_num)

    def _update_record(self) -> None:
        """Record the sequences of the running steps and of the steps that are about to run."""
        running = [flight.batch.req_ids for flight in self._flights] + self._computing
        ids = running[0] if running else []
        if any(others != ids for others in running):
            ids = list(dict.fromkeys(itertools.chain(*running)))
        # Most steps have the same sequences as the previous step.
        if ids != self._recorded:
            self._recorded = ids
            self._record.begin(ids)
