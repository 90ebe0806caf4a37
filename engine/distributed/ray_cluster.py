"""`RayCluster`: the hosts of a server as actors of a Ray cluster that runs already.

Used by the engine core for its ranks, and by the front end for its replicas. Ray chooses the machines, reserves
devices, and ends actors with this process. An actor is a `HostAgent`, which joins as any other host does: requests,
steps and tensors do not go through Ray.
"""

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from threading import Event, Thread
from typing import Any, NamedTuple

from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.distributed.cluster import Cluster, ClusterKeys, HostPosition, is_loopback
from engine.distributed.host_agent import HostAgent
from models.errors import first_line

_log = logging.getLogger(__name__)

_NODE_ID_LABEL = "ray.io/node-id"
_POLL_SECONDS = 1.0
_RESTART_SECONDS = 1.0, 30.0
"""Delays before an actor that has ended is replaced: the first, which doubles each time, and the longest.

An actor that ran for longer than the maximum resets the delay."""


class RayCluster(Cluster):
    """The hosts of one server as actors of a running Ray cluster, one for each rank or replica but the first.

    An actor is a host of its own: its number is that of its rank or replica. The first is on this machine, in this
    process, and has no actor.
    """

    def __init__(self, config: Config, size: int, *, ranks_each: int, title: str, restarts: bool) -> None:
        """Connect, and wait for resources for `size` ranks or replicas, of `ranks_each` ranks.

        `title` is what sentences call them; `restarts`: another actor follows one that has ended. Raises `ValueError`,
        a sentence: no Ray, no cluster, or no room in it.
        """
        self._config, self._restarts = config, restarts
        self._ray = ray = _connect()
        self._needs = _needs(ray, config, ranks_each)
        self._group = _reserve(ray, config, self._needs, size, title)
        bundles = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        nodes = [bundles[number] for number in range(size)]
        # A new key for each start: only the actors need it, and they receive it.
        self._key = secrets.token_urlsafe(32)
        given = config.parallel_config.master_addr
        super().__init__(
            [HostPosition(number, *self._share(nodes, number)) for number in range(size)],
            ray.util.get_node_ip_address() if is_loopback(given) else given,
            ClusterKeys.of(self._key),
        )
        self._actors: dict[int, Any] = {}
        self._closing = Event()
        self._keeper: Thread | None = None
        if "GPU" in self._needs:
            self._holder = self._actor(_DeviceHolder, 0)
            # HIP reads its own variable if that is set.
            devices = ",".join(ray.get(self._holder.devices.remote()))
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = devices

    def start(self, joining: str, on_failure: Callable[[int, str], object]) -> None:
        """See `Cluster`; return at once."""
        numbers = range(1, len(self.positions))
        arguments = self, numbers, joining, on_failure, self._closing
        self._keeper = Thread(
            target=keep_actors, args=arguments, kwargs={"restarts": self._restarts}, name="ray", daemon=True
        )
        self._keeper.start()

    def close(self) -> None:
        """See `Cluster`; give the resources back."""
        self._closing.set()
        self._kill_actors()
        if self._keeper is not None:
            self._keeper.join()
            # It may have started another one before it saw that the cluster closes.
            self._kill_actors()
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def serve(self, number: int, joining: str) -> Any:
        """Start an actor, which replaces the last one of its number and joins at `joining`. Returns its future."""
        self._actors[number] = actor = self._actor(_HostActor, number)
        return actor.serve.remote(number, joining, self._key, self._config.model_dump_json())

    def wait(self, served: list[Any], seconds: float | None = None) -> tuple[list[Any], list[Any]]:
        """Wait until an actor of `served` ends, or for `seconds`. Returns those that have ended, and the others."""
        ended, left = self._ray.wait(served, timeout=seconds)
        return ended, left

    def failure(self, served: Any) -> str | None:
        """Return the error with which an actor ended; None if it served to the end."""
        try:
            self._ray.get(served)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            return first_line(cause)
        return None

    def _kill_actors(self) -> None:
        while self._actors:
            _, actor = self._actors.popitem()
            self._ray.kill(actor)

    def _share(self, nodes: Sequence[str], number: int) -> tuple[int, int]:
        """Return the index of an actor among those that share its processors, and their number."""
        if "GPU" in self._needs:
            # Each actor sees its own devices only, and so does this process.
            return 0, 1
        return nodes[:number].count(nodes[number]), nodes.count(nodes[number])

    def _actor(self, kind: type, number: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=number
        )
        remote = self._ray.remote(kind)
        return remote.options(
            num_cpus=self._needs.get("CPU", 0), num_gpus=self._needs.get("GPU", 0), scheduling_strategy=strategy
        ).remote()


class _HostActor:
    """The `HostAgent` of one host, in a process that Ray starts on the node that it chose."""

    def serve(self, node: int, address: str, key: str, config_json: str) -> None:
        """Run the host's ranks until the engine core, or the front end, is gone."""
        config = Config.model_validate_json(config_json)
        path = resolve_checkpoint(config.model)
        HostAgent(config, path, node=node, address=address, keys=ClusterKeys.of(key)).serve(rejoins=False)


class _DeviceHolder:
    """Reserves the GPUs of the first bundle, which this process uses outside of Ray."""

    def devices(self) -> list[str]:
        """Return the numbers of the devices that Ray reserves for it."""
        import ray

        return [str(number) for number in ray.get_gpu_ids()]


def _connect() -> Any:
    """Return the module `ray`, connected to the cluster of this machine."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ValueError(
            "distributed_executor_backend is ray, but Ray is not installed; install kaon[ray], or choose mp"
        ) from error
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address="auto", configure_logging=False)
    except ConnectionError as error:
        raise ValueError(
            "distributed_executor_backend is ray, but no Ray cluster runs on this machine; start one (ray start "
            "--head), or join one (ray start --address), or choose mp"
        ) from error
    finally:
        # Ray's handlers would end this process, which its parent or its user must end.
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ray


def _needs(ray: Any, config: Config, ranks: int) -> dict[str, float]:
    """Return the resources that a number of ranks take of their node."""
    here = ray.get_runtime_context().get_node_id()
    [resources] = [node["Resources"] for node in ray.nodes() if node["NodeID"] == here]
    if config.device == "cuda" or (config.device == "auto" and resources.get("GPU")):
        return {"GPU": float(ranks)}
    return {"CPU": float(ranks * (config.cpu_threads or 1))}


def _reserve(ray: Any, config: Config, needs: dict[str, float], size: int, title: str) -> Any:
    """Reserve a placement group of `size` bundles, the first on this node."""
    parallel = config.parallel_config
    here = {_NODE_ID_LABEL: ray.get_runtime_context().get_node_id()}
    group = ray.util.placement_group(
        [dict(needs)] * size,
        strategy=parallel.ray_placement,
        bundle_label_selector=[here, *({} for _ in range(size - 1))],
    )
    if not group.wait(parallel.rank_start_timeout):
        ray.util.remove_placement_group(group)
        ray.shutdown()
        wanted = " and ".join(f"{number:g} {name}" for name, number in needs.items())
        raise ValueError(
            f"the Ray cluster had no room for {size} {title} of {wanted} each, placed by "
            f"{parallel.ray_placement}, within rank_start_timeout {parallel.rank_start_timeout:g} s"
        )
    return group


class _Running(NamedTuple):
    """An actor."""

    number: int
    since: float
    """Time of its start, on the monotonic clock."""


def keep_actors(
    cluster: RayCluster,
    numbers: Iterable[int],
    joining: str,
    on_failure: Callable[[int, str], object],
    closing: Event,
    *,
    restarts: bool,
) -> None:
    """Start the actors of these numbers, and report each that fails, until `closing`.

    `restarts`: whether to replace it. A new actor may start on another node, if Ray has moved its bundle.
    """
    first, longest = _RESTART_SECONDS
    # Time, on the monotonic clock, at which each number without an actor gets one.
    start_at = dict.fromkeys(numbers, time.monotonic())
    delays = dict.fromkeys(start_at, first)
    running: dict[Any, _Running] = {}
    while (start_at or running) and not closing.is_set():
        now = time.monotonic()
        for number in [number for number, at in start_at.items() if at <= now]:
            del start_at[number]
            running[cluster.serve(number, joining)] = _Running(number, now)
        seconds = min([_POLL_SECONDS, *(at - now for at in start_at.values())])
        if not running:
            closing.wait(seconds)
            continue
        ended, _ = cluster.wait(list(running), seconds)
        for served in ended if not closing.is_set() else ():
            number, since = running.pop(served)
            why = cluster.failure(served)
            if restarts:
                now = time.monotonic()
                delay = first if now - since > longest else delays[number]
                start_at[number] = now + delay
                delays[number] = min(2 * delay, longest)
                if why is not None:
                    _log.warning(
                        "the Ray actor of replica %d ended (%s); another is started in %g s", number, why, delay
                    )
            if why is not None:
                on_failure(number, why)
