"""Memory of the KV cache's tensors, and a GPU's memory figures. Used by the model runner."""

import contextlib
import math
import re
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy.typing as npt
import torch

from engine.batch import StepOutOfMemory
from engine.runner.memory_sizing import DeviceMemory
from models.ops.memory import Packing, Views, aligned_zeros


@contextmanager
def at_start(what: str, advice: str) -> Iterator[None]:
    """Raises `ValueError`, which names how much is missing, and what to do, where a GPU has no memory for `what`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{what} does not fit the GPU: {_shortage(error)}; {advice}") from error


@contextmanager
def in_step() -> Iterator[None]:
    """Raises `StepOutOfMemory` where a GPU has no memory for a step, having given back what torch keeps for reuse."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # Its frames hold what the step had made.
        traceback.clear_frames(error.__traceback__)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise StepOutOfMemory(f"the GPU ran out of memory: {_shortage(error)}") from error


def _shortage(error: torch.OutOfMemoryError) -> str:
    """What an allocation asked for and what there was, in torch's words, without its advice on fragmentation."""
    text = " ".join(str(error).split())
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    free = re.search(r"of which ([\d.]+ \w+) is free", text)
    if asked is None:
        return text
    return f"{asked[1]} more were asked for" + (f", and {free[1]} are free" if free else "")


def zeros(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    lower: str = "cpu_kvcache_gib or num_kvcache_blocks",
) -> torch.Tensor:
    """A zeroed tensor; on CPU the system commits its pages when they are first written.

    `torch.zeros` would touch every page. Zeros, and not whatever was there: attention multiplies masked values by 0.
    Raises `ValueError` when the host refuses the memory: the fields in `lower` would make it less.
    """
    if device.type != "cpu":
        with at_start(
            f"a KV cache tensor of {math.prod(shape) * dtype.itemsize / 2**30:.2f} GiB",
            "lower gpu_memory_utilization or num_kvcache_blocks",
        ):
            return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        pages = aligned_zeros(num_bytes)
    except (OSError, OverflowError) as error:
        raise ValueError(f"the system refused {num_bytes} bytes for the KV cache ({error}); lower {lower}") from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class TorchDeviceMemory:
    """A CUDA or ROCm device's figures by torch; see `engine.runner.memory_sizing.DeviceMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def in_use(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


# [device] `Device`: what steps that run ahead of the host need of where they run: pinned memory, copies, events and
# graphs.
#
# `HostDevice` does everything before the call returns; `GPUDevice` is CUDA or ROCm, both `torch.cuda`. What is
# enqueued runs in the order in which it was: one stream is enough, since a step's copies are a few kilobytes.


class Event(Protocol):
    """A place in what was enqueued."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def synchronize(self) -> None:
        """Wait until it has. Raises what it failed with."""


class Graph(Protocol):
    """Work that was captured, over the memory that it was captured with."""

    def replay(self) -> object:
        """Enqueue it again."""


class Device(Protocol):
    """Where steps run."""

    torch_device: torch.device
    has_graphs: bool
    """Whether replaying work saves time over enqueueing it anew."""
    is_host: bool
    """Whether it reads the host's memory, and at once: nothing need be copied."""
    memory: DeviceMemory | None
    """Its figures; None where its memory is the host's."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device copies from and to by itself. # [num_bytes] uint8"""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between the device's memory and pinned memory, either way. Shapes and types are equal."""

    def record(self) -> Event:
        """An event behind all that is enqueued."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """The work that `run` enqueues, as a graph; all graphs of a device share one pool of memory.

        It was run before, as it is: kernels are compiled and libraries set up by that.
        """


class HostDevice:
    """The CPU: nothing is ever pending, and a graph is the call itself."""

    torch_device = torch.device("cpu")
    has_graphs = False
    is_host = True
    memory: DeviceMemory | None = None

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """See `Device`."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device`."""
        target.copy_(source)

    def record(self) -> Event:
        """See `Device`."""
        return _Past()

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Device`."""
        return _Call(run)


class GPUDevice:
    """A device of `torch.cuda`."""

    has_graphs = True
    is_host = False

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.memory: DeviceMemory | None = TorchDeviceMemory(device)
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """See `Device`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device`."""
        target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        """See `Device`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Device`."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.torch_device)
        try:
            # Other threads may look at events of theirs meanwhile, as the one that watches over collectives does.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
        except BaseException:
            self._leave_pool()
            raise
        finally:
            # torch leaves its own stream only where the capture ended well.
            torch.cuda.set_stream(stream)
        return graph

    def _leave_pool(self) -> None:
        """Have torch allocate from its general memory again.

        Where a capture cannot even be ended, torch leaves its allocator in it, and that then gives nothing back.
        """
        index = self.torch_device.index
        # It is out of the pool already, or a release that leaves it by itself.
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device() if index is None else index, self._pool)


def device_of(device: torch.device) -> Device:
    """The seam to a torch device."""
    return HostDevice() if device.type == "cpu" else GPUDevice(device)


class _Past:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is pending."""


class _Call:
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


# [staging] `Uploads` and `Downloads`: a step's small arrays between host and device, each way by few copies that
# nobody awaits.
#
# Pinned memory is kept: an upload's is written again only when the device has read it, a download's when the host
# has.

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
