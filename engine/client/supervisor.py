"""`Supervisor`: keeps an engine core running: starts it, reads its messages, kills it when it hangs, starts the next.

Owned by `Replica`, which knows the requests; a supervisor knows processes. It works by blocking calls or on an event
loop. In this order: `CoreLink`, one core's process and sockets; `RestartPolicy`, whether another core is started;
`Watchdog`, whether a core hangs; and the supervisor, which has one of each.
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

import msgspec
import zmq

from engine.config.config import Config
from engine.distributed.core_process import CoreHandle, CoreTransport
from engine.messages import (
    AdapterChanged,
    CacheReleased,
    Failed,
    Inbound,
    Outbound,
    Ready,
    Shutdown,
    StepOutputs,
    Stopped,
    share_tables,
)

logger = logging.getLogger(__name__)

_LAST_MESSAGE_MS = 1000
"""A core that exits by itself sends the reason first; the message may arrive this much later than the exit is seen."""

_END_SECONDS = 2.0
"""From the end of the lifeline to SIGKILL, for a core that serves; one that does not has nothing to end."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Outbound)


THE_CORE = "the engine core"
"""Name of the only core in messages."""


def core_name(config: Config, replica: int) -> str:
    """Name of a replica's core in messages."""
    return THE_CORE if config.parallel_config.data_parallel_size == 1 else f"engine core {replica}"


class CoreLink:
    """A core from its start to its end. All calls come from one thread; none but `wait_end` and `close` blocks."""

    def __init__(self, core: CoreHandle, context: "zmq.Context[zmq.Socket[bytes]]", name: str = THE_CORE) -> None:
        """Start the process and return at once. Raises `ValueError`, `OSError` when it cannot be started.

        `name` is its name in messages; its own sockets are made in `context`.
        """
        self._core = core
        self._name = name
        self._wire: CoreTransport | None = None
        self.is_connected = False
        """Whether the core has been ready."""
        self.completed_steps = False
        """Whether it has reported a step."""
        self.reported_failure: Failed | None = None
        """Why it ends, if it has reported that."""
        try:
            self._wire = core.open_transport(context)
            core.start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id, on its own host; -1 while it is unknown."""
        return self._core.pid

    @property
    def wire(self) -> CoreTransport:
        """The sockets to the core."""
        assert self._wire is not None
        return self._wire

    @property
    def waits_for_host(self) -> bool:
        """Whether the core starts only when its host joins."""
        return self._core.waits_for_host

    @property
    def descriptors(self) -> tuple[int, int]:
        """Two descriptors: one is readable when there may be messages, the other when the core is gone."""
        return self.wire.descriptor, self._core.lifeline.fileno()

    def register(self, poller: zmq.Poller) -> None:
        """Have `poller` wake up when there is a message or the core is gone."""
        self.wire.register(poller)
        poller.register(self._core.lifeline, zmq.POLLIN)

    def receive(self) -> Outbound | None:
        """The next message that has arrived; None if there is none."""
        assert self._wire is not None
        frame = self._wire.receive()
        if frame is None:
            return None
        message: Outbound = _decoder.decode(frame)
        match message:
            case Ready():
                self.wire.connected()
                self._core.connected()
                self.is_connected = True
            case Failed():
                self.reported_failure = self._named(message)
            case Stopped():
                self.reported_failure = Failed(f"{self._name} has stopped")
            case AdapterChanged() | CacheReleased():
                pass
            case _:
                self.completed_steps = True
        return message

    def send(self, messages: Sequence[Inbound]) -> None:
        """Send one multipart message, a frame each. One to a core that just died is lost; its death is seen later."""
        if messages:
            self.wire.send([_encoder.encode(message) for message in share_tables(messages)])

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, or is about to."""
        return self._core.is_gone

    def wait_end(self) -> int:
        """Block until the process, which is gone, has been ended by the system; its exit code, or minus a signal."""
        return self._core.wait()

    def awaits_message(self, exit_code: int) -> bool:
        """Wait a while for a message of a core that exited by itself and of unknown cause; whether there is one."""
        is_known = self.reported_failure is not None or self._core.why_gone() is not None
        return exit_code >= 0 and not is_known and self.wire.poll(_LAST_MESSAGE_MS)

    def why_ended(self, exit_code: int) -> Failed:
        """Why the core ended: as it reported, or as the system did."""
        if self.reported_failure is not None:
            return self.reported_failure
        failure = self._core.why_gone()
        if failure is not None:
            return failure
        if exit_code < 0:
            return Failed(f"{self._name} was killed by {signal.Signals(-exit_code).name}")
        return Failed(f"{self._name} exited with code {exit_code}; its log says why")

    def running_step(self) -> Sequence[int] | None:
        """Ids of the requests in the step that the core died in; None where no request is the cause."""
        return self._core.running_step()

    def stopped_process(self) -> int | None:
        """A process of the core that a signal has stopped; None where there is none that can be seen."""
        return self._core.stopped_process()

    def dump_stacks(self) -> None:
        """Have the core and its ranks log the stack of each thread, even where they are stuck or stopped."""
        self._core.dump_stacks()

    def kill(self) -> None:
        """End the process now. Nothing happens if it is gone."""
        self._core.kill()

    def close(self, why: str = "") -> None:
        """End the process, within seconds, and free all that belonged to it; `why` as in `CoreHandle.stop`."""
        self._core.stop(_END_SECONDS if self.is_connected else 0.0, why)
        if self._wire is not None:
            self._wire.close()

    def _named(self, failure: Failed) -> Failed:
        """The failure with the name of this core where there are several; a user's mistake is not a core's."""
        if failure.usage or self._name == THE_CORE:
            return failure
        error = failure.error.removeprefix(f"{THE_CORE} ")
        sentence = f"{self._name} {error}" if error != failure.error else f"{self._name}: {error}"
        return msgspec.structs.replace(failure, error=sentence)


_MAX_FUTILE_STARTS = 5
"""Successive cores that died before they were ready or had completed a step: another would die too."""

_FIRST_DELAY_SECONDS = 0.25
"""Delay of the start after a futile one, doubled each time: memory or a device may be freed meanwhile."""


class RestartPolicy:
    """Whether a core that died is started again, and when: by the number of restarts within a window of time."""

    def __init__(self, max_restarts: int, window: float) -> None:
        """At most `max_restarts` within `window` seconds; 0: none at all."""
        self._max_restarts = max_restarts
        self._window = window
        self._restarts: deque[float] = deque()
        self._futile = 0

    def next_start(self, *, futile: bool) -> float | None:
        """When to start another core after one died, on the monotonic clock. None: never, for the reason `why_not`."""
        now = time.monotonic()
        self._futile = self._futile + 1 if futile else 0
        while self._restarts and self._restarts[0] <= now - self._window:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts or self._futile >= _MAX_FUTILE_STARTS:
            return None
        self._restarts.append(now)
        return now + (_FIRST_DELAY_SECONDS * 2.0 ** (self._futile - 2) if self._futile > 1 else 0.0)

    @property
    def why_not(self) -> str:
        """The reason, after `next_start` gave None, to end a sentence with; empty where restarts are off."""
        if not self._max_restarts:
            return ""
        if self._futile >= _MAX_FUTILE_STARTS:
            return f"; {self._futile} engine cores in a row died before they served, so no other is started"
        times = "once" if len(self._restarts) == 1 else f"{len(self._restarts)} times"
        window = math.ceil(self._window)
        return f"; it was started again {times} within {window} s (max_core_restarts), and is not once more"


_STOPPED_SECONDS = 2.0
"""Seconds without a step before a stopped process counts as stalled: waiting would not continue it."""


class Watchdog:
    """Finds a core that has work and completes no step, or is stopped, by the time since it last showed progress."""

    def __init__(self, stall_timeout: float) -> None:
        """`stall_timeout`: most seconds that a step may take."""
        self._timeout = stall_timeout
        self._last_progress = self._last_check = time.monotonic()
        self.interval = min(1.0, stall_timeout / 4)
        """Seconds between two checks."""

    def note_progress(self) -> None:
        """Note that a step was completed, or that the core was idle until now."""
        self._last_progress = time.monotonic()

    def why_stalled(self, stopped_process: Callable[[], int | None], grace: float = 0.0) -> str | None:
        """Why the core, which has work or is stopped, counts as stalled; None: it does not.

        `stopped_process` finds a process of the core that a signal has stopped. The core may take `grace` seconds
        longer than a step may.
        """
        now = time.monotonic()
        is_late, self._last_check = now - self._last_check > 2 * self.interval, now
        silent = now - self._last_progress
        if is_late:
            # This process was delayed itself, and messages of the core may be unread.
            return None
        if silent > self._timeout + grace:
            return f"no step was completed for {silent:.0f} s (stall_timeout is {self._timeout:g})"
        if silent > _STOPPED_SECONDS:
            stopped = stopped_process()
            if stopped is not None:
                return f"its process {stopped} was stopped by a signal"
        return None


_STACKS_SECONDS = 0.5
"""Time for a stalled core to log its threads' stacks before it is killed."""


class Keeper(Protocol):
    """What a supervisor needs of its `Replica`, which is a layer above it."""

    @property
    def live(self) -> Collection[int]:
        """Ids of its requests that have not ended."""

    @property
    def has_work(self) -> bool:
        """Whether the core owes an output."""

    @property
    def waits_for_peers(self) -> bool:
        """Whether the core waits for others with which it computes in lockstep, and none of them for it."""

    def new_core(self, config: Config, context: "zmq.Context[zmq.Socket[bytes]]", /) -> CoreLink:
        """Start a core. Raises `ValueError`, `OSError` when it cannot be started."""

    def on_step(self, step: StepOutputs, /) -> None:
        """The core has reported a step."""

    def on_adapter_changed(self, answer: AdapterChanged, /) -> None:
        """The core has attached or removed a LoRA adapter, or could not."""

    def on_cache_released(self) -> None:
        """The core has given its KV cache's memory back."""

    def on_core_ready(self, ready: Ready, /, *, again: bool) -> None:
        """A core serves; `again` for all but the first."""

    def on_core_death(self, in_step: Collection[int] | None, /, *, killed: bool) -> bool:
        """The core that served is gone, in a step of these requests; `killed` by another process.

        `in_step` is None where it ended because of another core, or was lost with its host: no request is the cause.
        Returns whether a request was found to be the cause, and was ended.
        """

    def on_unavailable(self) -> None:
        """The core that served is gone, and the next does not serve yet. Called repeatedly."""

    def on_end(self, failure: Failed, /) -> None:
        """There is no core, and none will be started."""


class Supervisor:
    """An engine core and its successors. All calls come from one thread."""

    def __init__(self, config: Config, keeper: Keeper, name: str = THE_CORE, *, starts: bool = True) -> None:
        """Start the core and return at once. Raises `ValueError`, `OSError` when it cannot be started.

        `name` is its name in messages. Without `starts` it begins suspended.
        """
        self.name = name
        self.is_serving = False
        """Whether there is a core that is ready and not known to have stalled."""
        self.since = time.monotonic()
        """When `is_serving` last changed, on the monotonic clock."""
        self.failure: Failed | None = None
        """Why there is no core, and none will be started; None otherwise."""
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
        self.is_suspended = not starts
        """Whether there is to be no core until `resume`."""

        context = zmq.Context()
        links: list[CoreLink] = []
        # `links` holds the core's link while there is a core.
        self._release = weakref.finalize(self, _release, links, context)
        self._context, self._links = context, links
        try:
            if starts:
                self._start()
        except BaseException:
            self._release()
            raise

    @property
    def pid(self) -> int:
        """The process id of the current or the latest core."""
        if self._links:
            self._pid = self._links[0].pid
        return self._pid

    @property
    def link(self) -> CoreLink | None:
        """The link to the core, while there is one."""
        return self._links[0] if self._links else None

    @property
    def longest_start(self) -> float:
        """Seconds that a restarted core may take until it serves, once its host is there, before it is killed."""
        return self._config.stall_timeout + 2 * self._first_start_seconds

    def send(self, messages: Sequence[Inbound]) -> None:
        """Send messages to the core, if it serves. To a core that just died they are lost; its death is seen later."""
        if messages and self.is_serving:
            link = self._links[0]
            link.send(messages)
            if self._loop is not None and link.wire.is_one_socket and not self._loop.is_closed():
                self._loop.call_soon(self._receive)

    def note_work(self) -> None:
        """Note that the core, which was idle, gets work: from now on it must show progress."""
        self._watchdog.note_progress()

    @property
    def has_core(self) -> bool:
        """Whether there is a core, from its start until it is gone."""
        return bool(self._links)

    @property
    def config(self) -> Config:
        """What further cores are started with."""
        return self._config

    def serve_for(self, keeper: Keeper) -> None:
        """From now on, report to `keeper`."""
        self._keeper = keeper

    def retire(self) -> None:
        """End the core, if there is one, and start no other; nothing is reported any more."""
        self._closing = True
        if self.failure is None:
            self._free(Failed(f"{self.name} was replaced"))

    def suspend(self) -> None:
        """Have the core end, which has no requests any more; the next starts after `resume`."""
        self.is_suspended = True
        self.send([Shutdown()])

    def resume(self) -> None:
        """Start a core, unless there is one. A core that does not start is started again as after a crash."""
        self.is_suspended = False
        if not self._links and self._start_at is None:
            self._start_again()

    def begin_shutdown(self, messages: Sequence[Inbound]) -> None:
        """Send the core, if it serves, these last messages, after which it ends; no other is started."""
        self._closing = True
        self.send(messages)

    def end(self, failure: Failed) -> None:
        """End the core by force, if there is one; no other is started."""
        self._closing = True
        if self.failure is None:
            self._end(failure)

    # -- reading the core's messages ----------------------------------------------------------------------------

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work on that event loop from now on. Call it from the loop's thread."""
        self._loop = loop
        if self._links:
            self._listen(loop, self._links[0])
        loop.call_later(self._watchdog.interval, self._watch, loop)

    @property
    def next_poll(self) -> float:
        """When to `poll` again though no message came, on the monotonic clock; infinite: only after a message."""
        start = math.inf if self._start_at is None else self._start_at
        checks = self._watches or self._awaits_host
        return min(start, time.monotonic() + self._watchdog.interval) if checks else start

    def poll(self) -> None:
        """Process everything that has happened, where no event loop reports it."""
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
        self._report_absence()

    def _listen(self, loop: asyncio.AbstractEventLoop, link: CoreLink) -> None:
        messages, lifeline = link.descriptors
        loop.add_reader(messages, self._receive)
        loop.add_reader(lifeline, self._on_gone)
        # ZMQ's descriptor reports changes only, not messages that arrived before.
        loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Process every message that has arrived."""
        try:
            while self._links and (message := self._links[0].receive()) is not None:
                self._take_in(message)
        except BaseException:
            # The descriptor does not report the messages after the one that raised again.
            if self._loop is not None:
                self._loop.call_soon(self._receive)
            raise

    def _take_in(self, message: Outbound) -> None:
        match message:
            case StepOutputs():
                # A message without statistics is from the input thread, which runs on when the loop is stuck.
                if message.stats is not None:
                    self._watchdog.note_progress()
                self._keeper.on_step(message)
            case AdapterChanged():
                self._keeper.on_adapter_changed(message)
            case CacheReleased():
                self._keeper.on_cache_released()
            case Ready():
                self._note_serving(True)
                self._watchdog.note_progress()
                # Later cores must have the cache that requests were checked against.
                self._config = self._config.model_copy(update={"num_kvcache_blocks": message.model.num_kvcache_blocks})
                again, self._served = self._served, True
                if not again:
                    self._first_start_seconds = time.monotonic() - self._started
                self._keeper.on_core_ready(message, again=again)

    # -- cores that hang ----------------------------------------------------------------------------------------

    @property
    def _watches(self) -> bool:
        return (self.is_serving and self._keeper.has_work) or self._starts_again

    @property
    def _starts_again(self) -> bool:
        """Whether a restarted core is starting; the start of the first one has no time limit."""
        return self._starts and not self._links[0].waits_for_host

    @property
    def _awaits_host(self) -> bool:
        """Whether a restarted core waits for its host to join, which has no time limit."""
        return self._starts and self._links[0].waits_for_host

    @property
    def _starts(self) -> bool:
        return self._served and self._stalled is None and bool(self._links) and not self._links[0].is_connected

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.failure is not None:
            return
        # Before anything that may raise: nothing else would schedule the next check.
        loop.call_later(self._watchdog.interval, self._watch, loop)
        self._receive()
        # An idle core owes no progress, but a stopped one would not compute the next request.
        if self._watches or (self.is_serving and self._links[0].stopped_process() is not None):
            self._check_progress()
        else:
            self._watchdog.note_progress()
        self._report_absence()

    def _report_absence(self) -> None:
        if self._served and not self.is_serving and self.failure is None:
            self._keeper.on_unavailable()

    def _note_serving(self, is_serving: bool) -> None:
        if is_serving != self.is_serving:
            self.is_serving, self.since = is_serving, time.monotonic()

    def _check_progress(self) -> None:
        """Kill a core that has stalled, once it has written what its threads do."""
        link = self._links[0]
        grace = 2 * self._first_start_seconds if self._starts_again else 0.0
        if self._keeper.waits_for_peers:
            # The core that it waits for is killed first, so that only that one's requests are suspected.
            grace += self._config.stall_timeout
        self._stalled = self._watchdog.why_stalled(link.stopped_process, grace)
        if self._stalled is None:
            return
        self._note_serving(False)
        logger.error("%s stalls: %s; it is killed, and its threads' stacks follow", self.name, self._stalled)
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
        while link.awaits_message(exit_code):
            self._receive()
        failure = link.why_ended(exit_code)
        killed = exit_code == -signal.SIGKILL or failure.killed
        if self._stalled is not None:
            failure, killed = Failed(f"{self.name} stalled: {self._stalled}"), False
        # Where it ended because of another core, no request of its step is the cause.
        in_step = None if failure.collateral else link.running_step()
        self._unlink(link)
        found_cause = link.is_connected and self._keeper.on_core_death(in_step, killed=killed)
        # A core that died before or in its first step would die again, unless a request was the cause, which is not
        # tried again.
        died_at_once = not link.is_connected or (bool(in_step) and not link.completed_steps)
        # A core that another process killed may be started again.
        self._lost(failure, futile=died_at_once and not found_cause and not killed and not failure.collateral)

    def _lost(self, failure: Failed, *, futile: bool) -> None:
        """Start another core, now or later, or none."""
        if not self._served or self._closing:
            self._end(failure)
            return
        if self.is_suspended:
            return
        self._start_at = self._restarts.next_start(futile=futile)
        if self._start_at is None:
            self._end(Failed(failure.error + self._restarts.why_not, failure.usage))
            return
        logger.error("%s; another is started for %d live requests", failure.error, len(self._keeper.live))
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
        """Free all that belongs to a core, and report that."""
        self._free(failure)
        self._keeper.on_end(failure)

    def _free(self, failure: Failed) -> None:
        for link in list(self._links):
            self._unlink(link, failure.error if failure.usage else "")
        self.failure = failure
        self._start_at = None
        self._release()


def _release(links: list[CoreLink], context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    for link in links:
        link.close()
    context.destroy(linger=0)
