"""`ops_for`: which implementation of the sampler's tensor operations computes on some logits.

There are `TorchOps` for any device, `CPUOps` and `TritonOps`. None waits for the device, so that a step's tokens can
be sampled while the step is still being computed. The three give the same tokens, except where the best two scores
of a row, or a filter's bound and a token's share of probability, are equal within rounding.
"""

import torch

from engine.sampling.torch_ops import CPUOps, TorchOps
from models.ops import triton


def ops_for(logits: torch.Tensor) -> TorchOps:
    """The implementation for logits on such a device."""
    if triton.runs(logits, operator="sampling"):
        # Triton is installed where its kernels run.
        from engine.sampling.triton_ops import TritonOps

        return TritonOps()
    return CPUOps() if logits.device.type == "cpu" else TorchOps()
