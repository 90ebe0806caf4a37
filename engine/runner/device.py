"""`Device`: where steps run: its memory figures, pinned memory, copies, events and graphs; `Uploads` and `Downloads`.

`HostDevice` does everything before a call returns; `GPUDevice` is CUDA or ROCm, both `torch.cuda`. Enqueued work runs
in order: one stream is enough, since a step's copies are a few kilobytes. `oom_at_start` and `oom_in_step` turn a
GPU's lack of memory into errors of the start and of a step.
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
    """Raises `ValueError`, with how much is missing and what to do, where a GPU has no memory for `what`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{what} does not fit the GPU: {_shortage(error)}; {advice}") from error


@contextmanager
def oom_in_step() -> Iterator[None]:
    """Raises `StepOutOfMemory` where a GPU has no memory for a step, after giving back what torch keeps for reuse."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # Its frames hold what the step had made.
        traceback.clear_frames(error.__traceback__)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise StepOutOfMemory(f"the GPU ran out of memory: {_shortage(error)}") from error


def _shortage(error: torch.OutOfMemoryError) -> str:
    """What an allocation asked for and what was free, in torch's words, without its advice on fragmentation."""
    text = " ".join(str(error).split())
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    free = re.search(r"of which ([\d.]+ \w+) is free", text)
    if asked is None:
        return text
    return f"{asked[1]} more were asked for" + (f", and {free[1]} are free" if free else "")


class DeviceMemory:
    """Figures of a GPU's memory, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """All of the device's memory."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """What no process holds."""
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        """What this process holds through torch's allocator, in use or kept for reuse."""
        return torch.cuda.memory_reserved(self._device)

    def in_use(self) -> int:
        """What of `held` is in use."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """The most that was in use at a time since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def give_back(self) -> None:
        """Give back what is kept for reuse: the next steps take it again, which takes time."""
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats(self._device)


class Event(Protocol):
    """A point in the enqueued work."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until it has. Raises what it failed with."""


class Graph(Protocol):
    """Captured work, which reads and writes the memory that it was captured with."""

    def replay(self) -> object:
        """Enqueue it again."""


class Device(Protocol):
    """Where steps run."""

    torch_device: torch.device
    has_graphs: bool
    """Whether replaying a graph is faster than enqueueing its work again."""
    has_pieces: bool
    """Whether it can capture a pass in pieces."""
    is_host: bool
    """Whether it reads the host's memory at once, so that nothing need be copied."""
    computes: bool
    """Whether kernels run; those of a GPU that is not there are only compiled."""
    memory: DeviceMemory | None
    """None where its memory is the host's."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Page-locked host memory, for asynchronous copies. # [num_bytes] uint8"""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between the device's memory and pinned memory, either way. Shapes and types are equal."""

    def record(self) -> Event:
        """An event after all work that is enqueued now."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """The work that `run` enqueues, as a graph. All graphs of a device share one pool of memory.

        The caller has called `run` before, which compiles kernels and sets up libraries.
        """

    def capture_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Graph]:
        """The same as several graphs: `run` receives a function that ends one graph and begins the next."""


class HostDevice:
    """The CPU: nothing is ever pending, and a graph is the call itself."""

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
            # Other threads may query their events during the capture, as the watchdog of collectives does.
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        torch.cuda.synchronize(self.torch_device)
        # Not by `torch.cuda.graph`, which gives back all memory that is kept for steps.
        with torch.cuda.stream(self._capture_stream):
            begin()
            try:
                run(cut)
                graphs[-1].capture_end()
            except BaseException:
                # What failed may have ended the capture already.
                with contextlib.suppress(RuntimeError):
                    graphs[-1].capture_end()
                self._leave_pool()
                raise
        return list(graphs)

    def _leave_pool(self) -> None:
        """Have torch allocate from its general memory again.

        Where a capture cannot be ended, torch's allocator stays in the graphs' pool and frees nothing.
        """
        index = self.torch_device.index
        # The allocator has left the pool already, or this release of torch leaves it by itself.
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
        """Copies and bytes so far."""

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """The arrays on the device, valid for work that is enqueued from now on; they share memory."""
        upload = self.begin()
        tensors = upload.add(arrays)
        upload.go()
        return tensors

    def begin(self) -> "Upload":
        """An upload whose arrays are added one after the other."""
        return Upload(self)

    def take(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pinned memory of at least `num_bytes`, and as much of the device's. # 2 x [...] uint8"""
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
        """Copy the first `num_bytes` of what `take` returned, and take the pinned memory back for reuse."""
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
        """The tensors that hold the arrays once `go` is called; the arrays are read now."""
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
    """A copy to the host that has begun."""

    def __init__(self, buffer: torch.Tensor, shape: torch.Size, arrived: Event) -> None:
        self.buffer, self._shape, self._arrived = buffer, shape, arrived

    def wait(self) -> torch.Tensor:
        """Wait for the copy; what is returned is valid until `Downloads.give_back`. # int64"""
        self._arrived.synchronize()
        num_bytes = self._shape.numel() * torch.int64.itemsize
        return self.buffer[:num_bytes].view(torch.int64).view(self._shape)


class Downloads:
    """Copies a step's results to pinned host memory. A buffer is reused once its reader has given it back."""

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
        """Reuse the download's buffer: its reader is done."""
        self._free.append(download.buffer)
