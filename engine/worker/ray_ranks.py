"""`RayRanks`: the ranks behind the first as actors of a Ray cluster that runs already, one each.

An actor is a host of `RemoteRanks` with one rank. Ray chooses where, keeps devices for it, and ends it with this
process; steps and tensors do not go through Ray.
"""

import logging
import os
import secrets
import signal
from pathlib import Path
from threading import Thread
from typing import Any

from engine.checkpoint import resolve_checkpoint
from engine.cluster_key import ClusterKeys, is_loopback
from engine.cluster_settings import CommonGround
from engine.config import Config
from engine.rank_host import RankHost
from engine.worker.curve import endpoint, resolve
from engine.worker.rank_messages import RankFailed
from engine.worker.remote_rank import RemoteRank
from engine.worker.remote_ranks import RemoteRanks

logger = logging.getLogger(__name__)

_NODE_ID_LABEL = "ray.io/node-id"


class RayRanks(RemoteRanks):
    """See `RankPlaces`."""

    def __init__(self, config: Config, path: Path) -> None:
        """Take places in the cluster, start the actors, and return.

        Raises `ValueError`, a sentence, where there is no Ray, no cluster, or no room in it.
        """
        parallel = config.parallel_config
        self._ray = ray = _connect()
        needs = _needs(ray, config)
        self._group = _reserve(ray, config, needs)
        nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        by_rank = [nodes[rank] for rank in range(parallel.tensor_parallel_size)]
        if "GPU" in needs:
            # Each actor sees its own device only, and so does this process from now on.
            places = {rank: (rank, 0, 1) for rank in range(len(by_rank))}
            self._holder = self._actor(_DeviceHolder, 0, needs)
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ray.get(self._holder.devices.remote()))
        else:
            places = {
                rank: (rank, by_rank[:rank].count(node), by_rank.count(node)) for rank, node in enumerate(by_rank)
            }
        address = parallel.master_addr
        if is_loopback(address):
            address = ray.util.get_node_ip_address()
        # Nobody else ever needs it: the actors are told.
        key = secrets.token_urlsafe(32)
        self._start(config, path, ClusterKeys.of(key), places, address)
        joining = endpoint(resolve(address), parallel.master_port)
        self._actors = [self._actor(_RankActor, rank, needs) for rank in range(1, len(by_rank))]
        served = [
            actor.serve.remote(rank, joining, key, config.model_dump_json())
            for rank, actor in enumerate(self._actors, 1)
        ]
        Thread(target=self._watch, args=(served,), name="ray", daemon=True).start()

    def close(self) -> None:
        """See `RankPlaces`."""
        super().close()
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def _actor(self, kind: type, rank: int, needs: dict[str, float]) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=rank
        )
        remote = self._ray.remote(kind)
        return remote.options(
            num_cpus=needs.get("CPU", 0), num_gpus=needs.get("GPU", 0), scheduling_strategy=strategy
        ).remote()

    def _watch(self, served: list[Any]) -> None:
        """Tell of actors that end before they have joined: of the others their connections tell."""
        links = dict(zip(served, self.links, strict=True))
        left = served
        while left:
            ended, left = self._ray.wait(left)
            for actor in ended:
                link = links[actor]
                try:
                    self._ray.get(actor)
                except self._ray.exceptions.RayError as error:
                    cause = getattr(error, "cause", None) or error
                    sentence = str(cause).strip().partition("\n")[0]
                    if isinstance(link, RemoteRank) and link.absence is not None:
                        link.give(RankFailed(sentence, usage=True))


class _RankActor:
    """In a process of Ray's, on the node that it chose."""

    def serve(self, node: int, address: str, key: str, config_json: str) -> None:
        """Run that rank until the engine core is gone."""
        config = Config.model_validate_json(config_json)
        path = resolve_checkpoint(config.model)
        timeout, ground = config.parallel_config.rank_start_timeout, CommonGround.of(config, path)
        host = RankHost(node, address, ClusterKeys.of(key), ground, path, timeout, config.cpu_threads)
        host.serve(rejoins=False)


class _DeviceHolder:
    """Holds the GPU of rank 0, which runs outside of Ray."""

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
        # When this process ends is for its parent to say, not for a signal.
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ray


def _needs(ray: Any, config: Config) -> dict[str, float]:
    """What a rank needs of its node."""
    here = ray.get_runtime_context().get_node_id()
    [resources] = [node["Resources"] for node in ray.nodes() if node["NodeID"] == here]
    if config.device == "cuda" or (config.device == "auto" and resources.get("GPU")):
        return {"GPU": 1.0}
    return {"CPU": float(config.cpu_threads or 1)}


def _reserve(ray: Any, config: Config, needs: dict[str, float]) -> Any:
    """A place for every rank, that of rank 0 on this node."""
    parallel = config.parallel_config
    size = parallel.tensor_parallel_size
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
            f"the Ray cluster had no room for {size} ranks of {wanted} each, placed by {parallel.ray_placement}, "
            f"within rank_start_timeout {parallel.rank_start_timeout:g} s"
        )
    return group
