"""Block-sparse attention (MiniMax-M3, 2026): each KV head attends to the blocks of keys that an indexer selects.

The layer caches keys and values as any other, and one index key a token. Torch computes it, a row at a time, from the
rows' lengths on the host.
"""

import torch
from torch import nn

from models.attention.context import between_graphs, get_forward_context
from models.layers.attention import Attention
from models.layers.base import VectorCacheSpec
from models.layers.linear import ColumnParallelLinear
from models.layers.norm import OffsetRMSNorm
from models.ops.block_selection import BlockChoice, attend_to_blocks
from models.ops.paged_attention import store, store_vectors
from models.ops.torch_ops import moved
from models.ops.types import HeadNorms, KVCacheTensor, Rotation, VectorCache


class BlockIndexer(nn.Module):
    """Queries and keys by which blocks are selected: a query for each KV head, and one key. Whole on every rank."""

    def __init__(self, layer_name: str, hidden_size: int, num_heads: int, head_dim: int, eps: float) -> None:
        """`layer_name` is the key of the index keys' cache in the forward context."""
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.cache_spec = VectorCacheSpec(layer_name, head_dim)
        self.q_proj = ColumnParallelLinear(hidden_size, num_heads * head_dim)
        self.k_proj = ColumnParallelLinear(hidden_size, head_dim)
        self.q_norm, self.k_norm = OffsetRMSNorm(head_dim, eps), OffsetRMSNorm(head_dim, eps)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """# [tokens, hidden_size] -> [tokens, heads, head_dim], [tokens, head_dim]"""
        q = self.q_proj(hidden).view(len(hidden), self.num_heads, self.head_dim)
        k = self.k_proj(hidden)[:, None]
        return moved(q, self.q_norm.operand, rotation), moved(k, self.k_norm.operand, rotation)[:, 0]


class BlockSparseAttention(Attention):
    """Causal attention to selected blocks of keys."""

    def __init__(
        self,
        layer_name: str,
        *,
        num_kv_heads: int,
        head_dim: int,
        index_name: str,
        index_heads: slice,
        choice: BlockChoice,
    ) -> None:
        """`index_name` is the key of the index keys' cache. `index_heads`: those of this rank's KV heads."""
        super().__init__(layer_name, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.index_name, self.index_heads, self.choice = index_name, index_heads, choice

    def over_blocks(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        index_q: torch.Tensor,
        index_k: torch.Tensor,
        *,
        norms: HeadNorms,
        rotation: Rotation,
    ) -> torch.Tensor:
        """# q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim]

        `index_q` [tokens, index heads, index dim], `index_k` [tokens, index dim]: normalised and rotated.
        """

        def attend(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            index_q: torch.Tensor,
            index_k: torch.Tensor,
            *rotation: torch.Tensor,
        ) -> torch.Tensor:
            context = get_forward_context()
            metadata = context.attn_metadata
            cache, index_cache = context.kv_cache_data[self.layer_name], context.kv_cache_data[self.index_name]
            assert isinstance(cache, KVCacheTensor)
            assert isinstance(index_cache, VectorCache)
            cos, sin = rotation
            q = store(q, k, v, cache, metadata.slot_mapping, self.options, norms, (cos, sin))
            store_vectors(index_k, index_cache.vectors, metadata.slot_mapping)
            return attend_to_blocks(
                q,
                index_q[:, self.index_heads],
                (cache, index_cache),
                metadata.cu_seqlens_q.tolist(),
                metadata.seq_lens.tolist(),
                metadata.block_tables,
                self.options,
                self.choice,
            )

        return between_graphs(attend, q, k, v, index_q, index_k, shared=rotation)
