"""StableLM 2: layer norms, partial rotation, and in some models attention and feed-forward in parallel."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import (
    DecoderBody,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    ParallelDecoderLayer,
)
from models.architectures.registry import ConfigFacts, architecture
from models.layers.norm import HeadsLayerNorm, LayerNorm
from models.parallel.tensor_parallel import TensorParallel


class StableLmAttention(LlamaAttention):
    """Grouped-query attention with optional norms with a separate weight per head."""

    has_output_bias: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.has_norms = config.fields.boolean("qk_layernorm", False)
        if self.has_norms:
            parts = self.qkv_proj.parts
            counts = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
            self.q_layernorm, self.k_layernorm = (
                HeadsLayerNorm(
                    parts[kind],
                    config.head_dim,
                    config.rms_norm_eps,
                    sources=({f"{kind}_layernorm.norms.{head}.weight": head for head in range(count)},),
                )
                for kind, count in counts.items()
            )

    def prepared(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the norms of queries and keys, if any. # [tokens, heads, head_dim] each"""
        return (self.q_layernorm(q), self.k_layernorm(k)) if self.has_norms else (q, k)


_FACTS = ConfigFacts(
    defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    rotates_parts=True,
    bias_field="use_qkv_bias",
    eps_field="layer_norm_eps",
    head_dim_field="",
)


@architecture("StableLmForCausalLM", _FACTS)
class StableLmForCausalLM(LlamaForCausalLM):
    """StableLM 2 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = StableLmAttention

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        is_parallel = config.fields.boolean("use_parallel_residual", False)
        return LlamaModel(
            config,
            self.attention,
            self.feed_forward,
            parallel,
            decoder_layer=ParallelDecoderLayer if is_parallel else LlamaDecoderLayer,
            norm=LayerNorm,
        )
