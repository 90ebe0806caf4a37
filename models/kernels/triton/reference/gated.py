"""What `models.kernels.triton.gated` computes, in torch."""

import torch
import torch.nn.functional as F

from models.kernels.cpu.structures import GELU_TANH, SILU


def gated(gate_up: torch.Tensor, activation: int, *, alpha: float = 0.0, limit: float = 0.0) -> torch.Tensor:
    """As the kernel's launcher."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == SILU:
        product = F.silu(gate) * up
    elif activation == GELU_TANH:
        product = F.gelu(gate, approximate="tanh") * up
    else:
        gate = gate.clamp(max=limit)
        product = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
    return product.to(gate_up.dtype)
