"""`CoreManager`: the front end's handle on the engine cores: it sends requests and receives every output.

Used by the server on its event loop and by `LLMEngine` with blocking calls. Starts no thread. One core, or with
`data_parallel_size` several, each with its own supervisor and journal: see `Replica`.
"""

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
import zmq

from engine.client.adapters import AdapterError, AdapterLedger
from engine.client.placement import Placement
from engine.client.relocation import Relocation
from engine.client.replica import Replica, ReplicaEvents, Successor
from engine.client.supervisor import CoreLink
from engine.config.config import Config
from engine.distributed.cluster import place_evenly
from engine.distributed.host_resources import HostShare, available_host_memory
from engine.distributed.lockstep import LockstepRendezvous
from engine.messages import AddRequest, Failed, LoadAdapter, Ready, StepOutputs, UnloadAdapter

if TYPE_CHECKING:
    from engine.distributed.core_hosts import CoreHosts

_POLL_SECONDS = 0.05
"""Between two looks at what an operator waits for: the last request of an adapter, the end or start of a core."""


_WIDENED = 2
"""Most memory of a weight, in bytes of the checkpoint's: 16 bits that are computed as 32."""
_ENGINE_BYTES = 2**30
"""Memory of a core besides its weights, before its cache fills."""


class EngineDeadError(RuntimeError):
    """No engine core can serve; one sentence says why. `usage` marks a mistake of the user."""

    def __init__(self, error: str, usage: bool = False) -> None:
        super().__init__(error)
        self.usage = usage


class WeightsError(RuntimeError):
    """New weights cannot be served; one sentence says why. `is_temporary`: the same may work in a moment."""

    def __init__(self, error: str, is_temporary: bool = False) -> None:
        super().__init__(error)
        self.is_temporary = is_temporary


class CoreManager:
    """The engine cores and their successors. All calls come from one thread.

    Every request added ends in exactly one output with `finished` set, also when it is aborted. When a core dies or
    stalls, another is started, and the live requests continue in it where they were: no token is lost or delivered
    twice, and the other replicas' requests are not delayed. Requests of a replica that stays unavailable continue in
    the others: see `Relocation`. Where none of that helps, all end with an error, and `failure` says why. Outputs go
    to the callback given to `attach`, or without one wait for `get_outputs`. An engine dropped without `shutdown` is
    ended when it is collected, or at the interpreter's exit.
    """

    def __init__(self, config: Config, *, starts: bool = True, model: str = "") -> None:
        """Start the cores and return at once: they load while the caller does other things.

        Without `starts` it begins asleep: `wake_up` starts the cores. `model` names their model in processes and logs,
        where the server has several.
        """
        self.ready: Ready | None = None
        """What holds for all cores, since all have been ready to serve; None before."""
        self.failure: Failed | None = None
        """Why a replica has no core, and gets none; None otherwise."""
        self.is_asleep = not starts
        """Whether requests are held until `wake_up`."""
        self._config = config
        self._model = model
        self._inbox: deque[StepOutputs] = deque()
        self._on_outputs: Callable[[StepOutputs], object] = self._inbox.append
        self._on_restart: Callable[[int, int], object] = lambda resumed, replica: None
        self._on_move: Callable[[int, int], object] = lambda resumed, replica: None
        self._settled = asyncio.Event()
        self._placement: Placement | None = None
        """Where there are several replicas, once they are ready."""
        self._relocation: Relocation | None = None
        """As `_placement`, except where the replicas compute in lockstep."""
        self._closing = False
        self._links: list[CoreLink] = []
        self._poller = zmq.Poller()
        """Polls `_links`, the links at the last wait."""
        self._hosts = _other_hosts(config)
        size = config.parallel_config.data_parallel_size
        self._placements = place_evenly(size, 1) if self._hosts is None else self._hosts.placements
        self._nodes = [placement.node for placement in self._placements]
        # This process avoids the CPUs that the cores reserve; later cores must be able to use them again.
        self._cpus = os.sched_getaffinity(0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rendezvous = _rendezvous(config)
        self._adapters = AdapterLedger(config.lora_paths)
        self._replicas: list[Replica] = []
        self._make_replicas()

    def _make_replicas(self) -> None:
        """Start the cores, unless asleep. Raises `ValueError`, `OSError` where one cannot be started."""
        size = len(self._placements)
        available = available_host_memory() // self._placements[0].num_local if size > 1 else None
        events = ReplicaEvents(
            self._deliver, self._on_step, self._on_core_ready, self._on_unavailable, self._on_replica_end
        )
        self._replicas = []
        lockstep = self._replicas if self._config.parallel_config.in_lockstep else None
        try:
            for number in range(size):
                _, local_index, num_local = self._placements[number]
                share = HostShare(number, local_index, num_local, available, self._model)
                self._replicas.append(
                    Replica(
                        self._config,
                        share,
                        events,
                        lockstep=lockstep,
                        rendezvous=self._rendezvous,
                        hosts=self._hosts,
                        adapters=self._adapters,
                        cpus=self._cpus,
                        starts=not self.is_asleep,
                    )
                )
        except BaseException:
            self._end(Failed("not all engine cores could be started"))
            raise

    @property
    def live(self) -> Collection[int]:
        """Ids of the requests that still owe their terminal output."""
        if len(self._replicas) == 1:
            return self._replicas[0].live
        return {request_id for replica in self._replicas for request_id in replica.live}

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted: the cores have been ready, and serve or will be restarted."""
        return self.ready is not None and self.failure is None

    @property
    def is_serving(self) -> bool:
        """Whether a core is ready now, after all have been."""
        return self.ready is not None and any(replica.is_serving for replica in self._replicas)

    @property
    def serving(self) -> list[int]:
        """The replicas whose cores are ready now."""
        return [replica.number for replica in self._replicas if replica.is_serving]

    @property
    def pids(self) -> list[int]:
        """The process ids of the current or latest cores, by replica."""
        return [replica.supervisor.pid for replica in self._replicas]

    @property
    def local_pids(self) -> list[int | None]:
        """As `pids`; None for a replica on another host."""
        return [None if node else pid for node, pid in zip(self._nodes, self.pids, strict=True)]

    @property
    def pid(self) -> int:
        """The process id of the first replica's current or latest core."""
        return self._replicas[0].supervisor.pid

    # -- start and end ------------------------------------------------------------------------------------------

    def wait_ready(self, timeout: float | None = None) -> Ready:
        """Block until all cores serve. Raises `EngineDeadError` if one cannot, `TimeoutError` after `timeout` s."""
        deadline = _deadline(timeout)
        while self.ready is None and self.failure is None:
            if not self._wait(deadline):
                raise TimeoutError(f"the engine core was not ready within {timeout:g} s")
        return self._ready_or_raise()

    async def wait_ready_async(self, timeout: float | None = None) -> Ready:
        """As `wait_ready`, for an attached event loop."""
        await asyncio.wait_for(self._settled.wait(), timeout)
        return self._ready_or_raise()

    def shutdown(self, timeout: float = 5.0) -> None:
        """Abort all requests and end the cores, after `timeout` seconds by force. A second call does nothing.

        The aborted requests' outputs are delivered before this returns.
        """
        self._closing = True
        for replica in self._replicas:
            replica.shutdown()
        deadline = _deadline(timeout)
        while any(replica.is_serving for replica in self._replicas) and self._wait(deadline):
            pass
        for replica in self._replicas:
            how = f"did not stop within {timeout:g} s" if replica.is_serving else "was stopped before it was ready"
            replica.supervisor.end(Failed(f"{replica.supervisor.name} {how}"))
        self._close_places("")

    def fail(self, why: str) -> None:
        """End the cores at once, because the front end cannot continue; other hosts are sent `why`, a sentence."""
        # It may quote a file name or JSON with half a surrogate pair.
        self._end(Failed(why.encode(errors="replace").decode(), usage=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- requests -----------------------------------------------------------------------------------------------

    def add_requests(self, requests: Sequence[AddRequest]) -> None:
        """Send requests, with ids never used before. Raises `EngineDeadError` when no core can serve them.

        Of several replicas, `Placement` chooses one that serves for each. While none serves, the requests wait.
        """
        if not self.is_alive:
            raise EngineDeadError(self.failure.error if self.failure else "the engine core is not ready yet")
        placement = self._placement
        if placement is None:
            self._replicas[0].add(requests)
            return
        for replica in self._replicas:
            replica.journal.check_new(requests)
        among = self.serving or range(len(self._replicas))
        for number, placed in placement.place(requests, among).items():
            for entry in self._replicas[number].add(placed):
                placement.follow(entry.request.request_id, entry.token_ids)

    def abort(self, request_ids: Collection[int]) -> None:
        """Ask the cores to end requests; their terminal outputs follow. Ids that are not live are ignored."""
        for replica in self._replicas:
            replica.abort(request_ids)

    def pause(self, request_ids: Collection[int]) -> None:
        """Recall requests from the cores until `resume`; a few of their outputs may follow."""
        if self._placement is not None:
            self._placement.pause(request_ids)
        for replica in self._replicas:
            replica.pause(request_ids)

    def resume(self, request_ids: Collection[int]) -> None:
        """Have the cores continue paused requests where they were."""
        if self._placement is not None:
            self._placement.resume(request_ids)
        for replica in self._replicas:
            replica.resume(request_ids)

    def set_log_level(self, level: str) -> None:
        """Have the cores, and those that take their places, log from this level on."""
        for replica in self._replicas:
            replica.set_log_level(level)

    # -- sleep --------------------------------------------------------------------------------------------------

    async def sleep(self, level: int) -> None:
        """Give memory back until `wake_up`, for an attached event loop: requests are held where they are.

        Level 1 frees the KV cache and keeps the weights on the host, level 2 ends the cores. On a GPU, and where a
        model is divided among ranks, level 1 ends them too: what keeps their weights is the system's cache of files.
        Returns when that is done.
        """
        assert self.ready is not None
        on_host = self.ready.model.device == "cpu" and self._config.parallel_config.tensor_parallel_size == 1
        ends_core = level > 1 or not on_host
        self.is_asleep = True
        for replica in self._replicas:
            replica.sleep(ends_core=ends_core)
        while not all(replica.is_at_rest for replica in self._replicas):
            await asyncio.sleep(_POLL_SECONDS)

    async def wake_up(self) -> None:
        """Continue all requests where they were; returns when all cores serve.

        An engine that has failed begins anew. Raises `EngineDeadError` where a core cannot be started.
        """
        if self.failure is not None:
            self._begin_anew()
        self.is_asleep = False
        for replica in self._replicas:
            replica.wake_up()
        while len(self.serving) < len(self._replicas):
            if self.failure is not None:
                raise EngineDeadError(self.failure.error, self.failure.usage)
            await asyncio.sleep(_POLL_SECONDS)

    # -- weights ------------------------------------------------------------------------------------------------

    async def update_weights(self, path: str, num_bytes: int, *, alongside: bool | None = None) -> None:
        """Serve the checkpoint directory `path`, of the same shape and `num_bytes`, in place of the present one.

        Cores with the new weights are started, `alongside` the present ones or in their place; None: as the host's
        memory seems to allow. Once all serve, every request goes on in them, behind the tokens that it has, which are
        computed again. Raises `WeightsError`, a sentence; then all requests go on with the present weights.
        """
        ready, parallel = self.ready, self._config.parallel_config
        if ready is None or self.is_asleep or len(self.serving) < len(self._replicas):
            raise WeightsError("the engine is being started again; send the request again in a moment", True)
        if self._hosts is not None or parallel.in_lockstep or parallel.has_remote_ranks:
            raise WeightsError(
                "replicas that compute in lockstep (enable_expert_parallel) and engines on several hosts cannot "
                "replace their weights; start the server again with the new model"
            )
        if alongside is None:
            needed = len(self._replicas) * (_WIDENED * num_bytes + _ENGINE_BYTES)
            alongside = ready.model.device == "cpu" and available_host_memory() > needed
            # A port is of one process.
            alongside = alongside and self._config.kv_events_config.kv_events_endpoint is None
        if not alongside:
            await self.sleep(2)
        successors: list[Successor] = []
        try:
            for replica in self._replicas:
                config = replica.supervisor.config.model_copy(update={"model": path})
                successors.append(replica.begin_successor(config))
            await self._wait_successors(successors, ready)
            if alongside:
                await self.sleep(2)
            if not all(each.supervisor.is_serving for each in successors):
                raise WeightsError("an engine core with the new weights died before it served; try again", True)
        except BaseException as error:
            for each in successors:
                each.supervisor.retire()
            if self.is_asleep:
                await self.wake_up()
            if isinstance(error, OSError | ValueError):
                raise WeightsError(str(error)) from error
            raise
        self._config = self._config.model_copy(update={"model": path})
        self.is_asleep = False
        for replica, successor in zip(self._replicas, successors, strict=True):
            replica.succeed(successor)

    async def _wait_successors(self, successors: "Sequence[Successor]", present: Ready) -> None:
        """Return when all serve. Raises `WeightsError` where one fails, or is not of the same shape as `present`."""
        loop = asyncio.get_running_loop()
        for each in successors:
            each.supervisor.attach(loop)
        while not all(each.supervisor.is_serving for each in successors):
            for each in successors:
                if each.failure is not None:
                    raise WeightsError(each.failure.error, is_temporary=not each.failure.usage)
            await asyncio.sleep(_POLL_SECONDS)
        for each in successors:
            assert each.ready is not None
            for name in ("architecture", "vocab_size", "max_model_len", "eos_token_ids", "num_kvcache_blocks"):
                new, old = getattr(each.ready.model, name), getattr(present.model, name)
                if new != old:
                    raise WeightsError(f"{name} of the new weights is {new}, and of the present ones {old}")

    def _begin_anew(self) -> None:
        """Make asleep replicas, in the place of those that have failed, whose requests have all ended."""
        self.failure, self._closing, self.is_asleep = None, False, True
        self.ready, self._placement, self._relocation = None, None, None
        self._settled = asyncio.Event()
        self._rendezvous = _rendezvous(self._config)
        self._make_replicas()
        if self._loop is not None:
            for replica in self._replicas:
                replica.supervisor.attach(self._loop)

    # -- LoRA adapters ------------------------------------------------------------------------------------------

    async def load_adapter(self, number: int, name: str, path: str) -> None:
        """Load a LoRA adapter under a new number in all cores, for an attached event loop. Requests may use it then.

        Raises `AdapterError`, a sentence; then no core has it.
        """
        if not self.is_alive or len(self.serving) < len(self._replicas):
            raise AdapterError("the engine is being started again; load the adapter in a moment", is_temporary=True)
        message = LoadAdapter(number, name, path)
        try:
            await self._change_adapters(number, message)
        except BaseException:
            # Those that have attached it remove it again.
            for replica in self._replicas:
                replica.send_command(UnloadAdapter(number))
            raise
        self._adapters.add(message)

    async def unload_adapter(self, number: int) -> None:
        """Remove a LoRA adapter from all cores once no live request uses it. No new request may use it meanwhile."""
        while any(entry.request.adapter == number for replica in self._replicas for entry in replica.journal):
            await asyncio.sleep(_POLL_SECONDS)
        self._adapters.remove(number)
        for replica in self._replicas:
            replica.send_command(UnloadAdapter(number))

    async def _change_adapters(self, number: int, message: LoadAdapter) -> None:
        """Send `message` to all cores and wait for their answers. Raises `AdapterError` where one cannot."""
        answers = [self._adapters.expect(replica.number, number) for replica in self._replicas]
        for replica in self._replicas:
            replica.send_command(message)
        errors = [error for error in await asyncio.gather(*answers) if error is not None]
        if errors:
            raise errors[0]

    # -- outputs ------------------------------------------------------------------------------------------------

    def get_outputs(self, timeout: float | None = None) -> StepOutputs | None:
        """The next step's outputs; None after `timeout` seconds. Raises `EngineDeadError` when no more can come."""
        deadline = _deadline(timeout)
        while not self._inbox:
            if self.failure is not None:
                raise EngineDeadError(self.failure.error, self.failure.usage)
            if not self._wait(deadline):
                return None
        return self._inbox.popleft()

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_outputs: Callable[[StepOutputs], object],
        on_restart: Callable[[int, int], object] = lambda resumed, replica: None,
        on_move: Callable[[int, int], object] = lambda resumed, replica: None,
    ) -> None:
        """From now on, call `on_outputs` from `loop` with the outputs of every step. Call from the loop's thread.

        `on_restart` is called when a restarted core is ready to serve, before its first outputs, with the number of
        requests that continue in it after tokens that they had, and with its replica. `on_move` is called with the
        same when a replica takes over requests of another that is unavailable.
        """
        self._loop = loop
        self._on_outputs, self._on_restart, self._on_move = on_outputs, on_restart, on_move
        for replica in self._replicas:
            replica.supervisor.attach(loop)

    def _wait(self, deadline: float | None) -> bool:
        """Block until something happened and process it; False when `deadline`, on the monotonic clock, came first."""
        supervisors = [replica.supervisor for replica in self._replicas]
        due = min(each.next_poll for each in supervisors)
        if deadline is not None:
            due = min(due, deadline)
        # Without a time to poll, a message will come.
        timeout = None if due == math.inf else max(0.0, due - time.monotonic())
        links = [each.link for each in supervisors if each.link is not None]
        if links != self._links:
            self._links, self._poller = links, zmq.Poller()
            for link in links:
                link.register(self._poller)
        if links:
            self._poller.poll(None if timeout is None else round(timeout * 1e3))
        else:
            assert timeout is not None
            time.sleep(timeout)
        for supervisor in supervisors:
            supervisor.poll()
        return deadline is None or time.monotonic() < deadline

    def _ready_or_raise(self) -> Ready:
        if self.ready is None or self.failure is not None:
            assert self.failure is not None
            raise EngineDeadError(self.failure.error, self.failure.usage)
        return self.ready

    # -- events of the replicas ---------------------------------------------------------------------------------

    def _deliver(self, replica: Replica, step: StepOutputs) -> None:
        if self._placement is not None:
            step.replica = replica.number
            self._placement.note(step.outputs)
        self._on_outputs(step)

    def _on_step(self) -> None:
        # The step may show whether a suspect is harmless.
        if self._relocation is not None and not self._closing:
            self._relocation.note_step()

    def _on_core_ready(self, replica: Replica, again: bool, resumed: int) -> None:
        """A core serves; the engine serves when all have been ready."""
        if again:
            if self._placement is not None:
                self._placement.begin_again(replica.number)
            self._on_restart(resumed, replica.number)
        ready = [each.ready for each in self._replicas if each.ready is not None]
        if len(ready) < len(self._replicas):
            return
        self.ready = _merged(ready)
        if len(ready) > 1 and self._placement is None:
            self._placement = self._place_among(ready)
            if not self._config.parallel_config.in_lockstep:
                # `attach` replaces the callback.
                self._relocation = Relocation(
                    self._replicas, self._placement, lambda resumed, replica: self._on_move(resumed, replica)
                )
        self._settled.set()

    def _on_unavailable(self, replica: Replica) -> None:
        if self._relocation is not None and not self._closing:
            self._relocation.relocate_from(replica)

    def _on_replica_end(self, replica: Replica, failure: Failed) -> None:
        """A replica without a core ends the engine: the others may not be enough for the load."""
        if failure.collateral:
            # The core that caused the end reports why.
            for other in self._replicas:
                if other is not replica:
                    other.supervisor.poll()
        if self.failure is None:
            self.failure = failure
        self._settled.set()
        if not self._closing:
            self._end(failure)

    def _end(self, failure: Failed) -> None:
        self._closing = True
        for replica in self._replicas:
            replica.supervisor.end(failure)
        self._close_places(failure.error)

    def _close_places(self, why: str) -> None:
        """Free what starts further cores; `why` is "" at an orderly end."""
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._hosts is not None:
            self._hosts.announce_shutdown(why)
            self._hosts.close()

    def _place_among(self, ready: Sequence[Ready]) -> Placement:
        models = [each.model for each in ready]
        return Placement(
            [model.num_kvcache_blocks * model.block_size for model in models],
            models[0].block_size,
            max(model.max_model_len for model in models),
            by_prefix=all(model.shares_prefixes for model in models),
            in_turn=self._config.parallel_config.data_parallel_placement == "round_robin",
        )


def _other_hosts(config: Config) -> "CoreHosts | None":
    """The hosts that run replicas; None where all run on this one. Raises `ValueError`, a sentence."""
    if not config.parallel_config.has_remote_replicas:
        return None
    # Imported here, because engines on one host do not need it.
    from engine.distributed.core_hosts import CoreHosts

    return CoreHosts.of(config)


def _rendezvous(config: Config) -> LockstepRendezvous | None:
    """The rendezvous of replicas that compute in lockstep; None where they do not."""
    parallel = config.parallel_config
    return (
        LockstepRendezvous(parallel.data_parallel_size, parallel.tensor_parallel_size)
        if parallel.in_lockstep
        else None
    )


def _merged(ready: Sequence[Ready]) -> Ready:
    """What holds for every replica, and the start-up times of the slowest."""
    if len(ready) == 1:
        return ready[0]
    models = [each.model for each in ready]
    model = msgspec.structs.replace(
        models[0],
        max_model_len=min(each.max_model_len for each in models),
        num_kvcache_blocks=min(each.num_kvcache_blocks for each in models),
        own_cpus=sorted({cpu for each in models for cpu in each.own_cpus}),
    )
    phases = ready[0].startup_seconds
    return Ready(model, {phase: max(each.startup_seconds.get(phase, 0.0) for each in ready) for phase in phases})


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
