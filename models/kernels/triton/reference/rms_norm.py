"""What `models.kernels.triton.rms_norm` computes, in torch."""

import torch

from models.kernels.triton.rms_norm import ADD_NORM, NORM_ADD, PLAIN


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    mode: int = PLAIN,
) -> torch.Tensor:
    """As the kernel's launcher; `residual` becomes the sum where `mode` is `ADD_NORM`."""
    if mode == ADD_NORM:
        assert residual is not None
        x = residual.copy_(x.float() + residual.float())
    exact = x.float()
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    if mode == NORM_ADD:
        assert residual is not None
        return (residual.float() + normed.to(x.dtype).float()).to(x.dtype)
    return normed.to(x.dtype)
