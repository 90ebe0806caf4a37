"""Activation of a gated feed-forward layer."""

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` (Shazeer, 2020) of the two side by side. # [tokens, 2 * features] -> [tokens, features]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
