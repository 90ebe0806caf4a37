"""`upload`: a step's small arrays, brought to the device in one asynchronous copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNED = 16
"""Bytes, so that kernels may read any of the arrays in the widest way."""


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, views of one buffer. The host does not wait for them to arrive."""
    sizes = [-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type != "cpu")
    for array, part in zip(arrays, torch.split(staged, sizes), strict=True):
        part.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    arrived = torch.split(staged.to(device, non_blocking=True), sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, part in zip(arrays, arrived, strict=True)
    ]
