"""The lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, 2025): which tokens each token attends to."""

import torch
from torch import nn

from models.base import VectorCacheSpec
from models.forward_context import get_forward_context
from models.kernels.rotary import rotate
from models.kernels.types import VectorCache
from models.layers.linear import ColumnParallelLinear
from models.layers.norm import LayerNorm

_KEY_NORM_EPS = 1e-6


class LightningIndexer(nn.Module):
    """Scores every earlier token by a few small heads and keeps the best. The same on every rank."""

    def __init__(
        self, layer_name: str, *, hidden_size: int, q_lora_rank: int, num_heads: int, head_dim: int, top_k: int
    ) -> None:
        """`layer_name` finds the cache of its keys in the forward context; `top_k` tokens are kept."""
        super().__init__()
        self.layer_name = layer_name
        self.num_heads, self.head_dim, self.top_k = num_heads, head_dim, top_k
        self.cache_spec = VectorCacheSpec(layer_name, head_dim)
        self.wq_b = ColumnParallelLinear(q_lora_rank, num_heads * head_dim)
        self.wk = ColumnParallelLinear(hidden_size, head_dim)
        self.k_norm = LayerNorm(head_dim, _KEY_NORM_EPS)
        self.weights_proj = ColumnParallelLinear(hidden_size, num_heads)

    def forward(
        self, hidden: torch.Tensor, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor | None:
        """Positions each token attends to, -1 for none; None: all before it. See `AttentionBackend.index_top_k`.

        The score of a key is the sum over heads of `weight * relu(query . key)`. Dimensions are rotated as halves,
        also where the attention's own are interleaved.

        # [tokens, hidden_size], [tokens, q_lora_rank], 2 x [tokens, 1, rotary_dim] -> [tokens, selected] int64
        """
        q = rotate(self.wq_b(q_latent).view(len(hidden), self.num_heads, self.head_dim), cos, sin)
        k = rotate(self.k_norm(self.wk(hidden))[:, None], cos, sin)[:, 0]
        weights = self.weights_proj(hidden).float()
        context = get_forward_context()
        metadata, cache = context.attn_metadata, context.kv_cache_data[self.layer_name]
        assert isinstance(cache, VectorCache)
        scale = (self.num_heads * self.head_dim) ** -0.5
        return metadata.backend.index_top_k(q, weights * scale, k, cache, metadata, self.top_k)
