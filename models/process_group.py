"""`ProcessGroupCollectives`: a tensor-parallel group by torch.distributed: NCCL, which on ROCm is RCCL, or Gloo."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from models import nccl
from models.kernels import aiter
from models.rendezvous import Rendezvous
from models.replica_world import ReplicaWorld

if TYPE_CHECKING:
    from models.kernels.aiter.reduce import FastSum


_log = logging.getLogger(__name__)


class ProcessGroupCollectives:
    """Ranks that meet in a store. A collective that one rank leaves out holds the others up."""

    def __init__(
        self, rank: int, size: int, device: torch.device, rendezvous: Rendezvous, world: ReplicaWorld | None = None
    ) -> None:
        """`world`: of all replicas' ranks, of which these are some. Joined before them, it spares the meeting."""
        self._rank, self._size, self._device = rank, size, device
        self._rendezvous, self._world = rendezvous, world
        self._group: dist.ProcessGroup | None = None
        self._fast_sum: FastSum | None = None

    def join(self) -> None:
        """Meet the other ranks. Raises `RuntimeError` where they do not come in time."""
        if self._world is not None:
            self._group = self._world.tensor_group
            return
        interface = self._rendezvous.interface()
        if self._device.type == "cpu":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        else:
            if not self._rendezvous.is_local:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
            nccl.prepare(self._device)
        dist.init_process_group(
            "gloo" if self._device.type == "cpu" else "nccl",
            store=self._rendezvous.store(self._rank, self._size),
            rank=self._rank,
            world_size=self._size,
            timeout=self._rendezvous.timeout,
            device_id=None if self._device.type == "cpu" else self._device,
        )
        # Each rank has probed for itself, and all must do the same.
        if self._device.type != "cpu" and torch.version.hip is not None and self._agree(aiter.takes("all_reduce")):
            self._fast_sum = self._joined_fast_sum()

    def _joined_fast_sum(self) -> "FastSum | None":
        """By aiter, among GPUs of one host."""
        if not self._rendezvous.is_local:
            _log.warning("all_reduce by RCCL (not aiter: it sums over GPUs of one host)")
            return None
        from models.kernels.aiter import reduce

        os.environ.setdefault("GLOO_SOCKET_IFNAME", self._rendezvous.interface())
        return reduce.join(self._rank, self._size, self._device, self._rendezvous.beside("aiter"), self._agree)

    def _agree(self, is_so: bool) -> bool:
        """Whether something is so on all ranks."""
        found = torch.tensor(int(is_so), device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group)
        return bool(found.item())

    def close(self) -> None:
        """Leave the group, before the interpreter ends: Gloo's threads would end it the hard way."""
        if self._device.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()

    def begin_step(self, number: int) -> None:
        """Nothing: a step that one rank fails ends the group."""

    def abort(self) -> None:
        """Nothing, as above."""

    @property
    def are_captured(self) -> bool:
        """See `Collectives`: NCCL's and RCCL's are kernels like others, Gloo's are calls of the host."""
        return self._device.type != "cpu"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        if self._fast_sum is not None and (summed := self._fast_sum(x)) is not None:
            return summed
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

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """See `Collectives`: NCCL's need nothing; RCCL's, that nobody asks whether earlier ones have ended."""
        if self._device.type != "cpu" and torch.version.hip is not None:
            # A thread of torch's does, as long as it knows of one. Up to ROCm 7.2.0 that breaks another thread's
            # capture, whatever the two say of threads, and the error ends the process.
            group = self._group or dist.group.WORLD
            assert isinstance(group, dist.ProcessGroup)
            group._wait_for_pending_works()
        with nullcontext() if self._fast_sum is None else self._fast_sum.capturing():
            yield
