"""`Device`: memory statistics, pinned memory, copies, events and graphs of a device; `Uploads` and `Downloads`.

`HostDevice` completes all work before a call returns; `GPUDevice` is CUDA or ROCm, both through `torch.cuda`. Enqueued
work runs in order on one stream, which suffices since a step's copies are a few kilobytes. `oom_at_start` and
`oom_in_step` convert torch's out-of-memory exceptions to errors of the start and of a step.
"""

import contextlib
import re
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy.typing as npt
import torch

from engine.batch import StepOutOfMemory
from models.ops.memory import Packing, Views


@contextmanager
def oom_at_start(what: str, advice: str) -> Iterator[None]:
    """Raises `ValueError`, with the missing amount and a remedy, where a GPU has no memory for `what`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{what} does not fit the GPU: {_shortage(error)}; {advice}") from error


@contextmanager
def oom_in_step() -> Iterator[None]:
    """Raises `StepOutOfMemory` where a GPU has no memory for a step, after torch has freed its cached memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The traceback's frames hold the step's tensors, so they must be cleared.
        traceback.clear_frames(error.__traceback__)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise StepOutOfMemory(f"the GPU ran out of memory: {_shortage(error)}") from error


def _shortage(error: torch.OutOfMemoryError) -> str:
    """The requested and the free bytes of torch's message, without its advice on fragmentation."""
    text = " ".join(str(error).split())
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    free = re.search(r"of which ([\d.]+ \w+) is free", text)
    if asked is None:
        return text
    return f"{asked[1]} more were asked for" + (f", and {free[1]} are free" if free else "")


class DeviceMemory:
    """Statistics of a GPU's memory, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """The device's total memory."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """Memory that no process has allocated."""
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        """Memory that torch's allocator has reserved in this process, in use or cached."""
        return torch.cuda.memory_reserved(self._device)

    def in_use(self) -> int:
        """The part of `held` that tensors use."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """The peak of `in_use` since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def give_back(self) -> None:
        """Free torch's cached memory. The next steps allocate it again, which takes time."""
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Reset `peak` to the memory in use now."""
        torch.cuda.reset_peak_memory_stats(self._device)


class Event(Protocol):
    """A point in the enqueued work."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it. Raises the error of work that failed."""


class Graph(Protocol):
    """Captured work, which reads and writes the same memory on each replay."""

    def replay(self) -> object:
        """Enqueue the captured work."""


class Device(Protocol):
    """The device on which steps run."""

    torch_device: torch.device
    has_graphs: bool
    """Whether replaying a graph is faster than enqueueing its work again."""
    has_pieces: bool
    """Whether the device can capture a pass in pieces."""
    is_host: bool
    """Whether the device reads host memory directly, so that no copies are needed."""
    computes: bool
    """Whether kernels run; on an emulated GPU they are only compiled."""
    memory: DeviceMemory | None
    """None where the device's memory is the host's."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Page-locked host memory, for asynchronous copies. # [num_bytes] uint8"""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between the device's memory and pinned memory, either way. Shapes and types are equal."""

    def record(self) -> Event:
        """An event after all work that is enqueued now."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Capture the work that `run` enqueues. All graphs of a device share one memory pool.

        The caller has called `run` before, which compiled kernels and initialised libraries.
        """

    def capture_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Graph]:
        """Capture several graphs: `run` receives a function that ends one graph and begins the next."""


class HostDevice:
    """The CPU: work is complete when a call returns, and a graph calls the captured function again."""

    torch_device = torch.device("cpu")
    has_graphs = False
    has_pieces = False
    is_host = True
    computes = True
    memory: DeviceMemory | None = None

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """See `Device`."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device`."""
        target.copy_(source)

    def record(self) -> Event:
        """See `Device`."""
        return CompletedEvent()

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Device`."""
        return EagerGraph(run)

    def capture_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Graph]:
        """See `Device`; `has_pieces` is false."""
        raise NotImplementedError


class GPUDevice:
    """A device of `torch.cuda`."""

    has_graphs = True
    has_pieces = True
    is_host = False
    computes = True

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.memory: DeviceMemory | None = DeviceMemory(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

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
        (graph,) = self.capture_pieces(lambda _: run())
        return graph

    def capture_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Graph]:
        """See `Device`."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # In this mode other threads may query events during the capture, as the watchdog of collectives does.
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        torch.cuda.synchronize(self.torch_device)
        # `torch.cuda.graph` is not used, since it frees all memory that torch has cached for steps.
        with torch.cuda.stream(self._capture_stream):
            begin()
            try:
                run(cut)
                graphs[-1].capture_end()
            except BaseException:
                # The failed work may have ended the capture already.
                with contextlib.suppress(RuntimeError):
                    graphs[-1].capture_end()
                self._leave_pool()
                raise
        return list(graphs)

    def _leave_pool(self) -> None:
        """Switch torch's allocator back from the graphs' pool to its general memory.

        After a capture that cannot be ended, the allocator would stay in the graphs' pool and free nothing.
        """
        index = self.torch_device.index
        # The allocator has left the pool already, or this release of torch has no such function.
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device() if index is None else index, self._pool)


def device_of(device: torch.device) -> Device:
    """The `Device` of a torch device."""
    return HostDevice() if device.type == "cpu" else GPUDevice(device)


class CompletedEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is pending."""


class EagerGraph:
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


_SMALLEST = 1 << 16
"""Bytes of the first pinned buffer."""


class Uploads:
    """Packs a step's small arrays into pinned buffers and copies them to the device while the host goes on.

    A pinned buffer is reused once the device has read it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.torch_device = device.torch_device
        self._sent: deque[tuple[torch.Tensor, Event]] = deque()
        self._free: list[torch.Tensor] = []
        self.num_copies = self.num_bytes = 0
        """Numbers of copies and bytes so far."""

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Copy arrays to the device in one copy; the tensors are valid for work that is enqueued from now on."""
        upload = self.begin()
        tensors = upload.add(arrays)
        upload.go()
        return tensors

    def begin(self) -> "Upload":
        """Begin an upload whose arrays are added one after the other."""
        return Upload(self)

    def take(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pinned memory of at least `num_bytes`, and device memory of the same size. # 2 x [...] uint8"""
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
        """Copy the first `num_bytes` of the buffers from `take`, and reuse the pinned memory after the copy."""
        if num_bytes == 0:
            self._free.append(pinned)
            return
        self._device.copy(on_device[:num_bytes], pinned[:num_bytes])
        self._sent.append((pinned, self._device.record()))
        self.num_copies += 1
        self.num_bytes += num_bytes


class Upload:
    """Arrays that are copied together: in one copy, unless they outgrow a buffer."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._end = self._room = 0

    def add(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Stage arrays. Returns the tensors that hold them after `go`; the arrays are read now."""
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
        """Enqueue the copy. Work that reads the tensors must be enqueued after this call."""
        if self._room:
            self._uploads.copy(self._pinned, self._on_device, self._end)
            self._end = self._room = 0


class Download:
    """An enqueued copy to the host."""

    def __init__(self, buffer: torch.Tensor, shape: torch.Size, arrived: Event) -> None:
        self.buffer, self._shape, self._arrived = buffer, shape, arrived

    def wait(self) -> torch.Tensor:
        """Wait for the copy. The returned tensor is valid until `Downloads.give_back`. # int64"""
        self._arrived.synchronize()
        num_bytes = self._shape.numel() * torch.int64.itemsize
        return self.buffer[:num_bytes].view(torch.int64).view(self._shape)


class Downloads:
    """Copies a step's results to pinned host memory. A buffer is reused after `give_back`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []

    def begin(self, source: torch.Tensor) -> Download:
        """Enqueue a copy. # int64, any shape"""
        buffer = self._free.pop() if self._free else None
        if buffer is None or len(buffer) < source.nbytes:
            buffer = self._device.pinned(max(_SMALLEST, 2 * source.nbytes))
        self._device.copy(buffer[: source.nbytes].view(torch.int64).view(source.shape), source)
        return Download(buffer, source.shape, self._device.record())

    def give_back(self, download: Download) -> None:
        """Return the download's buffer for reuse."""
        self._free.append(download.buffer)
