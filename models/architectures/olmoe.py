"""OLMoE: experts in every layer, and norms over all query and all key heads of a token."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaForCausalLM
from models.architectures.olmo import HeadsNormAttention
from models.architectures.registry import ConfigFacts, architecture
from models.layers.moe import FusedMoE, SparseMoE
from models.layers.routing import SoftmaxRouter, experts_per_token
from models.ops.activation import gated_activation
from models.parallel.tensor_parallel import TensorParallel


class OlmoeAttention(HeadsNormAttention):
    """Attention whose queries, keys and values are clamped in some models."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.limit = config.fields.number("clip_qkv") if config.fields.has("clip_qkv") else None

    def limited(self, x: torch.Tensor) -> torch.Tensor:
        """See `HeadsNormAttention`."""
        return x if self.limit is None else x.clamp(-self.limit, self.limit)


_FACTS = ConfigFacts(
    defaults={"rms_norm_eps": 1e-5, "num_experts_per_tok": 8}, renamed={"num_local_experts": "num_experts"}
)


@architecture("OlmoeForCausalLM", _FACTS)
class OlmoeForCausalLM(LlamaForCausalLM):
    """OLMoE with its language-model head."""

    attention: ClassVar[type[nn.Module]] = OlmoeAttention

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A mixture of experts in every layer."""
        del layer
        fields, size = config.fields, config.intermediate_size
        num_experts = fields.integer("num_experts", 64)
        top_k, renormalize = experts_per_token(fields, num_experts), fields.boolean("norm_topk_prob", False)
        gate = SoftmaxRouter(config.hidden_size, num_experts, top_k, renormalize=renormalize)
        activation = gated_activation(config.activation)
        return SparseMoE(
            gate, FusedMoE(config.hidden_size, size, num_experts, activation=activation, parallel=parallel)
        )
