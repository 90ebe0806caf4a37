"""Cohere's Command: attention and feed-forward in parallel, layer norms without biases, and scaled logits."""

from functools import partial
from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaAttention, LlamaForCausalLM, LlamaModel, ParallelDecoderLayer
from models.architectures.registry import ConfigFacts, architecture
from models.layers.norm import HeadsLayerNorm, LayerNorm
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel


class CohereAttention(LlamaAttention):
    """Grouped-query attention with rotation of adjacent pairs, and optional norms with a separate weight per head."""

    rotates_pairs: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.has_norms = config.fields.boolean("use_qk_norm", False)
        if self.has_norms:
            parts = self.qkv_proj.parts
            self.q_norm, self.k_norm = (
                HeadsLayerNorm(parts[kind], config.head_dim, config.rms_norm_eps) for kind in "qk"
            )

    def prepared(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the norms of queries and keys, if any. # [tokens, heads, head_dim] each"""
        return (self.q_norm(q), self.k_norm(k)) if self.has_norms else (q, k)


class Cohere2Attention(LlamaAttention):
    """Grouped-query attention with rotation of adjacent pairs; layers without a window have no rotary positions."""

    rotates_pairs: ClassVar[bool] = True

    @staticmethod
    def is_rotated(config: ModelConfig, layer: int) -> bool:
        """Whether the layer has rotary positions."""
        return config.sliding_windows[layer] is not None


_DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@architecture(
    "CohereForCausalLM", ConfigFacts(defaults={**_DEFAULTS, "rope_theta": 500000.0}, eps_field="layer_norm_eps")
)
class CohereForCausalLM(LlamaForCausalLM):
    """Command R with its language-model head."""

    attention: ClassVar[type[nn.Module]] = CohereAttention

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        super().__init__(config, parallel)
        self.logit_scale = config.fields.number("logit_scale")

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return LlamaModel(
            config,
            self.attention,
            self.feed_forward,
            parallel,
            decoder_layer=ParallelDecoderLayer,
            norm=partial(LayerNorm, bias=False),
        )


_FACTS = ConfigFacts(
    defaults={**_DEFAULTS, "sliding_window": 4096},
    eps_field="layer_norm_eps",
    full_attention_every=4,
)


@architecture("Cohere2ForCausalLM", _FACTS)
class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B and Command A with their language-model head."""

    attention: ClassVar[type[nn.Module]] = Cohere2Attention
