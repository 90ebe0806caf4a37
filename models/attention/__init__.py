"""Attention backends, one a kind of device; `select_backend` chooses."""

import torch

from models.attention.base import AttentionBackend
from models.kernels.cpu import runtime


def select_backend(device: torch.device) -> AttentionBackend:
    """The backend for `device`. Raises `ValueError` where this release has none."""
    if device.type != "cpu":
        raise ValueError(f"device is {device.type}, for which this release has no attention backend; use device cpu")
    if runtime.active():
        from models.attention.cpu_native import NativeCPUAttentionBackend

        return NativeCPUAttentionBackend()
    from models.attention.cpu import CPUAttentionBackend

    return CPUAttentionBackend()
