"""An engine core without a model: it answers every request with a token per step, at a fixed pace, over the real
sockets.

`benchmarks.front_end` runs it in place of `engine.core.main`.
"""

import itertools
import os
import socket
import time

import msgspec
import zmq

from engine.core.startup import PhaseClock
from engine.distributed.core_process import Launch
from engine.distributed.message_stream import MessageWriter
from engine.distributed.processes import end_with_parent, name_process, take_lifeline
from engine.messages import (
    AbortRequests,
    AddRequest,
    Inbound,
    ModelInfo,
    Ready,
    RequestOutput,
    SchedulerStats,
    Shutdown,
    StepOutputs,
    Stopped,
)

STEP_SECONDS = "KAON_STUB_STEP_SECONDS"
"""Environment variable: the pace of the steps."""

_MODEL = ModelInfo("StubForCausalLM", "float32", "cpu", "none", 0, 1536, 1 << 20, [2], 16, 1 << 20)
_TOKENS = range(300, 1300)
"""Ordinary words and parts of words of the embedded model's vocabulary."""


class _StubCore:
    """Live requests with the number of tokens that each is still to receive."""

    def __init__(self, launch: Launch) -> None:
        context = zmq.Context()
        self._input = context.socket(zmq.DEALER)
        assert launch.outputs is not None
        self._output = MessageWriter(socket.socket(fileno=launch.outputs))
        self._input.connect(launch.input_address)
        self._input.send(b"")
        self._decoder = msgspec.msgpack.Decoder(list[Inbound])
        self._encoder = msgspec.msgpack.Encoder()
        self._live: dict[int, int] = {}
        self._tokens = itertools.cycle(_TOKENS)
        self._stopping = False
        self._say(Ready(_MODEL, PhaseClock(launch.started).seconds))

    def run(self, step_seconds: float) -> None:
        """Serve until a shutdown message."""
        while not self._stopping:
            if self._live:
                time.sleep(step_seconds)
                self._step()
            while not self._stopping and self._input.poll(0 if self._live else None):
                self._take_in()
        self._say(Stopped())

    def _step(self) -> None:
        outputs = []
        for request_id in list(self._live):
            self._live[request_id] -= 1
            last = self._live[request_id] == 0
            outputs.append(RequestOutput(request_id, [next(self._tokens)], last, "max_tokens" if last else None))
            if last:
                del self._live[request_id]
        running = len(self._live)
        self._say(StepOutputs(outputs, SchedulerStats(running, 0, running, 1 << 20, 0, 0, 0, "decode", 0.001)))

    def _take_in(self) -> None:
        for message in self._decoder.decode(self._input.recv()):
            match message:
                case AddRequest() as request:
                    self._live[request.request_id] = request.sampling_params.max_tokens
                case AbortRequests(request_ids):
                    for request_id in request_ids:
                        self._live.pop(request_id, None)
                case Shutdown():
                    self._stopping = True

    def _say(self, message: Ready | StepOutputs | Stopped) -> None:
        self._output.send(self._encoder.encode(message))


def main() -> None:
    """Run one stub core for the server at the other end of standard input."""
    lifeline = take_lifeline()
    launch = msgspec.json.decode(lifeline.makefile("rb").readline(), type=Launch)
    name_process(launch.name)
    end_with_parent(lifeline, launch.directory)
    _StubCore(launch).run(float(os.environ[STEP_SECONDS]))


if __name__ == "__main__":
    main()
