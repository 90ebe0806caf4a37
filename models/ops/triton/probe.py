"""Whether Triton works on a device: `probe` runs a kernel that loads, multiplies and stores, and checks the result.

Also known faults of `ptxas`, NVIDIA's assembler, by release.
"""

import functools
import importlib
import importlib.util
import logging

import torch

from models.ops.triton.configs import target_of

_log = logging.getLogger(__name__)


@functools.cache
def probe(device: torch.device) -> str | None:
    """None where a kernel gave the right numbers on `device`; otherwise what was wrong, in words. Probes once."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; torch's builds for ROCm and CUDA bring it"
    try:
        kernel = importlib.import_module("models.ops.triton.probe_kernel")
        error = kernel.largest_error(device)
    # Anything may be raised here: a missing C compiler, a driver older than Triton, an unknown architecture.
    except Exception as failure:  # noqa: BLE001
        _log.debug("Triton's probe failed", exc_info=True)
        return f"Triton failed on {device}: {type(failure).__name__}: {failure}".splitlines()[0]
    if not error <= 1e-2:
        return f"Triton's product of two matrices on {device} is off by {error}"
    try:
        arch = target_of(device).arch
    except ValueError as like_none:
        return str(like_none)
    _log.info("Triton %s computes on %s (%s)", kernel.version(), device, arch)
    return None


# The release of `ptxas` that Triton uses, and known faults of releases.

_RIGHT = 13, 1
"""Older ones are known to make wrong code for Hopper of kernels like those of recurrent layers: 12.8, which Triton
brings up to 3.7, and 13.0 of some that compute gradients (github.com/fla-org/flash-linear-attention, 1262). Of none
that computes results; yet Triton leaves them for Hopper too (github.com/triton-lang/triton, 11854)."""


def release(device: torch.device) -> str | None:
    """The release that assembles Triton's kernels for a GPU, `12.8`; None where it is unknown."""
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
    """A warning about recurrent layers on a GPU, a sentence; None: no fault is known."""
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
