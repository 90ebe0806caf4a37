"""`StepPipeline`: submits scheduled steps to the model runner and reads them in order.

Its depth is the number of steps that may be submitted and unread. With a depth of 1 each step is read at once. With a
depth of 2 (`async_scheduling`) the device never waits for the host: step N+1 is launched, step N is read, and then
step N+1 samples, because what sampling needs to know of N's tokens (grammars, penalties, bad words) is known only
then; the device is still busy with N+1's forward pass meanwhile.
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
"""Called with the outputs of a step that was read, its kind, and the seconds that it took."""


class LaunchedStep(Protocol):
    """A step that runs."""

    @property
    def drafts_on_device(self) -> bool:
        """See `Scheduler.begin_step`."""

    def sample(self) -> None:
        """Have the device sample, if it has not yet. The steps before this one have been read."""

    def result(self) -> ScheduledBatchOutput:
        """Wait for the step's end. Raises what the step raised."""

    def wait(self) -> None:
        """Wait until the device has ended a step that is not read. Raises what the device raises."""


class ModelRunnerInterface(Protocol):
    """What the engine core needs of `ModelRunner`: the boundary between the core and torch."""

    tokens_across_dp: tuple[int, ...]
    """Tokens that each replica in lockstep computes in the next pass; 0 for a replica that computes a dummy."""

    may_replay: bool
    """Whether all replicas in lockstep replay a graph in the next pass."""

    def can_replay(self, batch: ScheduledBatch, /) -> bool:
        """Whether a graph may replay a step, if the graphs of all replicas in lockstep do."""

    def forward(self, batch: ScheduledBatch, /) -> ScheduledBatchOutput:
        """Compute a step."""

    def forward_with_pauses(self, batch: ScheduledBatch, on_pause: Callable[[], object], /) -> ScheduledBatchOutput:
        """As `forward`, with a pause for `on_pause` after each `interrupt`."""

    def interrupt(self) -> None:
        """Pause the step that runs `forward_with_pauses`, or the next that does. Called in any thread."""

    def forward_interposed(self, batch: ScheduledBatch, /) -> ScheduledBatchOutput:
        """As `forward`, while `forward_with_pauses` is paused or between two steps."""

    def launch(self, batch: ScheduledBatch, /) -> LaunchedStep:
        """Begin a step. A row's last token may be one that an unread step samples."""

    def dummy_prefill(self) -> None:
        """Compute a pass over one padding token."""

    def release_cache(self) -> None:
        """Give the KV cache's memory on the host back to the system until a step needs it; what it held is lost."""

    def read_adapter(self, path: str, /) -> Any:
        """Read a LoRA adapter's files, in any thread. Raises `ValueError`, a sentence."""

    def load_adapter(self, number: int, path: str, adapter: Any, /) -> None:
        """Attach what `read_adapter` returned, between two steps. Raises `ValueError`; then nothing has changed."""

    def unload_adapter(self, number: int, /) -> None:
        """Remove an adapter that no sequence uses any more, between two steps."""


class _ComputedStep(NamedTuple):
    """A step that was computed when it was submitted."""

    output: ScheduledBatchOutput
    drafts_on_device: bool = False

    def sample(self) -> None:
        """The step has sampled."""

    def result(self) -> ScheduledBatchOutput:
        return self.output

    def wait(self) -> None:
        """The step has ended."""


class _Flight(NamedTuple):
    batch: ScheduledBatch
    step: LaunchedStep
    launched: float
    """When, on `time.perf_counter`'s clock."""


class StepPipeline:
    """At most `depth` submitted steps, which the device computes in order.

    `record` always has the ids of the sequences in the steps that run. With a depth of 1, `on_pause` takes in the
    sequences that arrived during a step that is paused.
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
        self._last_end = 0.0
        self._on_pause = on_pause if depth == 1 else None
        self._computing: list[list[int]] = []
        """Ids of the sequences of the step that this thread computes, and of one interposed in it."""
        self._interposed_seconds = 0.0
        """The time that the steps interposed in the current step have taken."""
        self._pause_error: BaseException | None = None
        """What a pause of the current step raised, after which the engine core ends."""
        self.may_pause = False
        """Whether a step runs, or is about to, that can be paused. Read in any thread."""
        self._recorded: list[int] = []

    def __bool__(self) -> bool:
        """Whether a step is unread."""
        return bool(self._flights)

    def advance(self, on_read: OnRead) -> FailedStep | None:
        """Schedule and submit a step; with none to schedule, read one. The step that raised, if one did."""
        # Already now, so that the step pauses for what arrives before it begins.
        self.may_pause = self._on_pause is not None
        try:
            if self.may_pause:
                # Otherwise prompts that arrived since the last pause would be computed in a long step of other owners.
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
        """Launch a scheduled step, then read the oldest one where `depth` are unread. The step that raised.

        With `may_pause` sequences may be taken in, and steps interposed, while it runs. What is raised by that, other
        than by an interposed step, is raised here, since it is no fault of the step's.
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
            # The steps that were launched before it are valid.
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

    def drain(self, on_read: OnRead) -> FailedStep | None:
        """Read all steps; the one that raised, if one did, after which no other is read."""
        failed = None
        while self._flights and failed is None:
            failed = self._read(on_read)
        return failed

    def restore_record(self) -> None:
        """Write the record again, which was used for a sequence that was taken in."""
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
                # Where this raises, the record names the sequence that was taken in.
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
        """Compute and read the steps that the scheduler interposes in a step, or before the next one."""
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
            self._interposed_seconds += time.perf_counter() - start
            self._computing.pop()
            self._update_record()

    def _read(self, on_read: OnRead, following: LaunchedStep | None = None) -> FailedStep | None:
        """Read the oldest step, and have the one after it sample."""
        flight = self._flights.popleft()
        try:
            output = flight.step.result()
        except BaseException as error:  # noqa: BLE001 - it is reported to the clients of the step's sequences
            return self._give_up(flight, error)
        outputs = self._scheduler.read_step(output)
        now = time.perf_counter()
        seconds, self._last_end = now - max(flight.launched, self._last_end), now
        self._scheduler.note_duration(flight.batch, seconds, drafts_on_device=flight.step.drafts_on_device)
        self._update_record()
        failed = None if following is None else self._sample(following)
        on_read(outputs, flight.batch.kind, seconds)
        return failed

    def _sample(self, step: LaunchedStep) -> FailedStep | None:
        """Have the only unread step sample."""
        try:
            step.sample()
        except BaseException as error:  # noqa: BLE001 - it is reported to the clients of the step's sequences
            return self._give_up(self._flights.popleft(), error)
        return None

    def _give_up(self, flight: _Flight, error: BaseException) -> FailedStep:
        """Drop a step that raised, and the steps after it, which computed on invalid KV."""
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
        # Most steps have the sequences of the step before.
        if ids != self._recorded:
            self._recorded = ids
            self._record.begin(ids)
