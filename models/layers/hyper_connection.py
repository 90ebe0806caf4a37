"""Manifold-constrained hyper-connections (mHC; Xie et al., 2026): several residual streams, mixed around each layer.

    streams [tokens, N, hidden] --weights of the token--> one input --> layer --> streams: mixed, plus shares of it

The weights are computed from the streams in float32. The matrix that mixes the streams is doubly stochastic.
"""

import torch
from torch import nn

from models.layers.linear import float_logits
from models.layers.parameter import empty_parameter, load_whole


def _float_parameter(*shape: int) -> nn.Parameter:
    return empty_parameter(*shape, weight_loader=load_whole, dtype=torch.float32)


def _projected(streams: torch.Tensor, weight: nn.Parameter, eps: float) -> torch.Tensor:
    """Normalise each token's streams together and project them. # [tokens, N, hidden] -> [tokens, out] float32"""
    flat = streams.flatten(1)
    # The norm's factor commutes with the product, so it is applied to the smaller result.
    factor = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + eps)
    return float_logits(flat, weight) * factor


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
        pre, post, mix = torch.split(_projected(streams, self.fn, self.norm_eps), [count, count, count * count], -1)
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
        weights = torch.sigmoid(_projected(streams, self.hc_fn, self.norm_eps) * self.hc_scale + self.hc_base)
        return _collapsed(streams, weights + self.eps)
