"""`Supervisor`: starts an engine core, reads its messages, kills it when it hangs, and restarts it.

Owned by `Replica`, which manages requests; a supervisor manages processes. It works with blocking calls or on an event
loop. In this order: `CoreLink`, the process and sockets of one core; `RestartPolicy`, which decides whether another
core is started; `Watchdog`, which detects a core that hangs; and the supervisor, which has one of each.
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
    share_fields,
)

logger = logging.getLogger(__name__)

_LAST_MESSAGE_MS = 1000
"""A core that exits by itself sends the reason first. The message may be received this much later than the exit."""

_END_SECONDS = 2.0
"""Seconds between closing the lifeline and SIGKILL for a serving core. Other cores are killed at once."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Outbound)


THE_CORE = "the engine core"
"""Name of a single core in messages."""


def core_name(config: Config, replica: int) -> str:
    """Return the name of a replica's core for messages."""
    return THE_CORE if config.parallel_config.data_parallel_size == 1 else f"engine core {replica}"


class CoreLink:
    """The link to one core, from its start to its end. Single-threaded; only `wait_end` and `close` block."""

    def __init__(self, core: CoreHandle, context: "zmq.Context[zmq.Socket[bytes]]", name: str = THE_CORE) -> None:
        """Start the process and return at once. Raises `ValueError`, `OSError` when it cannot be started.

        `name` is its name in messages; its own sockets are made in `context`.
        """
        self._core = core
        self._name = name
        self._transport: CoreTransport | None = None
        self.is_connected = False
        """Whether the core has been ready."""
        self.completed_steps = False
        """Whether the core has reported a step."""
        self.reported_failure: Failed | None = None
        """Reason for its end, if the core has reported one."""
        try:
            self._transport = core.open_transport(context)
            core.start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id on the core's host; -1 while it is unknown."""
        return self._core.pid

    @property
    def transport(self) -> CoreTransport:
        """The sockets to the core."""
        assert self._transport is not None
        return self._transport

    @property
    def waits_for_host(self) -> bool:
        """Whether the start of the core waits until its host joins."""
        return self._core.waits_for_host

    @property
    def descriptors(self) -> tuple[int, int]:
        """Return two descriptors: the first is readable when messages may wait, the second when the core is gone."""
        return self.transport.descriptor, self._core.lifeline.fileno()

    def register(self, poller: zmq.Poller) -> None:
        """Register the core at `poller`, which wakes up for a message or when the core is gone."""
        self.transport.register(poller)
        poller.register(self._core.lifeline, zmq.POLLIN)

    def receive(self) -> Outbound | None:
        """Return the next received message; None if there is none."""
        assert self._transport is not None
        frame = self._transport.receive()
        if frame is None:
            return None
        message: Outbound = _decoder.decode(frame)
        match message:
            case Ready():
                self.transport.connected()
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
        """Send messages as the elements of one array. If the core has just died, they are lost."""
        if messages:
            # One frame: the send of each releases the interpreter's lock, which a computing thread then holds for a
            # while, so that the event loop would wait that long for each of a request's sequences.
            self.transport.send(
                _encoder.encode([msgspec.Raw(_encoder.encode(each)) for each in share_fields(messages)])
            )

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended or is ending."""
        return self._core.is_gone

    def wait_end(self) -> int:
        """Wait until the ending process has exited. Returns its exit code, or the negative number of a signal."""
        return self._core.wait()

    def awaits_message(self, exit_code: int) -> bool:
        """Wait a moment for the last message of a core that exited by itself for an unknown reason. Returns whether
        one was received."""
        is_known = self.reported_failure is not None or self._core.why_gone() is not None
        return exit_code >= 0 and not is_known and self.transport.poll(_LAST_MESSAGE_MS)

    def why_ended(self, exit_code: int) -> Failed:
        """Return why the core ended: the reason that it reported, or its exit code or signal."""
        if self.reported_failure is not None:
            return self.reported_failure
        failure = self._core.why_gone()
        if failure is not None:
            return failure
        if exit_code < 0:
            return Failed(f"{self._name} was killed by {signal.Signals(-exit_code).name}")
        return Failed(f"{self._name} exited with code {exit_code}; its log says why")

    def running_step(self) -> Sequence[int] | None:
        """Return the ids of the requests in the step in which the core died; None if no request can be the cause."""
        return self._core.running_step()

    def stopped_process(self) -> int | None:
        """Return the id of a process of the core that a signal has stopped; None if none is known."""
        return self._core.stopped_process()

    def dump_stacks(self) -> None:
        """Make the core and its ranks log the stack of each thread, even if they are blocked or stopped."""
        self._core.dump_stacks()

    def kill(self) -> None:
        """Kill the process. No effect if it is gone."""
        self._core.kill()

    def close(self, why: str = "") -> None:
        """End the process within seconds, and free its resources. `why` as in `CoreHandle.stop`."""
        self._core.stop(_END_SECONDS if self.is_connected else 0.0, why)
        if self._transport is not None:
            self._transport.close()

    def _named(self, failure: Failed) -> Failed:
        """Add the name of this core to a failure, if there are several cores and it is no mistake of the user."""
        if failure.usage or self._name == THE_CORE:
            return failure
        error = failure.error.removeprefix(f"{THE_CORE} ")
        sentence = f"{self._name} {error}" if error != failure.error else f"{self._name}: {error}"
        return msgspec.structs.replace(failure, error=sentence)


_MAX_FUTILE_STARTS = 5
"""Most successive cores that die before they are ready or complete a step: another one would die too."""

_FIRST_DELAY_SECONDS = 0.25
"""Delay after a futile start, doubled each time: memory or a device may become free meanwhile."""


class RestartPolicy:
    """Decides whether and when a dead core is restarted, by the number of restarts within a time window."""

    def __init__(self, max_restarts: int, window: float) -> None:
        """Allow at most `max_restarts` restarts within `window` seconds; 0 means no restarts."""
        self._max_restarts = max_restarts
        self._window = window
        self._restarts: deque[float] = deque()
        self._futile = 0

    def next_start(self, *, futile: bool) -> float | None:
        """Return the time, on the monotonic clock, at which to restart a dead core; None: never, because of
        `why_not`."""
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
        """Return the reason why `next_start` returned None, as the end of a sentence; empty if restarts are
        disabled."""
        if not self._max_restarts:
            return ""
        if self._futile >= _MAX_FUTILE_STARTS:
            return f"; {self._futile} engine cores in a row died before they served, so no other is started"
        times = "once" if len(self._restarts) == 1 else f"{len(self._restarts)} times"
        window = math.ceil(self._window)
        return f"; it was started again {times} within {window} s (max_core_restarts), so it is not started again"


_STOPPED_SECONDS = 2.0
"""Seconds without a step after which a stopped process counts as stalled: it would not continue by itself."""


class Watchdog:
    """Detects a core that has work but completes no step, or is stopped, by the time since its last progress."""

    def __init__(self, stall_timeout: float) -> None:
        """`stall_timeout` is the longest time in seconds that a step may take."""
        self._timeout = stall_timeout
        self._last_progress = self._last_check = time.monotonic()
        self.interval = min(1.0, stall_timeout / 4)
        """Seconds between two checks."""

    def note_progress(self) -> None:
        """Note that a step was completed, or that the core was idle until now."""
        self._last_progress = time.monotonic()

    def why_stalled(self, stopped_process: Callable[[], int | None], grace: float = 0.0) -> str | None:
        """Return why the core, which has work or is stopped, counts as stalled; None if it does not.

        `stopped_process` returns the id of a process of the core that a signal has stopped. `grace` is added to the
        time that a step may take.
        """
        now = time.monotonic()
        is_late, self._last_check = now - self._last_check > 2 * self.interval, now
        silent = now - self._last_progress
        if is_late:
            # This process itself was delayed, so messages of the core may be unread.
            return None
        if silent > self._timeout + grace:
            return f"no step was completed for {silent:.0f} s (stall_timeout is {self._timeout:g})"
        if silent > _STOPPED_SECONDS:
            stopped = stopped_process()
            if stopped is not None:
                return f"its process {stopped} was stopped by a signal"
        return None


_STACKS_SECONDS = 0.5
"""Seconds that a stalled core has to log its threads' stacks before it is killed."""


class Keeper(Protocol):
    """The interface of `Replica`, the layer above, that a supervisor calls."""

    @property
    def live(self) -> Collection[int]:
        """Ids of the requests that have not ended."""

    @property
    def has_work(self) -> bool:
        """Whether outputs of the core are pending."""

    @property
    def waits_for_peers(self) -> bool:
        """Whether the core waits for cores in lockstep with it, and none of them waits for it."""

    @property
    def awaits_peer_host(self) -> bool:
        """Whether a core in lockstep with this one waits until its host joins, so that this one could not serve."""

    def new_core(self, config: Config, context: "zmq.Context[zmq.Socket[bytes]]", /) -> CoreLink:
        """Start a core. Raises `ValueError`, `OSError` if it cannot be started."""

    def on_step(self, step: StepOutputs, /) -> None:
        """Called when the core has reported a step."""

    def on_adapter_changed(self, answer: AdapterChanged, /) -> None:
        """Called when the core has attached or removed a LoRA adapter, or failed to."""

    def on_cache_released(self) -> None:
        """Called when the core has freed its KV cache."""

    def on_core_ready(self, ready: Ready, /, *, again: bool) -> None:
        """Called when a core serves. `again` is false for the first core only."""

    def on_core_death(self, in_step: Collection[int] | None, /, *, killed: bool) -> bool:
        """Called when a serving core is gone, in a step of the requests `in_step`. `killed`: by another process.

        `in_step` is None if it ended because of another core, or was lost with its host: no request is the cause.
        Returns whether a request was found to be the cause, and was ended.
        """

    def on_unavailable(self) -> None:
        """Called repeatedly while the core is gone and the next one does not serve yet."""

    def on_end(self, failure: Failed, /) -> None:
        """Called when there is no core and none will be started."""


class Supervisor:
    """Runs an engine core and its successors. All calls come from one thread."""

    def __init__(self, config: Config, keeper: Keeper, name: str = THE_CORE, *, starts: bool = True) -> None:
        """Start the core and return at once. Raises `ValueError`, `OSError` when it cannot be started.

        `name` is its name in messages. Without `starts` it begins suspended.
        """
        self.name = name
        self.is_serving = False
        """Whether a core is ready and has not stalled."""
        self.since = time.monotonic()
        """Time at which `is_serving` last changed, on the monotonic clock."""
        self.failure: Failed | None = None
        """Reason why there is no core and none will be started; None while that is not so."""
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
        self._lost_peer: str | None = None
        """Name of a core in lockstep, without which this one is killed."""
        self._start_at: float | None = None
        self._closing = False
        self.is_suspended = not starts
        """Whether no core is started until `resume`."""

        context = zmq.Context()
        links: list[CoreLink] = []
        # `links` contains the link while there is a core.
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
        """Process id of the current or latest core."""
        if self._links:
            self._pid = self._links[0].pid
        return self._pid

    @property
    def link(self) -> CoreLink | None:
        """The link to the core; None without a core."""
        return self._links[0] if self._links else None

    @property
    def longest_start(self) -> float:
        """Longest time in seconds from the start of a restarted core, once its host has joined, until it serves."""
        return self._config.stall_timeout + 2 * self._first_start_seconds

    def send(self, messages: Sequence[Inbound]) -> None:
        """Send messages to the core if it serves. If it has just died, they are lost."""
        if messages and self.is_serving:
            link = self._links[0]
            link.send(messages)
            if self._loop is not None and link.transport.is_one_socket and not self._loop.is_closed():
                self._loop.call_soon(self._receive)

    def note_work(self) -> None:
        """Note that the idle core gets work, so that it must make progress from now on."""
        self._watchdog.note_progress()

    @property
    def has_core(self) -> bool:
        """Whether a core exists, from its start until it is gone."""
        return bool(self._links)

    @property
    def config(self) -> Config:
        """The configuration that later cores are started with."""
        return self._config

    def serve_for(self, keeper: Keeper) -> None:
        """Report to `keeper` from now on."""
        self._keeper = keeper

    def retire(self) -> None:
        """End the core, start no other, and report nothing more."""
        self._closing = True
        if self.failure is None:
            self._free(Failed(f"{self.name} was replaced"))

    def suspend(self) -> None:
        """End the core, which has no requests. `resume` starts the next one."""
        self.is_suspended = True
        self.send([Shutdown()])

    def end_with_peer(self, name: str) -> None:
        """Kill the core, since the core `name` in lockstep with it is lost. No request is the cause."""
        if self._links:
            self._lost_peer = name
            self._note_serving(False)
            self._links[0].kill()

    def resume(self) -> None:
        """Start a core unless there is one. A failed start is repeated as after a crash."""
        self.is_suspended = False
        if not self._links and self._start_at is None:
            self._start_again()

    def begin_shutdown(self, messages: Sequence[Inbound]) -> None:
        """Send a serving core these last messages, after which it ends. No other core is started."""
        self._closing = True
        self.send(messages)

    def end(self, failure: Failed) -> None:
        """Kill the core, and start no other."""
        self._closing = True
        if self.failure is None:
            self._end(failure)

    # -- reading the core's messages ----------------------------------------------------------------------------

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use the event loop `loop` from now on. Call it from the loop's thread."""
        self._loop = loop
        if self._links:
            self._listen(loop, self._links[0])
        loop.call_later(self._watchdog.interval, self._watch, loop)

    @property
    def next_poll(self) -> float:
        """Time, on the monotonic clock, at which to `poll` even without a message; infinite: only after a message."""
        start = math.inf if self._start_at is None else self._start_at
        checks = self._is_watched or self.awaits_host
        return min(start, time.monotonic() + self._watchdog.interval) if checks else start

    def poll(self) -> None:
        """Process all pending events, for use without an event loop."""
        if self._links:
            link = self._links[0]
            self._receive()
            if self._links and link.is_gone:
                self._on_gone()
            elif self._is_watched:
                self._check_progress()
            elif self.awaits_host:
                self._watchdog.note_progress()
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self._start_again()
        self._report_absence()

    def _listen(self, loop: asyncio.AbstractEventLoop, link: CoreLink) -> None:
        messages, lifeline = link.descriptors
        loop.add_reader(messages, self._receive)
        loop.add_reader(lifeline, self._on_gone)
        # ZMQ's descriptor reports only changes, not messages that were received before.
        loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Process all received messages."""
        try:
            while self._links and (message := self._links[0].receive()) is not None:
                self._process(message)
        except BaseException:
            # The descriptor does not report again the messages that follow the one that raised.
            if self._loop is not None:
                self._loop.call_soon(self._receive)
            raise

    def _process(self, message: Outbound) -> None:
        match message:
            case StepOutputs():
                # A message without statistics comes from the input thread, which runs even if the busy loop is
                # blocked.
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
                # Later cores must have a cache of the same size, since requests were checked against it.
                self._config = self._config.model_copy(update={"num_kvcache_blocks": message.model.num_kvcache_blocks})
                again, self._served = self._served, True
                if not again:
                    self._first_start_seconds = time.monotonic() - self._started
                self._keeper.on_core_ready(message, again=again)

    # -- cores that hang ----------------------------------------------------------------------------------------

    @property
    def _is_watched(self) -> bool:
        """Whether the core must make progress: it has work, or it is starting within a time limit."""
        return (self.is_serving and self._keeper.has_work) or self._has_start_limit

    @property
    def _has_start_limit(self) -> bool:
        """Whether a restarted core is starting on a host that has joined. The start of the first core has no limit."""
        return self._is_restarting and not self._links[0].waits_for_host

    @property
    def awaits_host(self) -> bool:
        """Whether a restarted core waits until its host joins, which has no time limit."""
        return self._is_restarting and self._links[0].waits_for_host

    @property
    def _is_restarting(self) -> bool:
        """Whether a core that replaces another one has not been ready yet."""
        return self._served and self._stalled is None and bool(self._links) and not self._links[0].is_connected

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.failure is not None:
            return
        # Schedule the next check before anything that may raise.
        loop.call_later(self._watchdog.interval, self._watch, loop)
        self._receive()
        # An idle core need not make progress, but a stopped one could not compute the next request.
        if self._is_watched or (self.is_serving and self._links[0].stopped_process() is not None):
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
        """Kill a stalled core after it has logged its threads' stacks."""
        link = self._links[0]
        grace = 2 * self._first_start_seconds if self._has_start_limit else 0.0
        if self._keeper.waits_for_peers:
            # The core that this one waits for must be killed first, so that only its requests are suspected.
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
        if self.failure is not None:
            return
        if self._keeper.awaits_peer_host:
            self._start_at = time.monotonic() + self._watchdog.interval
            if self._loop is not None:
                self._loop.call_later(self._watchdog.interval, self._start_again)
        else:
            try:
                self._start()
            except (OSError, ValueError, zmq.ZMQError) as error:
                self._lost(Failed(f"{self.name} cannot be started again: {error}"), futile=True)

    def _on_gone(self) -> None:
        """Handle that the core's process has ended or is ending."""
        link = self._links[0]
        exit_code = link.wait_end()
        self._receive()
        while link.awaits_message(exit_code):
            self._receive()
        failure = link.why_ended(exit_code)
        killed = exit_code == -signal.SIGKILL or failure.killed
        if self._stalled is not None:
            failure, killed = Failed(f"{self.name} stalled: {self._stalled}"), False
        elif self._lost_peer is not None and not failure.collateral:
            sentence = f"{self.name} was ended: {self._lost_peer} is gone, with which it computes in lockstep"
            failure, killed = Failed(sentence, collateral=True), False
        # If it ended because of another core, no request of its step is the cause.
        in_step = None if failure.collateral else link.running_step()
        self._unlink(link)
        found_cause = link.is_connected and self._keeper.on_core_death(in_step, killed=killed)
        # A core that died before or in its first step would die again, unless the cause was a request, which is not
        # tried again.
        died_at_once = not link.is_connected or (bool(in_step) and not link.completed_steps)
        # A core that was killed by another process may be restarted.
        self._lost(failure, futile=died_at_once and not found_cause and not killed and not failure.collateral)

    def _lost(self, failure: Failed, *, futile: bool) -> None:
        """Restart the core now or later, or end the supervisor if no restart is allowed."""
        if not self._served or self._closing:
            self._end(failure)
            return
        if self.is_suspended:
            return
        self._start_at = self._restarts.next_start(futile=futile)
        if self._start_at is None:
            self._end(Failed(failure.error + self._restarts.why_not, failure.usage))
            return
        logger.error("%s; another is started; live requests: %d", failure.error, len(self._keeper.live))
        if self._loop is not None:
            self._loop.call_at(self._loop.time() + self._start_at - time.monotonic(), self._start_again)

    def _unlink(self, link: CoreLink, why: str = "") -> None:
        self._pid = link.pid
        if self._loop is not None:
            for descriptor in link.descriptors:
                self._loop.remove_reader(descriptor)
        self._links.clear()
        self._note_serving(False)
        self._stalled = self._lost_peer = None
        link.close(why)

    def _end(self, failure: Failed) -> None:
        """Free the core's resources, and report the end."""
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
