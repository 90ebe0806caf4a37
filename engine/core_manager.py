"""`CoreManager`: the front end's handle on the engine core. Starts it, sends requests, receives outputs, ends it.

Used by the server on its event loop and by `LLMEngine` with blocking calls. Starts no thread.
"""

import asyncio
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self, cast

import msgspec
import zmq

from engine.config import Config
from engine.core_io import error_output
from engine.core_process import CoreProcess
from engine.messages import (
    AbortRequests,
    AddRequest,
    Failed,
    Inbound,
    Outbound,
    Ready,
    Shutdown,
    StepOutputs,
    Stopped,
)

_LAST_WORDS_MS = 1000
"""A core that exits by itself says why first; its message may be this much behind the news of its exit."""

_TERMINATE_SECONDS = 2.0
"""From SIGTERM to SIGKILL, for a core that does not answer."""


class EngineDeadError(RuntimeError):
    """The engine core is not there to serve; one sentence says why. `usage` marks the user's mistake."""

    def __init__(self, error: str, usage: bool = False) -> None:
        super().__init__(error)
        self.usage = usage


class CoreManager:
    """One engine core, from its start to its end. All calls come from one thread.

    Every request added ends in exactly one output with `finished` set, also when it is aborted and when the core
    dies. Outputs go to the callback given to `attach`, or without one wait for `get_outputs`. An engine dropped
    without `shutdown` is ended when it is collected, or at the interpreter's exit.
    """

    def __init__(self, config: Config) -> None:
        """Start the core and return at once: it loads while the caller does other things."""
        self.ready: Ready | None = None
        """What the core said when it was ready to serve; None before."""
        self.failure: Failed | None = None
        """Why the core is gone; None while it is there."""
        self.live: set[int] = set()
        """Ids of the requests that still owe their terminal output."""
        self._last_words: Failed | None = None
        self._inbox: deque[StepOutputs] = deque()
        self._deliver: Callable[[StepOutputs], object] = self._inbox.append
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Outbound)
        self._core_identity = b""

        self._core = CoreProcess(config)
        context = zmq.Context()
        self._release = weakref.finalize(self, _release, self._core, context)
        try:
            self._input = _bind(context, zmq.ROUTER, self._core.launch.input_address)
            self._output = _bind(context, zmq.PULL, self._core.launch.output_address)
            self.pid = self._core.start()
            """The core's process id."""
        except BaseException:
            self._release()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._output, zmq.POLLIN)
        self._poller.register(self._core.lifeline, zmq.POLLIN)

    @property
    def is_alive(self) -> bool:
        """Whether the core is ready and has not gone."""
        return self.ready is not None and self.failure is None

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
        if self.is_alive:
            self._send([Shutdown()])
            deadline = _deadline(timeout)
            while self.failure is None and self._wait(deadline):
                pass
        if self.failure is None:
            in_time = f"did not stop within {timeout:g} s" if self.ready else "was stopped before it was ready"
            self._end(Failed(f"the engine core {in_time}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- requests -----------------------------------------------------------------------------------------------

    def add_requests(self, requests: Sequence[AddRequest]) -> None:
        """Send requests, with ids never used before. Raises `EngineDeadError` when there is no core to serve them."""
        if not self.is_alive:
            raise EngineDeadError(self.failure.error if self.failure else "the engine core is not ready yet")
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or not self.live.isdisjoint(ids):
            raise ValueError("a request id is used twice; each live request needs an id of its own")
        self.live |= ids
        self._send(requests)

    def abort(self, request_ids: Collection[int]) -> None:
        """Ask the core to end requests; their terminal outputs follow. Ids that are not live are ignored."""
        ids = [request_id for request_id in request_ids if request_id in self.live]
        if ids and self.failure is None:
            self._send([AbortRequests(ids)])

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

    def attach(self, loop: asyncio.AbstractEventLoop, on_outputs: Callable[[StepOutputs], object]) -> None:
        """From now on, call `on_outputs` from `loop` with the outputs of every step. Call from the loop's thread."""
        self._loop, self._deliver = loop, on_outputs
        loop.add_reader(self._output.fileno(), self._receive)
        loop.add_reader(self._core.lifeline.fileno(), self._on_lifeline_closed)
        # ZMQ's descriptor tells of changes only: what arrived before is not told again.
        loop.call_soon(self._receive)

    def _wait(self, deadline: float | None) -> bool:
        """Block until something happened and take it in; False when `deadline` came first."""
        wait_ms = None if deadline is None else max(0, round((deadline - time.monotonic()) * 1e3))
        events = dict(self._poller.poll(wait_ms))
        self._receive()
        if self._core.lifeline.fileno() in events:
            self._on_lifeline_closed()
        return bool(events)

    def _receive(self) -> None:
        """Take in every message that has arrived."""
        try:
            # Not `poll`, which makes a poller at each call.
            while self.failure is None and cast(int, self._output.get(zmq.EVENTS)) & zmq.POLLIN:
                self._take_in(self._decoder.decode(self._output.recv(zmq.NOBLOCK)))
        except BaseException:
            # The descriptor will not tell again of the messages behind the one that raised.
            if self._loop is not None:
                self._loop.call_soon(self._receive)
            raise

    def _take_in(self, message: Outbound) -> None:
        match message:
            case StepOutputs():
                for output in message.outputs:
                    if output.finished:
                        self.live.discard(output.request_id)
                self._deliver(message)
            case Ready():
                self._core_identity = self._input.recv_multipart()[0]
                self._core.connected()
                self.ready = message
                self._settled.set()
            case Failed():
                self._last_words = message
            case Stopped():
                self._last_words = Failed("the engine core has stopped")

    def _send(self, messages: Sequence[Inbound]) -> None:
        """One multipart message, a frame each. To a core that just died it goes nowhere, and its death is told."""
        self._input.send_multipart([self._core_identity, *map(self._encoder.encode, messages)])

    # -- death --------------------------------------------------------------------------------------------------

    def _on_lifeline_closed(self) -> None:
        """The core's process has ended, or is about to."""
        exit_code = self._core.wait()
        self._receive()
        while exit_code >= 0 and self._last_words is None and self._output.poll(_LAST_WORDS_MS):
            self._receive()
        self.on_core_death(self._last_words or Failed(_epitaph(exit_code)))

    def on_core_death(self, failure: Failed) -> None:
        """What follows from the core's end: every live request ends with an error."""
        self._end(failure)

    def _end(self, failure: Failed) -> None:
        """Free the core's resources and give every live request its terminal output."""
        if self._loop is not None:
            self._loop.remove_reader(self._output.fileno())
            self._loop.remove_reader(self._core.lifeline.fileno())
        self.failure = failure
        self._release()
        self._settled.set()
        if self.live:
            ids, self.live = sorted(self.live), set()
            self._deliver(StepOutputs([error_output(request_id, failure.error) for request_id in ids]))

    def _ready_or_raise(self) -> Ready:
        if self.ready is None or self.failure is not None:
            assert self.failure is not None
            raise EngineDeadError(self.failure.error, self.failure.usage)
        return self.ready


def _bind(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str) -> "zmq.Socket[bytes]":
    """A socket without high-water mark: it never blocks the front end and never drops."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.bind(address)
    return socket


def _release(core: CoreProcess, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    core.stop(_TERMINATE_SECONDS)
    context.destroy(linger=0)


def _epitaph(exit_code: int) -> str:
    if exit_code < 0:
        return f"the engine core was killed by {signal.Signals(-exit_code).name}"
    return f"the engine core exited with code {exit_code}; its log says why"


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
