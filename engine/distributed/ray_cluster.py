"""`RayCluster`: places in a Ray cluster that runs already, and the actors that run there.

Used by the engine core for its ranks, and by the front end for its replicas. Ray chooses where, keeps devices, and
ends actors with this process; requests, steps and tensors do not go through Ray.
"""

import os
import secrets
import signal
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.distributed.cluster import ClusterKeys, is_loopback
from engine.distributed.curve import endpoint, resolve
from engine.distributed.host_agent import RankHost
from engine.distributed.rank_link import RankFailed
from engine.distributed.remote_ranks import RankPlace, RemoteRank, RemoteRanks
from models.errors import first_line

_NODE_ID_LABEL = "ray.io/node-id"


class Asked(NamedTuple):
    """What is asked of a cluster."""

    size: int
    """Places, the first of them for this process."""
    ranks: int
    """That run at each."""
    what: str
    """As a sentence calls those that take the places."""


class RayCluster:
    """Places, numbered from 0, which is on this machine and has no actor."""

    def __init__(self, config: Config, asked: Asked) -> None:
        """Connect, and wait for the places. Raises `ValueError`, a sentence: no Ray, no cluster, or no room in it."""
        self._config = config
        self._ray = ray = _connect()
        self._needs = _needs(ray, config, asked.ranks)
        self._group = _reserve(ray, config, self._needs, asked)
        nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        self._nodes = [nodes[number] for number in range(asked.size)]
        self._actors: dict[int, Any] = {}
        self._key = secrets.token_urlsafe(32)
        if "GPU" in self._needs:
            self._holder = self._actor(_DeviceHolder, 0)
            # HIP goes by its own variable where that is set.
            devices = ",".join(ray.get(self._holder.devices.remote()))
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = devices

    @property
    def keys(self) -> ClusterKeys:
        """Of a key that nobody else ever needs: the actors are told."""
        return ClusterKeys.of(self._key)

    @property
    def address(self) -> str:
        """Of this machine, by which the actors' reach it."""
        given = self._config.parallel_config.master_addr
        own: str = self._ray.util.get_node_ip_address() if is_loopback(given) else given
        return own

    def share(self, number: int) -> tuple[int, int]:
        """Which of how many places on the same machine that one is, as far as they share its processors or devices."""
        if "GPU" in self._needs:
            # Each actor sees its own devices only, and so does this process.
            return 0, 1
        node = self._nodes[number]
        return self._nodes[:number].count(node), self._nodes.count(node)

    def serve(self, number: int, joining: str) -> Any:
        """Have an actor at that place serve who listens at `joining`, in place of the last one there; see `result`."""
        self._actors[number] = actor = self._actor(_HostActor, number)
        return actor.serve.remote(number, joining, self._key, self._config.model_dump_json())

    def wait(self, served: list[Any], seconds: float | None = None) -> tuple[list[Any], list[Any]]:
        """Those of `served` whose actors have ended, once there is one or so many seconds are over; the others."""
        ended, left = self._ray.wait(served, timeout=seconds)
        return ended, left

    def failure(self, served: Any) -> str | None:
        """Why an actor that has ended did, in a sentence; None where it served to the end."""
        try:
            self._ray.get(served)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            return first_line(cause)
        return None

    def close(self) -> None:
        """End the actors, and give the places back."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def _actor(self, kind: type, number: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=number
        )
        remote = self._ray.remote(kind)
        return remote.options(
            num_cpus=self._needs.get("CPU", 0), num_gpus=self._needs.get("GPU", 0), scheduling_strategy=strategy
        ).remote()


class _HostActor:
    """In a process of Ray's, on the node that it chose."""

    def serve(self, node: int, address: str, key: str, config_json: str) -> None:
        """Run that host's part until the engine core, or the front end, is gone."""
        config = Config.model_validate_json(config_json)
        path = resolve_checkpoint(config.model)
        RankHost(config, path, node=node, address=address, keys=ClusterKeys.of(key)).serve(rejoins=False)


class _DeviceHolder:
    """Holds the GPUs of the first place, which are used outside of Ray."""

    def devices(self) -> list[str]:
        """Numbers of the devices that Ray keeps for it."""
        import ray

        return [str(number) for number in ray.get_gpu_ids()]


def _connect() -> Any:
    """Ray, connected to the cluster of this machine."""
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
        # When this process ends is for its parent to say, or its user, not for a signal that Ray takes.
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ray


def _needs(ray: Any, config: Config, ranks: int) -> dict[str, float]:
    """What so many ranks need of their node."""
    here = ray.get_runtime_context().get_node_id()
    [resources] = [node["Resources"] for node in ray.nodes() if node["NodeID"] == here]
    if config.device == "cuda" or (config.device == "auto" and resources.get("GPU")):
        return {"GPU": float(ranks)}
    return {"CPU": float(ranks * (config.cpu_threads or 1))}


def _reserve(ray: Any, config: Config, needs: dict[str, float], asked: Asked) -> Any:
    """The places, the first on this node."""
    parallel = config.parallel_config
    here = {_NODE_ID_LABEL: ray.get_runtime_context().get_node_id()}
    group = ray.util.placement_group(
        [dict(needs)] * asked.size,
        strategy=parallel.ray_placement,
        bundle_label_selector=[here, *({} for _ in range(asked.size - 1))],
    )
    if not group.wait(parallel.rank_start_timeout):
        ray.util.remove_placement_group(group)
        ray.shutdown()
        wanted = " and ".join(f"{number:g} {name}" for name, number in needs.items())
        raise ValueError(
            f"the Ray cluster had no room for {asked.size} {asked.what} of {wanted} each, placed by "
            f"{parallel.ray_placement}, within rank_start_timeout {parallel.rank_start_timeout:g} s"
        )
    return group


# [ray_ranks] `RayRanks`: the ranks behind the first as actors of a Ray cluster that runs already, one each.
#
# An actor is a host of `RemoteRanks` with one rank.


class RayRanks(RemoteRanks):
    """See `RankPlaces`."""

    def __init__(self, config: Config, path: Path) -> None:
        """Take places in the cluster, start the actors, and return.

        Raises `ValueError`, a sentence, where there is no Ray, no cluster, or no room in it.
        """
        parallel = config.parallel_config
        self._cluster = cluster = RayCluster(config, Asked(parallel.tensor_parallel_size, 1, "ranks"))
        places = [RankPlace(rank, *cluster.share(rank)) for rank in range(parallel.tensor_parallel_size)]
        self._start(config, path, cluster.keys, places, cluster.address)
        joining = endpoint(resolve(cluster.address), parallel.master_port)
        served = [cluster.serve(link.rank, joining) for link in self.links]
        Thread(target=self._watch, args=(served,), name="ray", daemon=True).start()

    def close(self) -> None:
        """See `RankPlaces`."""
        super().close()
        self._cluster.close()

    def _watch(self, served: list[Any]) -> None:
        """Tell of actors that end before they have joined: of the others their connections tell."""
        links = dict(zip(served, self.links, strict=True))
        left = served
        while left:
            ended, left = self._cluster.wait(left)
            for actor in ended:
                link, why = links[actor], self._cluster.failure(actor)
                if why is not None and isinstance(link, RemoteRank) and link.absence is not None:
                    link.give(RankFailed(why, usage=True))
