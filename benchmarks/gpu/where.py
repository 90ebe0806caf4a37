"""`describe`: the device, its driver and the libraries that figures were taken with."""

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe(device: str) -> dict[str, str] | None:
    """By name, in the order in which it is told; None where there is no such device."""
    import torch

    found = {}
    if device != "cpu":
        if not torch.cuda.is_available():
            return None
        properties = torch.cuda.get_device_properties(device)
        arch = getattr(properties, "gcnArchName", None) or f"sm_{properties.major}{properties.minor}"
        found["device"] = f"{properties.name} ({arch}, {properties.multi_processor_count} processors)"
        found["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        found["driver"] = _driver() or "unknown"
        found["ROCm" if torch.version.hip else "CUDA"] = str(torch.version.hip or torch.version.cuda)
    else:
        found["device"] = "CPU (a dry run, whose figures say nothing)"
    found["torch"] = str(torch.__version__)
    for name in ("triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = _own_version(name)
    found["Python"] = platform.python_version()
    return found


def _own_version(name: str) -> str:
    """ROCm's Triton is installed under other names than its own."""
    from importlib import import_module

    try:
        return str(import_module(name).__version__)
    except ImportError:
        return "none"


def _driver(root: Path = Path("/")) -> str | None:
    """Of the kernel: NVIDIA's or AMD's."""
    for path, pattern in (
        ("proc/driver/nvidia/version", r"Kernel Module(?: for \S+)?\s+([\d.]+)"),
        ("sys/module/amdgpu/version", r"(\S+)"),
    ):
        file = root / path
        if file.exists() and (match := re.search(pattern, file.read_text())):
            return match[1]
    return None
