"""Gemma 3's text model: norms before and after attention and feed-forward, and a separate rope in windowed layers."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.gemma import embedding_scale, require_causal
from models.architectures.llama import DecoderBody, LlamaForCausalLM, SandwichDecoderLayer, TwoRopesBody, soft_cap
from models.architectures.qwen3 import Qwen3Attention
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.config.rope import RopeConfig, parse_rope
from models.layers.norm import OffsetRMSNorm, RMSNorm
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

_LOCAL_THETA = 10000.0
"""The default rope theta of the windowed layers."""


class Gemma3Attention(Qwen3Attention):
    """Grouped-query attention with norms on queries and keys, and a scale of its own."""

    norm: ClassVar[type[RMSNorm]] = OffsetRMSNorm

    @staticmethod
    def score_scale(config: ModelConfig) -> float:
        """The scale of the attention scores."""
        return float(config.fields.number("query_pre_attn_scalar", 256.0) ** -0.5)


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
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    full_attention_every=6,
)


@architecture("Gemma3ForCausalLM", _FACTS)
class Gemma3ForCausalLM(LlamaForCausalLM):
    """Gemma 3's text model with its language-model head."""

    attention: ClassVar[type[nn.Module]] = Gemma3Attention

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        fields = config.fields
        _reject_unsupported(config)
        super().__init__(config, parallel)
        self.soft_cap = soft_cap(fields, "final_logit_softcapping")

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""

        def make_layer(layer: int) -> nn.Module:
            attention, feed_forward = self.attention, self.feed_forward
            return SandwichDecoderLayer(config, layer, attention, feed_forward, parallel, norm=OffsetRMSNorm)

        rope, scale = local_rope(config), embedding_scale(config)
        return TwoRopesBody(config, make_layer, parallel, local_rope=rope, norm=OffsetRMSNorm, embed_scale=scale)


def _reject_unsupported(config: ModelConfig) -> None:
    fields = config.fields
    require_causal(config)
    if fields.has("attn_logit_softcapping"):
        raise fields.invalid("attn_logit_softcapping", "null: Gemma 3 normalises queries and keys instead")


def local_rope(config: ModelConfig) -> RopeConfig:
    """Read the rope of windowed layers, with the field names of transformers 5 or 4."""
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
