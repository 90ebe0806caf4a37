"""`CoreManager`: the front end's interface to the engine cores. It sends requests and receives all outputs.

The server uses it on its event loop, `LLMEngine` with blocking calls. It starts no thread. It has one core or, with
`data_parallel_size`, several, each with its own supervisor and journal: see `Replica`.
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
from engine.distributed.cluster import spread_evenly
from engine.distributed.host_resources import HostShare, available_host_memory
from engine.distributed.lockstep import LockstepRendezvous
from engine.messages import AddRequest, Failed, LoadAdapter, Ready, StepOutputs, UnloadAdapter

if TYPE_CHECKING:
    from engine.distributed.core_hosts import CoreHosts

_POLL_SECONDS = 0.05
"""Seconds between two checks of an event that an operator waits for: the end of an adapter's last request, the end or
start of a core."""


_WIDENED = 2
"""Most bytes of memory per byte of weights in the checkpoint: 16-bit weights may be converted to 32 bits."""
_ENGINE_BYTES = 2**30
"""Bytes of memory of a core in addition to its weights, while its KV cache is empty."""


class EngineDeadError(RuntimeError):
    """No engine core can serve; the message is a sentence. `usage`: whether it is a mistake of the user."""

    def __init__(self, error: str, usage: bool = False) -> None:
        super().__init__(error)
        self.usage = usage


class WeightsError(RuntimeError):
    """New weights cannot be served; the message is a sentence. `is_temporary`: a retry may succeed."""

    def __init__(self, error: str, is_temporary: bool = False) -> None:
        super().__init__(error)
        self.is_temporary = is_temporary


class CoreManager:
    """Runs the engine cores and restarts them. All calls come from one thread.

    Every added request ends in exactly one output with `finished` set, even if it is aborted. When a core dies or
    stalls, another one is started and continues the live requests after their last token: no token is lost or
    delivered twice, and requests of other replicas are not delayed. Requests of a replica that stays unavailable
    continue in other replicas: see `Relocation`. If that fails too, all requests end with an error, and `failure` says
    why. Outputs are passed to the callback given to `attach`, or else returned by `get_outputs`. If `shutdown` is not
    called, the cores are ended when the object is collected, or at the interpreter's exit.
    """

    def __init__(self, config: Config, *, starts: bool = True, model: str = "") -> None:
        """Start the cores and return at once: they load while the caller does other things.

        Without `starts` it begins asleep, and `wake_up` starts the cores. `model` is the model's name in processes and
        logs, if the server has several models.
        """
        self.ready: Ready | None = None
        """Common properties of all cores; None until all are ready to serve."""
        self.failure: Failed | None = None
        """Reason why a replica has no core and none will be started; None while that is not so."""
        self.is_asleep = not starts
        """Whether requests wait until `wake_up`."""
        self._config = config
        self._model = model
        self._inbox: deque[StepOutputs] = deque()
        self._on_outputs: Callable[[StepOutputs], object] = self._inbox.append
        self._on_restart: Callable[[int, int], object] = lambda resumed, replica: None
        self._on_move: Callable[[int, int], object] = lambda resumed, replica: None
        self._settled = asyncio.Event()
        self._placement: Placement | None = None
        """Chooses replicas; None with one replica, or before all are ready."""
        self._relocation: Relocation | None = None
        """Moves requests between replicas; None where `_placement` is, or if the replicas compute in lockstep."""
        self._closing = False
        self._links: list[CoreLink] = []
        self._poller = zmq.Poller()
        """Polls `_links`, which are the core links at the last wait."""
        self._hosts = _other_hosts(config)
        size = config.parallel_config.data_parallel_size
        self._positions = spread_evenly(size, 1) if self._hosts is None else self._hosts.positions
        self._nodes = [position.node for position in self._positions]
        # This process avoids the CPUs that the cores reserve, but restarted cores must be able to use them.
        self._cpus = os.sched_getaffinity(0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rendezvous = _rendezvous(config, self._hosts)
        self._adapters = AdapterLedger(config.lora_paths)
        self._replicas: list[Replica] = []
        self._make_replicas()

    def _make_replicas(self) -> None:
        """Create the replicas, and start their cores unless asleep. Raises `ValueError`, `OSError` if one cannot
        start."""
        size = len(self._positions)
        available = available_host_memory() // self._positions[0].num_local if size > 1 else None
        events = ReplicaEvents(
            self._deliver, self._on_step, self._on_core_ready, self._on_unavailable, self._on_replica_end
        )
        self._replicas = []
        lockstep = self._replicas if self._config.parallel_config.in_lockstep else None
        try:
            for number in range(size):
                _, local_index, num_local = self._positions[number]
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
        """Ids of the requests that have not had their terminal output."""
        if len(self._replicas) == 1:
            return self._replicas[0].live
        return {request_id for replica in self._replicas for request_id in replica.live}

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted: all cores have been ready, and each serves or will be restarted."""
        return self.ready is not None and self.failure is None

    @property
    def is_serving(self) -> bool:
        """Whether any core is ready now, after all have been ready once."""
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
        """Abort all requests and end the cores, after `timeout` seconds by force. Idempotent.

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
        self._close_hosts("")

    def fail(self, why: str) -> None:
        """End the cores at once, because the front end cannot continue. Other hosts receive `why`, a sentence."""
        # The sentence may quote a file name or JSON with an unpaired surrogate.
        self._end(Failed(why.encode(errors="replace").decode(), usage=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- requests -----------------------------------------------------------------------------------------------

    def add_requests(self, requests: Sequence[AddRequest]) -> None:
        """Send requests, whose ids were never used before. Raises `EngineDeadError` if no core can serve them.

        With several replicas, `Placement` chooses a serving one for each request. While none serves, requests wait.
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
        """Recall requests from the cores until `resume`. A few of their outputs may still follow."""
        if self._placement is not None:
            self._placement.pause(request_ids)
        for replica in self._replicas:
            replica.pause(request_ids)

    def resume(self, request_ids: Collection[int]) -> None:
        """Continue paused requests after their last token."""
        if self._placement is not None:
            self._placement.resume(request_ids)
        for replica in self._replicas:
            replica.resume(request_ids)

    def set_log_level(self, level: str) -> None:
        """Set the log level of the cores, and of cores that are started later."""
        for replica in self._replicas:
            replica.set_log_level(level)

    # -- sleep --------------------------------------------------------------------------------------------------

    async def sleep(self, level: int) -> None:
        """Free memory until `wake_up`, for an attached event loop. Live requests pause.

        Level 1 frees the KV cache, and the weights stay in the host's memory; level 2 ends the cores. On a GPU, and if
        a model is divided among ranks, level 1 ends the cores too: their weights stay only in the system's page cache.
        Returns when the memory is free.
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
        """Continue all requests after their last token. Returns when all cores serve.

        A failed engine is started again. Raises `EngineDeadError` if a core cannot be started.
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
        """Replace the weights by those of the checkpoint directory `path`, of the same shape and with `num_bytes`
        bytes.

        Cores with the new weights are started `alongside` the present ones, or after these have ended; None: alongside
        if the host's memory seems to suffice. When all new cores serve, every request continues there after its last
        token; its prefix is computed again. Raises `WeightsError`; then requests continue with the present weights.
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
            # Two processes cannot bind the same port.
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
        """Wait until all serve. Raises `WeightsError` if one fails, or has another shape than `present`."""
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
        """Replace the failed replicas, whose requests have all ended, by new ones that are asleep."""
        self.failure, self._closing, self.is_asleep = None, False, True
        self.ready, self._placement, self._relocation = None, None, None
        self._settled = asyncio.Event()
        self._rendezvous = _rendezvous(self._config, self._hosts)
        self._make_replicas()
        if self._loop is not None:
            for replica in self._replicas:
                replica.supervisor.attach(self._loop)

    # -- LoRA adapters ------------------------------------------------------------------------------------------

    async def load_adapter(self, number: int, name: str, path: str) -> None:
        """Load a LoRA adapter under a new number in all cores, for an attached event loop. Then requests may use it.

        Raises `AdapterError`, and then no core has it.
        """
        if not self.is_alive or len(self.serving) < len(self._replicas):
            raise AdapterError("the engine is being started again; load the adapter in a moment", is_temporary=True)
        message = LoadAdapter(number, name, path)
        try:
            await self._change_adapters(number, message)
        except BaseException:
            # Cores that have attached it remove it again.
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
        """Send `message` to all cores and wait for their answers. Raises `AdapterError` if a core reports an error."""
        answers = [self._adapters.expect(replica.number, number) for replica in self._replicas]
        for replica in self._replicas:
            replica.send_command(message)
        errors = [error for error in await asyncio.gather(*answers) if error is not None]
        if errors:
            raise errors[0]

    # -- outputs ------------------------------------------------------------------------------------------------

    def get_outputs(self, timeout: float | None = None) -> StepOutputs | None:
        """Return the next step's outputs; None after `timeout` seconds. Raises `EngineDeadError` if none can
        follow."""
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
        """Register `on_outputs`, which `loop` calls with the outputs of every step. Call it from the loop's thread.

        `on_restart` is called when a restarted core is ready, before its first outputs, with the number of requests
        with tokens that continue in it, and with the number of its replica. `on_move` is called with the same when a
        replica takes over requests of an unavailable one.
        """
        self._loop = loop
        self._on_outputs, self._on_restart, self._on_move = on_outputs, on_restart, on_move
        for replica in self._replicas:
            replica.supervisor.attach(loop)

    def _wait(self, deadline: float | None) -> bool:
        """Block until an event, and process it. Returns False if `deadline`, on the monotonic clock, passed first."""
        supervisors = [replica.supervisor for replica in self._replicas]
        due = min(each.next_poll for each in supervisors)
        if deadline is not None:
            due = min(due, deadline)
        # Without a due time, a message will wake the poller.
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
        # The step may show that a suspected request is harmless.
        if self._relocation is not None and not self._closing:
            self._relocation.note_step()

    def _on_core_ready(self, replica: Replica, again: bool, resumed: int) -> None:
        """Note that a core serves. The engine serves when all cores have been ready."""
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
        """End the engine because a replica has no core: the other replicas may not suffice for the load."""
        if failure.collateral:
            # The core that caused the end reports the reason.
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
        self._close_hosts(failure.error)

    def _close_hosts(self, why: str) -> None:
        """Free the resources for starting cores. `why` is "" at an orderly end."""
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
    """Return the hosts that run replicas; None if all run on this one. Raises `ValueError` with a sentence."""
    if not config.parallel_config.has_remote_replicas:
        return None
    # Imported here, because engines on one host do not need it.
    from engine.distributed.core_hosts import CoreHosts

    return CoreHosts.of(config)


def _rendezvous(config: Config, hosts: "CoreHosts | None") -> LockstepRendezvous | None:
    """Return the rendezvous of replicas that compute in lockstep; None if they do not."""
    parallel = config.parallel_config
    if not parallel.in_lockstep:
        return None
    # The replicas' own ports come first.
    hub = None if hosts is None else (hosts.address, parallel.master_port + parallel.data_parallel_size)
    return LockstepRendezvous(parallel.data_parallel_size, parallel.tensor_parallel_size, hub)


def _merged(ready: Sequence[Ready]) -> Ready:
    """Merge the properties of all replicas, with the start-up times of the slowest."""
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
