"""`CoreLink`: one engine core's life as the front end sees it: a process, a wire, and what it leaves behind.

Made by `Replica`, a new one for each core that `Supervisor` starts.
"""

import signal
from collections.abc import Sequence

import msgspec
import zmq

from engine.config.config import Config
from engine.distributed.core_process import CoreHandle, CoreWire
from engine.messages import Failed, Inbound, Outbound, Ready, Stopped

_LAST_WORDS_MS = 1000
"""A core that exits by itself says why first; its message may be this much behind the news of its exit."""

_END_SECONDS = 2.0
"""From the end of the lifeline to SIGKILL, for a core that serves; one that does not has nothing to end."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Outbound)


THE_CORE = "the engine core"
"""What sentences call the only one."""


def core_name(config: Config, replica: int) -> str:
    """What sentences call the core of a replica."""
    return THE_CORE if config.parallel_config.data_parallel_size == 1 else f"engine core {replica}"


class CoreLink:
    """A core from its start to its end. All calls come from one thread; none but `wait_end` and `close` blocks."""

    def __init__(self, core: CoreHandle, context: "zmq.Context[zmq.Socket[bytes]]", name: str = THE_CORE) -> None:
        """Start the process and return at once. Raises `ValueError`, `OSError` when it cannot be started.

        `name` is what sentences call it; sockets of its own are of `context`.
        """
        self._core = core
        self._name = name
        self._wire: CoreWire | None = None
        self.is_connected = False
        """Whether the core was ready once."""
        self.completed_steps = False
        """Whether it has told of a step."""
        self.last_words: Failed | None = None
        """Why it ends, if it has said so."""
        try:
            self._wire = core.open_wire(context)
            core.start()
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self.register(self._poller)

    @property
    def pid(self) -> int:
        """The process id, on its own host; -1 as long as it is not known."""
        return self._core.pid

    @property
    def wire(self) -> CoreWire:
        """The way to the core."""
        assert self._wire is not None
        return self._wire

    @property
    def is_awaited(self) -> bool:
        """Whether it starts as soon as its host joins, not before."""
        return self._core.is_awaited

    @property
    def descriptors(self) -> tuple[int, int]:
        """Readable: when there may be messages; when the core is gone."""
        return self.wire.descriptor, self._core.lifeline.fileno()

    def register(self, poller: zmq.Poller) -> None:
        """Have `poller` wake when there is a message, or the core is gone."""
        self.wire.register(poller)
        poller.register(self._core.lifeline, zmq.POLLIN)

    def poll(self, timeout: float | None) -> bool:
        """Block until there is a message, or the core is gone; False if neither came within `timeout` seconds."""
        return bool(self._poller.poll(None if timeout is None else max(0, round(timeout * 1e3))))

    def receive(self) -> Outbound | None:
        """The next message that has arrived; None if there is none."""
        frame = self.wire.receive()
        if frame is None:
            return None
        message: Outbound = _decoder.decode(frame)
        match message:
            case Ready():
                self.wire.connected()
                self._core.connected()
                self.is_connected = True
            case Failed():
                self.last_words = self._named(message)
            case Stopped():
                self.last_words = Failed(f"{self._name} has stopped")
            case _:
                self.completed_steps = True
        return message

    def send(self, messages: Sequence[Inbound]) -> None:
        """One multipart message, a frame each. To a core that just died it goes nowhere, and its death is told."""
        if messages:
            self.wire.send([_encoder.encode(message) for message in messages])

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, or is about to."""
        return self._core.is_gone

    def wait_end(self) -> int:
        """Block until the process, which is gone, has been ended by the system; its exit code, or minus a signal."""
        return self._core.wait()

    def hears_more(self, exit_code: int) -> bool:
        """Whether a core that exited by itself, and of unknown cause, brings another message; waits a while for it."""
        is_known = self.last_words is not None or self._core.why_gone() is not None
        return exit_code >= 0 and not is_known and self.wire.poll(_LAST_WORDS_MS)

    def why_ended(self, exit_code: int) -> Failed:
        """What the core said of its end, or what the system did."""
        if self.last_words is not None:
            return self.last_words
        failure = self._core.why_gone()
        if failure is not None:
            return failure
        if exit_code < 0:
            return Failed(f"{self._name} was killed by {signal.Signals(-exit_code).name}")
        return Failed(f"{self._name} exited with code {exit_code}; its log says why")

    def running_step(self) -> Sequence[int] | None:
        """Ids of the requests in the step that the core died in; None where no request is to blame."""
        return self._core.running_step()

    def stopped_process(self) -> int | None:
        """A process of the core that a signal has stopped; None where there is none, or none can be seen."""
        return self._core.stopped_process()

    def dump_stacks(self) -> None:
        """Have the core and its ranks write what each of their threads does to the log, even stuck or stopped ones."""
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
        """What a core says of its end, with the name of one of several; a user's mistake is no core's."""
        if failure.usage or self._name == THE_CORE:
            return failure
        error = failure.error.removeprefix(f"{THE_CORE} ")
        sentence = f"{self._name} {error}" if error != failure.error else f"{self._name}: {error}"
        return msgspec.structs.replace(failure, error=sentence)
