"""The engine core's ends of its two sockets: a thread that reads the one, and a queue that writes to the other.

Made by `engine.core_main`; the busy loop knows their queues only.
"""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec
import zmq

from engine.messages import AbortRequests, AddRequest, Inbound, Outbound, Shutdown, StepOutputs, terminal_output
from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.core_call import CoreCall
    from engine.structured.admission import GrammarAdmission
    from engine.structured.matchers import Matchers
    from engine.worker.host_messages import CoreAddress

logger = logging.getLogger(__name__)


class Wake(NamedTuple):
    """Another replica has work, and waits for this one in that round; see `engine.dp_engine_core`."""

    round: int


Incoming: TypeAlias = Sequence | AbortRequests | Shutdown | Wake
InputQueue: TypeAlias = SimpleQueue[Incoming]


class OutputQueue(Protocol):
    """Where the core puts what it has to tell."""

    def put(self, message: Outbound, /) -> None: ...


_LINGER_MS = 2000
"""How long the last messages may take to leave for a parent that does not read."""


class _OutputSocket:
    """Sends what any thread puts, at once: handing it to a thread costs more, and wakes that while a step computes."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._turn = threading.Lock()

    def put(self, message: Outbound) -> None:
        """Send a message. Never blocks: the socket has no high-water mark. After `close`, nobody would read it."""
        with self._turn:
            if not self._socket.closed:
                self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Let what was sent leave, and take no more."""
        with self._turn:
            self._socket.close()


class CoreSockets:
    """The core's ends of the two sockets, between the addresses and the queues."""

    def __init__(
        self,
        input_address: str,
        output_address: str,
        block_size: int,
        front_end: "CoreAddress | None" = None,
        timeout: float = 0.0,
    ) -> None:
        """`front_end`: on another host, to be reached in `timeout` seconds; the other addresses are not used then.

        Raises `ConnectionError`, a sentence, where it is not.
        """
        self.input_queue: InputQueue = SimpleQueue()
        self._block_size = block_size
        self._grammars: GrammarAdmission | None = None
        self._context = zmq.Context()
        self._call: CoreCall | None = None
        if front_end is None:
            self._input = self._context.socket(zmq.DEALER)
            output = self._context.socket(zmq.PUSH)
            for socket, address in ((self._input, input_address), (output, output_address)):
                # No high-water mark: at one a DEALER or PUSH blocks or drops, and no message of ours may be lost.
                socket.set_hwm(0)
                socket.connect(address)
        else:
            # Not above: cores of the front end's own host need none of it.
            from engine import core_call

            self._call = core_call.CoreCall(self._context, front_end, timeout)
            self._input, output = self._call.input, self._call.output
        for socket in (self._input, output):
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self.output_queue = _OutputSocket(output)
        # A ROUTER can address a peer once it has heard from it.
        self._input.send(b"")
        threading.Thread(target=self.process_input_sockets, name="input", daemon=True).start()

    def watch(self, on_lost: Callable[[str], object]) -> None:
        """From now on, `on_lost` is called, by another thread, when a front end on another host is gone."""
        if self._call is not None:
            self._call.watch(on_lost)

    def serve_grammars(self, matchers: "Matchers") -> None:
        """From now on, take requests with a grammar. To be called before the first request can arrive."""
        # Not above: the front end, which imports this module too, needs none of it.
        from engine.structured.admission import GrammarAdmission

        self._grammars = GrammarAdmission(matchers, self.input_queue.put, self._refuse_sequence)

    def process_input_sockets(self) -> None:
        """Decode what arrives into the input queue, until the context ends."""
        decoder = msgspec.msgpack.Decoder(Inbound)
        while True:
            try:
                frames = self._input.recv_multipart()
            except zmq.ContextTerminated:
                self._input.close()
                return
            for frame in frames:
                try:
                    self._accept(decoder.decode(frame))
                except BaseException as error:  # noqa: BLE001 - logged, and told; a native panic is no `Exception`
                    self._refuse(frame, error)

    def close(self) -> None:
        """Close both sockets, once what was put has left."""
        if self._call is not None:
            self._call.close()
        self.output_queue.close()
        self._context.term()

    def _accept(self, message: Inbound) -> None:
        if isinstance(message, AddRequest):
            # Made here, so that its arrival time does not wait for the step that is running.
            seq = Sequence(
                message.prompt_token_ids,
                self._block_size,
                message.sampling_params,
                message.stop_token_sequences,
                id=message.request_id,
                cache_salt=message.cache_salt,
                priority=message.priority,
                adapter=message.adapter,
                resumed_token_ids=message.resumed_token_ids,
            )
            seq.is_suspect = message.suspect
            if seq.sampling_params.grammar is None:
                self.input_queue.put(seq)
            elif self._grammars is None:
                self._refuse_sequence(seq, "this engine takes no grammars", False)
            else:
                self._grammars.add(seq)
            return
        if isinstance(message, AbortRequests) and self._grammars is not None:
            taken_back = self._grammars.take_back(message.request_ids)
            if taken_back:
                outputs = [terminal_output(id, "abort") for id in taken_back]
                self.output_queue.put(StepOutputs(outputs))
                # Told of their end, whoever sent them may send them again, before the loop reads this.
                message = AbortRequests([id for id in message.request_ids if id not in set(taken_back)])
        self.input_queue.put(message)

    def _refuse_sequence(self, seq: Sequence, error: str, bad_request: bool) -> None:
        """Answer a sequence that cannot be queued."""
        self.output_queue.put(StepOutputs([terminal_output(seq.id, "error", error, bad_request=bad_request)]))

    def _refuse(self, frame: bytes, error: BaseException) -> None:
        """Log a message that cannot be taken in; answer it where it names the request that it was to add."""
        fault = not isinstance(error, ValueError)
        logger.error("a message to the engine core was refused: %s", error, exc_info=error if fault else None)
        request_id = _request_id(frame)
        if request_id is not None:
            self.output_queue.put(
                StepOutputs([terminal_output(request_id, "error", str(error) or type(error).__name__)])
            )


def _request_id(frame: bytes) -> int | None:
    """The id of the request that an undecodable message was to add, if that much can be read."""
    try:
        message = msgspec.msgpack.decode(frame)
    except msgspec.DecodeError:
        return None
    request_id = message.get("request_id") if isinstance(message, dict) else None
    return request_id if isinstance(request_id, int) else None
