"""Norms (Zhang and Sennrich, 2019; Ba, 2016), each by the fastest operator that supports the tensor."""

import torch

from models.ops import aiter, triton
from models.ops.aiter import operators as dense
from models.ops.cpu import dense as ops
from models.ops.cpu import experts as expert_ops
from models.ops.cpu import runtime
from models.ops.stored_weight import Feed
from models.ops.torch_ops import torch_norm
from models.ops.types import NormWeight


def add_rows(residual: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Compute `residual + scale * x`; operators overwrite `residual` with it. # [rows, size] each"""
    if runtime.runs(residual, x):
        return ops.add(residual, x, scale)
    return residual + (x if scale == 1.0 else x * scale)


def scale_rows(x: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply rows by their scales; also return new scales of 1. # [rows, size], [rows, 1] float32 -> the same"""
    ones = torch.ones(len(x), 1, device=x.device)
    if runtime.runs(x):
        # `combine` of one expert per token, whose output is the row itself, multiplies each row by its weight.
        return expert_ops.combine(x, scales, torch.arange(len(x))[:, None]), ones
    return (x * scales).to(x.dtype), ones


def rms_norm(x: torch.Tensor, norm: NormWeight, feed: Feed | None = None) -> torch.Tensor:
    """See `NormWeight`; computed in float32. # [..., size] -> [..., size]; with 3 dimensions, heads are contiguous

    `feed`: the format in which the next product reads the result.
    """
    weight, eps, offset, bias, is_centred = norm
    is_rows = x.dim() == 2 or (x.dim() == 3 and x.stride(1) == x.shape[2])
    if is_rows and runtime.runs(x, weight):
        return ops.rms_norm(x, weight, eps, offset=offset, bias=bias, is_centred=is_centred)
    if offset == 0.0 and not is_centred and aiter.runs("norm", x, weight):
        return dense.rms_norm(x, weight, eps)
    if triton.runs(x, weight, operator="norm"):
        import models.ops.triton.elementwise as kernels

        rounded = feed.memory(len(x), x.shape[1], x) if feed is not None and x.dim() == 2 else None
        out = kernels.rms_norm(x, weight, eps, offset=offset, bias=bias, is_centred=is_centred, rounded=rounded)
        if feed is not None:
            feed.give(out, rounded)
        return out
    return torch_norm(x, norm)
