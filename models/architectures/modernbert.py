"""ModernBERT: pre-norm encoder layers with rotary positions; most layers have windowed attention."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.bert import ACTIVATIONS
from models.architectures.encoder_config import EncoderConfig
from models.architectures.registry import ENCODERS
from models.config.rope import RopeConfig
from models.layers.attention import EncoderAttention
from models.layers.base import CacheSpec
from models.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from models.layers.norm import LayerNorm
from models.layers.rotary import RotaryEmbedding
from models.ops.types import Rotation
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel


def _norm(config: EncoderConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, bias=config.has_norm_bias)


class ModernBertEmbeddings(nn.Module):
    """Token embedding with a norm."""

    def __init__(self, config: EncoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.tok_embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        self.norm = _norm(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """# [tokens] int64 -> [tokens, hidden_size]"""
        return self.norm(self.tok_embeddings(input_ids))  # type: ignore[no-any-return]


class ModernBertAttention(nn.Module):
    """Attention of each token to its whole prompt, or to a window around the token."""

    def __init__(self, config: EncoderConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        heads, bias = config.num_attention_heads, config.has_attention_bias
        self.Wqkv = QKVParallelLinear(
            config.hidden_size,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=config.head_dim,
            bias=bias,
            parallel=parallel,
        )
        self.Wo = RowParallelLinear(heads * config.head_dim, config.hidden_size, bias=bias, parallel=parallel)
        self.shape = 3, self.Wqkv.num_heads, config.head_dim
        self.attn = EncoderAttention(window=config.windows[layer])

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        q, k, v = self.Wqkv(hidden).view(len(hidden), *self.shape).unbind(1)
        return self.Wo(self.attn(q, k, v, rotation=rotation).view(len(hidden), -1))  # type: ignore[no-any-return]


class ModernBertMLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, config: EncoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        bias = config.has_mlp_bias
        self.Wi = MergedColumnParallelLinear(
            config.hidden_size, [config.intermediate_size] * 2, bias=bias, parallel=parallel
        )
        self.Wo = RowParallelLinear(config.intermediate_size, config.hidden_size, bias=bias, parallel=parallel)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        activated, gate = self.Wi(hidden).chunk(2, dim=-1)
        return self.Wo(self.activation(activated) * gate)  # type: ignore[no-any-return]


class ModernBertLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it; the first layer's attention has none."""

    def __init__(self, config: EncoderConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if layer else nn.Identity()
        self.attn = ModernBertAttention(config, layer, parallel)
        self.mlp_norm = _norm(config)
        self.mlp = ModernBertMLP(config, parallel)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        hidden = hidden + self.attn(self.attn_norm(hidden), rotation)
        return hidden + self.mlp(self.mlp_norm(hidden))  # type: ignore[no-any-return]


@ENCODERS.register("ModernBertModel")
class ModernBertModel(nn.Module):
    """Embedding, layers and final norm. `PoolingHead` computes the heads."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {}

    def __init__(self, config: EncoderConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        super().__init__()
        self.embeddings = ModernBertEmbeddings(config, parallel)
        self.layers = nn.ModuleList(ModernBertLayer(config, layer, parallel) for layer in range(len(config.ropes)))
        self.final_norm = _norm(config)
        self.rotary_emb = nn.ModuleList(RotaryEmbedding(rope, config.max_model_len) for rope in _distinct(config))
        self._rope_of_layer = [_distinct(config).index(rope) for rope in config.ropes]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Final hidden states. # 2 x [tokens] int64 -> [tokens, hidden_size]"""
        hidden: torch.Tensor = self.embeddings(input_ids)
        rotations = [rotary(positions) for rotary in self.rotary_emb]
        for layer, rope in zip(self.layers, self._rope_of_layer, strict=True):
            hidden = layer(hidden, rotations[rope])
        return self.final_norm(hidden)  # type: ignore[no-any-return]

    def kv_cache_layers(self) -> list[CacheSpec]:
        """Empty: a prompt is computed in one step, so nothing is cached."""
        return []


def _distinct(config: EncoderConfig) -> list[RopeConfig]:
    """Return the distinct ropes of the layers."""
    return list(dict.fromkeys(config.ropes))
