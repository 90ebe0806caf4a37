"""Gemma 3's text model: norms on both sides of attention and feed-forward, and another rope in windowed layers."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaForCausalLM, LlamaMLP, TwoRopesBody
from models.architectures.qwen3 import Qwen3Attention
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.config.rope import RopeConfig, parse_rope
from models.layers.linear import VocabParallelEmbedding
from models.layers.norm import OffsetRMSNorm, RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.ops.activation import geglu_tanh
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

_LOCAL_THETA = 10000.0
"""The default rope theta of the windowed layers."""


class Gemma3Attention(Qwen3Attention):
    """Grouped-query attention with norms on queries and keys, and a scale of its own."""

    norm: ClassVar[type[RMSNorm]] = OffsetRMSNorm

    @staticmethod
    def score_scale(config: ModelConfig) -> float:
        """The factor of the scores."""
        return float(config.fields.number("query_pre_attn_scalar", 256.0) ** -0.5)


class Gemma3MLP(LlamaMLP):
    """Feed-forward layer gated by a GELU."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__(config, parallel)
        self.activation = geglu_tanh


class Gemma3DecoderLayer(nn.Module):
    """Attention and feed-forward, each between two norms, with residual connections."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.is_local = config.sliding_windows[layer] is not None
        self.self_attn = Gemma3Attention(config, layer, parallel)
        self.mlp = Gemma3MLP(config, parallel)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = OffsetRMSNorm(size, eps)
        self.post_attention_layernorm = OffsetRMSNorm(size, eps)
        self.pre_feedforward_layernorm = OffsetRMSNorm(size, eps)
        self.post_feedforward_layernorm = OffsetRMSNorm(size, eps)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, head_dim] -> [tokens, hidden_size]"""
        attended = self.self_attn(self.input_layernorm(hidden), cos, sin)
        hidden = self.post_attention_layernorm.norm_add(attended, hidden)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(hidden))
        return self.post_feedforward_layernorm.norm_add(fed_forward, hidden)


class Gemma3Model(TwoRopesBody):
    """Scaled embedding, decoder layers and final norm."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        # Rounded to the model's dtype, as the model was trained.
        scale: float = torch.tensor(config.hidden_size**0.5, device="cpu").item()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, scale=scale, parallel=parallel
        )
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_model_len)
        self.local_rotary_emb = RotaryEmbedding(_local_rope(config), config.max_model_len)
        self.layers = nn.ModuleList(
            Gemma3DecoderLayer(config, layer, parallel) for layer in range(config.num_hidden_layers)
        )
        self.norm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)


_FACTS = ConfigFacts(
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
    full_attention_every=6,
)


@architecture("Gemma3ForCausalLM", _FACTS)
class Gemma3ForCausalLM(LlamaForCausalLM):
    """Gemma 3's text model with its language-model head."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        fields = config.fields
        _reject_unsupported(config)
        super().__init__(config, parallel)
        self.soft_cap = fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else None

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """All below the head."""
        return Gemma3Model(config, parallel)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [rows, hidden_size] -> [rows, vocab_size] float32"""
        logits = super().compute_logits(hidden)
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


def _reject_unsupported(config: ModelConfig) -> None:
    fields = config.fields
    if fields.string("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise fields.invalid("hidden_activation", '"gelu_pytorch_tanh"')
    if fields.boolean("use_bidirectional_attention", False) and not config.is_bidirectional:
        raise fields.invalid("use_bidirectional_attention", "false: a generated token sees only earlier ones")
    if fields.has("attn_logit_softcapping"):
        raise fields.invalid("attn_logit_softcapping", "null: Gemma 3 normalises queries and keys instead")


def _local_rope(config: ModelConfig) -> RopeConfig:
    """The windowed layers' rope, under the names of transformers' version 5 or 4."""
    fields = config.fields
    by_kind = fields.section("rope_parameters")
    own = by_kind.section("sliding_attention") if by_kind is not None else None
    parameters = Fields({}, fields.where) if own is None else own
    theta = fields.number("rope_local_base_freq", _LOCAL_THETA)
    return parse_rope(
        fields,
        head_dim=config.head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        parameters=parameters.with_defaults({"rope_theta": theta}),
    )
