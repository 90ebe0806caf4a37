"""`SharedMemoryCollectives`: a tensor-parallel group of one host's CPU ranks; see group.c. Used by the layers."""

import ctypes
import mmap
import os
from contextlib import AbstractContextManager, nullcontext

import torch

from models.errors import CollectiveAborted
from models.kernels.cpu import runtime
from models.kernels.cpu.group_structures import AllReduce, Group
from models.kernels.cpu.library import Library
from models.kernels.cpu.structures import Step


class SharedMemoryCollectives:
    """A rank's end of the group. One thread calls it."""

    def __init__(self, library: Library, rank: int, size: int, descriptor: int) -> None:
        """`descriptor` is of a file that all the ranks map, which stays the caller's to close."""
        self._functions = library.group_functions
        num_bytes = self._functions.bytes(size)
        os.ftruncate(descriptor, num_bytes)  # By whoever comes first: its length is the same for all.
        self._memory = mmap.mmap(descriptor, num_bytes)
        self._size = size
        self._group = Group(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), rank, size)
        self._address = ctypes.addressof(self._group)

    def join(self) -> None:
        """Nothing: the first collective waits for all ranks."""

    def close(self) -> None:
        """Nothing: the memory goes with the process."""

    def begin_step(self, number: int) -> None:
        """The collectives from here on belong to this step."""
        self._functions.begin(self._address, number)

    def abort(self) -> None:
        """Have every rank leave the step: what waits, or will, raises `CollectiveAborted`."""
        self._functions.leave(self._address)

    def check(self) -> None:
        """Raise `CollectiveAborted` where a recorded collective could not be finished."""
        if self._group.has_left:
            raise CollectiveAborted("another rank has left this step")

    @property
    def are_captured(self) -> bool:
        """See `Collectives`."""
        return False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        if x.dtype is torch.bfloat16 and runtime.active():
            rows, columns = x.shape
            assert x.stride(0) == columns, "sums are of rows without gaps"
            arguments = AllReduce(x.data_ptr(), columns, 0, self._address)
            runtime.current().run(arguments, Step(num_tokens=rows), (x,))
            self.check()
            return x
        if x.dtype not in (torch.float32, torch.bfloat16):
            return self.all_reduce(x.float()).to(x.dtype)
        x = x.contiguous()
        if self._functions.all_reduce(self._address, x.data_ptr(), x.numel(), x.dtype is torch.float32):
            self.check()
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        x = x.contiguous()
        columns = x.shape[-1]
        whole = None if self._group.rank else x.new_empty(*x.shape[:-1], self._size * columns)
        rows = x.numel() // max(1, columns)
        if self._functions.gather(
            self._address, x.data_ptr(), rows, columns * x.itemsize, None if whole is None else whole.data_ptr()
        ):
            self.check()
        return x if whole is None else whole

    def capturing(self) -> AbstractContextManager[None]:
        """See `Collectives`: no graph has them."""
        return nullcontext()
