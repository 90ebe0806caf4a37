"""`Attend`: the arithmetic of one attention layer over keys and values that lie in a row. Used by the CPU backend."""

import torch
import torch.nn.functional as F

from models.kernels.types import AttentionOptions

_MAX_SCORES = 1 << 24
"""Scores that are in memory at a time where a soft cap rules the fused kernel out: 64 MiB."""


class Attend:
    """Softmax attention with an optional soft cap and sinks."""

    def __init__(self, options: AttentionOptions, sinks: torch.Tensor | None) -> None:
        """`sinks` by KV head and query head of its group. # [Hkv, group]"""
        self._options = options
        self._sinks = sinks

    def first_key(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        window = self._options.sliding_window
        return 0 if window is None else max(0, position - window + 1)

    def grouped_rows(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, heads: slice
    ) -> torch.Tensor:
        """One token a sequence, the query heads of a group as rows of one product.

        # q [batch, heads, group, D], k and v [batch, heads, length, D], mask [batch, 1, 1, length]
        """
        sinks = None if self._sinks is None else self._sinks[heads]
        return self._attend(q, k, v, mask, sinks)

    def grouped_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, heads: slice
    ) -> torch.Tensor:
        """Consecutive tokens of one sequence; without a mask they are causal among themselves.

        # q [heads, group, n, D], k and v [heads, group, length, D], mask [n, length]
        """
        sinks = None if self._sinks is None else self._sinks[heads][..., None]
        return self._attend(q, k, v, mask, sinks)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """# q [..., rows, D], k and v [..., length, D], sinks like a row of scores without its length"""
        scale, soft_cap = self._options.scale, self._options.soft_cap
        if soft_cap is not None:
            return _capped(q, k, v, mask, sinks, scale, soft_cap)
        if sinks is None:
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        # A sink takes its share of the probability: what is left is 1 / (1 + exp(sink - logsumexp)).
        return (out * torch.sigmoid(logsumexp - sinks.float())[..., None]).to(q.dtype)  # type: ignore[no-any-return]


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """Attention with squeezed scores, a few rows of queries at a time."""
    num_rows, length = q.shape[-2], k.shape[-2]
    step = max(1, _MAX_SCORES // (q[..., 0, 0].numel() * length))
    if mask is None:
        mask = torch.full((num_rows, length), -torch.inf, device=q.device).triu_(1)
    pieces = []
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        scores = (q[..., rows, :] @ k.transpose(-1, -2)).float() * scale
        scores = soft_cap * torch.tanh(scores / soft_cap) + (mask[..., rows, :] if mask.shape[-2] > 1 else mask)
        shift = scores.amax(-1, keepdim=True)
        if sinks is not None:
            beside = sinks.float()[..., rows, None] if sinks.shape[-1] > 1 else sinks.float()[..., None]
            shift = torch.maximum(shift, beside)
        weights = torch.exp(scores - shift)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(beside - shift)
        pieces.append((weights / total).to(v.dtype) @ v)
    return torch.cat(pieces, dim=-2)
