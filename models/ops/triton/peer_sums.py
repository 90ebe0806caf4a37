"""Sums over the ranks of one host, in memory that all of their GPUs read; also with a residual sum and a norm.

    a rank's memory:   flags [PHASES, PROGRAMS, ranks] int64 | half 0 | half 1

Each rank copies its part to a half, sets a flag at every other rank, waits for theirs, and reads all parts in the
order of ranks: all get the same bits, whatever the number of rows. Where that is much to read, each rank adds up its
share of the tiles, and a second barrier later reads the others' (two-shot). Calls alternate between the halves: a rank
that writes to one for the second time has met all others in the call between, so none still reads. The number of a
call is kept on the device, so a graph can replay it; it has 64 bits, since a server makes 2^31 calls in some days.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from models.ops.triton.configs import launch_of
from models.ops.triton.grids import next_power_of_2
from models.ops.triton.launcher import jit
from models.ops.types import NormWeight

PROGRAMS = 64
"""Programs of a launch, however small the sum: all of them count the calls."""
_PHASES = 2
_PROGRAMS = tl.constexpr(PROGRAMS)
_ONE_SHOT_BYTES = 1 << 19
"""Bytes that a rank reads, at most, where it reads the whole parts of all others."""
STEP = 16
"""The number of elements is a multiple of this, so that loads are wide."""
_STEP_SIZE = tl.constexpr(STEP)


def flag_bytes(size: int) -> int:
    """Bytes of the flags of `size` ranks, which come before the halves."""
    return _PHASES * PROGRAMS * size * torch.int64.itemsize


@triton.jit
def _meet(peers, phase, call, limit, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Wait until this program has come here on every rank, at most for `limit` looks at each."""
    # All warps have stored what the others are to read.
    tl.debug_barrier()
    first = (phase * _PROGRAMS + tl.program_id(0)) * SIZE
    for rank in tl.static_range(SIZE):
        theirs = tl.load(peers + rank).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(theirs + first + RANK, call, sem="release", scope="sys")
    own = tl.load(peers + RANK).to(tl.pointer_type(tl.int64))
    for rank in tl.static_range(SIZE):
        looks = 0
        seen = tl.atomic_add(own + first + rank, 0, sem="acquire", scope="sys")
        while (seen < call) & (looks < limit):
            seen = tl.atomic_add(own + first + rank, 0, sem="acquire", scope="sys")
            looks += 1
    tl.debug_barrier()


@triton.jit
def _half(peers, rank, offset, DTYPE: tl.constexpr):
    """A rank's part of the sum, in the half that this call uses."""
    return tl.multiple_of((tl.load(peers + rank) + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _total(peers, offset, at, mask, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """All ranks' parts, added in the order of ranks in float32 and rounded once."""
    total = tl.load(_half(peers, 0, offset, DTYPE) + at, mask=mask, other=0.0, cache_modifier=".cv").to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        part = tl.load(_half(peers, rank, offset, DTYPE) + at, mask=mask, other=0.0, cache_modifier=".cv")
        total += part.to(tl.float32)
    return total.to(DTYPE)


@jit(do_not_specialize=["num_steps", "limit"])
def peer_sum_kernel(
    x,  # [num_elements]
    out,  # [num_elements]
    peers,  # [SIZE] int64, addresses of all ranks' memory
    calls,  # [PROGRAMS] int64, calls so far
    num_steps,  # num_elements / STEP
    limit,  # Looks at a flag, at most
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    IS_TWO_SHOT: tl.constexpr,
    ELEMENTS: tl.constexpr,  # Of one tile
):
    """Each program adds up every PROGRAMS-th run of tiles. Grid: (PROGRAMS,)."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    call = tl.load(calls + tl.program_id(0)) + 1
    offset = FLAG_BYTES + call % 2 * HALF_BYTES
    lanes = tl.arange(0, ELEMENTS)
    num_elements = num_steps * _STEP_SIZE
    RUN: tl.constexpr = SIZE if IS_TWO_SHOT else 1
    own = _half(peers, RANK, offset, DTYPE)
    run = tl.program_id(0)
    num_runs = tl.cdiv(num_elements, RUN * ELEMENTS)
    while run < num_runs:
        for tile in tl.static_range(RUN):
            at = (run * RUN + tile) * ELEMENTS + lanes
            tl.store(own + at, tl.load(x + at, mask=at < num_elements, other=0.0), mask=at < num_elements)
        run += _PROGRAMS
    if tl.program_id(0) < num_runs:
        _meet(peers, 0, call, limit, RANK, SIZE)
    run = tl.program_id(0)
    if IS_TWO_SHOT:
        while run < num_runs:
            # Nobody else reads this tile of the half before the next barrier.
            at = (run * RUN + RANK) * ELEMENTS + lanes
            tl.store(own + at, _total(peers, offset, at, at < num_elements, DTYPE, SIZE), mask=at < num_elements)
            run += _PROGRAMS
        if tl.program_id(0) < num_runs:
            _meet(peers, 1, call, limit, RANK, SIZE)
        run = tl.program_id(0)
        while run < num_runs:
            for tile in tl.static_range(RUN):
                at = (run * RUN + tile) * ELEMENTS + lanes
                theirs = _half(peers, tile, offset, DTYPE) + at
                summed = tl.load(theirs, mask=at < num_elements, other=0.0, cache_modifier=".cv")
                tl.store(out + at, summed, mask=at < num_elements)
            run += _PROGRAMS
    else:
        while run < num_runs:
            at = run * ELEMENTS + lanes
            tl.store(out + at, _total(peers, offset, at, at < num_elements, DTYPE, SIZE), mask=at < num_elements)
            run += _PROGRAMS
    tl.store(calls + tl.program_id(0), call)


@jit(do_not_specialize=["num_rows", "limit"])
def peer_sum_norm_kernel(
    x,  # [num_rows, WIDTH]
    residual,  # [num_rows, WIDTH], the next residual is written there
    weight,  # [WIDTH]
    out,  # [num_rows, WIDTH]
    peers,  # As above
    calls,
    num_rows,
    eps,
    limit,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
    ELEMENTS: tl.constexpr,  # WIDTH filled up to a power of two
    OFFSET: tl.constexpr,  # Added to the weight
):
    """The norm of `sum over ranks of x + residual`, rounded as by one kernel after the other. Grid: (PROGRAMS,)."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    call = tl.load(calls + tl.program_id(0)) + 1
    offset = FLAG_BYTES + call % 2 * HALF_BYTES
    columns = tl.arange(0, ELEMENTS)
    inside = columns < WIDTH
    own = _half(peers, RANK, offset, DTYPE)
    row = tl.program_id(0)
    while row < num_rows:
        at = row * WIDTH + columns
        tl.store(own + at, tl.load(x + at, mask=inside, other=0.0), mask=inside)
        row += _PROGRAMS
    row = tl.program_id(0)
    if row < num_rows:
        _meet(peers, 0, call, limit, RANK, SIZE)
        while row < num_rows:
            at = row * WIDTH + columns
            total = _total(peers, offset, at, inside, DTYPE, SIZE).to(tl.float32)
            kept = (total + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(DTYPE)
            tl.store(residual + at, kept, mask=inside)
            exact = kept.to(tl.float32)
            scale = tl.rsqrt(tl.sum(exact * exact, 0) / WIDTH + eps)
            weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + OFFSET
            tl.store(out + at, (exact * scale * weights).to(DTYPE), mask=inside)
            row += _PROGRAMS
    tl.store(calls + tl.program_id(0), call)


class PeerMemory:
    """One rank's view of the memory of all, and the sums in it. All ranks make the same calls in the same order."""

    def __init__(self, rank: int, parts: Sequence[torch.Tensor]) -> None:
        """`parts`: each rank's memory, zeros at first, as this process reads it. # size x [bytes] uint8

        Raises `ValueError` where the memory holds no sum.
        """
        self._rank, self._size, self._parts = rank, len(parts), parts
        device = parts[rank].device
        self._flag_bytes = flag_bytes(self._size)
        self._half_bytes = (parts[rank].nbytes - self._flag_bytes) // 2 // 16 * 16
        if self._half_bytes <= 0:
            raise ValueError(f"{parts[rank].nbytes} bytes hold no sum of {self._size} ranks; allocate more")
        self._peers = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=device)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)
        self.limit = (1 << 31) - 1
        """Looks at another rank's flag before its part is read although it has not come."""

    def fits(self, x: torch.Tensor) -> bool:
        """Whether a sum is computed here, on all ranks alike."""
        is_whole = x.numel() % STEP == 0 and x.numel() > 0
        return is_whole and x.dtype in (torch.bfloat16, torch.float16) and x.nbytes <= self._half_bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, which `fits`. # any shape"""
        x = x.contiguous()
        out = torch.empty_like(x)
        is_two_shot = self._size > 2 and self._size * x.nbytes > _ONE_SHOT_BYTES
        peer_sum_kernel[(PROGRAMS,)](
            x,
            out,
            self._peers,
            self._calls,
            x.numel() // STEP,
            self.limit,
            RANK=self._rank,
            SIZE=self._size,
            FLAG_BYTES=self._flag_bytes,
            HALF_BYTES=self._half_bytes,
            IS_TWO_SHOT=is_two_shot,
            **launch_of("peer_sum", x.device).keywords,
        )
        return out

    def fits_norm(self, x: torch.Tensor, norm: NormWeight) -> bool:
        """Whether a sum is computed with the norm after it: one that is small, of the weight's type."""
        if x.shape[-1] % STEP:
            return False
        is_small = self._size == 2 or self._size * x.nbytes <= _ONE_SHOT_BYTES
        return is_small and x.dim() == 2 and x.dtype is norm.weight.dtype and self.fits(x)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight) -> tuple[torch.Tensor, torch.Tensor]:
        """`RMSNorm.add_norm` of the sum of all ranks' `x`, which `fits_norm`. # [rows, size] each"""
        x, residual = x.contiguous(), residual.contiguous()
        out = torch.empty_like(x)
        num_rows, width = x.shape
        peer_sum_norm_kernel[(PROGRAMS,)](
            x,
            residual,
            norm.weight,
            out,
            self._peers,
            self._calls,
            num_rows,
            norm.eps,
            self.limit,
            RANK=self._rank,
            SIZE=self._size,
            FLAG_BYTES=self._flag_bytes,
            HALF_BYTES=self._half_bytes,
            WIDTH=width,
            ELEMENTS=next_power_of_2(width),
            OFFSET=norm.offset,
            **launch_of("peer_sum_norm", x.device, size=width).keywords,
        )
        return out, residual
