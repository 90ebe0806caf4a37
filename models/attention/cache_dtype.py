"""Conversion between the model's type and the cache's, where they differ. Used by attention backends."""

import torch

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max


def to_cache(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """`x` as the cache holds it: in 8 bits divided by `scale`, and what is out of range at its end."""
    if dtype != FP8_DTYPE:
        return x.to(dtype)
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(dtype)


def restored(stored: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """What `stored` means, as `dtype`; the same tensor where that is how it is stored."""
    values = stored.to(dtype)
    return values.mul_(scale) if stored.dtype == FP8_DTYPE and scale != 1.0 else values


def from_cache(stored: torch.Tensor, scale: float, out: torch.Tensor) -> torch.Tensor:
    """What `stored` means, in the type and memory of `out`."""
    out.copy_(stored)
    return out.mul_(scale) if stored.dtype == FP8_DTYPE and scale != 1.0 else out
