"""`CoreSockets`: the engine core's two sockets to the front end. A thread reads one, a queue writes to the other.

`engine.core.main` creates them; the busy loop uses only the queues. Requests with a grammar first pass through a
`GrammarQueue`, whose thread compiles the grammar, so that neither the busy loop nor other requests wait for that.
"""

import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import zmq

from engine.distributed.message_stream import MessageWriter
from engine.fair_shares import FairShares
from engine.messages import (
    AbortRequests,
    AddRequest,
    Inbound,
    LoadAdapter,
    Outbound,
    ReleaseCache,
    SetLogLevel,
    Shutdown,
    StepOutputs,
    UnloadAdapter,
    take_fields,
    terminal_output,
)
from engine.sequence import Sequence
from engine.text.sandbox import NICENESS
from engine.text.structured.matcher import Matchers
from engine.text.structured.spec import InvalidGrammar

if TYPE_CHECKING:
    from engine.distributed.host_messages import CoreAddress
    from engine.distributed.remote_core import FrontEndConnection


logger = logging.getLogger(__name__)


class Wake(NamedTuple):
    """Another replica has work and waits for this one in the given round; see `engine.core.dp_engine_core`."""

    round: int


class AdapterRead(NamedTuple):
    """A thread has read the files of an adapter that is to be attached; see `engine.core.adapters`."""

    message: LoadAdapter
    adapter: Any
    """The adapter as `ModelRunner.read_adapter` returned it; None after an error."""
    error: str | None = None


Incoming: TypeAlias = (
    Sequence | AbortRequests | Shutdown | Wake | LoadAdapter | UnloadAdapter | AdapterRead | ReleaseCache
)
InputQueue: TypeAlias = SimpleQueue[Incoming]


_LINGER_MS = 2000
"""Most milliseconds for sending the last messages to a parent that does not read."""


class OutputQueue:
    """Sends the core's messages in the calling thread: another thread would wake up while a step computes."""

    def __init__(self, send: Callable[[bytes], object]) -> None:
        """Calls of `send` are serialised. It must not block."""
        self._send = send
        self._encoder = msgspec.msgpack.Encoder()
        self._turn = threading.Lock()
        self._is_closed = False

    def put(self, message: Outbound) -> None:
        """Send a message unless the queue is closed. Never blocks."""
        with self._turn:
            if not self._is_closed:
                self._send(self._encoder.encode(message))

    def close(self) -> None:
        """Drop later messages."""
        with self._turn:
            self._is_closed = True


class CoreSockets:
    """The core's two sockets, with a queue for each direction."""

    def __init__(
        self,
        input_address: str,
        outputs: socket.socket | None,
        block_size: int,
        front_end: "CoreAddress | None" = None,
        timeout: float = 0.0,
    ) -> None:
        """`outputs` is the stream to the front end; this object closes it.

        `front_end` is the address of a front end on another host, to which it connects within `timeout` seconds; then
        `input_address` and `outputs` are not used. Raises `ConnectionError` with a sentence if that fails.
        """
        self.input_queue: InputQueue = SimpleQueue()
        self._block_size = block_size
        self._grammars: GrammarQueue | None = None
        self._on_sequence: Callable[[Sequence], object] | None = None
        self._context = zmq.Context()
        self._remote: FrontEndConnection | None = None
        """The connection to a front end on another host."""
        self._writer: MessageWriter | None = None
        self._output: zmq.Socket[bytes] | None = None
        if front_end is None:
            assert outputs is not None
            self._writer = MessageWriter(outputs)
            self.output_queue = OutputQueue(self._writer.send)
            self._input = self._context.socket(zmq.DEALER)
            # No high-water mark: at the mark a DEALER blocks or drops messages, and none may be lost.
            self._input.set_hwm(0)
            self._input.connect(input_address)
        else:
            # Imported here, because cores on the front end's host do not need it.
            from engine.distributed import remote_core

            self._remote = remote_core.FrontEndConnection(self._context, front_end, timeout)
            self._input, self._output = self._remote.input, self._remote.output
            self._output.setsockopt(zmq.LINGER, _LINGER_MS)
            self.output_queue = OutputQueue(functools.partial(self._output.send, flags=zmq.NOBLOCK))
        self._input.setsockopt(zmq.LINGER, _LINGER_MS)
        # A ROUTER can address a peer only after it has received a message from it.
        self._input.send(b"")
        threading.Thread(target=self.process_input_sockets, name="input", daemon=True).start()

    def watch(self, on_lost: Callable[[str], object]) -> None:
        """Register `on_lost`, which another thread calls when a front end on another host is lost."""
        if self._remote is not None:
            self._remote.watch(on_lost)

    def serve(self, matchers: Matchers, on_sequence: Callable[[Sequence], object]) -> None:
        """Begin to accept requests with a grammar. Another thread calls `on_sequence` after each new sequence.

        Call it before the first request can be received.
        """
        self._on_sequence = on_sequence
        self._grammars = GrammarQueue(matchers, self._queue, self._refuse_sequence)

    def process_input_sockets(self) -> None:
        """Decode received messages into the input queue, until the context ends."""
        array_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
        decoder = msgspec.msgpack.Decoder(Inbound)
        while True:
            try:
                frame = self._input.recv()
            except zmq.ContextTerminated:
                self._input.close()
                return
            try:
                messages = array_decoder.decode(frame)
            except msgspec.MsgspecError as error:
                self._refuse(frame, error)
                continue
            previous: AddRequest | None = None
            for encoded in messages:
                before, previous = previous, None  # A message that is refused is shared by no later one.
                try:
                    message = decoder.decode(encoded)
                    if isinstance(message, AddRequest):
                        take_fields(message, before)
                        previous = message
                    else:
                        previous = before
                    self._accept(message)
                except BaseException as error:  # noqa: BLE001 - logged and answered; a native panic is no `Exception`
                    self._refuse(encoded, error)

    def close(self) -> None:
        """Close both sockets when all messages have been sent."""
        if self._remote is not None:
            self._remote.close()
        self.output_queue.close()
        if self._writer is not None:
            self._writer.flush(_LINGER_MS / 1e3)
        if self._output is not None:
            self._output.close()
        self._context.term()

    def _accept(self, message: Inbound) -> None:
        if isinstance(message, AddRequest):
            # Created in this thread, so that the arrival time does not include the rest of the running step. The clock
            # of a front end on another host is unknown; then times count from the receipt.
            sent_time = message.sent_time if self._remote is None else None
            seq = Sequence.from_request(message, self._block_size, sent_time=sent_time)
            if seq.sampling_params.grammar is None:
                self._queue(seq)
            elif self._grammars is None:
                self._refuse_sequence(seq, "this engine takes no grammars", False)
            else:
                self._grammars.add(seq)
            return
        if isinstance(message, AbortRequests) and self._grammars is not None:
            taken_back = self._grammars.cancel(message.request_ids)
            if taken_back:
                outputs = [terminal_output(id, "abort") for id in taken_back]
                self.output_queue.put(StepOutputs(outputs))
                # These ids may be reused as soon as they are answered, before the loop reads this message.
                message = AbortRequests([id for id in message.request_ids if id not in set(taken_back)])
        if isinstance(message, SetLogLevel):
            logging.getLogger().setLevel(message.level.upper())
            return
        self.input_queue.put(message)

    def _queue(self, seq: Sequence) -> None:
        self.input_queue.put(seq)
        if self._on_sequence is not None:
            self._on_sequence(seq)

    def _refuse_sequence(self, seq: Sequence, error: str, bad_request: bool) -> None:
        """Answer a sequence that cannot be queued with an error."""
        self.output_queue.put(StepOutputs([terminal_output(seq.id, "error", error, bad_request=bad_request)]))

    def _refuse(self, encoded: bytes | msgspec.Raw, error: BaseException) -> None:
        """Log a message that cannot be decoded, and answer it if the id of its request can be read."""
        fault = not isinstance(error, ValueError)
        logger.error("a message to the engine core was refused: %s", error, exc_info=error if fault else None)
        request_id = _request_id(encoded)
        if request_id is not None:
            self.output_queue.put(
                StepOutputs([terminal_output(request_id, "error", str(error) or type(error).__name__)])
            )


def _request_id(encoded: bytes | msgspec.Raw) -> int | None:
    """Return the request id in an undecodable message; None if it cannot be read."""
    try:
        message = msgspec.msgpack.decode(encoded)
    except msgspec.DecodeError:
        return None
    request_id = message.get("request_id") if isinstance(message, dict) else None
    return request_id if isinstance(request_id, int) else None


_CREDIT_SECONDS = 0.1
"""Most unused time of its share that an owner of grammars may use later, with precedence over others."""

_STACK_BYTES = 64 * 2**20
"""Stack size of the compiling thread, far more than in the front end's checking process, so that a grammar that passed
there cannot overflow the stack here."""


class GrammarQueue:
    """Compiles the grammars of sequences before these are queued. Owned by the input thread.

    One grammar is compiled at a time, next of the owner whose grammars took the least time.
    """

    def __init__(
        self,
        matchers: Matchers,
        admit: Callable[[Sequence], object],
        refuse: Callable[[Sequence, str, bool], object],
    ) -> None:
        """`admit` is called with each sequence that can run, `refuse` with any other, the error, and whether the
        request is invalid."""
        self._matchers = matchers
        self._admit = admit
        self._refuse = refuse
        self._owners: dict[int, str] = {}
        """Owners of sequences that are not admitted yet, by the sequences' ids."""
        self._pending: dict[str, dict[int, Sequence]] = {}
        """These sequences, by owner and id, in the order of arrival. No owner is without a sequence."""
        self._shares = FairShares(_CREDIT_SECONDS)
        """Seconds for which each owner's grammars were compiled."""
        self._changed = threading.Condition()
        previous = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._work, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(previous)

    def add(self, seq: Sequence) -> None:
        """Admit a sequence with a grammar, at once if the grammar is compiled, otherwise when it is."""
        assert seq.sampling_params.grammar is not None
        seq.matcher = self._matchers.cached(seq.sampling_params.grammar)
        if seq.matcher is not None:
            refusal = _catch_up(seq)
            if refusal is None:
                self._admit(seq)
            else:
                self._refuse(seq, refusal, False)
            return
        with self._changed:
            self._shares.join(seq.owner)
            self._owners[seq.id] = seq.owner
            self._pending.setdefault(seq.owner, {})[seq.id] = seq
            self._changed.notify()

    def cancel(self, seq_ids: Collection[int]) -> list[int]:
        """Drop those of the given sequences that are not admitted yet. Returns their ids."""
        with self._changed:
            return [seq_id for seq_id in seq_ids if self._take(seq_id)]

    def _take(self, seq_id: int) -> bool:
        """Remove a sequence, under the lock. Returns False if it is not pending."""
        owner = self._owners.pop(seq_id, None)
        if owner is None:
            return False
        del self._pending[owner][seq_id]
        if not self._pending[owner]:
            del self._pending[owner]
        return True

    def _next(self) -> Sequence:
        """Wait for a sequence, and return the first one of the owner to serve next."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending)
            self._shares.set_time(time.monotonic())
            if self._shares.is_crowded:
                self._shares.forget_all_but(self._pending.keys())
            owner = min(self._pending, key=self._shares.served)
            self._shares.serve(owner, 0.0)
            return next(iter(self._pending[owner].values()))

    def _work(self) -> None:
        self._matchers.load()
        # On Linux, of this thread alone. All first grammars wait for the vocabulary, so it is read at normal priority.
        os.nice(NICENESS)
        while True:
            seq = self._next()
            began = time.thread_time()
            refusal = self._prepare(seq)
            # Under the lock, so that an abort finds the sequence either here or in the input queue.
            with self._changed:
                self._shares.charge(seq.owner, (time.thread_time() - began) / seq.weight)
                if not self._take(seq.id):
                    continue
                if refusal is None:
                    self._admit(seq)
                else:
                    self._refuse(seq, *refusal)

    def _prepare(self, seq: Sequence) -> tuple[str, bool] | None:
        """Create the matcher of `seq`. On failure, return the error and whether the request is invalid; else None."""
        assert seq.sampling_params.grammar is not None
        try:
            seq.matcher = self._matchers.matcher(seq.sampling_params.grammar)
        except InvalidGrammar as error:
            return str(error), True
        except BaseException as error:  # a native panic is not an `Exception`, and must not end the thread
            logger.exception("a grammar cannot be compiled")
            return f"the grammar of this request cannot be compiled: {error}", False
        refusal = _catch_up(seq)
        return None if refusal is None else (refusal, False)


def _catch_up(seq: Sequence) -> str | None:
    """Advance the matcher over the generated tokens of a resumed sequence. Returns an error if it rejects one."""
    assert seq.matcher is not None
    for token_id in seq.completion_token_ids:
        if not seq.matcher.accept(token_id):
            return seq.matcher.error
    return None
