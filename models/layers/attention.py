"""`Attention`: where a model meets the attention backend and its layer's KV cache."""

import torch
from torch import nn

from models.base import KVCacheSpec
from models.forward_context import get_forward_context


class Attention(nn.Module):
    """Causal attention over the sequences of the current step, by the backend that made the step's metadata."""

    def __init__(self, layer_name: str, *, num_kv_heads: int, head_dim: int) -> None:
        """`layer_name` finds the layer's cache in the forward context. Heads are this rank's."""
        super().__init__()
        self.cache_spec = KVCacheSpec(layer_name, num_kv_heads, head_dim)
        self.layer_name = layer_name
        self.scale = head_dim**-0.5

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """# [tokens, heads, head_dim], 2 x [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim]"""
        context = get_forward_context()
        metadata = context.attn_metadata
        return metadata.backend.forward(q, k, v, context.kv_cache_data[self.layer_name], metadata, self.scale)
