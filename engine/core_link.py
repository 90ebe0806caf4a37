"""`CoreLink`: one engine core's life as its parent sees it: a process, two sockets, and what it leaves behind.

Made by `Supervisor`, a new one for each core that it starts.
"""

import contextlib
import os
import signal
from collections.abc import Collection, Sequence
from typing import cast

import msgspec
import zmq

from engine.config import Config
from engine.core_process import CoreProcess
from engine.lifetime import family
from engine.meeting import Seat
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

    def __init__(
        self,
        config: Config,
        context: "zmq.Context[zmq.Socket[bytes]]",
        replica: int = 0,
        cpus: Collection[int] | None = None,
        available_bytes: int | None = None,
        seat: Seat | None = None,
    ) -> None:
        """Start the process and return at once. Raises `ValueError`, `OSError` when it cannot be started.

        See `Launch` for the arguments; it may use the `cpus` of its parent if there are none.
        """
        self._core = CoreProcess(config, replica, cpus, available_bytes, seat)
        self._name = core_name(config, replica)
        self._identity = b""
        self._sockets: list[zmq.Socket[bytes]] = []
        self.is_connected = False
        """Whether the core was ready once."""
        self.completed_steps = False
        """Whether it has told of a step."""
        self.last_words: Failed | None = None
        """Why it ends, if it has said so."""
        try:
            self._input = self._bind(context, zmq.ROUTER, self._core.launch.input_address)
            self._output = self._bind(context, zmq.PULL, self._core.launch.output_address)
            self.pid = self._core.start()
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self.register(self._poller)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Readable: when there may be messages; when the core is gone."""
        return self._output.fileno(), self._core.lifeline.fileno()

    @property
    def directory(self) -> str:
        """Where its sockets have their names until it is connected."""
        return self._core.launch.directory

    def register(self, poller: zmq.Poller) -> None:
        """Have `poller` wake when there is a message, or the core is gone."""
        poller.register(self._output, zmq.POLLIN)
        poller.register(self._core.lifeline, zmq.POLLIN)

    def poll(self, timeout: float | None) -> bool:
        """Block until there is a message, or the core is gone; False if neither came within `timeout` seconds."""
        return bool(self._poller.poll(None if timeout is None else max(0, round(timeout * 1e3))))

    def receive(self) -> Outbound | None:
        """The next message that has arrived; None if there is none."""
        # Not `poll`, which makes a poller at each call.
        if not cast(int, self._output.get(zmq.EVENTS)) & zmq.POLLIN:
            return None
        message: Outbound = _decoder.decode(self._output.recv(zmq.NOBLOCK))
        match message:
            case Ready():
                self._identity = self._input.recv_multipart()[0]
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
            self._input.send_multipart([self._identity, *map(_encoder.encode, messages)])

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, or is about to."""
        return self._core.is_gone

    def wait_end(self) -> int:
        """Block until the process, which is gone, has been ended by the system; its exit code, or minus a signal."""
        return self._core.wait()

    def hears_more(self, exit_code: int) -> bool:
        """Whether a core that exited by itself, and has not said why, brings another message; waits a while for it."""
        return exit_code >= 0 and self.last_words is None and bool(self._output.poll(_LAST_WORDS_MS))

    def why_ended(self, exit_code: int) -> Failed:
        """What the core said of its end, or what the system did."""
        if self.last_words is not None:
            return self.last_words
        if exit_code < 0:
            return Failed(f"{self._name} was killed by {signal.Signals(-exit_code).name}")
        return Failed(f"{self._name} exited with code {exit_code}; its log says why")

    def running_step(self) -> list[int]:
        """Ids of the requests in the step that the core computes, or died in."""
        return self._core.flight_record.read()

    def dump_stacks(self) -> None:
        """Have the core and its ranks write what each of their threads does to the log, even stuck or stopped ones."""
        ranks = family(self.pid)[1:]
        for number in (signal.SIGUSR2, signal.SIGCONT):
            self._core.signal(number)
            for rank in ranks:
                # They end with the core.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, number)

    def kill(self) -> None:
        """End the process now. Nothing happens if it is gone."""
        self._core.signal(signal.SIGKILL)

    def close(self) -> None:
        """End the process, within seconds, and free all that belonged to it."""
        self._core.stop(_END_SECONDS if self.is_connected else 0.0)
        for socket in self._sockets:
            socket.close(linger=0)

    def _named(self, failure: Failed) -> Failed:
        """What a core says of its end, with the name of one of several; a user's mistake is no core's."""
        if failure.usage or self._name == THE_CORE:
            return failure
        error = failure.error.removeprefix(f"{THE_CORE} ")
        sentence = f"{self._name} {error}" if error != failure.error else f"{self._name}: {error}"
        return msgspec.structs.replace(failure, error=sentence)

    def _bind(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str) -> "zmq.Socket[bytes]":
        """A socket without high-water mark: it never blocks the front end and never drops."""
        socket = context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(0)
        socket.bind(address)
        return socket
