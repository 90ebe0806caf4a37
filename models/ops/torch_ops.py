"""Norms (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021) and decays of chunks in plain torch."""

import torch
import torch.nn.functional as F

from models.ops.types import NormWeight


def torch_norm(x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
    """See `NormWeight`; a weight with an offset is applied in float32. # [..., size] -> [..., size]"""
    weight, eps, offset, bias, is_centred = norm
    if is_centred:
        exact = F.layer_norm(x.float(), x.shape[-1:], eps=eps) * (offset + weight.float())
        return (exact if bias is None else exact + bias.float()).to(x.dtype)
    if offset == 0.0:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, offset + weight.float(), eps).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair `(i, i + rotary_dim / 2)` of a head's leading dimensions. # [tokens, heads, head_dim]

    elementwise.c of `models.ops.cpu` and `models.ops.triton.cache_store` compute the same when they store keys.

    `cos` and `sin` [tokens, 1, rotary_dim] float32; the first half of `sin` is negated.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(rotary_dim // 2, -1), sin).to(x.dtype)


def moved(
    x: torch.Tensor,
    norm: NormWeight | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    is_rotated_first: bool = False,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise, rotate and scale heads, each if given; the norm follows the rotation with `is_rotated_first`.

    # [tokens, heads, head_dim] -> [tokens, heads, head_dim]
    """
    if norm is not None and not is_rotated_first:
        x = torch_norm(x, norm)
    if rotation is not None:
        x = rotate(x, *rotation)
    if norm is not None and is_rotated_first:
        x = torch_norm(x, norm)
    return x if scales is None else (x * scales[..., None]).to(x.dtype)


def top_k_lower_first(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` largest numbers of each row, descending, and their indices; equal numbers by ascending index.

    # [rows, count] -> 2 x [rows, k], the values' dtype and int64

    `torch.topk` does not define which of several equal numbers it selects.
    """
    # Sort distinct 64-bit integers: the high half orders like the float, the low half orders by descending index.
    bits = (values.float() + 0.0).view(torch.int32)  # Adding 0 turns -0 into +0.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = values.shape[-1] - 1
    keys = (ordered << 32) | (last - torch.arange(last + 1, device=values.device))
    indices = last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return values.gather(-1, indices), indices


def deinterleave(x: torch.Tensor) -> torch.Tensor:
    """Reorder adjacent pairs `(2i, 2i + 1)` to the pairs that `rotate` rotates. # [..., rotary_dim]

    Both queries and keys must be reordered, which leaves their dot products unchanged.
    """
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


def decays_between(decay: torch.Tensor) -> torch.Tensor:
    """Return the decay from each token of a chunk to each later one. `decay`: the logarithms of the tokens' decays.

    It adds only the logarithms between two tokens. The difference of two sums from the chunk's first token would have
    the rounding errors of these longer sums.

    # [heads, tokens, ...] -> [heads, to tokens, from tokens, ...]: 1 from a token to itself, 0 to earlier ones
    """
    tokens = torch.arange(decay.shape[1], device=decay.device)
    apart = (tokens[:, None] - tokens).view(len(tokens), len(tokens), *(1 for _ in decay.shape[2:]))
    sums = decay[:, :, None].where(apart > 0, 0).cumsum(1)
    return sums.exp().where(apart >= 0, 0)
