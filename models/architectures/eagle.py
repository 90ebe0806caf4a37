"""EAGLE heads: small drafters of Llama decoder layers, with a checkpoint of their own, trained for one target.

EAGLE (Li et al., 2024) fuses the target's final hidden state of a token with the embedding of the next token, and
predicts the next hidden state, from which the target's head computes logits. EAGLE-3 (Li et al., 2025) fuses the
residual streams of three layers of the target, and may have a head of its own with a smaller vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.draft_head import DraftHead, TargetWeights
from models.architectures.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from models.layers.linear import ColumnParallelLinear, ParallelLMHead, VocabParallelEmbedding
from models.layers.norm import RMSNorm
from models.ops.columns import join_columns
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel


class _EagleHead(DraftHead):
    """Base of both versions, with an embedding and a head, each of the checkpoint or of the target."""

    checkpoint_modules: ClassVar[Mapping[str, str]] = {"own_embedding": "embed_tokens", "own_head": "lm_head"}
    """Module of the model -> its name in checkpoints."""

    def __init__(self, config: ModelConfig, target: TargetWeights, vocab_size: int, parallel: TensorParallel) -> None:
        """`vocab_size`: number of tokens of the head, if the checkpoint has one."""
        embedding, head, size = target.embed_tokens, target.lm_head, config.hidden_size
        super().__init__(
            config,
            embedding or VocabParallelEmbedding(config.vocab_size, size, parallel=parallel),
            head or ParallelLMHead(vocab_size, size, parallel=parallel),
        )
        if embedding is None:
            self.own_embedding = self.embed_tokens
        if head is None:
            self.own_head = self.lm_head


class EagleLayer(LlamaDecoderLayer):
    """A decoder layer; the first layer has no norm before its attention."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, LlamaAttention, LlamaForCausalLM.feed_forward, parallel)
        self.is_first = layer == 0
        if self.is_first:
            del self.input_layernorm

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LlamaDecoderLayer`."""
        if not self.is_first:
            return super().forward(hidden, residual, cos, sin)
        attended, residual = self.post_attention_layernorm.add_norm(self.self_attn(hidden, cos, sin), hidden)
        return self.mlp(attended), residual


class Eagle(_EagleHead):
    """`LlamaForCausalLMEagle`. The head and its own next pass read its output without a norm."""

    def __init__(
        self,
        config: ModelConfig,
        target: TargetWeights,
        parallel: TensorParallel = SINGLE_RANK,
        *,
        has_bias: bool = False,
    ) -> None:
        """`has_bias`: whether `fc` has a bias."""
        super().__init__(config, target, config.vocab_size, parallel)
        self.fc = ColumnParallelLinear(2 * config.hidden_size, config.hidden_size, bias=has_bias)
        self.layers = nn.ModuleList(EagleLayer(config, layer, parallel) for layer in range(config.num_hidden_layers))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftLM`."""
        cos, sin = self.rotary_emb(positions)
        hidden = self.fc(join_columns(self.embed_tokens(input_ids), hidden))
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, cos, sin)
        return _stream(cast(EagleLayer, self.layers[-1]).post_attention_layernorm, hidden, residual)


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """Options of an EAGLE-3 checkpoint in addition to those of its decoder layer."""

    target_hidden_size: int
    target_layers: tuple[int, ...]
    """Layers of the target whose input the head reads; empty if it reads the target's final hidden states."""
    draft_vocab_size: int
    norm_before_residual: bool = False
    """Whether the residual stream starts from the normalised hidden state."""


class Eagle3Attention(LlamaAttention):
    """Attention whose input is an embedding concatenated with a hidden state."""

    num_inputs: ClassVar[int] = 2


class Eagle3Layer(LlamaDecoderLayer):
    """A decoder layer whose attention reads the normalised embedding concatenated with the normalised hidden state."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__(config, 0, Eagle3Attention, LlamaForCausalLM.feed_forward, parallel)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def fuse(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        norm_before_residual: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`LlamaDecoderLayer.forward` for two inputs. # 2 x [tokens, hidden_size] -> 2 x [tokens, hidden_size]"""
        normed = self.hidden_norm(hidden)
        # Copied, because the next norm may overwrite the residual stream.
        residual = join_columns(normed if norm_before_residual else hidden)
        attended = self.self_attn(join_columns(self.input_layernorm(embedded), normed), cos, sin)
        attended, residual = self.post_attention_layernorm.add_norm(attended, residual)
        return self.mlp(attended), residual


class Eagle3(_EagleHead):
    """`LlamaForCausalLMEagle3`. It returns the residual stream, which the head normalises."""

    def __init__(
        self,
        config: ModelConfig,
        target: TargetWeights,
        shape: Eagle3Shape,
        token_map: torch.Tensor | None,
        parallel: TensorParallel = SINGLE_RANK,
    ) -> None:
        """`token_map` [draft_vocab_size] int64: the target's token id of each draft token id; None if they are
        equal."""
        super().__init__(config, target, shape.draft_vocab_size, parallel)
        self.vocab_size = config.vocab_size
        self.shape = shape
        self.token_map: torch.Tensor | None
        self.register_buffer("token_map", token_map, persistent=False)
        if shape.target_layers:
            self.hidden_layers = shape.target_layers
            self.fc = ColumnParallelLinear(len(shape.target_layers) * shape.target_hidden_size, config.hidden_size)
        self.midlayer = Eagle3Layer(config, parallel)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, parallel)

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftLM`."""
        return self.fc(hidden) if self.shape.target_layers else hidden

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftLM`."""
        cos, sin = self.rotary_emb(positions)
        embedded = self.embed_tokens(input_ids)
        fused = self.midlayer.fuse(embedded, hidden, cos, sin, norm_before_residual=self.shape.norm_before_residual)
        return _stream(self.norm, *fused)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftHead`. The logits are of the target's vocabulary; without `token_map`, or on ranks other than 0,
        of the draft vocabulary.
        """
        logits = super().compute_logits(self.norm(hidden))
        if self.token_map is None or logits.shape[1] != len(self.token_map):
            return logits
        return logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, self.token_map, logits)


def _stream(norm: RMSNorm, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of a layer's two outputs, by the fused operator of sum and norm. # [tokens, hidden_size]"""
    assert residual is not None, "a head has at least one layer"
    return norm.add_norm(hidden, residual)[1]
