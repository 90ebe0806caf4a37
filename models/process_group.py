"""`ProcessGroupCollectives`: a tensor-parallel group by torch.distributed: NCCL, which on ROCm is RCCL, or Gloo."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from models.replica_world import ReplicaWorld


class ProcessGroupCollectives:
    """Ranks of one host, joined through a file. A collective that one rank leaves out holds the others up."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        store: Path,
        timeout: float,
        world: ReplicaWorld | None = None,
    ) -> None:
        """`store` is a file that no other group uses. `timeout`: seconds to join, and of each collective.

        `world`: of all replicas' ranks, of which these are some; joined before they are.
        """
        self._rank, self._size, self._device = rank, size, device
        self._store, self._timeout, self._world = store, timedelta(seconds=timeout), world
        self._group: dist.ProcessGroup | None = None

    def join(self) -> None:
        """Meet the other ranks. Raises `RuntimeError` where they do not come in time."""
        if self._world is not None:
            self._group = self._world.tensor_group
            return
        if self._device.type == "cpu":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        else:
            # It would look into the store from time to time, which is gone by then; deaths are noticed otherwise.
            os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        dist.init_process_group(
            "gloo" if self._device.type == "cpu" else "nccl",
            init_method=self._store.as_uri(),
            rank=self._rank,
            world_size=self._size,
            timeout=self._timeout,
            device_id=None if self._device.type == "cpu" else self._device,
        )

    def close(self) -> None:
        """Leave the group, before the interpreter ends: Gloo's threads would end it the hard way."""
        if self._device.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()

    def begin_step(self, number: int) -> None:
        """Nothing: a step that one rank fails ends the group."""

    def abort(self) -> None:
        """Nothing, as above."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        x = x.contiguous()
        if x.numel() == 0:
            return x if self._rank else x.new_empty(*x.shape[:-1], self._size * x.shape[-1])
        if self._rank:
            dist.gather(x, group=self._group, group_dst=0)
            return x
        parts = [torch.empty_like(x) for _ in range(self._size)]
        dist.gather(x, parts, group=self._group, group_dst=0)
        return torch.cat(parts, -1)
