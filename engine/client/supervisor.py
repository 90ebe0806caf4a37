"""`Supervisor`: keeps an engine core running: starts it, hears it, kills it when it hangs, and starts the next.

Owned by `Replica`, which knows the requests; this knows processes. Works by blocking calls, or on an event loop.
"""

import asyncio
import logging
import math
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import zmq

from engine.client.core_link import THE_CORE, CoreLink
from engine.config.config import Config
from engine.messages import Failed, Inbound, Outbound, Ready, StepOutputs

# [restarts] `RestartPolicy`: whether an engine core that died is started again, and when. Asked by `Supervisor`.

_MOST_FUTILE = 5
"""Cores in a row that died before they completed a step, or were ready and idle: more would change nothing."""

_FIRST_DELAY_SECONDS = 0.25
"""Before the start that follows a futile one; doubled each time: memory or a device may yet be freed."""


class RestartPolicy:
    """Counts deaths over a window of time."""

    def __init__(self, most: int, window: float) -> None:
        """At most `most` restarts within `window` seconds; 0: none at all."""
        self._most = most
        self._window = window
        self._restarts: deque[float] = deque()
        self._futile = 0

    def next_start(self, *, futile: bool) -> float | None:
        """A core died; when to start the next, on `time.monotonic`'s clock. None: no more, `why_not` says why."""
        now = time.monotonic()
        self._futile = self._futile + 1 if futile else 0
        while self._restarts and self._restarts[0] <= now - self._window:
            self._restarts.popleft()
        if len(self._restarts) >= self._most or self._futile >= _MOST_FUTILE:
            return None
        self._restarts.append(now)
        return now + (_FIRST_DELAY_SECONDS * 2.0 ** (self._futile - 2) if self._futile > 1 else 0.0)

    @property
    def why_not(self) -> str:
        """After `next_start` gave None: why, to end a sentence with; empty where restarts are off."""
        if not self._most:
            return ""
        if self._futile >= _MOST_FUTILE:
            return f"; {self._futile} engine cores in a row died before they served, so no other is started"
        times = "once" if len(self._restarts) == 1 else f"{len(self._restarts)} times"
        window = math.ceil(self._window)
        return f"; it was started again {times} within {window} s (max_core_restarts), and is not once more"


# [watchdog] `Watchdog`: notices an engine core that has work and completes no step, or is stopped.
#
# Asked by `Supervisor` again and again.

_STOPPED_SECONDS = 2.0
"""Without a step, before a process that the system holds stopped counts as stalled: no waiting will move it."""


class Watchdog:
    """Measures the time since the core last showed progress, or was given work when it had none."""

    def __init__(self, stall_timeout: float) -> None:
        """`stall_timeout`: seconds that the longest step may take."""
        self._timeout = stall_timeout
        self._last = self._looked = time.monotonic()
        self.interval = min(1.0, stall_timeout / 4)
        """Seconds between two looks."""

    def note_progress(self) -> None:
        """A step was completed, or the core was idle until now."""
        self._last = time.monotonic()

    def why_stalled(self, stopped_process: Callable[[], int | None], more: float = 0.0) -> str | None:
        """Why the core, which has work or is stopped, counts as stalled; None: it does not.

        `stopped_process` finds a process of it that a signal has stopped. It may take `more` seconds than a step may.
        """
        now = time.monotonic()
        late, self._looked = now - self._looked > 2 * self.interval, now
        silent = now - self._last
        if late:
            # This process was held up itself, and what the core said meanwhile may still be unread.
            return None
        if silent > self._timeout + more:
            return f"no step was completed for {silent:.0f} s (stall_timeout is {self._timeout:g})"
        if silent > _STOPPED_SECONDS:
            stopped = stopped_process()
            if stopped is not None:
                return f"its process {stopped} was stopped by a signal"
        return None


_log = logging.getLogger(__name__)

_STACKS_SECONDS = 0.5
"""For a stalled core to write its threads' stacks, before it is killed."""


class Keeper(Protocol):
    """Who has requests for the core."""

    @property
    def live(self) -> Collection[int]:
        """Ids of its requests that have not ended."""

    @property
    def has_work(self) -> bool:
        """Whether the core owes anything."""

    @property
    def is_held_up(self) -> bool:
        """Whether the core waits for others with which it computes in lockstep, and none for it."""

    def new_core(self, config: Config, context: "zmq.Context[zmq.Socket[bytes]]", /) -> CoreLink:
        """Start a core. Raises `ValueError`, `OSError` when it cannot be started."""

    def on_step(self, step: StepOutputs, /) -> None:
        """The core tells of a step."""

    def on_core_ready(self, ready: Ready, /, *, again: bool) -> None:
        """A core serves; `again` for all but the first."""

    def on_core_death(self, in_step: Collection[int] | None, /, *, killed: bool) -> bool:
        """The core that served is gone, in a step of these requests; `killed` by another process.

        `in_step` is None where it followed another core into its end, or was lost with its host: no request is to
        blame. Whether one was found to be at fault, and is gone too.
        """

    def on_away(self) -> None:
        """The core that served is gone, and the next does not serve yet; told again and again."""

    def on_end(self, failure: Failed, /) -> None:
        """There is no core, and will be none."""


class Supervisor:
    """An engine core through all of its lives. All calls come from one thread."""

    def __init__(self, config: Config, keeper: Keeper, name: str = THE_CORE) -> None:
        """Start the core and return at once. Raises `ValueError`, `OSError` when it cannot be started.

        `name` is what sentences call it.
        """
        self.name = name
        self.is_serving = False
        """Whether there is a core that is ready, and not known to be stuck."""
        self.since = time.monotonic()
        """When that last changed, on the monotonic clock."""
        self.failure: Failed | None = None
        """Why there is no core any more, and will be none."""
        self._pid = -1
        self._config = config
        self._keeper = keeper
        self._restarts = RestartPolicy(config.max_core_restarts, config.core_restart_window)
        self._watchdog = Watchdog(config.stall_timeout)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._served = False
        self._started = time.monotonic()
        self._first_start_seconds = 0.0
        self._stalled: str | None = None
        self._start_at: float | None = None
        self._closing = False

        context = zmq.Context()
        links: list[CoreLink] = []
        # `links` has the core's while there is one.
        self._release = weakref.finalize(self, _release, links, context)
        self._context, self._links = context, links
        try:
            self._start()
        except BaseException:
            self._release()
            raise

    @property
    def pid(self) -> int:
        """The process id of the core, or of the last one."""
        if self._links:
            self._pid = self._links[0].pid
        return self._pid

    @property
    def link(self) -> CoreLink | None:
        """The core's process and sockets, while there is one."""
        return self._links[0] if self._links else None

    @property
    def longest_start(self) -> float:
        """Seconds that a core may take to take another's place, where its host is there, before it is killed."""
        return self._config.stall_timeout + 2 * self._first_start_seconds

    def send(self, messages: Sequence[Inbound]) -> None:
        """Send messages to the core, which serves. To one that just died they go nowhere, and its death is told."""
        if messages and self.is_serving:
            link = self._links[0]
            link.send(messages)
            if self._loop is not None and link.wire.is_one_socket and not self._loop.is_closed():
                self._loop.call_soon(self._receive)

    def note_work(self) -> None:
        """The core, which was idle, is given work: from now on it must show progress."""
        self._watchdog.note_progress()

    def begin_end(self, farewell: Sequence[Inbound]) -> None:
        """Have the core, if it serves, end by itself, as `farewell` tells it; there will be no other."""
        self._closing = True
        self.send(farewell)

    def end(self, failure: Failed) -> None:
        """End what is left, by force and for good; nothing if nothing is."""
        self._closing = True
        if self.failure is None:
            self._end(failure)

    # -- hearing the core ---------------------------------------------------------------------------------------

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on, work on that event loop, whose thread calls this."""
        self._loop = loop
        if self._links:
            self._listen(loop, self._links[0])
        loop.call_later(self._watchdog.interval, self._watch, loop)

    @property
    def next_look(self) -> float:
        """When to `look` again though nothing is heard, on the monotonic clock; infinite: not before."""
        start = math.inf if self._start_at is None else self._start_at
        looks = self._watches or self._awaits_host
        return min(start, time.monotonic() + self._watchdog.interval) if looks else start

    def look(self) -> None:
        """Take in what has happened, where there is no event loop that tells of it."""
        if self._links:
            link = self._links[0]
            self._receive()
            if self._links and link.is_gone:
                self._on_gone()
            elif self._watches:
                self._check_progress()
            elif self._awaits_host:
                self._watchdog.note_progress()
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self._start_again()
        self._tell_of_absence()

    def _listen(self, loop: asyncio.AbstractEventLoop, link: CoreLink) -> None:
        messages, lifeline = link.descriptors
        loop.add_reader(messages, self._receive)
        loop.add_reader(lifeline, self._on_gone)
        # ZMQ's descriptor tells of changes only: what arrived before is not told again.
        loop.call_soon(self._receive)

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
                # Without these it is the input thread's, which goes on when the loop is stuck.
                if message.stats is not None:
                    self._watchdog.note_progress()
                self._keeper.on_step(message)
            case Ready():
                self._note_serving(True)
                self._watchdog.note_progress()
                # What requests were checked against holds for every core that serves them.
                self._config = self._config.model_copy(update={"num_kvcache_blocks": message.model.num_kvcache_blocks})
                again, self._served = self._served, True
                if not again:
                    self._first_start_seconds = time.monotonic() - self._started
                self._keeper.on_core_ready(message, again=again)

    # -- a core that hangs --------------------------------------------------------------------------------------

    @property
    def _watches(self) -> bool:
        return (self.is_serving and self._keeper.has_work) or self._starts_again

    @property
    def _starts_again(self) -> bool:
        """Whether a core that takes another's place is starting; the first one may take as long as it likes."""
        return self._starts and not self._links[0].is_awaited

    @property
    def _awaits_host(self) -> bool:
        """Whether a core that takes another's place waits for its host to join, which may take as long as it likes."""
        return self._starts and self._links[0].is_awaited

    @property
    def _starts(self) -> bool:
        return self._served and self._stalled is None and bool(self._links) and not self._links[0].is_connected

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.failure is not None:
            return
        # Before anything that may raise: nobody else would look again.
        loop.call_later(self._watchdog.interval, self._watch, loop)
        self._receive()
        # An idle core owes no progress, but one that is stopped would keep whoever comes next waiting.
        if self._watches or (self.is_serving and self._links[0].stopped_process() is not None):
            self._check_progress()
        else:
            self._watchdog.note_progress()
        self._tell_of_absence()

    def _tell_of_absence(self) -> None:
        if self._served and not self.is_serving and self.failure is None:
            self._keeper.on_away()

    def _note_serving(self, is_serving: bool) -> None:
        if is_serving != self.is_serving:
            self.is_serving, self.since = is_serving, time.monotonic()

    def _check_progress(self) -> None:
        """Kill a core that has stalled, once it has written what its threads do."""
        link = self._links[0]
        more = 2 * self._first_start_seconds if self._starts_again else 0.0
        if self._keeper.is_held_up:
            # The one that it waits for is killed first, and is suspected alone; this one follows it into its end.
            more += self._config.stall_timeout
        self._stalled = self._watchdog.why_stalled(link.stopped_process, more)
        if self._stalled is None:
            return
        self._note_serving(False)
        _log.error("%s stalls: %s; it is killed, and its threads' stacks follow", self.name, self._stalled)
        link.dump_stacks()
        if self._loop is not None:
            self._loop.call_later(_STACKS_SECONDS, link.kill)
        else:
            time.sleep(_STACKS_SECONDS)
            link.kill()

    # -- from one core to the next ------------------------------------------------------------------------------

    def _start(self) -> None:
        link = self._keeper.new_core(self._config, self._context)
        self._links.append(link)
        self._started = time.monotonic()
        self._watchdog.note_progress()
        if self._loop is not None:
            self._listen(self._loop, link)

    def _start_again(self) -> None:
        self._start_at = None
        if self.failure is None:
            try:
                self._start()
            except (OSError, ValueError, zmq.ZMQError) as error:
                self._lost(Failed(f"{self.name} cannot be started again: {error}"), futile=True)

    def _on_gone(self) -> None:
        """The core's process has ended, or is about to."""
        link = self._links[0]
        exit_code = link.wait_end()
        self._receive()
        while link.hears_more(exit_code):
            self._receive()
        failure = link.why_ended(exit_code)
        killed = exit_code == -signal.SIGKILL or failure.killed
        if self._stalled is not None:
            failure, killed = Failed(f"{self.name} stalled: {self._stalled}"), False
        # What it computed when it followed another into its end is nobody's fault.
        in_step = None if failure.collateral else link.running_step()
        self._unlink(link)
        found = link.is_connected and self._keeper.on_core_death(in_step, killed=killed)
        # One that died in its first step, or before any, would do no better the next time: unless it was a request's
        # doing, which will not be tried again.
        died_at_once = not link.is_connected or (bool(in_step) and not link.completed_steps)
        # One that was killed may be as good as the next.
        self._lost(failure, futile=died_at_once and not found and not killed and not failure.collateral)

    def _lost(self, failure: Failed, *, futile: bool) -> None:
        """Start another core, now or later, or end for good."""
        if not self._served or self._closing:
            self._end(failure)
            return
        self._start_at = self._restarts.next_start(futile=futile)
        if self._start_at is None:
            self._end(Failed(failure.error + self._restarts.why_not, failure.usage))
            return
        _log.error("%s; another is started for %d live requests", failure.error, len(self._keeper.live))
        if self._loop is not None:
            self._loop.call_at(self._loop.time() + self._start_at - time.monotonic(), self._start_again)

    def _unlink(self, link: CoreLink, why: str = "") -> None:
        self._pid = link.pid
        if self._loop is not None:
            for descriptor in link.descriptors:
                self._loop.remove_reader(descriptor)
        self._links.clear()
        self._note_serving(False)
        self._stalled = None
        link.close(why)

    def _end(self, failure: Failed) -> None:
        """Free all that belongs to a core."""
        for link in list(self._links):
            self._unlink(link, failure.error if failure.usage else "")
        self.failure = failure
        self._start_at = None
        self._release()
        self._keeper.on_end(failure)


def _release(links: list[CoreLink], context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    for link in links:
        link.close()
    context.destroy(linger=0)
