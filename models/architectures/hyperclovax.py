"""HyperCLOVA X: Granite with norms also after attention and after the feed-forward layer."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.granite import GraniteForCausalLM
from models.architectures.llama import DecoderBody, FeedForward, LlamaAttention, TwoRopesBody
from models.architectures.registry import ConfigFacts, architecture
from models.layers.norm import RMSNorm, round_for_reader
from models.ops.norm import add_rows
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel


class HyperCLOVAXAttention(LlamaAttention):
    """Grouped-query attention with the scale of the config."""

    @staticmethod
    def score_scale(config: ModelConfig) -> float:
        """The scale of the attention scores."""
        return config.fields.number("attention_multiplier", config.head_dim**-0.5)


class PeriNormDecoderLayer(nn.Module):
    """Attention and feed-forward, each between two norms; their outputs are scaled and added to the residual."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        attention: type[nn.Module],
        feed_forward: FeedForward,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.is_local = False
        self.residual_scale = config.fields.number("residual_multiplier", 1.0)
        self.self_attn = attention(config, layer, parallel)
        self.mlp = feed_forward(config, layer, parallel)
        self.input_layernorm, self.post_norm1, self.post_attention_layernorm, self.post_norm2 = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(4)
        )
        round_for_reader(self.self_attn, self.input_layernorm)
        round_for_reader(self.mlp, self.post_attention_layernorm)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        attended = self.self_attn(self.input_layernorm(hidden), cos, sin)
        hidden = add_rows(hidden, self.post_norm1(attended), self.residual_scale)
        fed_forward = self.mlp(self.post_attention_layernorm(hidden))
        return add_rows(hidden, self.post_norm2(fed_forward), self.residual_scale)


@architecture("HyperCLOVAXForCausalLM", ConfigFacts(defaults={"rms_norm_eps": 1e-6}, has_mlp_bias=True))
class HyperCLOVAXForCausalLM(GraniteForCausalLM):
    """HyperCLOVA X with its language-model head."""

    attention: ClassVar[type[nn.Module]] = HyperCLOVAXAttention

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        super().__init__(config, parallel)
        # A factor, where Granite's is a divisor.
        self.logit_scale = config.fields.number("logits_scaling", 1.0)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        if not config.fields.boolean("use_post_norm", True):
            return super().body(config, parallel)

        def make_layer(layer: int) -> nn.Module:
            return PeriNormDecoderLayer(config, layer, self.attention, self.feed_forward, parallel)

        return TwoRopesBody(
            config, make_layer, parallel, embed_scale=config.fields.number("embedding_multiplier", 1.0)
        )
