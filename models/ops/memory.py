"""Allocation of host memory, and its transfer to the device.

`mapped_zeros` and `aligned_zeros` allocate host memory for weights and caches, which is committed when it is written,
in huge pages if it is large. `upload` copies a step's small arrays to the device in one asynchronous transfer;
`Packing` lays them out in it.
"""

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

HUGE_PAGE = 2 << 20
"""Bytes per huge page, the unit in which large allocations are committed."""


def mapped_zeros(num_bytes: int) -> mmap.mmap:
    """Allocate zeroed private memory. Raises `OSError` or `OverflowError` if the system refuses it.

    Huge pages are committed several times faster than small ones, and cause fewer TLB misses.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # An operating system may be built without huge pages.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def aligned_zeros(num_bytes: int) -> memoryview:
    """As `mapped_zeros`; large memory begins at a huge page, so that no huge page is shared with other data."""
    if num_bytes < HUGE_PAGE:
        return memoryview(mapped_zeros(num_bytes))
    pages = mapped_zeros(num_bytes + HUGE_PAGE)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % HUGE_PAGE
    return memoryview(pages)[first : first + num_bytes]


# Small arrays of a step, copied to the device in one transfer.

Send: TypeAlias = Callable[[Sequence[npt.NDArray[Any]]], list[torch.Tensor]]
"""Copies arrays to the device. The tensors are valid for work that is enqueued from now on."""

_ALIGNED = 16
"""Alignment in bytes, so that kernels may use the widest loads on every array."""
_TORCH = {
    np.dtype(f"{kind}{size}"): getattr(torch, f"{name}{8 * size}")
    for kind, name, sizes in (("i", "int", (1, 2, 4, 8)), ("u", "uint", (1, 2, 4, 8)), ("f", "float", (2, 4, 8)))
    for size in sizes
} | {np.dtype(bool): torch.bool}


class Packing:
    """The layout of arrays in one buffer of bytes."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], first: int = 0) -> None:
        """`first`: the offset of the first array in bytes, a multiple of 16."""
        self._arrays = arrays
        self._begins = []
        self.end = first
        """The offset after the last array, in bytes."""
        for array in arrays:
            self._begins.append(self.end)
            self.end += -(-array.nbytes // _ALIGNED) * _ALIGNED

    def write(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill a buffer on the host. # [end or more] uint8"""
        for array, begin in zip(self._arrays, self._begins, strict=True):
            np.ndarray(array.shape, array.dtype, buffer, begin)[...] = array

    def read(self, views: "Views") -> list[torch.Tensor]:
        """The arrays in a buffer on any device, as views of it."""
        return [
            views.array(array.dtype, array.shape, begin)
            for array, begin in zip(self._arrays, self._begins, strict=True)
        ]


class Views:
    """A buffer of bytes on any device, seen as arrays."""

    def __init__(self, buffer: torch.Tensor) -> None:
        """# [a multiple of 16] uint8"""
        self._typed: dict[torch.dtype, torch.Tensor] = {torch.uint8: buffer}

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], begin: int) -> torch.Tensor:
        """The array of this dtype and shape that begins at this byte offset."""
        torch_dtype = _TORCH[dtype]
        typed = self._typed.get(torch_dtype)
        if typed is None:
            typed = self._typed[torch_dtype] = self._typed[torch.uint8].view(torch_dtype)
        begin //= dtype.itemsize
        if len(shape) == 1:
            return typed[begin : begin + shape[0]]
        return typed[begin : begin + math.prod(shape)].view(shape)


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, views of one buffer. The host does not wait for them to arrive."""
    packing = Packing(arrays)
    staged = torch.empty(packing.end, dtype=torch.uint8, pin_memory=device.type != "cpu" and packing.end > 0)
    packing.write(staged.numpy())
    return packing.read(Views(staged.to(device, non_blocking=True)))
