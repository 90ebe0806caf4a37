"""`DeferredSteps`: submits each step before the one before it is read, so that the device never waits for the host.

Owned by the engine core's loop where `async_scheduling` is on. Order of one turn: schedule and launch step N+1, read
step N, then have N+1 choose its tokens: what a choice needs to know of N's tokens (grammars, penalties, bad words) is
known by then, while the device is still busy with N+1's pass.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.core.isolation import FailedStep
from engine.core.scheduler import OutputQueue, Scheduler
from engine.distributed.flight_record import FlightRecord

logger = logging.getLogger(__name__)


class LaunchedStep(Protocol):
    """A step that runs."""

    def sample(self) -> None:
        """Have the device choose tokens, if it was not told to yet: the steps before this one have been read."""

    def result(self) -> ScheduledBatchOutput:
        """Wait for the step's end. Raises what the step raised."""

    def wait(self) -> None:
        """Wait until the device does nothing more for it, which nobody will read. Raises what the device does."""


class LaunchingRunner(Protocol):
    """What is needed of a runner whose steps do not hold up their caller."""

    def launch(self, batch: ScheduledBatch, /) -> LaunchedStep:
        """Begin a step. A row's last token may be one that a step before, unread, has sampled."""


class _Flight(NamedTuple):
    batch: ScheduledBatch
    step: LaunchedStep
    launched: float
    """When, on `time.perf_counter`'s clock."""


class DeferredSteps:
    """At most two steps that are not read, the second behind the first on the device."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: LaunchingRunner,
        record: FlightRecord,
        outputs: OutputQueue,
        send: Callable[[str, float], None],
    ) -> None:
        """`outputs` collects what a step brings; `send(kind, seconds)` then tells of the step."""
        self._scheduler, self._runner, self._record = scheduler, runner, record
        self._outputs, self._send = outputs, send
        self._flights: deque[_Flight] = deque()
        self._last_end = 0.0
        self._noted: list[int] = []
        """What the record says."""

    def __bool__(self) -> bool:
        """Whether a step is not read yet."""
        return bool(self._flights)

    def advance(self) -> FailedStep | None:
        """Launch the next step and read the one before; with none to launch, read what runs. The step that raised."""
        scheduled = self._scheduler.schedule()
        if scheduled is None:
            self._note()
            return self._read_and_tell() if self._flights else None
        batch, seqs = scheduled
        self._note(batch)
        launched = time.perf_counter()
        try:
            step = self._runner.launch(batch)
        except BaseException as error:  # a panic of native code is no `Exception`
            logger.exception("a step of %d sequences failed", len(seqs))
            # What was launched before is not to blame.
            failed = self.drain()
            self._scheduler.retract(seqs.values())
            self._note()
            live = [seq for seq in seqs.values() if not seq.is_finished]
            return failed or FailedStep(live, error, batch.total_tokens_num)
        self._scheduler.submitted.begin(batch)
        self._flights.append(_Flight(batch, step, launched))
        return self._read_and_tell(step) if len(self._flights) > 1 else self._sample(step)

    def note_again(self) -> None:
        """The record was emptied by somebody else: write down again who is in the steps that run."""
        self._noted = []
        self._note()

    def drain(self) -> FailedStep | None:
        """Read all that runs; the step that raised, behind which nothing was read."""
        failed = None
        while self._flights and failed is None:
            failed = self._read_and_tell()
        return failed

    def _read_and_tell(self, following: LaunchedStep | None = None) -> FailedStep | None:
        """Read the step that was launched first, and have the one that follows choose its tokens."""
        flight = self._flights.popleft()
        try:
            output = flight.step.result()
        except BaseException as error:  # noqa: BLE001 - whoever is in the step is told
            return self._give_up(flight, error)
        self._scheduler.submitted.read(output, self._outputs)
        now = time.perf_counter()
        seconds, self._last_end = now - max(flight.launched, self._last_end), now
        self._note()
        failed = None if following is None else self._sample(following)
        self._send(flight.batch.kind, seconds)
        return failed

    def _sample(self, step: LaunchedStep) -> FailedStep | None:
        """Called with this step alone unread."""
        try:
            step.sample()
        except BaseException as error:  # noqa: BLE001 - whoever is in the step is told
            return self._give_up(self._flights.popleft(), error)
        return None

    def _give_up(self, flight: _Flight, error: BaseException) -> FailedStep:
        """A step raised: what followed it computed on what it left, and is not read."""
        logger.error("a step of %d sequences failed", len(flight.batch.req_ids), exc_info=error)
        for each in self._flights:
            try:
                each.step.wait()
            except BaseException:
                logger.exception("the step behind it failed too")
        self._flights.clear()
        seqs = [seq for seq in flight.batch.sequences if not seq.is_finished]
        self._scheduler.submitted.drop()
        self._note()
        return FailedStep(seqs, error, flight.batch.total_tokens_num)

    def _note(self, beginning: ScheduledBatch | None = None) -> None:
        """Write down who is in the steps that run, one that begins included."""
        running = [flight.batch.req_ids for flight in self._flights]
        if beginning is not None:
            running.append(beginning.req_ids)
        ids = running[0] if running else []
        if any(others != ids for others in running):
            ids = list(dict.fromkeys(itertools.chain(*running)))
        # Most steps are of the sequences that the last one was of.
        if ids != self._noted:
            self._noted = ids
            self._record.begin(ids)
