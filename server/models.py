"""`Models`: finds the model that a request names, and loads and unloads models within a memory budget.

A server of one model has one entry, which is loaded at the start and stays. With several models, each has its own
`Frontend` and `CoreManager`. A request for a model that is not loaded waits in that model's admission queue and causes
it to be loaded. If the budget has no room, the least recently used model without requests is unloaded. If all have
requests, the least recently used model is closed: its new requests wait until its live ones have ended, and then it is
unloaded. So no request is cut off, and a model in constant use does not block the others.

Models are shared fairly among owners: owners take turns at having a model loaded; a model that others use stays loaded
at least as long as its loading took; and a model is closed for a bounded time, after which it is open for as long.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self

from fastapi import FastAPI

from engine.client.core_manager import CoreManager
from engine.config.config import Config
from engine.config.settings import ModelEntry, ModelList
from server.errors import BadRequest, ModelNotFound, NotReady, ShuttingDown
from server.frontend import SHUTTING_DOWN, Frontend, Shared
from server.limits.owners import Owner
from server.metrics import resident_bytes

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
"""Seconds between two checks whether a model is idle."""

_RETRY_SECONDS = 10.0
"""Seconds for which requests are refused without another attempt after a model could not be loaded."""

_CLOSED_SHARE = 0.25
"""Share of `model_wait_timeout` for which a model is closed to new requests while its live ones end. Requests that
wait for it meanwhile are served long before that timeout, even if a stream of another owner continues."""

_MOST_TURNS = 1024
"""Most owners whose last loads are recorded."""

_MOST_NAMED = 20
"""Most served names that the error for an unknown name lists."""

_GIB = 2**30


class _Entry:
    """One model. It is resident while it occupies memory, and open while it accepts requests."""

    def __init__(self, entry: ModelEntry, core: CoreManager, frontend: Frontend) -> None:
        self.frontend, self.core = frontend, core
        self.name = entry.config.model_names[0]
        self.loads_at_start, self.memory = entry.loads_at_start, entry.memory_bytes
        self.is_resident = entry.loads_at_start
        self.is_open = False
        self.is_leaving = False
        """Whether it is closed: new requests wait, so that it becomes idle and can be unloaded."""
        self.num_users = 0
        """Number of requests that are being prepared, before they are submitted."""
        self.last_used = 0.0
        self.waiting: dict[asyncio.Future[None], str] = {}
        """Futures of the requests that wait until it is open, with their parties."""
        self.parties: set[str] = set()
        """Parties that have used it since it was loaded. Recorded until `stays_until`."""
        self.stays_until = 0.0
        """Time, on the monotonic clock, until which it is unloaded only for requests of its own users."""
        self.change_at = 0.0
        """While it is closed, the time at which it opens again; else, the earliest time at which it may be closed."""
        self.loading: asyncio.Task[None] | None = None
        self.retry_at = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it is open and has no request. False if an operator has put it to sleep."""
        return self.is_open and not (self.num_users or self.frontend.hub.num_live or self.frontend.is_asleep)

    @property
    def last_use(self) -> float:
        """Time of its last use, on the monotonic clock."""
        return max(self.last_used, self.frontend.hub.last_end)

    def open(self) -> None:
        """Open it: the waiting requests continue and count as its users."""
        self.is_open, self.is_leaving = True, False
        for each, party in self.waiting.items():
            if not each.done():
                each.set_result(None)
                self.enter(party)
        self.waiting.clear()

    @property
    def waiting_parties(self) -> set[str]:
        """Parties of the requests that wait for it."""
        return {party for each, party in self.waiting.items() if not each.done()}

    def close_for_a_time(self, seconds: float) -> None:
        """Close it for `seconds`, so that it becomes idle. Later calls open and close it in turns of `seconds`."""
        now = time.monotonic()
        if now < self.change_at:
            return
        self.change_at = now + seconds
        if self.is_leaving:
            self.open()
        else:
            self.is_leaving = True

    def enter(self, party: str) -> None:
        """Count a request of this party as a user until `leave`."""
        self.num_users += 1
        if time.monotonic() < self.stays_until:
            self.parties.add(party)

    def refuse(self, error: Exception) -> None:
        """Fail the waiting requests with `error`."""
        for each in self.waiting:
            if not each.done():
                each.set_exception(error)
        self.waiting.clear()

    def leave(self) -> None:
        """Note that a request was submitted or abandoned."""
        self.num_users -= 1
        self.last_used = time.monotonic()


class Models:
    """The models of a server. Used from the event loop's thread only."""

    def __init__(
        self,
        config: Config,
        models: ModelList,
        cores: Sequence[CoreManager],
        read_config: Callable[[], Config] | None = None,
    ) -> None:
        """`config` has the server's settings; `cores` are the cores of `models`. `read_config` as for `Shared`."""
        self.config = config
        sizes = [entry.config.parallel_config.data_parallel_size for entry in models.entries]
        is_one = len(sizes) == 1
        by_name = {entry.config.model_names[0]: size for entry, size in zip(models.entries, sizes, strict=True)}
        self.shared = Shared(config, sizes[0] if is_one else by_name, read_config, models)
        self._budget = models.memory_bytes
        self._entries: list[_Entry] = []
        for number, (entry, core) in enumerate(zip(models.entries, cores, strict=True)):
            frontend = Frontend(
                entry.config,
                core,
                shared=self.shared,
                first_replica=sum(sizes[:number]),
                is_taken=lambda name, number=number: self._has_other(name, number),  # type: ignore[misc]
            )
            self._entries.append(_Entry(entry, core, frontend))
        if not is_one:
            self.shared.metrics.show_models(lambda: {entry.name: entry.is_open for entry in self._entries})
        self._room = asyncio.Lock()
        """Held while one model is unloaded to make room for another."""
        self._turns: dict[str, int] = {}
        """Number of the last load that was for a party. The next load is for the party whose last load is the
        oldest."""
        self._num_turns = 0
        self._is_started = False
        self._is_closing = False

    @classmethod
    def of(cls, app: FastAPI) -> Self:
        """Return the models of an application."""
        models: Self = app.state.models
        return models

    async def start(self, on_ready: Callable[[tuple[str, ...]], object]) -> None:
        """Load the models that are loaded at the start. If none fails, call `on_ready` with all served names."""
        at_start = [entry for entry in self._entries if entry.loads_at_start]
        await asyncio.gather(*(entry.frontend.load() for entry in at_start))
        if self.why_ended is None:
            for entry in at_start:
                entry.open()
            self._is_started = True
            on_ready(self.names)

    # -- what routes ask ----------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Values of `model` in requests: for each model, its names, the main one first, then those of its adapters."""
        return tuple(name for entry in self._entries for name in entry.frontend.model_names)

    @property
    def names_may_change(self) -> bool:
        """Whether adapters may be loaded while the server runs."""
        return any(frontend.config.server_config.lora_directories for frontend in self.frontends)

    @property
    def has_budget(self) -> bool:
        """Whether the models share a memory budget."""
        return self._budget is not None

    @property
    def frontends(self) -> list[Frontend]:
        """The front ends of all models, loaded or not."""
        return [entry.frontend for entry in self._entries]

    def named(self, name: str | None) -> Frontend:
        """Return the front end of the model or adapter `name`, loaded or not; for None, that of the first model.

        Raises `ModelNotFound`.
        """
        return self._named(name).frontend

    def chosen(self, name: str | None) -> Frontend:
        """As `named`, for calls that must not reach the wrong model: with several models, None is refused."""
        if name is None and len(self._entries) > 1:
            names = ", ".join(entry.name for entry in self._entries[:_MOST_NAMED])
            raise BadRequest(f"model is missing; this server has several, so name one of {names}", param="model")
        return self.named(name)

    @asynccontextmanager
    async def use(self, name: str | None, owner: Owner) -> AsyncIterator[Frontend]:
        """Yield the front end of the model or adapter `name`, which stays loaded within this context; see `named`.

        Waits until it is loaded. Raises `NotReady` if it cannot be, and `Overloaded` if too many requests wait.
        Requests that the caller submits within this context, or after it without awaiting before, keep the model
        loaded until they end.
        """
        self._check_started()
        entry = self._named(name)
        if entry.is_open and entry.core.failure is not None and len(self._entries) > 1:
            entry.is_open = entry.is_resident = False
        if entry.frontend.is_asleep or (entry.is_open and not entry.is_leaving):
            entry.enter(owner.party)
        else:
            await self._wait_open(entry, owner)
        try:
            entry.frontend.check_loaded()
            yield entry.frontend
        finally:
            entry.leave()

    def check_open(self) -> None:
        """Raise `NotReady` unless a model accepts requests, or can be loaded for them."""
        self._check_started()
        if all(entry.is_open or entry.frontend.is_asleep for entry in self._entries):
            self._require_one(Frontend.check_loaded)

    def check_ready(self) -> None:
        """Raise `NotReady` unless the server is ready: a loaded model serves requests, or no model is loaded."""
        self._check_started()
        if any(entry.is_open for entry in self._entries):
            self._require_one(Frontend.check_ready)

    @property
    def max_request_bytes(self) -> int:
        """Largest request body in bytes, for any model: a body is read before its model is known."""
        return max(frontend.max_request_bytes for frontend in self.frontends)

    @property
    def max_request_bytes_once_loaded(self) -> int:
        """Largest request body in bytes once all models are loaded: a batch may be read before its model is."""
        return max(frontend.max_request_bytes_once_loaded for frontend in self.frontends)

    @property
    def num_live(self) -> int:
        """Number of live sequences of all models."""
        return sum(frontend.hub.num_live for frontend in self.frontends)

    # -- the end ------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse new requests, and those that wait for a model; live ones continue."""
        self._is_closing = True
        for entry in self._entries:
            entry.frontend.drain()
            entry.refuse(ShuttingDown(SHUTTING_DOWN))

    def close(self) -> None:
        """Refuse new requests and end the live ones with an error."""
        self.drain()
        for entry in self._entries:
            if entry.loading is not None:
                entry.loading.cancel()
            entry.frontend.close()

    @property
    def why_ended(self) -> str | None:
        """A sentence that says why the server must end: a model of the start could not be loaded, or all have failed.
        None if it need not end."""
        reasons = [entry.frontend.why_ended for entry in self._entries if entry.loads_at_start]
        failed = [reason for reason in reasons if reason is not None]
        return failed[0] if failed and (not self._is_started or len(failed) == len(reasons)) else None

    # -- loading and unloading ----------------------------------------------------------------------------------

    async def _wait_open(self, entry: _Entry, owner: Owner) -> None:
        """Wait as a queued request until `entry` is open. The request then counts as a user of it."""
        if entry.frontend.failure is not None and (seconds := entry.retry_at - time.monotonic()) > 0:
            raise _not_loaded(entry, seconds)
        timeout = self.config.server_config.model_wait_timeout
        with entry.frontend.admission.waiting(owner):
            opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry.waiting[opened] = owner.party
            if not entry.is_open:
                self._start_loading(entry)
            try:
                async with asyncio.timeout(timeout):
                    await opened
            except BaseException as error:
                entry.waiting.pop(opened, None)
                if opened.done() and not opened.cancelled() and opened.exception() is None:
                    entry.leave()
                if isinstance(error, TimeoutError):
                    raise NotReady(
                        f"model {entry.name} could not be loaded within {timeout:g} s (model_wait_timeout): the other "
                        "models are in use, or it loads slowly; send the request again later"
                    ) from None
                raise

    def _start_loading(self, entry: _Entry) -> None:
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._load(entry))

    async def _load(self, entry: _Entry) -> None:
        """Make room for `entry` and load it, for the requests that wait for it."""
        try:
            if await self._make_room(entry):
                await self._load_resident(entry)
        except Exception as error:  # noqa: BLE001 - reported to the requests, which wait for it
            _log.exception("model %s cannot be loaded", entry.name)
            entry.refuse(NotReady(f"model {entry.name} cannot be loaded: {type(error).__name__}: {error}"))
        finally:
            entry.loading = None

    async def _load_resident(self, entry: _Entry) -> None:
        began = time.monotonic()
        await entry.frontend.load()
        if entry.frontend.why_ended is None:
            seconds = time.monotonic() - began
            self.shared.metrics.model_loaded(entry.name, seconds)
            _log.info("model %s is loaded, in %.1f s", entry.name, seconds)
            entry.parties.clear()
            entry.stays_until, entry.change_at = time.monotonic() + seconds, 0.0
            entry.open()
            self._check_memory(entry)
            return
        # Also if only its tokenizer cannot be read: its core must end then.
        entry.core.fail(entry.frontend.why_ended)
        entry.is_resident = False
        entry.retry_at = time.monotonic() + _RETRY_SECONDS
        _log.error("model %s cannot be loaded: %s", entry.name, entry.frontend.why_ended)
        entry.refuse(_not_loaded(entry, _RETRY_SECONDS))

    async def _make_room(self, entry: _Entry) -> bool:
        """Unload models until `entry` fits. Returns False as soon as no request waits for `entry`."""
        leaving: set[_Entry] = set()
        try:
            while parties := entry.waiting_parties:
                async with self._room:
                    if self._is_turn_of(parties) and await self._has_made_room(entry, parties, leaving):
                        entry.is_resident = True
                        self._take_turn(parties)
                        return True
                await asyncio.sleep(_POLL_SECONDS)
            entry.waiting.clear()
            return False
        finally:
            for each in leaving:
                if each.is_open:
                    each.open()
                elif each.waiting:
                    self._start_loading(each)

    def _is_turn_of(self, parties: set[str]) -> bool:
        """Return whether it is the turn of `parties`: since their last load, every other waiting party had a load."""
        own = min(self._turns.get(party, 0) for party in parties)
        rivals = (each for each in self._entries if each.loading is not None and not each.is_resident)
        return all(own <= self._turns.get(party, 0) for each in rivals for party in each.waiting_parties)

    def _take_turn(self, parties: set[str]) -> None:
        self._num_turns += 1
        self._turns.update(dict.fromkeys(parties, self._num_turns))
        if len(self._turns) > _MOST_TURNS:
            earliest = self._num_turns - _MOST_TURNS // 2
            self._turns = {party: turn for party, turn in self._turns.items() if turn > earliest}

    async def _has_made_room(self, entry: _Entry, parties: set[str], leaving: set[_Entry]) -> bool:
        """Unload the models that may be unloaded for `entry`, and close others. Returns whether `entry` fits."""
        closed_seconds = _CLOSED_SHARE * self.config.server_config.model_wait_timeout
        while (excess := self._excess(entry)) > 0:
            now = time.monotonic()
            others = [each for each in self._entries if each.is_resident and each.is_open]
            others = [each for each in others if now >= each.stays_until or each.parties <= parties]
            others.sort(key=lambda each: each.last_use)
            idle = [each for each in others if each.is_idle]
            if sum(each.memory for each in idle) < excess:
                for each in others:
                    if excess > 0:
                        each.close_for_a_time(closed_seconds)
                        leaving.add(each)
                    excess -= each.memory
                return False
            await self._evict(idle[0], entry.name)
        return True

    def _excess(self, entry: _Entry) -> float:
        """Return the bytes of memory that must become free for `entry`."""
        resident = sum(each.memory for each in self._entries if each.is_resident)
        return 0 if self._budget is None else resident + entry.memory - self._budget

    async def _evict(self, entry: _Entry, wanted: str) -> None:
        self._check_memory(entry)
        entry.is_open = entry.is_leaving = False
        _log.info("model %s is unloaded to make room for %s", entry.name, wanted)
        await asyncio.shield(entry.frontend.unload())
        entry.is_resident = False
        self.shared.metrics.model_evicted(entry.name)
        if entry.waiting:
            self._start_loading(entry)

    def _check_memory(self, entry: _Entry) -> None:
        """Warn if a model on a CPU takes more memory than its share of the budget."""
        ready = entry.core.ready
        if self._budget is None or ready is None or ready.model.device != "cpu":
            return
        taken = sum(bytes for pid in entry.core.local_pids if not math.isnan(bytes := resident_bytes(pid)))
        if taken > entry.memory:
            _log.warning(
                "model %s takes %.2f GiB, more than its memory_gib, %g; raise it, or lower cpu_kvcache_gib",
                entry.name,
                taken / _GIB,
                entry.memory / _GIB,
            )

    # -- look-ups -----------------------------------------------------------------------------------------------

    def _named(self, name: str | None) -> _Entry:
        if name is None:
            return self._entries[0]
        for entry in self._entries:
            if name in entry.frontend.model_names:
                return entry
        names = self.names
        served = " or ".join(names[:_MOST_NAMED]) + (" or another of /v1/models" if len(names) > _MOST_NAMED else "")
        raise ModelNotFound(f"model is {name[:60]!r}, which this server does not serve; use {served}", param="model")

    def _has_other(self, name: str, number: int) -> bool:
        """Return whether another model than number `number` has the name."""
        return any(name in frontend.model_names for index, frontend in enumerate(self.frontends) if index != number)

    def _check_started(self) -> None:
        if self._is_closing:
            raise ShuttingDown(SHUTTING_DOWN)
        if not self._is_started:
            for entry in self._entries:
                if entry.loads_at_start:
                    entry.frontend.check_loaded()
            raise NotReady("the models are still loading; try again in a moment")

    def _require_one(self, check: Callable[[Frontend], object]) -> None:
        """Check that `check` passes for an open model. Raises the error that it raises for the first one."""
        errors = []
        for entry in self._entries:
            if entry.is_open:
                try:
                    check(entry.frontend)
                except NotReady as error:
                    errors.append(error)
                else:
                    return
        raise errors[0]


def _not_loaded(entry: _Entry, seconds: float) -> NotReady:
    return NotReady(f"model {entry.name} cannot be loaded: {entry.frontend.why_ended}", retry_seconds=seconds)
