"""`CoreAdapters`: the LoRA adapters of an engine core, which are attached and removed between two steps.

A separate thread reads an adapter's files while steps run. The result is put on the input queue.
"""

import logging
import threading
from collections.abc import Iterable

from engine.core.sockets import AdapterRead, InputQueue, OutputQueue
from engine.core.step_pipeline import ModelRunnerInterface
from engine.messages import AdapterChanged, LoadAdapter, UnloadAdapter

logger = logging.getLogger(__name__)


class CoreAdapters:
    """Adapters by number. All calls come from the thread of the busy loop, between steps."""

    def __init__(
        self, names: Iterable[str], runner: ModelRunnerInterface, input_queue: InputQueue, output_queue: OutputQueue
    ) -> None:
        """`names` are the adapters that were loaded with the model. They have the numbers from 1."""
        self.names = dict(enumerate(names, 1))
        """Names by number."""
        self._runner, self._input_queue, self._output_queue = runner, input_queue, output_queue

    def check(self, number: int) -> None:
        """Raise `ValueError` with a sentence unless `number` is 0 or the number of an adapter."""
        if number and number not in self.names:
            raise ValueError("the LoRA adapter of this request is not loaded in the engine; load it again")

    def change(self, message: LoadAdapter | UnloadAdapter | AdapterRead) -> None:
        """Attach or remove an adapter and answer, or begin to read an adapter."""
        match message:
            case UnloadAdapter():
                if self.names.pop(message.number, None) is not None:
                    self._runner.unload_adapter(message.number)
                self._answer(message.number)
            case AdapterRead():
                self._attach(message)
            case LoadAdapter() if message.number in self.names:
                self._answer(message.number)
            case LoadAdapter() if message.at_once:
                self._attach(self._read(message))
            case LoadAdapter():
                # A daemon thread: the core does not wait for it at its end, since it changes nothing.
                threading.Thread(
                    target=lambda: self._input_queue.put(self._read(message)), name="adapter", daemon=True
                ).start()

    def _read(self, message: LoadAdapter) -> AdapterRead:
        try:
            return AdapterRead(message, self._runner.read_adapter(message.path))
        except (ValueError, OSError, MemoryError) as error:
            return AdapterRead(message, None, str(error) or "memory ran out while the adapter was read")
        except Exception as error:  # whatever a broken file makes a library raise must not end this process
            logger.exception("a LoRA adapter cannot be read")
            return AdapterRead(message, None, f"{message.path} cannot be read: {type(error).__name__}: {error}")

    def _attach(self, read: AdapterRead) -> None:
        message, error = read.message, read.error
        if error is None:
            try:
                self._runner.load_adapter(message.number, message.path, read.adapter)
            except (ValueError, MemoryError) as refused:
                error = str(refused) or "memory ran out while the adapter was attached"
        if error is None:
            self.names[message.number] = message.name
            logger.info("LoRA adapter %s is loaded from %s", message.name, message.path)
        self._answer(message.number, error)

    def _answer(self, number: int, error: str | None = None) -> None:
        self._output_queue.put(AdapterChanged(number, error))
