"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

import torch
import torch.nn.functional as F
from torch import nn

from models.layers.parameter import empty_parameter, load_whole


class RMSNorm(nn.Module):
    """Scales the last dimension to unit root mean square, then by a weight; computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = empty_parameter(size, weight_loader=load_whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [..., size] -> [..., size]"""
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `x + residual`, and that sum, which is the next residual. # [..., size] each"""
        residual = x + residual
        return F.rms_norm(residual, self.shape, self.weight, self.eps), residual
