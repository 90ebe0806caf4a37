"""Manifold-constrained hyper-connections (mHC; Xie et al., 2026): several residual streams, mixed around each layer.

    streams [tokens, N, hidden] --weights of the token--> one input --> layer --> streams: mixed, plus shares of it

The weights are computed from the streams in float32. The matrix that mixes the streams is doubly stochastic.
"""

import torch
from torch import nn

from models.layers.linear import PackedLinear, float_logits
from models.layers.parameter import empty_parameter, load_whole, packed_of
from models.ops.cpu import streams as ops


def _float_parameter(*shape: int) -> nn.Parameter:
    return empty_parameter(*shape, weight_loader=load_whole, dtype=torch.float32)


def repeated(hidden: torch.Tensor, count: int) -> torch.Tensor:
    """Return the initial streams: `count` copies of the embedding. # [tokens, hidden] -> [tokens, N, hidden]"""
    return ops.repeat(hidden, count) if ops.supports(hidden, count) else hidden[:, None].repeat(1, count, 1)


def projected(streams: torch.Tensor, linear: PackedLinear) -> torch.Tensor:
    """Apply a linear layer without bias to each stream. # [tokens, N, in] -> [tokens, N, out]"""
    packed = packed_of(linear.weight)
    if packed is not None and ops.supports(streams, streams.shape[1]):
        return ops.linear(streams, packed)
    found: torch.Tensor = linear(streams.view(-1, streams.shape[2]))
    return found.view(*streams.shape[:2], -1)


def mean_of(streams: torch.Tensor) -> torch.Tensor:
    """# [tokens, N, hidden] -> [tokens, hidden]"""
    if ops.supports(streams, streams.shape[1]):
        return ops.collapse(streams)
    return streams.float().mean(1).to(streams.dtype)


def _projected(streams: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """# [tokens, N, hidden] -> [tokens, out] float32"""
    return float_logits(streams.view(len(streams), -1), weight)


def _factor(streams: torch.Tensor, eps: float) -> torch.Tensor:
    """The factor of the norm of each token's streams together, which commutes with their projection.

    # [tokens, N, hidden] -> [tokens, 1] float32
    """
    return torch.rsqrt(streams.flatten(1).float().square().mean(-1, keepdim=True) + eps)


def _collapsed(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the streams. # [tokens, N, hidden], [tokens, N] float32 -> [tokens, hidden]"""
    return (weights[..., None] * streams).sum(1).to(streams.dtype)


class HyperConnection(nn.Module):
    """The connections around attention, or around the feed-forward layer."""

    def __init__(self, hidden_size: int, count: int, num_iterations: int, eps: float, norm_eps: float) -> None:
        """`count`: number of streams. `num_iterations`: of Sinkhorn-Knopp, with `eps` in its denominators."""
        super().__init__()
        self.count, self.num_iterations, self.eps, self.norm_eps = count, num_iterations, eps, norm_eps
        self.fn = _float_parameter((2 + count) * count, count * hidden_size)
        self.base = _float_parameter((2 + count) * count)
        self.scale = _float_parameter(3)

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The layer's input, the weights of its output in each stream, and the matrix that mixes the streams.

        # [tokens, N, hidden] -> [tokens, hidden], [tokens, N] and [tokens, N, N] float32
        """
        count, eps = self.count, self.eps
        projected = _projected(streams, self.fn)
        if ops.supports(streams, count):
            own = self.base, self.scale
            return ops.mix(streams, projected, own, self.num_iterations, eps=eps, norm_eps=self.norm_eps)
        projected = projected * _factor(streams, self.norm_eps)
        pre, post, mix = torch.split(projected, [count, count, count * count], -1)
        pre_base, post_base, mix_base = torch.split(self.base, [count, count, count * count])
        pre = torch.sigmoid(pre * self.scale[0] + pre_base) + eps
        post = 2 * torch.sigmoid(post * self.scale[1] + post_base)
        mix = (mix * self.scale[2] + mix_base).view(-1, count, count).softmax(-1) + eps
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
        for _ in range(self.num_iterations - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + eps)
            mix = mix / (mix.sum(-2, keepdim=True) + eps)
        return _collapsed(streams, pre), post, mix

    def spread(
        self, output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        """The next streams, from the layer's output and the result of `forward`. # -> [tokens, N, hidden]"""
        if ops.supports(streams, self.count):
            return ops.spread(output, streams, post, mix)
        # Sums are used, since products of small matrices round differently for different numbers of tokens.
        mixed = post[..., None] * output[:, None]
        for number in range(self.count):
            mixed = mixed + mix[:, number, :, None] * streams[:, number, None]
        return mixed.to(streams.dtype)


class HyperHead(nn.Module):
    """The weighted sum of the streams before the model's final norm."""

    def __init__(self, hidden_size: int, count: int, eps: float, norm_eps: float) -> None:
        super().__init__()
        self.eps, self.norm_eps = eps, norm_eps
        self.hc_fn = _float_parameter(count, count * hidden_size)
        self.hc_base = _float_parameter(count)
        self.hc_scale = _float_parameter(1)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """# [tokens, N, hidden] -> [tokens, hidden]"""
        projected = _projected(streams, self.hc_fn)
        if ops.supports(streams, streams.shape[1]):
            own = self.hc_base, self.hc_scale
            return ops.collapse(streams, projected, own, eps=self.eps, norm_eps=self.norm_eps)
        weights = torch.sigmoid(projected * _factor(streams, self.norm_eps) * self.hc_scale + self.hc_base)
        return _collapsed(streams, weights + self.eps)
