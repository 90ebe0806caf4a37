"""The engine core's two I/O threads: the only code of the core that touches its sockets.

Started by `engine.engine_core`; the busy loop knows their queues only.
"""

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import zmq

from engine.messages import AbortRequests, AddRequest, Inbound, Outbound, RequestOutput, Shutdown, StepOutputs
from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.structured.admission import GrammarAdmission
    from engine.structured.matchers import Matchers

logger = logging.getLogger(__name__)

InputQueue: TypeAlias = SimpleQueue[Sequence | AbortRequests | Shutdown]
OutputQueue: TypeAlias = SimpleQueue[Outbound | None]
"""None ends the thread that empties it."""

_LINGER_MS = 2000
"""How long the last messages may take to leave for a parent that does not read."""


class CoreSockets:
    """The core's ends of the two sockets, with a thread each, between the addresses and the queues."""

    def __init__(self, input_address: str, output_address: str, block_size: int) -> None:
        self.input_queue: InputQueue = SimpleQueue()
        self.output_queue: OutputQueue = SimpleQueue()
        self._block_size = block_size
        self._grammars: GrammarAdmission | None = None
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.DEALER)
        self._output = self._context.socket(zmq.PUSH)
        for socket, address in ((self._input, input_address), (self._output, output_address)):
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            # No high-water mark: at one a DEALER or PUSH blocks or drops, and no message of ours may be lost.
            socket.set_hwm(0)
            socket.connect(address)
        # A ROUTER can address a peer once it has heard from it.
        self._input.send(b"")
        threading.Thread(target=self.process_input_sockets, name="input", daemon=True).start()
        self._output_thread = threading.Thread(target=self.process_output_sockets, name="output", daemon=True)
        self._output_thread.start()

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

    def process_output_sockets(self) -> None:
        """Encode and send what the output queue brings, until it brings None."""
        encoder = msgspec.msgpack.Encoder()
        while (message := self.output_queue.get()) is not None:
            self._output.send(encoder.encode(message))
        self._output.close()

    def close(self) -> None:
        """Send what the output queue still holds, then close both sockets."""
        self.output_queue.put(None)
        self._output_thread.join()
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
            )
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
                outputs = [RequestOutput(id, [], finished=True, finish_reason="abort") for id in taken_back]
                self.output_queue.put(StepOutputs(outputs))
        self.input_queue.put(message)

    def _refuse_sequence(self, seq: Sequence, error: str, bad_request: bool) -> None:
        """Answer a sequence that cannot be queued."""
        self.output_queue.put(StepOutputs([error_output(seq.id, error, bad_request)]))

    def _refuse(self, frame: bytes, error: BaseException) -> None:
        """Log a message that cannot be taken in; answer it where it names the request that it was to add."""
        fault = not isinstance(error, ValueError)
        logger.error("a message to the engine core was refused: %s", error, exc_info=error if fault else None)
        request_id = _request_id(frame)
        if request_id is not None:
            self.output_queue.put(StepOutputs([error_output(request_id, str(error) or type(error).__name__)]))


def error_output(request_id: int, error: str, bad_request: bool = False) -> RequestOutput:
    """The terminal output of a request that failed; `error` is the sentence its client gets."""
    return RequestOutput(request_id, [], finished=True, finish_reason="error", error=error, bad_request=bad_request)


def _request_id(frame: bytes) -> int | None:
    """The id of the request that an undecodable message was to add, if that much can be read."""
    try:
        message = msgspec.msgpack.decode(frame)
    except msgspec.DecodeError:
        return None
    request_id = message.get("request_id") if isinstance(message, dict) else None
    return request_id if isinstance(request_id, int) else None
