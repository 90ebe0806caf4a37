"""`RayRanks`: the ranks behind the first as actors of a Ray cluster that runs already, one each.

An actor is a host of `RemoteRanks` with one rank.
"""

from pathlib import Path
from threading import Thread
from typing import Any

from engine.config import Config
from engine.worker.curve import endpoint, resolve
from engine.worker.rank_messages import RankFailed
from engine.worker.ray_cluster import Asked, RayCluster
from engine.worker.remote_rank import RemoteRank
from engine.worker.remote_ranks import RankPlace, RemoteRanks


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
