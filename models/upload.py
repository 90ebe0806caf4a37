"""`upload`: a step's small arrays, brought to the device in one asynchronous copy; `Packing`: how they share it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNED = 16
"""Bytes, so that kernels may read any of the arrays in the widest way."""


class Packing:
    """Where arrays lie in one buffer of bytes."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        self._arrays = arrays
        self._begins = []
        self.num_bytes = 0
        """Of the buffer."""
        for array in arrays:
            self._begins.append(self.num_bytes)
            self.num_bytes += -(-array.nbytes // _ALIGNED) * _ALIGNED

    def write(self, buffer: torch.Tensor) -> None:
        """Fill a buffer on the host. # [num_bytes or more] uint8"""
        host = buffer.numpy()
        for array, begin in zip(self._arrays, self._begins, strict=True):
            host[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def read(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The arrays in a buffer on any device, as views of it. # [num_bytes] uint8"""
        return [
            buffer[begin : begin + array.nbytes]
            .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
            .view(array.shape)
            for array, begin in zip(self._arrays, self._begins, strict=True)
        ]


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, views of one buffer. The host does not wait for them to arrive."""
    packing = Packing(arrays)
    staged = torch.empty(packing.num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    packing.write(staged)
    return packing.read(staged.to(device, non_blocking=True))
