"""BERT, RoBERTa and XLM-RoBERTa: post-norm encoder layers with learned position embeddings."""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from models.architectures.encoder_config import EncoderConfig
from models.architectures.registry import ENCODERS
from models.attention.context import get_forward_context
from models.layers.attention import EncoderAttention
from models.layers.base import CacheSpec
from models.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear, VocabParallelEmbedding
from models.layers.norm import LayerNorm
from models.layers.parameter import empty_parameter, load_whole
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
"""Activation functions by the names in `models.architectures.encoder_config.ACTIVATIONS`."""


class _Table(nn.Module):
    """An embedding table that is replicated on every rank."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(num_rows, size, weight_loader=load_whole)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """# [tokens] int64 -> [tokens, size]"""
        return F.embedding(numbers, self.weight)


class BertEmbeddings(nn.Module):
    """The sum of token, position and token-type embeddings; the token type distinguishes the two texts of a pair."""

    def __init__(self, config: EncoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.first_position = config.first_position
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        self.position_embeddings = _Table(config.first_position + config.max_positions, config.hidden_size)
        self.token_type_embeddings = _Table(config.num_token_types, config.hidden_size)
        self.has_second_type = config.num_token_types > 1
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens] int64 -> [tokens, hidden_size]"""
        prompts = get_forward_context().context.prompts
        is_second = None if prompts is None else prompts.is_second
        if is_second is None or not self.has_second_type:
            types = self.token_type_embeddings.weight[0]
        else:
            types = self.token_type_embeddings(is_second)
        hidden = self.word_embeddings(input_ids) + types + self.position_embeddings(positions + self.first_position)
        return self.LayerNorm(hidden)  # type: ignore[no-any-return]


class BertSelfAttention(nn.Module):
    """Attention of each token to its whole prompt."""

    def __init__(self, config: EncoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        heads = config.num_attention_heads
        self.qkv = QKVParallelLinear(
            config.hidden_size,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=config.head_dim,
            bias=True,
            parallel=parallel,
        )
        self.shape = 3, self.qkv.num_heads, config.head_dim
        self.attn = EncoderAttention()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, the rank's heads * head_dim]"""
        q, k, v = self.qkv(hidden).view(len(hidden), *self.shape).unbind(1)
        return self.attn(q, k, v).view(len(hidden), -1)  # type: ignore[no-any-return]


class BertOutput(nn.Module):
    """A projection whose output is added to the residual stream, followed by the norm."""

    def __init__(self, in_features: int, config: EncoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.dense = RowParallelLinear(in_features, config.hidden_size, bias=True, parallel=parallel)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """# [tokens, the rank's in_features], [tokens, hidden_size] -> [tokens, hidden_size]"""
        return self.LayerNorm(self.dense(x) + residual)  # type: ignore[no-any-return]


class BertAttention(nn.Module):
    """Attention with its output projection and norm, with the checkpoint's module names."""

    def __init__(self, config: EncoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, parallel)
        self.output = BertOutput(config.num_attention_heads * config.head_dim, config, parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        return self.output(self.self(hidden), hidden)  # type: ignore[no-any-return]


class BertIntermediate(nn.Module):
    """The first projection of the feed-forward layer, and its activation."""

    def __init__(self, config: EncoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.dense = ColumnParallelLinear(config.hidden_size, config.intermediate_size, bias=True, parallel=parallel)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, the rank's intermediate_size]"""
        return self.activation(self.dense(hidden))


class BertLayer(nn.Module):
    """Attention, then the feed-forward layer."""

    def __init__(self, config: EncoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.attention = BertAttention(config, parallel)
        self.intermediate = BertIntermediate(config, parallel)
        self.output = BertOutput(config.intermediate_size, config, parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        hidden = self.attention(hidden)
        return self.output(self.intermediate(hidden), hidden)  # type: ignore[no-any-return]


class BertEncoder(nn.Module):
    """The list of layers, as a module with the checkpoint's name."""

    def __init__(self, config: EncoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config, parallel) for _ in range(config.num_hidden_layers))


@ENCODERS.register("BertModel")
@ENCODERS.register("RobertaModel")
@ENCODERS.register("XLMRobertaModel")
class BertModel(nn.Module):
    """Embeddings and layers. `PoolingHead` computes the heads."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        "query": ("qkv", "q"),
        "key": ("qkv", "k"),
        "value": ("qkv", "v"),
    }

    def __init__(self, config: EncoderConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config, parallel)
        self.encoder = BertEncoder(config, parallel)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Final hidden states. # 2 x [tokens] int64 -> [tokens, hidden_size]"""
        hidden: torch.Tensor = self.embeddings(input_ids, positions)
        for layer in self.encoder.layer:
            hidden = layer(hidden)
        return hidden

    def kv_cache_layers(self) -> list[CacheSpec]:
        """Empty: a prompt is computed in one step, so nothing is cached."""
        return []
