"""`Adapters`: LoRA adapters by the names that requests use, loaded and unloaded while the server runs."""

import asyncio
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from engine.client.adapters import AdapterError
from engine.client.core_manager import CoreManager
from engine.config.config import Config
from server.errors import AdapterNotLoaded, BadRequest, ModelNotFound, NotReady, PathNotAllowed

_Result = TypeVar("_Result")


async def allowed_directory(path: str, directories: Sequence[Path], *, param: str, setting: str) -> Path | None:
    """Resolve `path`, links included, to a directory beneath one of `directories`; None if there is no such directory.

    Raises `PathNotAllowed` for a path outside of `directories`, without saying whether it exists, and for a directory
    that contains a link to a file outside, or an entry that is no regular file: reading a pipe could block for ever.
    """
    # The work runs in a thread, since the file system may be slow, or the directory very large.
    return await asyncio.to_thread(_allowed_directory, path, directories, param, setting)


def _allowed_directory(path: str, directories: Sequence[Path], param: str, setting: str) -> Path | None:
    try:
        resolved = Path(path).resolve()
    except (OSError, ValueError, RuntimeError):  # a loop of links, or a null character
        resolved = None
    if resolved is None or not _is_beneath(resolved, directories):
        raise PathNotAllowed(
            f"{param} is {path[:200]!r}, which is not beneath a directory of {setting}; move it there", param=param
        )
    try:
        files = list(resolved.iterdir()) if resolved.is_dir() else None
    except OSError:  # a name that is too long, or a directory that may not be searched
        files = None
    if files is None:
        return None
    for file in files:
        if (why := _why_not_allowed(file, directories)) is not None:
            raise PathNotAllowed(
                f"{param} is {path[:200]!r}, whose file {file.name[:100]!r} {why}; copy the file itself beneath a "
                f"directory of {setting}",
                param=param,
            )
    return resolved


def _why_not_allowed(file: Path, directories: Sequence[Path]) -> str | None:
    """Return why a file must not be read; None if it may be."""
    try:
        target = file.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError):
        return None if not file.is_symlink() else "is a link that leads nowhere"
    if not _is_beneath(target, directories):
        return "is a link to a file elsewhere"
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is neither a file nor a directory"


def _is_beneath(path: Path, directories: Sequence[Path]) -> bool:
    return any(path.is_relative_to(directory) for directory in directories)


class Adapters:
    """Maps names of adapters to numbers. A number is never reused, because it is part of the keys of cached prefixes.

    Adapters are loaded one at a time. While one call of `unload` waits for live requests, further calls do not wait.
    """

    def __init__(
        self, config: Config, core: CoreManager, is_taken: Callable[[str], bool] = lambda name: False
    ) -> None:
        """`is_taken(name)` returns whether another model of the server, or an adapter of one, has that name."""
        self._core, self._is_taken = core, is_taken
        self._model_names = config.model_names
        self._directories = [Path(directory).resolve() for directory in config.server_config.lora_directories]
        self._most = config.server_config.max_lora_adapters
        self._numbers = {name: number for number, name in enumerate(config.lora_paths, 1)}
        self._names = {number: name for name, number in self._numbers.items()}
        self._next = len(self._numbers) + 1
        self._leaving = 0
        """Number of adapters that are unloaded as soon as the live requests that use them have ended."""
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters that requests may use."""
        return tuple(self._numbers)

    def number_of(self, name: str) -> int:
        """Return the number of the adapter `name`; 0 for another name, such as the model's own."""
        return self._numbers.get(name, 0)

    def model_name(self, number: int) -> str:
        """Return the name of an adapter; for 0, the model's. Raises `ModelNotFound` if the adapter was unloaded."""
        if number == 0:
            return self._model_names[0]
        if number not in self._names:
            raise ModelNotFound("the LoRA adapter of this request was unloaded before it began", param="model")
        return self._names[number]

    @asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """Prevent loading and unloading within this context. Raises `NotReady` if an adapter is still being
        unloaded."""
        async with self._loading:
            if self._leaving:
                raise NotReady("a LoRA adapter is unloaded after its last request; try again in a moment")
            yield

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load the adapter in the directory `path`. Requests may use it when this returns.

        `in_place` allows to replace an adapter of that name; live requests continue with the old one. Raises an
        `ApiError`, and then nothing has changed. Loading continues if the caller is cancelled.
        """
        await self._finish(self._load(name, await self._allowed(path), in_place))

    async def unload(self, name: str) -> None:
        """Unload an adapter. New requests are refused at once; returns when the last live request with it has
        ended."""
        number = self._numbers.pop(name, None)
        if number is None:
            raise AdapterNotLoaded(
                f"lora_name is {name[:60]!r}, which is not an adapter of this server; /v1/models lists them",
                param="lora_name",
            )
        self._leaving += 1  # Now: a call of `load` may get the lock before this one, and must count the adapter.
        await self._finish(self._unload_now(number))

    async def _unload_now(self, number: int) -> None:
        async with self._loading:
            leaving = self._unload(number)
        await leaving

    async def _load(self, name: str, path: Path, in_place: bool) -> None:
        async with self._loading:
            self._check_name(name, in_place)
            number, self._next = self._next, self._next + 1
            try:
                await self._core.load_adapter(number, name, str(path))
            except AdapterError as error:
                if error.is_temporary:
                    raise NotReady(str(error)) from error
                raise BadRequest(f"LoRA adapter {name} cannot be served: {error}", param="lora_path") from error
            previous = self._numbers.get(name)
            self._numbers[name], self._names[number] = number, name
            if previous is not None:
                self._leaving += 1
                self._unload(previous)

    def _unload(self, number: int) -> asyncio.Task[None]:
        """Refuse new requests for an adapter that is leaving. The returned task unloads it after its live requests."""
        del self._names[number]
        return self._start(self._leave(number))

    async def _leave(self, number: int) -> None:
        try:
            await self._core.unload_adapter(number)
        finally:
            self._leaving -= 1

    def _check_name(self, name: str, in_place: bool) -> None:
        if name in self._model_names:
            raise BadRequest(
                f"lora_name is {name!r}, which is the model's own name; choose another", param="lora_name"
            )
        if self._is_taken(name):
            raise BadRequest(
                f"lora_name is {name!r}, which another model of this server has; choose another", param="lora_name"
            )
        if name in self._numbers and not in_place:
            raise BadRequest(
                f"lora_name is {name!r}, which is loaded already; set load_inplace to true to replace it",
                param="lora_name",
            )
        count = len(self._numbers) + self._leaving
        # A replaced adapter may stay until its live requests have ended.
        if count - (name in self._numbers) >= self._most:
            raise BadRequest(
                f"{count} LoRA adapters are loaded, and this server loads {self._most} at most (max_lora_adapters); "
                "unload one first",
                param="lora_name",
            )

    async def _allowed(self, path: str) -> Path:
        if not self._directories:
            raise PathNotAllowed(
                "this server loads no LoRA adapters while it runs; start it with --lora-directories DIRECTORY",
                param="lora_path",
            )
        resolved = await allowed_directory(path, self._directories, param="lora_path", setting="lora_directories")
        if resolved is None:
            raise AdapterNotLoaded(f"lora_path is {path[:200]!r}, which is not a directory", param="lora_path")
        return resolved

    async def _finish(self, work: Coroutine[None, None, None]) -> None:
        """Wait for `work`, which continues if the caller is cancelled."""
        await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
