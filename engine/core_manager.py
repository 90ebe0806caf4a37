"""`CoreManager`: the front end's handle on the engine core: sends requests, receives outputs, loses none of them.

Used by the server on its event loop and by `LLMEngine` with blocking calls. Starts no thread.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self

from engine.config import Config
from engine.journal import Entry, Journal
from engine.messages import AbortRequests, AddRequest, Failed, Ready, RequestOutput, Shutdown, StepOutputs
from engine.supervisor import Supervisor

_log = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine core is not there to serve; one sentence says why. `usage` marks the user's mistake."""

    def __init__(self, error: str, usage: bool = False) -> None:
        super().__init__(error)
        self.usage = usage


class CoreManager:
    """The engine core, through all of its lives. All calls come from one thread.

    Every request added ends in exactly one output with `finished` set, also when it is aborted. When the core dies
    or stalls, another is started, and the live requests go on in it where they were: nothing of them is lost or told
    twice. Where that does not help, they end with an error, and `failure` says why. Outputs go to the callback given
    to `attach`, or without one wait for `get_outputs`. An engine dropped without `shutdown` is ended when it is
    collected, or at the interpreter's exit.
    """

    def __init__(self, config: Config) -> None:
        """Start the core and return at once: it loads while the caller does other things."""
        self.ready: Ready | None = None
        """What the latest core said when it was ready to serve; None before the first."""
        self._journal = Journal()
        self._inbox: deque[StepOutputs] = deque()
        self._deliver: Callable[[StepOutputs], object] = self._inbox.append
        self._on_restart: Callable[[int], object] = lambda resumed: None
        self._settled = asyncio.Event()
        self._supervisor = Supervisor(config, self)

    @property
    def live(self) -> Collection[int]:
        """Ids of the requests that still owe their terminal output."""
        return self._journal.ids

    @property
    def failure(self) -> Failed | None:
        """Why there is no core any more, and will be none; None while there is, or will be."""
        return self._supervisor.failure

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken: the core was ready once, and is there or will be again."""
        return self.ready is not None and self.failure is None

    @property
    def is_serving(self) -> bool:
        """Whether there is a core now that is ready."""
        return self._supervisor.is_serving

    @property
    def pid(self) -> int:
        """The process id of the core, or of the last one."""
        return self._supervisor.pid

    # -- start and end ------------------------------------------------------------------------------------------

    def wait_ready(self, timeout: float | None = None) -> Ready:
        """Block until the core serves. Raises `EngineDeadError` if it cannot, `TimeoutError` after `timeout` s."""
        deadline = _deadline(timeout)
        while self.ready is None and self.failure is None:
            if not self._supervisor.wait(deadline):
                raise TimeoutError(f"the engine core was not ready within {timeout:g} s")
        return self._ready_or_raise()

    async def wait_ready_async(self, timeout: float | None = None) -> Ready:
        """As `wait_ready`, for an attached event loop."""
        await asyncio.wait_for(self._settled.wait(), timeout)
        return self._ready_or_raise()

    def shutdown(self, timeout: float = 5.0) -> None:
        """Abort what runs and end the core, within `timeout` seconds and by force after; the second time, nothing.

        The aborted requests' outputs are delivered before this returns.
        """
        self._supervisor.shutdown([Shutdown()], timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- requests -----------------------------------------------------------------------------------------------

    def add_requests(self, requests: Sequence[AddRequest]) -> None:
        """Send requests, with ids never used before. Raises `EngineDeadError` when there is no core to serve them.

        While a core is being started again, they wait for it.
        """
        if not self.is_alive:
            raise EngineDeadError(self.failure.error if self.failure else "the engine core is not ready yet")
        self._go_on(self._journal.add(requests))

    def abort(self, request_ids: Collection[int]) -> None:
        """Ask the core to end requests; their terminal outputs follow. Ids that are not live are ignored."""
        there, ended = self._journal.abort(self._journal.entries(request_ids))
        if there:
            self._supervisor.send([AbortRequests(there)])
        self._tell(ended)

    def pause(self, request_ids: Collection[int]) -> None:
        """Have the core give up requests until `resume`; a few outputs of theirs may follow."""
        leaving = self._journal.call_back(self._journal.entries(request_ids))
        if leaving:
            self._supervisor.send([AbortRequests(leaving)])

    def resume(self, request_ids: Collection[int]) -> None:
        """Have the core go on with paused requests where they were."""
        self._go_on(self._journal.let_go_on(self._journal.entries(request_ids)))

    # -- outputs ------------------------------------------------------------------------------------------------

    def get_outputs(self, timeout: float | None = None) -> StepOutputs | None:
        """The next step's outputs; None after `timeout` seconds. Raises `EngineDeadError` when no more can come."""
        deadline = _deadline(timeout)
        while not self._inbox:
            if self.failure is not None:
                raise EngineDeadError(self.failure.error, self.failure.usage)
            if not self._supervisor.wait(deadline):
                return None
        return self._inbox.popleft()

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_outputs: Callable[[StepOutputs], object],
        on_restart: Callable[[int], object] = lambda resumed: None,
    ) -> None:
        """From now on, call `on_outputs` from `loop` with the outputs of every step. Call from the loop's thread.

        `on_restart` is called when another core is ready to serve, before its first outputs, with the number of
        requests that go on in it behind tokens that they had.
        """
        self._deliver, self._on_restart = on_outputs, on_restart
        self._supervisor.attach(loop)

    def _tell(self, outputs: list[RequestOutput]) -> None:
        """Deliver outputs that no core sends."""
        if outputs:
            step = StepOutputs(outputs)
            self._journal.record(step)
            self._deliver(step)

    def _go_on(self, entries: Sequence[Entry]) -> None:
        """Bring requests that are here to the core, if there is one; if not, they wait for it."""
        if self.is_serving and entries:
            if not self.has_work:
                self._supervisor.note_work()
            self._supervisor.send(self._journal.send(entries))

    def _ready_or_raise(self) -> Ready:
        if self.ready is None or self.failure is not None:
            assert self.failure is not None
            raise EngineDeadError(self.failure.error, self.failure.usage)
        return self.ready

    # -- what the supervisor tells ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether the core owes anything."""
        return self._journal.has_work

    def on_step(self, step: StepOutputs) -> None:
        """Write down what the core tells of a step, and deliver it."""
        left = self._journal.record(step)
        self._deliver(step)
        self._go_on(left)

    def on_core_ready(self, ready: Ready, *, again: bool) -> None:
        """Give a core what waits for it."""
        self.ready = ready
        self._settled.set()
        if again:
            resumed = sum(bool(entry.token_ids) for entry in self._journal)
            others = len(self.live) - resumed
            _log.warning("the engine core serves again; %d requests go on, %d others begin", resumed, others)
            self._on_restart(resumed)
        self._go_on(list(self._journal))

    def on_core_death(self, in_step: Collection[int], *, killed: bool) -> bool:
        """Call all requests back; those that do not go on end. Whether one was found to be at fault."""
        ended = self._journal.core_died(in_step, killed=killed)
        self._tell(ended)
        return any(output.is_poison for output in ended)

    def on_end(self, failure: Failed) -> None:
        """What follows from the last core's end: every live request ends with an error."""
        self._settled.set()
        self._tell(self._journal.end_all(failure.error))


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
