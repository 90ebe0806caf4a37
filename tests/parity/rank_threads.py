"""Model runners of several ranks as threads of one process: rank 0 sends steps, and the others follow them."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from engine.config.config import Config
from engine.distributed.rank_steps import RankSteps, StepMessage, decode_step
from engine.runner.device_batch import DeviceBatch
from engine.runner.model_runner import ModelRunner
from models.parallel.tensor_parallel import TensorParallel
from tests.parity.delayed_device import DelayedDevice
from tests.parity.runners import load
from tests.parity.thread_ranks import at_once, thread_ranks, without_turn

Result = TypeVar("Result")
_END = b""


class _Group:
    """Ranks that cannot leave a step."""

    def begin_step(self, number: int) -> None:
        """See `RankGroup`."""

    def abort(self) -> bool:
        """See `RankGroup`."""
        return False


class _Transport:
    """A `StepTransport` and the `StepSource` of one other rank."""

    def __init__(self) -> None:
        self._steps: SimpleQueue[bytes] = SimpleQueue()
        self._reports: SimpleQueue[str] = SimpleQueue()

    def write(self, message: bytes) -> None:
        self._steps.put(message)

    def take(self, rank: int) -> str:
        return without_turn(self._reports.get)

    def read(self) -> bytes:
        return without_turn(self._steps.get)

    def report(self, failure: str = "") -> None:
        self._reports.put(failure)


class RankThreads:
    """Two ranks of a checkpoint. `messages` are those that rank 1 has followed."""

    def __init__(self, checkpoint: Path, **fields: Any) -> None:
        self._config = Config(**fields)
        [self._ranks] = thread_ranks(2)
        self._checkpoint, self._transport = checkpoint, _Transport()
        self.messages: list[StepMessage] = []

    def run(self, lead: Callable[[ModelRunner], Result]) -> Result:
        """What `lead` returns, called with the runner of rank 0 while rank 1 follows."""
        led, _ = at_once([partial(self._lead, lead), self._follow])
        assert led is not None
        return led

    def _runner(self, parallel: TensorParallel) -> ModelRunner:
        assert self._config.num_kvcache_blocks is not None
        runner = ModelRunner(load(self._checkpoint, self._config, parallel=parallel), self._config.num_kvcache_blocks)
        runner.device_batch = DeviceBatch(DelayedDevice(), self._config.max_num_seqs)
        return runner

    def _lead(self, lead: Callable[[ModelRunner], Result]) -> Result:
        def fail(sentence: str) -> None:
            raise AssertionError(sentence)

        try:
            runner = self._runner(self._ranks[0])
            runner.lead(RankSteps(self._transport, 2, _Group(), fail))  # type: ignore[arg-type]
            return lead(runner)
        finally:
            self._transport.write(_END)

    def _follow(self) -> None:
        runner = self._runner(self._ranks[1])
        for message in self._received():
            self.messages.append(message)
            runner.follow(message)
            self._transport.report()

    def _received(self) -> Iterator[StepMessage]:
        while (message := self._transport.read()) != _END:
            yield decode_step(message)
