"""Root-mean-square normalisation (Zhang and Sennrich, 2019), and layer normalisation (Ba, 2016)."""

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
        return self.forward(residual), residual


class LayerNorm(nn.Module):
    """Shifts the last dimension to mean 0, scales it to variance 1, then by a weight, and adds a bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = empty_parameter(size, weight_loader=load_whole)
        self.bias = empty_parameter(size, weight_loader=load_whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [..., size] -> [..., size]"""
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class OffsetRMSNorm(RMSNorm):
    """An `RMSNorm` whose checkpoint holds its weight less one, as Gemma's and Qwen3-Next's do; scaled in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [..., size] -> [..., size]"""
        return F.rms_norm(x.float(), self.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)
