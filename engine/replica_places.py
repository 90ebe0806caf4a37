"""`deal_out`: which host runs which of the data-parallel replicas. Used by the front end."""

from typing import NamedTuple


class ReplicaPlace(NamedTuple):
    """Where a replica runs."""

    node: int
    """Number of its host; 0 is the front end's own."""
    place: int
    """Among the replicas of its host, which share out its GPUs or its cores."""
    places: int
    """How many those are."""


def deal_out(num_replicas: int, nnodes: int) -> list[ReplicaPlace]:
    """By replica: as many on each host, neighbours together. `nnodes` divides the replicas."""
    per_node = num_replicas // nnodes
    return [ReplicaPlace(*divmod(replica, per_node), per_node) for replica in range(num_replicas)]
