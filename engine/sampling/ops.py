"""`ops_for`: selects the implementation of the sampler's tensor operations.

There are `TorchOps` for any device, `CPUOps` and `TritonOps`. None of them waits for the device, so that sampling can
be enqueued while the step is still being computed. All three give the same tokens, except if the best two scores of a
row, or a filter's bound and a token's probability, are equal within rounding.
"""

import torch

from engine.sampling.torch_ops import CPUOps, TorchOps
from models.ops import triton


def ops_for(logits: torch.Tensor) -> TorchOps:
    """Return the implementation for the device of `logits`."""
    if triton.runs(logits, operator="sampling"):
        # Triton is installed wherever its kernels run.
        from engine.sampling.triton_ops import TritonOps

        return TritonOps()
    return CPUOps() if logits.device.type == "cpu" else TorchOps()
