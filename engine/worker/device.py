"""`Device`: what steps that run ahead of the host need of where they run: pinned memory, copies, events and graphs.

`HostDevice` does everything before the call returns; `GPUDevice` is CUDA or ROCm, both `torch.cuda`. What is
enqueued runs in the order in which it was: one stream is enough, since a step's copies are a few kilobytes.
"""

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch

from engine.worker.kv_memory import TorchDeviceMemory
from engine.worker.memory import DeviceMemory


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
