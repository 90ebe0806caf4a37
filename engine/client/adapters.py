"""`AdapterLedger`: the LoRA adapters that every engine core must have, and the pending answers of cores about changes.

Owned by `CoreManager`. Cores start with the adapters of the configuration. Once adapters have been loaded or unloaded,
a restarted core starts without adapters, and receives them by messages before its requests.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from engine.config.config import Config
from engine.messages import AdapterChanged, LoadAdapter

_log = logging.getLogger(__name__)


class AdapterError(RuntimeError):
    """An adapter cannot be loaded; the message is a sentence. `is_temporary`: a retry may succeed."""

    def __init__(self, error: str, *, is_temporary: bool = False) -> None:
        super().__init__(error)
        self.is_temporary = is_temporary


class AdapterLedger:
    """Records the adapters of all replicas. All calls come from one thread."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        """`paths` has the directories of the configured adapters by name, in the order of their numbers from 1."""
        self._wanted = {
            number: LoadAdapter(number, name, str(path), at_once=True)
            for number, (name, path) in enumerate(paths.items(), 1)
        }
        self._has_changed = False
        """Whether the adapters differ from the configured ones."""
        self._awaited: dict[tuple[int, int], asyncio.Future[AdapterError | None]] = {}
        """Future of the answer, by replica and adapter number."""

    # -- adapters of the cores ----------------------------------------------------------------------------------

    def add(self, message: LoadAdapter) -> None:
        """Note that all cores have attached this adapter, so that later cores must attach it too."""
        self._wanted[message.number] = LoadAdapter(message.number, message.name, message.path, at_once=True)
        self._has_changed = True

    def remove(self, number: int) -> None:
        """Note that later cores do not need the adapter of this number."""
        self._wanted.pop(number, None)
        self._has_changed = True

    def config_of_core(self, config: Config) -> Config:
        """Return the configuration to start a core with: without adapters if they differ from the configured ones."""
        return config.model_copy(update={"lora": ()}) if self._has_changed else config

    def missing_messages(self) -> list[LoadAdapter]:
        """Return the messages that a ready core must receive before its requests. It ignores adapters that it has."""
        return list(self._wanted.values()) if self._has_changed else []

    # -- answers ------------------------------------------------------------------------------------------------

    def expect(self, replica: int, number: int) -> "asyncio.Future[AdapterError | None]":
        """Return a future of a replica's answer about an adapter: an error if it cannot be attached, or None."""
        future = self._awaited[replica, number] = asyncio.get_running_loop().create_future()
        return future

    def answered(self, replica: int, answer: AdapterChanged) -> None:
        """Handle the answer of a core."""
        future = self._awaited.pop((replica, answer.number), None)
        if future is not None:
            if not future.done():
                future.set_result(None if answer.error is None else AdapterError(answer.error))
        elif answer.error is not None and (wanted := self._wanted.get(answer.number)) is not None:
            _log.error(
                "LoRA adapter %s could not be loaded again, and its requests end with an error: %s",
                wanted.name,
                answer.error,
            )

    def core_died(self, replica: int, name: str) -> None:
        """Fail the pending answers of a replica whose core has died."""
        for key in [key for key in self._awaited if key[0] == replica]:
            future = self._awaited.pop(key)
            if not future.done():
                sentence = f"{name} died while it loaded the adapter, so the adapter is not loaded; load it again"
                future.set_result(AdapterError(sentence, is_temporary=True))
