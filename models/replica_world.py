"""`ReplicaWorld`: the ranks of all replicas that share experts out, joined by torch.distributed; NCCL or Gloo."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from models import nccl
from models.layers.token_exchange import AllToAllExchange


class ReplicaWorld(AllToAllExchange):
    """This rank's end of it, and an `Exchange`. A collective that one rank leaves out holds the others up."""

    tensor_group: dist.ProcessGroup
    """The ranks of this replica."""
    _column: dist.ProcessGroup
    """The ranks of the same place in their replicas."""
    _heads: dist.ProcessGroup
    """The first rank of each replica, on the host."""

    def __init__(
        self,
        *,
        replica: int,
        num_replicas: int,
        rank: int,
        size: int,
        device: torch.device,
        store: Path,
        timeout: float,
        note_arrival: Callable[[], object] | None = None,
    ) -> None:
        """`store` is a file that no other group uses. `timeout`: seconds to join, and of each collective.

        `note_arrival` is called before each, so that it is known who waits for whom.
        """
        self._note_arrival = note_arrival
        self._replica, self._num_replicas, self._rank, self._size = replica, num_replicas, rank, size
        self._device, self._store, self._timeout = device, store, timedelta(seconds=timeout)

    def join(self) -> None:
        """Meet the other ranks. Raises `RuntimeError` where they do not come in time."""
        on_host = self._device.type == "cpu"
        if on_host:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        else:
            nccl.prepare(self._device)
        num_ranks = self._num_replicas * self._size
        dist.init_process_group(
            "gloo" if on_host else "cpu:gloo,cuda:nccl",
            init_method=self._store.as_uri(),
            rank=self._replica * self._size + self._rank,
            world_size=num_ranks,
            timeout=self._timeout,
        )
        # Every rank makes all groups, in this order, and is in some.
        replicas = [list(range(first, first + self._size)) for first in range(0, num_ranks, self._size)]
        columns = [list(range(first, num_ranks, self._size)) for first in range(self._size)]
        self.tensor_group = [dist.new_group(ranks, timeout=self._timeout) for ranks in replicas][self._replica]
        self._column = [dist.new_group(ranks, timeout=self._timeout) for ranks in columns][self._rank]
        self._heads = dist.new_group(columns[0], timeout=self._timeout, backend="gloo")

    def all_to_all(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """See `AllToAllExchange`."""
        self._arrive()
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self._column)
        return arrived

    def agree(self, own: int) -> tuple[int, ...]:
        """What each replica says, by number; called by their first ranks alone."""
        self._arrive()
        said = torch.zeros(self._num_replicas, dtype=torch.int64)
        said[self._replica] = own
        dist.all_reduce(said, group=self._heads)
        return tuple(said.tolist())

    def leave(self) -> bool:
        """False: the others learn of this one's end by their connections alone."""
        return False

    @property
    def num_bytes(self) -> int:
        """0: nothing is kept."""
        return 0

    def check(self) -> None:
        """Nothing: each exchange that fails raises."""

    def _arrive(self) -> None:
        if self._note_arrival is not None:
            self._note_arrival()
