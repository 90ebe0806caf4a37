"""Sets up all-reduce through peer memory of one host's GPUs, computed by `models.ops.triton.peer_sums`.

Each rank allocates memory and sends a CUDA or HIP interprocess handle of it to the others. The ranks use it if every
GPU can access every other one, and if trial sums are right on all ranks. The caller computes sums that do not fit.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import msgspec
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from models.ops.torch_ops import torch_norm
from models.ops.types import NormWeight

_log = logging.getLogger(__name__)

_HALF_BYTES = 8 << 20
"""The most bytes of a sum: decodes of hundreds of rows. Larger sums are bound by bandwidth, where NCCL is faster."""
_TRIAL_LOOKS = 1 << 20
"""Number of polls of another rank's flag in a trial, about a second."""
_TRIED_ROWS = (1, 5, 64, 700)
_TRIED_WIDTH = 1024


_Handle: TypeAlias = tuple[int, bytes, int, int, bytes, int, bytes, bool]
"""The handle by which torch opens memory of another process."""
NormForm: TypeAlias = tuple[int, torch.dtype, float, float]
"""Features, dtype, epsilon and offset."""


class PeerSums:
    """The all-reduce of `Collectives` for small tensors on one host."""

    def __init__(self, memory: Any, agree: Callable[[bool], bool]) -> None:
        """`memory`: a `PeerMemory`. `agree`: whether something holds on all ranks."""
        self._memory, self._agree = memory, agree
        self._norms: dict[NormForm, bool] = {}
        """Whether the kernel fused with a norm of this shape was right on all ranks, by shape."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The sum of all ranks' `x`; None, on all ranks alike, if this object does not support it."""
        return self._memory.all_reduce(x) if self._memory.fits(x) else None

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Collectives`."""
        if not self._memory.fits_norm(x, norm):
            return None
        form = x.shape[1], x.dtype, norm.eps, norm.offset
        if form not in self._norms:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            self._norms[form] = self._agree(self._is_right(x, residual, norm))
        return self._memory.add_norm(x, residual, norm) if self._norms[form] else None

    def _is_right(self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight) -> bool:
        """Whether the kernel gives what a sum and then a norm by torch give, of these numbers."""
        before, limit = residual.clone(), self._memory.limit
        self._memory.limit = _TRIAL_LOOKS
        normed, kept = self._memory.add_norm(x, before.clone(), norm)
        expected = self._memory.all_reduce(x) + before
        self._memory.limit = limit
        is_right = torch.allclose(normed.float(), torch_norm(expected, norm).float(), rtol=2**-6, atol=2**-6)
        if not (is_right and torch.equal(kept, expected)):
            _log.warning("sums with a norm of %d features are not fused: the kernel is wrong", x.shape[1])
            return False
        return True

    def try_out(self, rank: int, device: torch.device, exact: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
        """The reason why trial sums fail, each repeated since its flags are reused; None if all are right.

        All ranks compute all trial sums, even after a failure.
        """
        limit, self._memory.limit = self._memory.limit, _TRIAL_LOOKS
        reason: str | None = None
        for rows in _TRIED_ROWS * 3:
            x = torch.arange(rows * _TRIED_WIDTH, device=device).view(rows, -1) % 13 * (rank + 1)
            found = self(x.bfloat16())
            expected = exact(x.float())
            if found is None or not torch.allclose(found.float(), expected, rtol=2**-7):
                reason = f"its sum of {rows} rows is wrong"
        self._memory.limit = limit
        return reason

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """See `Collectives`: the kernels read fixed addresses, and count their calls on the device."""
        yield


def join(
    rank: int,
    size: int,
    device: torch.device,
    mailbox: Store,
    agree: Callable[[bool], bool],
    exact: Callable[[torch.Tensor], torch.Tensor],
) -> PeerSums | None:
    """This rank's `PeerSums` if trial sums were right on all ranks; else None, with a log line.

    `mailbox`: a store of these ranks alone. `agree`: whether something holds on all ranks. `exact`: the sum of all
    ranks' tensors by other means.
    """
    sums: PeerSums | None = None
    reason = _obstacle(rank, device, size)
    if agree(reason is None):
        try:
            from models.ops.triton.peer_sums import PeerMemory, flag_bytes

            own = torch.zeros(flag_bytes(size) + 2 * _HALF_BYTES, dtype=torch.uint8, device=device)
            memory = PeerMemory(rank, _parts(rank, size, own, mailbox))
            torch.cuda.synchronize(device)
            sums = PeerSums(memory, agree)
        # Drivers and compilers may raise anything.
        except Exception as error:  # noqa: BLE001
            reason = f"it failed: {type(error).__name__}: {error}".splitlines()[0]
        if agree(reason is None):
            assert sums is not None
            reason = sums.try_out(rank, device, exact)
            if agree(reason is None):
                return sums
    _log.info("all_reduce by NCCL (not in the GPUs' memory: %s)", reason or "another rank cannot")
    return None


def _obstacle(rank: int, device: torch.device, size: int) -> str | None:
    """The reason why this GPU cannot read the others' memory; None if it can."""
    first = device.index - rank
    others = [index for index in range(first, first + size) if index != device.index]
    blind = [index for index in others if not torch.cuda.can_device_access_peer(device, index)]
    return f"GPU {device.index} cannot access GPU {blind[0]}" if blind else None


def _parts(rank: int, size: int, own: torch.Tensor, mailbox: Store) -> Sequence[torch.Tensor]:
    """The addresses of all ranks' memory in this process."""
    handle: tuple[Any, ...] = own.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    mailbox.set(f"memory {rank}", msgspec.json.encode(handle).decode())
    parts = []
    for other in range(size):
        if other == rank:
            parts.append(own)
            continue
        theirs = msgspec.json.decode(mailbox.get(f"memory {other}"), type=_Handle)
        storage = torch.UntypedStorage._new_shared_cuda(*theirs)
        parts.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    return parts
