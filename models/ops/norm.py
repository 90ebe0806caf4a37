"""Root-mean-square norm (Zhang and Sennrich, 2019) of one tensor, by the fastest operator that takes it."""

import torch

from models.ops import aiter, triton
from models.ops.aiter import operators as dense
from models.ops.cpu import dense as ops
from models.ops.cpu import runtime
from models.ops.torch_ops import torch_rms_norm
from models.ops.types import NormWeight


def rms_norm(x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)`, computed in float32. # [..., size] -> [..., size]"""
    weight, eps, offset = norm
    if x.dim() == 2 and runtime.runs(x, weight):
        return ops.rms_norm(x, weight, eps, offset=offset)
    if offset == 0.0 and aiter.runs("norm", x, weight):
        return dense.rms_norm(x, weight, eps)
    if triton.runs(x, weight, operator="norm"):
        import models.ops.triton.elementwise as kernels

        return kernels.rms_norm(x, weight, eps, offset=offset)
    return torch_rms_norm(x, norm)
