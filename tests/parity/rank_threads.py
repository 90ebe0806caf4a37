"""Model runners of several ranks as threads of one process: rank 0 sends steps, and the others follow them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from engine.config.config import Config
from engine.distributed.rank_steps import RankSteps, StepMessage, decode_step
from engine.runner.device import Device
from engine.runner.model_runner import ModelRunner
from engine.runner.start import start_runner
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

    def __init__(
        self,
        checkpoint: Path,
        devices: Sequence[Device] | None = None,
        capture: str = "behind",
        sizes: tuple[int, ...] = (),
        **fields: Any,
    ) -> None:
        """`devices`: the ranks' devices; by default late ones without graphs. `capture`, `sizes`: of their graphs."""
        self._config = Config(compilation_config={"cudagraph_capture_sizes": sizes, "capture": capture}, **fields)  # type: ignore[arg-type]
        [self._ranks] = thread_ranks(2)
        self._devices = devices or [DelayedDevice(), DelayedDevice()]
        self._checkpoint, self._transport = checkpoint, _Transport()
        self.messages: list[StepMessage] = []

    def run(self, lead: Callable[[ModelRunner], Result]) -> Result:
        """Return the result of `lead`, called with the runner of rank 0 while rank 1 follows."""
        led, _ = at_once([partial(self._lead, lead), self._follow])
        return cast(Result, led)

    def _runner(self, parallel: TensorParallel) -> ModelRunner:
        """Started as an engine starts it."""
        loaded = load(self._checkpoint, self._config, parallel=parallel, device_api=self._devices[parallel.rank])
        return start_runner(loaded, rendezvous=lambda: None, agree=lambda size: (size.num_blocks, size.num_slots))

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
