"""The GPUs' path over CPU tensors: block tables on the device, metadata in fixed buffers, attention in plain torch."""

import torch

from models.attention.gpu import GPUAttentionBackend
from models.attention.torch_paged import TorchAttentionBackend


class CapturedTorchBackend(TorchAttentionBackend):
    """It may be captured if a graph is the call itself, which may read lengths back."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))

    prepare_for_capture = GPUAttentionBackend.prepare_for_capture  # type: ignore[assignment]
