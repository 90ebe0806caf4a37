"""Attention backends, one a kind of device; `select_backend` chooses."""

import logging

import torch

from models.attention.base import AttentionBackend
from models.kernels import aiter as library
from models.kernels import triton as kernels
from models.kernels.cpu import runtime

_log = logging.getLogger(__name__)


def select_backend(device: torch.device) -> AttentionBackend:
    """The backend for `device`, whose Triton kernels run from here on. Raises `ValueError` where there is no GPU."""
    require_backend(device)
    if device.type == "cuda":
        return _gpu_backend(device)
    if runtime.active():
        from models.attention.cpu_native import NativeCPUAttentionBackend

        return NativeCPUAttentionBackend()
    from models.attention.cpu import CPUAttentionBackend

    return CPUAttentionBackend()


def require_backend(device: torch.device) -> None:
    """Raise `ValueError` where a kind of device has no backend. Touches no GPU: a rank has not chosen its own yet."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device.type}, but torch finds no GPU; `kaon doctor` says why; use device cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device.type}, for which this release has no attention backend; use device cpu")


def _gpu_backend(device: torch.device) -> AttentionBackend:
    # Who leaves attention to torch may do so because Triton takes the process down.
    reason = None if kernels.leaves("attention") else kernels.start(device)
    if kernels.takes("attention") and (library.takes("attention") or library.takes("decode")):
        from models.attention.aiter import AiterAttentionBackend

        return AiterAttentionBackend(device)
    if kernels.takes("attention"):
        from models.attention.triton import TritonAttentionBackend

        return TritonAttentionBackend(device)
    from models.attention.torch_paged import TorchAttentionBackend

    if reason is not None:
        _log.warning("Plain torch computes everything, slowly: %s", reason)
    return TorchAttentionBackend(device)
