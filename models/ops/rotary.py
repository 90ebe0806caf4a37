"""Rotary position embedding (Su et al., 2021) of queries and keys, in plain torch."""

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair `(i, i + rotary_dim / 2)` of a head's leading dimensions. # [tokens, heads, head_dim]

    `cos` and `sin` [tokens, 1, rotary_dim] float32; the first half of `sin` has its sign turned.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(rotary_dim // 2, -1), sin).to(x.dtype)


def deinterleave(x: torch.Tensor) -> torch.Tensor:
    """Reorder neighbouring pairs `(2i, 2i + 1)` to those that `rotate` turns. # [..., rotary_dim]

    Queries and keys must both be reordered: their products are then the same.
    """
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
