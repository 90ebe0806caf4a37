"""`ptxas`, NVIDIA's assembler, which Triton brings or finds: its release, and what is known of some."""

import importlib
import importlib.util

import torch

_RIGHT = 13, 1
"""Older ones are known to make wrong code for Hopper of kernels like those of recurrent layers: 12.8, which Triton
brings up to 3.7, and 13.0 of some that compute gradients (github.com/fla-org/flash-linear-attention, 1262). Of none
that computes results; yet Triton leaves them for Hopper too (github.com/triton-lang/triton, 11854)."""


def release(device: torch.device) -> str | None:
    """That of the one which assembles Triton's kernels for a GPU, `12.8`; None where nobody says."""
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    try:
        compiler = importlib.import_module("triton.backends.nvidia.compiler")
        version: str = compiler.get_ptxas(10 * major + minor).version
    # Of a Triton that is without one, or that is asked in another way.
    except (ImportError, RuntimeError, AttributeError, TypeError):
        return None
    return version


def caution(device: torch.device) -> str | None:
    """What to know of recurrent layers on a GPU, a sentence; None: nothing."""
    found = None if device.type == "cpu" else release(device)
    if found is None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    if tuple(int(part) for part in found.split(".")[:2]) >= _RIGHT:
        return None
    return (
        f"ptxas {found} assembles the kernels of recurrent layers; releases of its age make wrong code for Hopper of "
        "some that are like them, of none that is known to be Kaon's. Should answers look wrong, have "
        f"TRITON_PTXAS_PATH name the ptxas of CUDA {_RIGHT[0]}.{_RIGHT[1]} or newer"
    )
