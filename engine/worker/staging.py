"""`Uploads` and `Downloads`: a step's small arrays between host and device, each way by few copies that nobody awaits.

Pinned memory is kept: an upload's is written again only when the device has read it, a download's when the host has.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from engine.worker.device import Device, Event
from models.upload import Packing

_SMALLEST = 1 << 16
"""Bytes of a first buffer."""


class Uploads:
    """Packs arrays into one buffer and copies it while the host goes on."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sent: deque[tuple[torch.Tensor, Event]] = deque()

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Each array on the device, by the time at which what is enqueued now has run; they share memory."""
        packing = Packing(arrays)
        pinned = self._buffer(packing.num_bytes)
        packing.write(pinned)
        on_device = torch.empty(packing.num_bytes, dtype=torch.uint8, device=self._device.torch_device)
        self._device.copy(on_device, pinned[: packing.num_bytes])
        self._sent.append((pinned, self._device.record()))
        return packing.read(on_device)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """The one that was sent longest ago, if the device has read it and it is large enough."""
        if self._sent and self._sent[0][1].query():
            buffer, _ = self._sent.popleft()
            if len(buffer) >= num_bytes:
                return buffer
        return self._device.pinned(max(_SMALLEST, 2 * num_bytes))


class Download:
    """Words on their way to the host."""

    def __init__(self, buffer: torch.Tensor, shape: torch.Size, arrived: Event) -> None:
        self.buffer, self._shape, self._arrived = buffer, shape, arrived

    def wait(self) -> torch.Tensor:
        """The words, once they are there; valid until `Downloads.give_back`. # int64"""
        self._arrived.synchronize()
        num_bytes = self._shape.numel() * torch.int64.itemsize
        return self.buffer[:num_bytes].view(torch.int64).view(self._shape)


class Downloads:
    """Copies of results, begun when the device is told to make them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []

    def begin(self, source: torch.Tensor) -> Download:
        """Copy once what is enqueued now has run. # int64, any shape"""
        buffer = self._free.pop() if self._free else None
        if buffer is None or len(buffer) < source.nbytes:
            buffer = self._device.pinned(max(_SMALLEST, 2 * source.nbytes))
        self._device.copy(buffer[: source.nbytes].view(torch.int64).view(source.shape), source)
        return Download(buffer, source.shape, self._device.record())

    def give_back(self, download: Download) -> None:
        """Nothing looks at its words any more."""
        self._free.append(download.buffer)
