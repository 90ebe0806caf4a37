"""Memory of the KV cache's tensors, and a GPU's memory figures. Used by the model runner."""

import math
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.step_limits import StepOutOfMemory
from models.host_memory import aligned_zeros


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
    """A CUDA or ROCm device's figures by torch; see `engine.worker.memory.DeviceMemory`."""

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
