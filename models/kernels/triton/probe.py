"""`probe`: whether Triton works on a device, found by running a kernel that loads, multiplies and stores."""

import functools
import importlib
import importlib.util
import logging

import torch

from models.kernels.triton.configs import target_of

_log = logging.getLogger(__name__)


@functools.cache
def probe(device: torch.device) -> str | None:
    """None where a kernel gave the right numbers on `device`; otherwise what was wrong, in words. Looks once."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; torch's builds for ROCm and CUDA bring it"
    try:
        kernel = importlib.import_module("models.kernels.triton.probe_kernel")
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
