"""`Uploads` and `Downloads`: a step's small arrays between host and device, each way by few copies that nobody awaits.

Pinned memory is kept: an upload's is written again only when the device has read it, a download's when the host has.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from engine.worker.device import Device, Event
from models.upload import Packing, Views

_SMALLEST = 1 << 16
"""Bytes of a first buffer."""


class Uploads:
    """Packs arrays into pinned buffers and copies them while the host goes on."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.torch_device = device.torch_device
        self._sent: deque[tuple[torch.Tensor, Event]] = deque()
        self._free: list[torch.Tensor] = []
        self.num_copies = self.num_bytes = 0
        """So far."""

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Each array on the device, by the time at which what is enqueued now has run; they share memory."""
        upload = self.begin()
        tensors = upload.add(arrays)
        upload.go()
        return tensors

    def begin(self) -> "Upload":
        """A copy whose arrays are not all known yet."""
        return Upload(self)

    def take(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pinned memory of at least so many bytes, and as much of the device's. # 2 x [...] uint8"""
        while self._sent and self._sent[0][1].query():
            self._free.append(self._sent.popleft()[0])
        while self._free:
            pinned = self._free.pop()
            if len(pinned) >= num_bytes:
                break
        else:
            pinned = self._device.pinned(max(_SMALLEST, 2 * num_bytes))
        return pinned, torch.empty(len(pinned), dtype=torch.uint8, device=self.torch_device)

    def copy(self, pinned: torch.Tensor, on_device: torch.Tensor, num_bytes: int) -> None:
        """Copy the beginning of what `take` gave, if there is any, and have the pinned memory back."""
        if num_bytes == 0:
            self._free.append(pinned)
            return
        self._device.copy(on_device[:num_bytes], pinned[:num_bytes])
        self._sent.append((pinned, self._device.record()))
        self.num_copies += 1
        self.num_bytes += num_bytes


class Upload:
    """Arrays that go together, added one after the other: one copy, unless they are many."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._end = self._room = 0

    def add(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Where the arrays, which are read now, will be on the device once `go` is called."""
        packing = Packing(arrays, self._end)
        if packing.end == self._end:
            nothing = torch.empty(0, dtype=torch.uint8, device=self._uploads.torch_device)
            return Packing(arrays).read(Views(nothing))
        if packing.end > self._room:
            self.go()
            packing = Packing(arrays)
            self._pinned, self._on_device = self._uploads.take(packing.end)
            self._host, self._views, self._room = self._pinned.numpy(), Views(self._on_device), len(self._pinned)
        packing.write(self._host)
        self._end = packing.end
        return packing.read(self._views)

    def go(self) -> None:
        """Enqueue the copy. Until then no work may be enqueued that reads the arrays."""
        if self._room:
            self._uploads.copy(self._pinned, self._on_device, self._end)
            self._end = self._room = 0


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
