"""The GPUs' path over CPU tensors: block tables on the device, metadata in fixed buffers, attention in plain torch."""

import torch

from models.attention.gpu import GPUAttentionBackend
from models.attention.torch_paged import TorchAttentionBackend


class CapturedTorchBackend(TorchAttentionBackend):
    """May be captured where a graph is the call itself: that may read lengths back."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))

    prepare_for_capture = GPUAttentionBackend.prepare_for_capture  # type: ignore[assignment]
