"""Block-sparse attention (MiniMax-M3, 2026): each KV head attends to the blocks of keys that an indexer selects.

The layer caches keys and values like other layers, and one index key per token. The CPU's operators compute it if a
block has a multiple of 16 keys; otherwise torch does, all decodes of a step on a GPU together, other rows one by one.
"""

import torch
from torch import nn

from models.attention.context import between_graphs, get_forward_context
from models.layers.attention import Attention
from models.layers.base import VectorCacheSpec
from models.layers.linear import ColumnParallelLinear
from models.layers.norm import OffsetRMSNorm
from models.ops import triton
from models.ops.block_selection import BlockChoice, attend_decodes, attend_to_blocks
from models.ops.compression import tokens_of
from models.ops.cpu import attention as attention_ops
from models.ops.cpu import runtime
from models.ops.cpu import selection as selection_ops
from models.ops.cpu.structures import Step
from models.ops.paged_attention import store, store_vectors
from models.ops.torch_ops import moved
from models.ops.types import HeadNorms, KVCacheTensor, Rotation, VectorCache


class BlockIndexer(nn.Module):
    """Computes the queries, one per KV head, and the key that select blocks. Replicated on every rank."""

    def __init__(self, layer_name: str, hidden_size: int, num_heads: int, head_dim: int, eps: float) -> None:
        """`layer_name` is the key of the index keys' cache in the forward context."""
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.cache_spec = VectorCacheSpec(layer_name, head_dim)
        self.q_proj = ColumnParallelLinear(hidden_size, num_heads * head_dim)
        self.k_proj = ColumnParallelLinear(hidden_size, head_dim)
        self.q_norm, self.k_norm = OffsetRMSNorm(head_dim, eps), OffsetRMSNorm(head_dim, eps)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """# [tokens, hidden_size] -> [tokens, heads, head_dim], [tokens, head_dim]

        Where the CPU's operators run, `BlockSparseAttention` normalises and rotates them.
        """
        q = self.q_proj(hidden).view(len(hidden), self.num_heads, self.head_dim)
        k = self.k_proj(hidden)
        return (q, k) if runtime.runs(q) else self.moved(q, k, rotation)

    def moved(self, q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise and rotate queries and keys; shapes as in `forward`."""
        return moved(q, self.q_norm.operand, rotation), moved(k[:, None], self.k_norm.operand, rotation)[:, 0]


class BlockSparseAttention(Attention):
    """Causal attention to selected blocks of keys."""

    def __init__(
        self,
        layer_name: str,
        *,
        num_kv_heads: int,
        head_dim: int,
        indexer: BlockIndexer,
        index_heads: slice,
        choice: BlockChoice,
        max_len: int,
    ) -> None:
        """`indexer`: owns the index keys' cache. `index_heads`: the index heads of this rank's KV heads. `max_len`:
        length of the longest sequence.
        """
        super().__init__(layer_name, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.index_heads, self.choice, self.max_len = index_heads, choice, max_len
        # In a list, so that torch does not register the indexer as a second submodule.
        self._indexer = [indexer]

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

        `index_q` [tokens, index heads, index dim], `index_k` [tokens, index dim]: as `BlockIndexer` returns them.
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
            (indexer,) = self._indexer
            cache = context.kv_cache_data[self.layer_name]
            index_cache = context.kv_cache_data[indexer.cache_spec.name]
            assert isinstance(cache, KVCacheTensor)
            assert isinstance(index_cache, VectorCache)
            cos, sin = rotation
            if runtime.runs(index_q):
                index = index_q, index_k, index_cache.vectors
                if metadata.step is not None and self._runs(q, cache, index_q, index_cache):
                    return self._by_operators(q, k, v, cache, norms, (cos, sin), metadata.step, *index)
                index_q, index_k = indexer.moved(index_q, index_k, (cos, sin))
            options, index_scale = self.options, 1.0
            if triton.runs(q, index_q, operator="attention"):
                # Prefills and decodes share the caches, so that torch writes the hardware's format, too.
                from models.ops.triton import cache_store as kernels

                cache, options = kernels.as_hardware_reads(cache, options, q.device)
                vectors, index_scale = kernels.vectors_as_hardware_reads(index_cache.vectors, index_scale, q.device)
                index_cache = VectorCache(vectors)
                if metadata.num_decodes == len(metadata.seq_lens):
                    tokens = tokens_of(
                        metadata.block_tables, metadata.seq_lens, metadata.slot_mapping, metadata.query_len
                    )
                    q = kernels.store(q, k, v, cache, tokens.slots, options, norms, (cos, sin))
                    kernels.vector_store(index_k, vectors, tokens.slots, index_scale)
                    index_q = index_q[:, self.index_heads]
                    return attend_decodes(q, index_q, (cache, index_cache), tokens, options, self.choice)
            q = store(q, k, v, cache, metadata.slot_mapping, options, norms, (cos, sin))
            store_vectors(index_k, index_cache.vectors, metadata.slot_mapping, index_scale)
            return attend_to_blocks(
                q,
                index_q[:, self.index_heads],
                (cache, index_cache),
                metadata.cu_seqlens_q.tolist(),
                metadata.seq_lens.tolist(),
                metadata.block_tables,
                options,
                self.choice,
            )

        return between_graphs(attend, q, k, v, index_q, index_k, shared=rotation)

    def _runs(self, q: torch.Tensor, cache: KVCacheTensor, index_q: torch.Tensor, index_cache: VectorCache) -> bool:
        size, top_k, _ = self.choice
        selects = selection_ops.selects_blocks(index_q, index_cache.vectors, size, top_k, self.max_len)
        return selects and attention_ops.supports(q, cache.k_cache, cache.v_cache)

    def _by_operators(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCacheTensor,
        norms: HeadNorms,
        rotation: Rotation,
        step: Step,
        index_q: torch.Tensor,
        index_k: torch.Tensor,
        index_pages: torch.Tensor,
    ) -> torch.Tensor:
        (indexer,), (size, top_k, num_local) = self._indexer, self.choice
        selection_ops.rotate_heads(index_k[:, None], rotation, step, norm=indexer.k_norm.operand, pages=index_pages)
        index_q = selection_ops.rotate_heads(index_q, rotation, norm=indexer.q_norm.operand)
        selected = selection_ops.select_blocks(
            index_q[:, self.index_heads], index_pages, step, block=size, top_k=top_k, num_local=num_local
        )
        attention_ops.rope_store(q, k, v, cache.k_cache, cache.v_cache, step, norms=norms, rotation=rotation)
        return attention_ops.attention(
            q, cache.k_cache, cache.v_cache, step, self.options, selected=selected, block=size
        )
