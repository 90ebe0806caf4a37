"""`StepSocket` and `RankSocket`: steps and their ends over TCP, where ranks share no memory with rank 0.

In place of `StepRing` and `StepEnds`; one message a step to each rank. Both ends are known to each other by CURVE keys
that were made for this start, and came over the connection by which the host joined.
"""

import time
from collections import deque

import zmq

from engine.cluster_key import CurvePair
from engine.worker.curve import dial, listen, name_of
from engine.worker.rank_messages import StepAddress
from engine.worker.step_ends import shortened

_HERE = b""
"""A rank's first message: a ROUTER sends only to whom it has heard."""


_FAILURE_BYTES = 64 << 10
"""Of a failure: a sentence and the ends of its traceback."""


class StepsLost(ConnectionError):
    """A rank cannot be told of a step."""


class StepSocket:
    """Rank 0's end. One thread calls it."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: CurvePair, num_ranks: int
    ) -> None:
        """Listen for ranks 1 to `num_ranks`. Raises `OSError`, a sentence, when the address cannot be had."""
        self._socket = listen(context, zmq.ROUTER, address, keys)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._names = [name_of(rank) for rank in range(1, num_ranks + 1)]
        self._missing = set(self._names)
        self._told: dict[bytes, deque[str]] = {name: deque() for name in self._names}

    def wait_for_ranks(self, seconds: float) -> int | None:
        """Wait until every rank has connected; the first that has not within so many seconds, None for none."""
        deadline = time.monotonic() + seconds
        while self._missing and self._socket.poll(max(0, round(1e3 * (deadline - time.monotonic())))):
            name, _ = self._socket.recv_multipart()
            self._missing.discard(name)
        return min((self._names.index(name) + 1 for name in self._missing), default=None)

    def write(self, message: bytes) -> None:
        """Tell every rank of a step. Raises `StepsLost` where the connection to one of them is gone."""
        for rank, name in enumerate(self._names, 1):
            try:
                self._socket.send_multipart([name, message], copy=False)
            except zmq.ZMQError as error:
                raise StepsLost(f"the connection to tensor-parallel rank {rank} is lost ({error.strerror})") from error

    def take(self, rank: int) -> str:
        """Wait until a rank, numbered from 0, has ended the step; its failure, "" for none."""
        told = self._told[self._names[rank]]
        while not told:
            self._receive()
        return told.popleft()

    def take_within(self, rank: int, seconds: float) -> str | None:
        """As `take`; None where the rank has not ended the step after so many seconds."""
        deadline = time.monotonic() + seconds
        told = self._told[self._names[rank]]
        while not told:
            if not self._socket.poll(max(0, round(1e3 * (deadline - time.monotonic())))):
                return None
            self._receive()
        return told.popleft()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close(linger=0)

    def _receive(self) -> None:
        name, end = self._socket.recv_multipart()
        self._told[name].append(end.decode(errors="replace"))


class RankSocket:
    """A rank's end. One thread calls it."""

    def __init__(self, steps: StepAddress, rank: int) -> None:
        own = CurvePair(steps.public, steps.secret)
        self._socket = dial(zmq.Context.instance(), own, steps.core_public, name_of(rank))
        self._socket.connect(steps.address)
        self._socket.send(_HERE)

    def read(self) -> bytes:
        """The next message, once there is one."""
        return self._socket.recv()

    def tell(self, failure: str = "") -> None:
        """This rank has ended the step; `failure` says why it could not compute it."""
        self._socket.send(shortened(failure.encode(), _FAILURE_BYTES))
