"""`CoreManager`: the front end's handle on the engine core. Starts it, and again when it dies; sends and receives.

Used by the server on its event loop and by `LLMEngine` with blocking calls. Starts no thread.
"""

import asyncio
import logging
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self

import zmq

from engine.config import Config
from engine.core_link import CoreLink
from engine.journal import Entry, Journal
from engine.messages import AbortRequests, AddRequest, Failed, Outbound, Ready, RequestOutput, Shutdown, StepOutputs
from engine.restarts import RestartPolicy
from engine.watchdog import Watchdog

_log = logging.getLogger(__name__)

_STACKS_SECONDS = 0.5
"""For a stalled core to write its threads' stacks, before it is killed."""


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
        self.failure: Failed | None = None
        """Why there is no core any more, and will be none; None while there is, or will be."""
        self._config = config
        self._journal = Journal()
        self._restarts = RestartPolicy(config.max_core_restarts, config.core_restart_window)
        self._watchdog = Watchdog(config.stall_timeout)
        self._inbox: deque[StepOutputs] = deque()
        self._deliver: Callable[[StepOutputs], object] = self._inbox.append
        self._on_restart: Callable[[int], object] = lambda resumed: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled = asyncio.Event()
        self._serving = False
        self._stalled: str | None = None
        self._start_at: float | None = None
        self._closing = False

        context = zmq.Context()
        links: list[CoreLink] = []
        self._release = weakref.finalize(self, _release, links, context)
        self._context, self._links = context, links
        try:
            self._start()
        except BaseException:
            self._release()
            raise

    @property
    def live(self) -> Collection[int]:
        """Ids of the requests that still owe their terminal output."""
        return self._journal.ids

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken: the core was ready once, and is there or will be again."""
        return self.ready is not None and self.failure is None

    @property
    def is_serving(self) -> bool:
        """Whether there is a core now that is ready."""
        return self._serving

    @property
    def pid(self) -> int:
        """The process id of the core, or of the last one."""
        return self._pid

    # -- start and end ------------------------------------------------------------------------------------------

    def wait_ready(self, timeout: float | None = None) -> Ready:
        """Block until the core serves. Raises `EngineDeadError` if it cannot, `TimeoutError` after `timeout` s."""
        deadline = _deadline(timeout)
        while self.ready is None and self.failure is None:
            if not self._wait(deadline):
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
        self._closing = True
        if self._serving:
            self._send([Shutdown()])
            deadline = _deadline(timeout)
            while self.failure is None and self._wait(deadline):
                pass
        if self.failure is None:
            how = f"did not stop within {timeout:g} s" if self._serving else "was stopped before it was ready"
            self._end(Failed(f"the engine core {how}"))

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
        if there and self._serving:
            self._send([AbortRequests(there)])
        self._tell(ended)

    def pause(self, request_ids: Collection[int]) -> None:
        """Have the core give up requests until `resume`; a few outputs of theirs may follow."""
        leaving = self._journal.call_back(self._journal.entries(request_ids))
        if leaving and self._serving:
            self._send([AbortRequests(leaving)])

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
            if not self._wait(deadline):
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
        self._loop, self._deliver, self._on_restart = loop, on_outputs, on_restart
        if self._links:
            self._listen(loop, self._links[0])
        loop.call_later(self._watchdog.interval, self._watch, loop)

    def _listen(self, loop: asyncio.AbstractEventLoop, link: CoreLink) -> None:
        messages, lifeline = link.descriptors
        loop.add_reader(messages, self._receive)
        loop.add_reader(lifeline, self._on_core_gone)
        # ZMQ's descriptor tells of changes only: what arrived before is not told again.
        loop.call_soon(self._receive)

    def _wait(self, deadline: float | None) -> bool:
        """Block until something happened and take it in; False when `deadline` came first."""
        now = time.monotonic()
        due = [each for each in (deadline, self._start_at) if each is not None]
        if self._watches:
            due.append(now + self._watchdog.interval)
        timeout = max(0.0, min(due) - now) if due else None
        if self._links:
            self._links[0].poll(timeout)
            self._receive()
            if self._links and self._links[0].is_gone:
                self._on_core_gone()
            elif self._watches:
                self._check_progress()
        else:
            assert timeout is not None
            time.sleep(timeout)
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self._start_again()
        return deadline is None or time.monotonic() < deadline

    def _receive(self) -> None:
        """Take in every message that has arrived."""
        try:
            while self._links and (message := self._links[0].receive()) is not None:
                self._take_in(message)
        except BaseException:
            # The descriptor will not tell again of the messages behind the one that raised.
            if self._loop is not None:
                self._loop.call_soon(self._receive)
            raise

    def _take_in(self, message: Outbound) -> None:
        match message:
            case StepOutputs():
                self._watchdog.note_progress()
                left = self._journal.record(message)
                self._deliver(message)
                self._go_on(left)
            case Ready():
                self._take_up(message)

    def _tell(self, outputs: list[RequestOutput]) -> None:
        """Deliver outputs that no core sends."""
        if outputs:
            step = StepOutputs(outputs)
            self._journal.record(step)
            self._deliver(step)

    def _go_on(self, entries: Sequence[Entry]) -> None:
        """Bring requests that are here to the core, if there is one; if not, they wait for it."""
        if self._serving and entries:
            if not self._journal.has_work:
                self._watchdog.note_progress()
            self._send(self._journal.send(entries))

    def _send(self, messages: Sequence[AddRequest | AbortRequests | Shutdown]) -> None:
        self._links[0].send(messages)

    # -- from one core to the next ------------------------------------------------------------------------------

    def _start(self) -> None:
        link = CoreLink(self._config, self._context)
        self._links.append(link)
        self._pid = link.pid
        if self._loop is not None:
            self._listen(self._loop, link)

    def _start_again(self) -> None:
        self._start_at = None
        if self.failure is None:
            try:
                self._start()
            except (OSError, ValueError) as error:
                self._core_lost(Failed(f"no engine core can be started: {error}"), futile=True)

    def _take_up(self, ready: Ready) -> None:
        """A core is ready: give it what waits."""
        again = self.ready is not None
        self.ready, self._serving = ready, True
        self._watchdog.note_progress()
        self._settled.set()
        if again:
            resumed = sum(bool(entry.token_ids) for entry in self._journal)
            others = len(self.live) - resumed
            _log.warning("the engine core serves again; %d requests go on, %d others begin", resumed, others)
            self._on_restart(resumed)
        self._go_on(list(self._journal))

    @property
    def _watches(self) -> bool:
        return self._serving and self._journal.has_work

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.failure is None:
            self._receive()
            if self._watches:
                self._check_progress()
            else:
                self._watchdog.note_progress()
            loop.call_later(self._watchdog.interval, self._watch, loop)

    def _check_progress(self) -> None:
        """Kill a core that has stalled, once it has written what its threads do."""
        link = self._links[0]
        self._stalled = self._watchdog.why_stalled(link.pid)
        if self._stalled is None:
            return
        self._serving = False
        _log.error("the engine core stalls: %s; it is killed, and the stacks of its threads follow", self._stalled)
        link.dump_stacks()
        if self._loop is not None:
            self._loop.call_later(_STACKS_SECONDS, link.kill)
        else:
            time.sleep(_STACKS_SECONDS)
            link.kill()

    def _on_core_gone(self) -> None:
        """The core's process has ended, or is about to."""
        link = self._links[0]
        exit_code = link.wait_end()
        self._receive()
        while link.hears_more(exit_code):
            self._receive()
        in_step = link.running_step()
        # One that died in its first step, or before any, would do no better the next time.
        futile = not link.is_connected or (bool(in_step) and not link.completed_steps)
        failure = link.why_ended(exit_code)
        if self._stalled is not None:
            failure = Failed(f"the engine core stalled: {self._stalled}")
        killed = exit_code == -signal.SIGKILL and self._stalled is None
        self._unlink(link)
        self._tell(self._journal.core_died(in_step, killed=killed))
        self._core_lost(failure, futile=futile)

    def _core_lost(self, failure: Failed, *, futile: bool) -> None:
        """Start another core, now or later, or end for good."""
        if self.ready is None or self._closing:
            self._end(failure)
            return
        self._start_at = self._restarts.next_start(futile=futile)
        if self._start_at is None:
            self._end(Failed(failure.error + self._restarts.why_not, failure.usage))
            return
        _log.error("%s; another is started for %d live requests", failure.error, len(self.live))
        if self._loop is not None:
            self._loop.call_at(self._loop.time() + self._start_at - time.monotonic(), self._start_again)

    def _unlink(self, link: CoreLink) -> None:
        if self._loop is not None:
            for descriptor in link.descriptors:
                self._loop.remove_reader(descriptor)
        self._links.clear()
        self._serving, self._stalled = False, None
        link.close()

    def _end(self, failure: Failed) -> None:
        """Free all that belongs to a core and give every live request its terminal output."""
        for link in list(self._links):
            self._unlink(link)
        self.failure = failure
        self._start_at = None
        self._release()
        self._settled.set()
        self._tell(self._journal.end_all(failure.error))

    def _ready_or_raise(self) -> Ready:
        if self.ready is None or self.failure is not None:
            assert self.failure is not None
            raise EngineDeadError(self.failure.error, self.failure.usage)
        return self.ready


def _release(links: list[CoreLink], context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    for link in links:
        link.close()
    context.destroy(linger=0)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
