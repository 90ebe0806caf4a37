"""Gemma 1 and 2: scaled embeddings and tanh-GELU gates; Gemma 2 has norms before and after sublayers, and soft
caps."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import (
    DecoderBody,
    LlamaAttention,
    LlamaForCausalLM,
    LlamaModel,
    SandwichDecoderLayer,
    TwoRopesBody,
    soft_cap,
)
from models.architectures.registry import ConfigFacts, architecture
from models.layers.norm import OffsetRMSNorm
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": 256000,
}


@architecture("GemmaForCausalLM", ConfigFacts(defaults=_DEFAULTS, activation=("hidden_act", "gelu_pytorch_tanh")))
class GemmaForCausalLM(LlamaForCausalLM):
    """Gemma with its language-model head."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        require_causal(config)
        if config.fields.values.get("hidden_act") == "gelu":
            # The first checkpoints declare `gelu`, but were trained with its tanh approximation.
            config = replace(config, activation="gelu_tanh")
        super().__init__(config, parallel)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        scale = embedding_scale(config)
        return LlamaModel(config, self.attention, self.feed_forward, parallel, norm=OffsetRMSNorm, embed_scale=scale)


class Gemma2Attention(LlamaAttention):
    """Grouped-query attention with a scale of its own and capped scores."""

    @staticmethod
    def score_scale(config: ModelConfig) -> float:
        """The scale of the attention scores."""
        return float(config.fields.number("query_pre_attn_scalar", 256.0) ** -0.5)

    @staticmethod
    def score_cap(config: ModelConfig) -> float | None:
        """The soft cap of the attention scores."""
        return soft_cap(config.fields, "attn_logit_softcapping")


_GEMMA2 = ConfigFacts(
    defaults={**_DEFAULTS, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096},
    absent={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    full_attention_every=2,
)


@architecture("Gemma2ForCausalLM", _GEMMA2)
class Gemma2ForCausalLM(LlamaForCausalLM):
    """Gemma 2 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = Gemma2Attention

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        require_causal(config)
        super().__init__(config, parallel)
        self.soft_cap = soft_cap(config.fields, "final_logit_softcapping")

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""

        def make_layer(layer: int) -> nn.Module:
            attention, feed_forward = self.attention, self.feed_forward
            return SandwichDecoderLayer(config, layer, attention, feed_forward, parallel, norm=OffsetRMSNorm)

        scale = embedding_scale(config)
        return TwoRopesBody(config, make_layer, parallel, norm=OffsetRMSNorm, embed_scale=scale)


def embedding_scale(config: ModelConfig) -> float:
    """Return the square root of the hidden size, rounded to the model's dtype as in training."""
    return torch.tensor(config.hidden_size**0.5, device="cpu").item()


def require_causal(config: ModelConfig) -> None:
    """Raise `CheckpointError` for a model with bidirectional attention, unless it is served as an encoder."""
    fields = config.fields
    if fields.boolean("use_bidirectional_attention", False) and not config.is_bidirectional:
        raise fields.invalid("use_bidirectional_attention", "false: a generated token sees only earlier ones")
