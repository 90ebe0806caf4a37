"""How much of a GPU's memory is free, as its driver tells it. Touches no GPU: a context takes seconds and memory.

Called by `engine.doctor`. AMD's driver tells in sysfs, NVIDIA's by its management library, NVML.
"""

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import Any

_NVML = "libnvidia-ml.so.1"


class _NvmlMemory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def pci_address(properties: Any) -> str | None:
    """Where torch's device properties say that a GPU is, `0000:c1:00.0`; None where they do not."""
    try:
        domain, bus, device = (getattr(properties, f"pci_{name}_id") for name in ("domain", "bus", "device"))
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def free_memory(address: str | None, root: Path = Path("/sys")) -> int | None:
    """Bytes of the GPU at a PCI address that nobody has; None where no driver says."""
    if address is None:
        return None
    device = root / "bus/pci/devices" / address
    with suppress(OSError, ValueError):
        total, used = (int((device / f"mem_info_vram_{what}").read_text()) for what in ("total", "used"))
        return total - used
    with suppress(OSError):
        return told_by_nvml(ctypes.CDLL(_NVML), address)
    return None


def told_by_nvml(nvml: Any, address: str) -> int | None:
    """The same, as NVIDIA's library tells it."""
    if nvml.nvmlInit_v2():
        return None
    try:
        device, memory = ctypes.c_void_p(), _NvmlMemory()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(address.encode(), ctypes.byref(device)):
            return None
        return None if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) else int(memory.free)
    finally:
        nvml.nvmlShutdown()
