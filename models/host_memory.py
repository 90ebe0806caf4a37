"""Zeroed host memory, committed as it is written, in huge pages where it is large. Used for weights and caches."""

import contextlib
import ctypes
import mmap

HUGE_PAGE = 2 << 20
"""Bytes that are committed at a time where memory is large."""


def mapped_zeros(num_bytes: int) -> mmap.mmap:
    """Memory that nothing else holds. Raises `OSError` or `OverflowError` where the system refuses it.

    Huge pages are committed at several times the speed of small ones, and seldom miss the processor's table of pages.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # Kernels may be built without them.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def aligned_zeros(num_bytes: int) -> memoryview:
    """The same, from the beginning of a huge page on where it takes one, so that each holds nothing else."""
    if num_bytes < HUGE_PAGE:
        return memoryview(mapped_zeros(num_bytes))
    pages = mapped_zeros(num_bytes + HUGE_PAGE)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % HUGE_PAGE
    return memoryview(pages)[first : first + num_bytes]
