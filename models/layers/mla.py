"""Multi-head latent attention (MLA; DeepSeek-V2, 2024): all heads' keys and values are projected from one latent.

The cache holds for each token that latent and one rotated key, which all heads share. `LightningIndexer`, of DeepSeek
Sparse Attention (DeepSeek-V3.2, 2025), selects the tokens that each token attends to.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from models.attention.context import LoRARows, between_graphs, get_forward_context
from models.layers.base import VectorCacheSpec
from models.layers.linear import ColumnParallelLinear, RowParallelLinear, round_for
from models.layers.norm import KEY_NORM_EPS, LayerNorm, RMSNorm
from models.layers.parameter import mark_read_directly
from models.ops.cpu import runtime
from models.ops.cpu import selection as ops
from models.ops.cpu.latent_attention import PackedHeads
from models.ops.norm import scale_rows
from models.ops.torch_ops import rotate
from models.ops.types import AttentionOptions, LatentInputs, Rotation, VectorCache
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

if TYPE_CHECKING:
    from models.layers.compressed import PoolIndexer

_LATENT_NORM_EPS = 1e-6
"""Default epsilon of the norms of the query and key-value latents, which does not follow `rms_norm_eps`."""


class LightningIndexer(nn.Module):
    """Scores every earlier token by a few small heads and selects the `top_k` best. Replicated on every rank."""

    def __init__(
        self,
        layer_name: str,
        *,
        hidden_size: int,
        q_lora_rank: int,
        num_heads: int,
        head_dim: int,
        top_k: int,
        max_len: int,
        interleaved: bool = False,
    ) -> None:
        """`layer_name`: key of the indexer's cache in the forward context. `max_len`: length of the longest sequence.
        `interleaved`: whether adjacent dimensions are rotated as a pair; otherwise a dimension of the first half is
        paired with one of the second half.
        """
        super().__init__()
        self.interleaved = interleaved
        self.layer_name = layer_name
        self.num_heads, self.head_dim, self.top_k, self.max_len = num_heads, head_dim, top_k, max_len
        self.scale = (num_heads * head_dim) ** -0.5
        self.cache_spec = VectorCacheSpec(layer_name, head_dim)
        self.wq_b = ColumnParallelLinear(q_lora_rank, num_heads * head_dim)
        self.wk = ColumnParallelLinear(hidden_size, head_dim)
        self.k_norm = LayerNorm(head_dim, KEY_NORM_EPS)
        self.weights_proj = ColumnParallelLinear(hidden_size, num_heads)

    def forward(
        self, hidden: torch.Tensor, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries, head weights and keys from which `select` selects positions.

        The score of a key is the sum over heads of `weight * relu(query . key)`. DeepSeek-V3.2 rotates halves here,
        although its attention rotates adjacent pairs. If the CPU operators run, the result is not yet rotated and
        scaled; `select` does that.

        # [tokens, hidden_size], [tokens, q_lora_rank], 2 x [tokens, 1, rotary_dim]
        # -> [tokens, heads, head_dim], [tokens, heads] float32, [tokens, head_dim]
        """
        q = self.wq_b(q_latent).view(len(hidden), self.num_heads, self.head_dim)
        k, weights = self.k_norm(self.wk(hidden)), self.weights_proj(hidden)
        return (q, weights, k) if runtime.runs(q) else self._rotated(q, weights, k, (cos, sin))

    def _rotated(
        self, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (cos, sin), k = rotation, k[:, None]
        if self.interleaved:
            # Reordering the dimensions of both queries and keys leaves their dot products unchanged.
            q, k = _in_halves(q, cos.shape[-1]), _in_halves(k, cos.shape[-1])
        return rotate(q, cos, sin), weights.float() * self.scale, rotate(k, cos, sin)[:, 0]

    def select(
        self, rotation: Rotation, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the positions that each token attends to, padded with -1, or None if it attends to all earlier ones.

        See `AttentionBackend.index_top_k`.
        # q, weights and k as `forward` returns them -> [tokens, selected] int64, or int32 from the CPU operators
        """
        context = get_forward_context()
        metadata, cache = context.attn_metadata, context.kv_cache_data[self.layer_name]
        assert isinstance(cache, VectorCache)
        if runtime.runs(q):
            step = metadata.step
            if step is not None and ops.selects(q, cache.vectors, self.top_k, self.max_len):
                ops.rotate_heads(k[:, None], rotation, step, is_interleaved=self.interleaved, pages=cache.vectors)
                q = ops.rotate_heads(q, rotation, is_interleaved=self.interleaved)
                block_size = cache.vectors.shape[1]
                return ops.select_keys(q, weights, self.scale, cache.vectors, step, self.top_k, block_size=block_size)
            q, weights, k = self._rotated(q, weights, k, rotation)
        return metadata.backend.index_top_k(q, weights, k, cache, metadata, self.top_k)


def _in_halves(x: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Reorder adjacent rotated pairs into halves: the first dimension of each pair, then the second of each.

    # [tokens, heads, head_dim] -> [tokens, heads, head_dim]
    """
    pairs = x[..., :rotary_dim].reshape(*x.shape[:-1], rotary_dim // 2, 2).transpose(-1, -2).flatten(-2)
    return torch.cat((pairs, x[..., rotary_dim:]), dim=-1)


@dataclass(frozen=True, slots=True)
class MLAShape:
    """Sizes of one layer, in elements."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    """Rank of the queries' latent, or None if queries are projected directly from the hidden states."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Number of dimensions of a head's query and key that are not rotated."""
    qk_rope_head_dim: int
    """Number of rotated dimensions of a query; the rotated part of a key is shared by all heads."""
    v_head_dim: int
    scale: float
    """The scale of the attention scores."""
    bias: bool
    """Whether the projections from and to the hidden states have biases."""
    interleaved: bool
    """Whether adjacent dimensions are rotated as a pair; otherwise halves are."""
    latent_eps: float = _LATENT_NORM_EPS
    """Epsilon of the norms of both latents."""


class MLAAttention(nn.Module):
    """Latent attention with its projections. Heads are sharded over the ranks; latents are replicated."""

    def __init__(
        self,
        layer_name: str,
        shape: MLAShape,
        *,
        indexer: "LightningIndexer | PoolIndexer | None" = None,
        shares_selection: bool = False,
        parallel: TensorParallel = SINGLE_RANK,
    ) -> None:
        """`layer_name`: key of the layer's cache in the forward context. `indexer`: selects the tokens to attend to.
        `shares_selection`: the layer reuses the selection of the nearest earlier layer that has an indexer.
        """
        super().__init__()
        self.shape = shape
        self.layer_name = layer_name
        self.num_heads = parallel.share(shape.num_heads, "num_attention_heads")
        self.latent_dim = shape.kv_lora_rank + shape.qk_rope_head_dim
        self.cache_spec = VectorCacheSpec(layer_name, self.latent_dim, is_latent=True)
        self.options = AttentionOptions(shape.scale)
        hidden, q_features = shape.hidden_size, shape.num_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
        if shape.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, q_features, parallel=parallel)
        else:
            self.q_a_proj = ColumnParallelLinear(hidden, shape.q_lora_rank, bias=shape.bias)
            self.q_a_layernorm = RMSNorm(shape.q_lora_rank, shape.latent_eps)
            self.q_b_proj = ColumnParallelLinear(shape.q_lora_rank, q_features, parallel=parallel)
            self.q_b_proj.follow(self.q_a_layernorm)
        self.kv_a_proj_with_mqa = ColumnParallelLinear(hidden, self.latent_dim, bias=shape.bias)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, shape.latent_eps)
        self.kv_b_proj = ColumnParallelLinear(
            shape.kv_lora_rank, shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim), parallel=parallel
        )
        mark_read_directly(self.kv_b_proj.weight)  # Attention reads it as [heads, nope + v, kv_lora_rank].
        self.o_proj = RowParallelLinear(shape.num_heads * shape.v_head_dim, hidden, bias=shape.bias, parallel=parallel)
        self.indexer = indexer
        self.shares_selection = shares_selection
        self.packed_heads: PackedHeads | None = None

    def follow(self, norm: RMSNorm) -> None:
        """See `ParallelLinear.follow`."""
        self.first_proj.follow(norm)

    @property
    def first_proj(self) -> ColumnParallelLinear:
        """The projection of hidden states to queries or to the queries' latent."""
        return self.q_proj if self.shape.q_lora_rank is None else self.q_a_proj

    def pack_heads(self) -> None:
        """Copy the loaded `kv_b_proj` in the layout of the CPU operators."""
        kv_b = self.kv_b_proj.weight.view(self.num_heads, -1, self.shape.kv_lora_rank)
        self.packed_heads = PackedHeads(kv_b, self.shape.qk_nope_head_dim)

    def scale_cache(self, k_scale: float, _v_scale: float) -> None:
        """Set the scale of latents in an 8-bit cache, which is the checkpoint's scale of keys."""
        self.options = dataclasses.replace(self.options, k_scale=k_scale)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, qk_rope_head_dim] -> [tokens, hidden_size]"""
        shape, num_tokens = self.shape, len(hidden)
        rounded = round_for(hidden, self.first_proj, self.kv_a_proj_with_mqa)
        q_latent = hidden
        q = self.first_proj(hidden, rounded)
        if shape.q_lora_rank is not None:
            q_latent = self.q_a_layernorm(q)
            q = self.q_b_proj(q_latent)
        scales = self.query_scales()
        if scales is not None:
            q, _ = scale_rows(q, scales)
        latent = self.kv_a_proj_with_mqa(hidden, rounded)
        indexed = () if self.indexer is None else self.indexer(hidden, q_latent, cos, sin)
        q = q.view(num_tokens, self.num_heads, -1)
        attended = self._attend(q, latent, *indexed, shared=(cos, sin))
        return self.o_proj(self.gated(attended, hidden).view(num_tokens, -1))  # type: ignore[no-any-return]

    def query_scales(self) -> torch.Tensor | None:
        """Factors of the step's queries; None without factors. # [tokens, 1] float32"""
        return None

    def gated(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the output gate, if any; `hidden`: the layer's input. # [tokens, heads, v] -> the same"""
        del hidden
        return attended

    def _attend(self, *tokens: torch.Tensor, shared: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return between_graphs(self._attend_rows, *tokens, shared=shared)

    def _attend_rows(self, q: torch.Tensor, latent: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """# [tokens, heads, nope + rope], [tokens, rank + rope] -> [tokens, heads, v]

        `others`: the result of the indexer's `forward` if there is an indexer, then cos and sin.
        """
        context = get_forward_context()
        *indexed, cos, sin = others
        if self.indexer is not None:
            context.selected = self.indexer.select((cos, sin), *indexed)
        selected = None if self.indexer is None and not self.shares_selection else context.selected
        metadata, cache = context.attn_metadata, context.kv_cache_data[self.layer_name]
        assert isinstance(cache, VectorCache)
        backend, options, lora = metadata.backend, self.options, self.kv_b_proj.lora

        def attend(weight: torch.Tensor, heads: PackedHeads | None) -> torch.Tensor:
            kv_b = weight.view(self.num_heads, -1, self.shape.kv_lora_rank)
            inputs = LatentInputs(self.kv_a_layernorm.operand, (cos, sin), self.shape.interleaved, heads)
            return backend.latent_attention(q, latent, kv_b, cache, metadata, options, selected, inputs)

        attended = attend(self.kv_b_proj.weight, self.packed_heads)
        # An adapter of `kv_b_proj` changes all keys and values, so its tokens attend again with the adapted weight.
        groups = None if lora is None else context.lora
        assert not isinstance(groups, LoRARows), "graphs capture no adapters of kv_b_proj"
        for adapter, tokens in groups or ():
            if lora is not None and (delta := lora.delta(adapter)) is not None:
                attended[tokens] = attend(self.kv_b_proj.weight + delta, None)[tokens]
        return attended
