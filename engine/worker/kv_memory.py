"""Memory of the KV cache's tensors, and a GPU's memory figures. Used by the model runner."""

import math

import torch

from models.host_memory import aligned_zeros


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

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
