"""What NCCL, and RCCL, which has its name on ROCm, are told before the first group is joined."""

import os

import torch


def prepare(device: torch.device) -> None:
    """Settings of a group of GPUs; what the environment says already stays."""
    # It would look into the store from time to time, which is gone by then; deaths are noticed otherwise.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    if torch.version.hip is not None and torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx12"):
        # Its other protocols count on an order of writes that these GPUs do not keep: with ROCm 7.2 sums hang.
        os.environ.setdefault("NCCL_PROTO", "Simple")
